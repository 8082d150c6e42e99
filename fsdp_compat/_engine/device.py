"""The order of streams, and CPU offloading.

Unsharded parameters are allocated and freed on the stream that computes, and it waits for their
all-gathers. So an unused prefetch is freed after it has arrived, and no memory needs to be recorded
on a second stream. A program that computes on several streams (forward on one, backward on another)
only needs these to be joined: work on the stream of the engine's last call comes before work on the
stream of the present call.

What need not be done on the computing stream is enqueued on side streams (``SideStream``): casts
and copies of shards before their all-gathers on one, everything that is done with gradients on the
other. Each waits for the computing stream before it is used, so that it sends the shard as the
optimizer left it, and what it allocates is used in its own order."""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterable, Iterator

import torch


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


def has_streams(device: torch.device) -> bool:
    """False for a device that computes in the order of the calls."""
    return device.type not in ("cpu", "meta")


def compute_streams(device: torch.device) -> ComputeStreams:
    """Return the streams of a device."""
    return _CurrentStream(device) if has_streams(device) else _NoStreams()


class SideStream:
    """A stream beside the one that computes; on a device without streams, nothing."""

    exists = False

    def work(self) -> contextlib.AbstractContextManager[None]:
        """Enqueue the work of the context here, after all work of the current stream so far."""
        return HERE

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Inside ``work``: keep tensors that were allocated on the computing stream until
        ``release``, because work enqueued here so far reads them."""

    def release(self) -> None:
        """Let the current stream wait until what is held was read, and drop it."""

    def join(self) -> None:
        """Let the current stream wait for all work enqueued here so far."""

    def mark(self) -> Callable[[], None]:
        """Return a function that lets the then current stream wait for all work enqueued here so
        far, and for nothing later."""
        return _nothing


class _RealSideStream(SideStream):
    exists = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device=device)
        self._held: list[torch.Tensor] = []
        self._read: torch.Event | None = None  # after the last read of what is held

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        current = torch.accelerator.current_stream(self._device)
        if current == self._stream:
            yield
            return
        self._stream.wait_stream(current)
        with self._stream:
            yield

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        if torch.accelerator.current_stream(self._device) == self._stream:
            self._held += tensors
            self._read = self._stream.record_event()

    def release(self) -> None:
        if self._read is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._read)
            self._held, self._read = [], None

    def mark(self) -> Callable[[], None]:
        done = self._stream.record_event()
        return lambda: torch.accelerator.current_stream(self._device).wait_event(done)

    def join(self) -> None:
        self.release()
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)


def _side_stream(device: torch.device) -> SideStream:
    return _RealSideStream(device) if has_streams(device) else SideStream()


def read_later(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy values to the host. The returned function waits for them."""
    if not has_streams(values.device):
        return typing.cast("Callable[[], list[float]]", values.tolist)
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    copied = torch.accelerator.current_stream(values.device).record_event()

    def read() -> list[float]:
        copied.synchronize()
        return typing.cast("list[float]", copy.tolist())

    return read


@functools.cache
def gather_stream(device: torch.device) -> SideStream:
    """Return the stream that sends shards of a device."""
    return _side_stream(device)


@functools.cache
def reduce_stream(device: torch.device) -> SideStream:
    """Return the stream that takes, reduces and accumulates gradients on a device."""
    return _side_stream(device)


def run_on(
    stream: torch.Stream | None, function: Callable[[torch.Tensor], object], tensor: torch.Tensor
) -> Callable[[], None]:
    """Run ``function(tensor)`` on ``stream``, after all work of the current stream; None: on the
    current stream. The returned function lets the then current stream wait for it."""
    if stream is None:
        function(tensor)
        return _nothing
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with stream:
        function(tensor)
    done = stream.record_event()
    return lambda: torch.accelerator.current_stream(stream.device).wait_event(done)


def _nothing() -> None:
    pass


HERE = contextlib.nullcontext()  # on the current stream


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
        self._device, self._has_streams = device, has_streams(device)
        self._last: dict[int, torch.Event] = {}  # by stream: after its last read or copy

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
            stream = torch.accelerator.current_stream(self._device)
            self._last[stream.stream_id] = stream.record_event()

    def wait_readers(self) -> None:
        while self._last:  # not whole streams: later work may still run
            self._last.popitem()[1].synchronize()


ON_DEVICE: OffloadPolicy = _OnDevice()


def offload_policy(device: torch.device, offload: bool) -> OffloadPolicy:
    """Return the policy for shards of a group that computes on ``device``."""
    return _OnHost(device) if offload else ON_DEVICE
