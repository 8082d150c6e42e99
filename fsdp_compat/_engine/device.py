"""The order of streams, and CPU offloading.

Unsharded parameters are allocated and freed on the computing stream, which waits for their
all-gathers. Hence an unused prefetch is freed only after it has arrived, and ``record_stream`` is
never needed. Two side streams (``SideStream``) take work that need not run on the computing stream:
casts and copies of shards before their all-gathers, and all work on gradients.

    call                        who waits            for
    --------------------------  -------------------  -----------------------------------------------
    ComputeStreams.join         the current stream   the stream on which the engine was called last
    SideStream.work             the side stream      the current one: the optimizer's latest values
    SideStream.join             the current stream   all work on the side stream so far
    SideStream.release          the current stream   the last read of the tensors of ``hold``
    SideStream.mark, run_on     the caller's stream  the work so far, in the function returned
    to_host_later, read_later   the host             the copy, in the function returned
    OffloadPolicy.wait_copies   the host             reads of shards by a device, and copies to the
                                                     host
    Transport.settle            the host             peers that read what this rank has sent: of one
                                                     axis, of a group's gradients
                                                     (ReduceAxes.wait_until_writable), or all of a
                                                     runtime, with its copies (Communicators.settle)
    Transport.end_gather, ...   the host over gloo,  the collective
                                otherwise the
                                current stream"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

_is_simulated = False


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """A context in which front ends compute on the meta device, for a plan."""
    global _is_simulated
    _is_simulated = True
    try:
        yield
    finally:
        _is_simulated = False


def is_simulated() -> bool:
    return _is_simulated


class ComputeStreams:
    """The streams of a device on which one runtime's units compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.Stream | None = None

    def join(self) -> None:
        """Order work enqueued from now on after all that the runtime has enqueued."""
        current = torch.accelerator.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current


def has_streams(device: torch.device) -> bool:
    """False for a device that runs operations in the order of the calls."""
    return device.type not in ("cpu", "meta")


def compute_streams(device: torch.device) -> ComputeStreams | None:
    """Return the streams of a device, or None if it has none."""
    return ComputeStreams(device) if has_streams(device) else None


class SideStream:
    """A stream beside the one that computes, of high priority: copies and casts go before what
    waits to be computed."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device=device, priority=-1)
        self._held: list[Tensor] = []
        self._read: torch.Event | None = None  # after the last read of the held tensors

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Enqueue the work of the context here, after all work of the current stream so far."""
        current = torch.accelerator.current_stream(self._device)
        if current == self._stream:
            yield
            return
        self._stream.wait_stream(current)
        with self._stream:
            yield

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Inside ``work``: keep tensors of the computing stream, which the work reads, until the
        computing stream calls ``release``."""
        if torch.accelerator.current_stream(self._device) == self._stream:
            self._held += tensors
            self._read = self._stream.record_event()

    def release(self) -> None:
        """On the computing stream: wait until the held tensors were read, and drop them."""
        if self._read is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._read)
            self._held, self._read = [], None

    def mark(self) -> Callable[[], None]:
        """Return ``_mark`` of this stream."""
        return _mark(self._stream)

    def join(self) -> None:
        """Let the current stream wait for all work enqueued here so far."""
        self.release()
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)


def to_host_later(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy values of a device to pinned memory. The returned function waits for them."""
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    copied = torch.accelerator.current_stream(values.device).record_event()

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def read_later(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy values to the host. The returned function waits for them."""
    if not has_streams(values.device):
        return typing.cast("Callable[[], list[float]]", values.tolist)
    wait = to_host_later(values)
    return lambda: typing.cast("list[float]", wait().tolist())


@functools.cache
def side_stream(device: torch.device, use: typing.Literal["gather", "reduce"]) -> SideStream | None:
    """Return the device's stream that sends shards (gather) or handles gradients (reduce), if
    any."""
    return SideStream(device) if has_streams(device) else None


def run_on(
    stream: torch.Stream, function: Callable[[Tensor], object], tensor: Tensor
) -> Callable[[], None]:
    """Run ``function(tensor)`` on ``stream`` after the current stream. Return ``_mark`` of it."""
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with stream:
        function(tensor)
    return _mark(stream)


def _mark(stream: torch.Stream) -> Callable[[], None]:
    """Return a function that lets its caller's stream wait for the work on ``stream`` so far."""
    done = stream.record_event()
    return lambda: torch.accelerator.current_stream(stream.device).wait_event(done)


class OffloadPolicy:
    """Where a group's shard and gradients live: here, on the computing device."""

    is_offloaded = False  # True: to the CPU; the shard itself is never computed with

    def to_compute(self, own: Tensor) -> Tensor:
        """Return ``own``, which lives where the shard does, on the computing device."""
        return own

    def to_host(self, total: Tensor) -> Tensor:
        """Return ``total`` where the shard lives, to be read after ``wait_copies``."""
        return total

    def was_read(self) -> None:
        """Record that an operation that reads the shard was enqueued."""

    def wait_copies(self) -> None:
        """Wait for all reads of the shard and all copies."""


class OnHost(OffloadPolicy):
    """Shards and gradients live on the CPU, and are copied even if that is the computing device.
    Groups share one per device, so that the host waits once per stream."""

    is_offloaded = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_streams = device, has_streams(device)
        self._last: dict[int, torch.Event] = {}  # by stream: after its last read or copy

    def to_compute(self, own: Tensor) -> Tensor:
        copy = own.to(self._device, non_blocking=True, copy=True)
        self.was_read()
        return copy

    def to_host(self, total: Tensor) -> Tensor:
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

    def wait_copies(self) -> None:
        while self._last:  # not whole streams: later work may still run
            self._last.popitem()[1].synchronize()


ON_DEVICE = OffloadPolicy()
on_host = functools.cache(OnHost)
