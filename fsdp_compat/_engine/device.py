"""The order of streams. There is one: the stream on which the engine was last called goes before the one on which it is called now.

Buffers are allocated and freed on the stream that computes, collectives start on it, and their waits are waits of it. So a gather
sends the shard as the optimizer left it, an unused prefetch is freed after it has arrived, and no memory needs to be recorded on a
second stream. What is left to do is to join streams where a program computes on several: forward on one, backward on another.
"""

from __future__ import annotations

import typing

import torch

__all__ = ["ComputeStreams", "compute_streams"]


class ComputeStreams(typing.Protocol):
    """The streams on which one runtime's units compute."""

    def join(self) -> None:
        """Let what is enqueued from now on run after everything the runtime has enqueued before. The CPU does not wait."""


class _NoStreams:
    """A device that computes as it is told to."""

    def join(self) -> None:
        pass


class _CurrentStream:
    """A device with streams."""

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
