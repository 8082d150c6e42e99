"""The order of streams, and where shards live.

There is one order: the stream on which the engine was last called goes before the one on which it
is called now.

Buffers are allocated and freed on the stream that computes, collectives start on it, and their
waits are waits of it. So a gather sends the shard as the optimizer left it, an unused prefetch is
freed after it has arrived, and no memory needs to be recorded on a second stream. What is left to
do is to join streams where a program computes on several: forward on one, backward on another."""

from __future__ import annotations

import typing

import torch

__all__ = ["ON_DEVICE", "ComputeStreams", "OffloadPolicy", "compute_streams", "offload_policy"]


class ComputeStreams(typing.Protocol):
    """The streams on which one runtime's units compute."""

    several: bool  # the device has streams, and so a thread of its own in autograd

    def join(self) -> None:
        """Let what is enqueued from now on run after everything the runtime has enqueued before.
        The CPU does not wait."""


class _NoStreams:
    """A device that computes as it is told to."""

    several = False

    def join(self) -> None:
        pass


class _CurrentStream:
    """A device with streams."""

    several = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.Stream | None = None

    def join(self) -> None:
        current = torch.accelerator.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current


def compute_streams(device: torch.device) -> ComputeStreams:
    """Return what orders the streams of a device."""
    return _NoStreams() if device.type in ("cpu", "meta") else _CurrentStream(device)


class OffloadPolicy(typing.Protocol):
    """Where a group's shard and its gradients live, seen from the device that computes."""

    is_offloaded: (
        bool  # elsewhere than where is computed: the shard itself can never be computed with
    )

    def to_compute(self, own: torch.Tensor) -> torch.Tensor:
        """Return ``own``, from home, on the device that computes."""

    def to_host(self, total: torch.Tensor) -> torch.Tensor:
        """Return ``total``, from the device that computes, at home. It may be read after
        ``settle``."""

    def was_read(self) -> None:
        """Something was begun that reads what lives here."""

    def wait_readers(self) -> None:
        """Wait until everything that was read, brought or sent back has arrived."""


class _OnDevice:
    """Shards live where they are computed with."""

    is_offloaded = False

    def to_compute(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def to_host(self, total: torch.Tensor) -> torch.Tensor:
        return total

    def was_read(self) -> None:
        pass

    def wait_readers(self) -> None:
        pass


class _OnHost:
    """Shards, gradients and so the optimizer live on the CPU. Where the CPU computes as well, the
    same copies are made."""

    is_offloaded = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_streams = device, device.type not in ("cpu", "meta")
        self._last: torch.Event | None = None  # what was enqueued up to it has to arrive

    def to_compute(self, own: torch.Tensor) -> torch.Tensor:
        there = own.to(self._device, non_blocking=True, copy=True)
        self.was_read()
        return there

    def to_host(self, total: torch.Tensor) -> torch.Tensor:
        home = torch.empty(
            total.shape, dtype=total.dtype, device="cpu", pin_memory=self._has_streams
        )
        home.copy_(total, non_blocking=True)
        self.was_read()
        return home

    def was_read(self) -> None:
        if self._has_streams:
            self._last = torch.accelerator.current_stream(self._device).record_event()

    def wait_readers(self) -> None:
        if self._last is not None:  # what computes after it need not be waited for
            self._last.synchronize()
            self._last = None


ON_DEVICE: OffloadPolicy = _OnDevice()


def offload_policy(device: torch.device, offload: bool) -> OffloadPolicy:
    """Return the home of shards that are computed with on ``device``."""
    return _OnHost(device) if offload else ON_DEVICE
