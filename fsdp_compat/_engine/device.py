"""The order of streams, and CPU offloading.

Buffers are allocated and freed on the stream that computes, collectives start on it, and it waits
for them. So an all-gather sends the shard as the optimizer left it, an unused prefetch is freed
after it has arrived, and no memory needs to be recorded on a second stream. A program that computes
on several streams (forward on one, backward on another) only needs these to be joined: work on the
stream of the engine's last call comes before work on the stream of the present call."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator

import torch

__all__ = [
    "ON_DEVICE",
    "ComputeStreams",
    "OffloadPolicy",
    "compute_streams",
    "offload_policy",
    "on_stream",
]


class ComputeStreams(typing.Protocol):
    """The streams on which one runtime's units compute."""

    several: bool  # the device has streams, and so its own autograd thread

    def join(self) -> None:
        """Let work that is enqueued from now on run after all work that the runtime has enqueued.
        The CPU does not wait."""


class _NoStreams:
    """A device that computes in the order of the calls."""

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
    """Return the streams of a device."""
    return _NoStreams() if device.type in ("cpu", "meta") else _CurrentStream(device)


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run work of the context on ``stream``, after all work of the current stream and before later
    work on it; None: on the current stream."""
    if stream is None:
        yield
        return
    current = torch.accelerator.current_stream(stream.device)
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


class OffloadPolicy(typing.Protocol):
    """Where a group's shard and gradients live: on the device that computes, or offloaded to the
    CPU."""

    is_offloaded: bool  # the shard itself is never computed with

    def to_compute(self, own: torch.Tensor) -> torch.Tensor:
        """Return ``own``, which lives where the shard does, on the device that computes."""

    def to_host(self, total: torch.Tensor) -> torch.Tensor:
        """Return ``total``, from the device that computes, where the shard lives. It may be read
        after ``wait_readers``."""

    def was_read(self) -> None:
        """An operation that reads the shard was enqueued."""

    def wait_readers(self) -> None:
        """Wait for all reads of the shard and all copies."""


class _OnDevice:
    """Shards live on the device that computes."""

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
    """Shards, gradients and with them the optimizer live on the CPU. If the CPU computes as well,
    the same copies are made."""

    is_offloaded = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_streams = device, device.type not in ("cpu", "meta")
        self._last: torch.Event | None = None  # after the last read or copy

    def to_compute(self, own: torch.Tensor) -> torch.Tensor:
        copy = own.to(self._device, non_blocking=True, copy=True)
        self.was_read()
        return copy

    def to_host(self, total: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(
            total.shape, dtype=total.dtype, device="cpu", pin_memory=self._has_streams
        )
        copy.copy_(total, non_blocking=True)
        self.was_read()
        return copy

    def was_read(self) -> None:
        if self._has_streams:
            self._last = torch.accelerator.current_stream(self._device).record_event()

    def wait_readers(self) -> None:
        if self._last is not None:  # not the whole stream: later work may still run
            self._last.synchronize()
            self._last = None


ON_DEVICE: OffloadPolicy = _OnDevice()


def offload_policy(device: torch.device, offload: bool) -> OffloadPolicy:
    """Return the policy for shards of a group that computes on ``device``."""
    return _OnHost(device) if offload else ON_DEVICE
