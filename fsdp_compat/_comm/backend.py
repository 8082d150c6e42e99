"""The transports that use a backend's own collectives: BackendTransport for backends in C++,
PythonGroupTransport for process groups that are written in Python."""

from __future__ import annotations

import contextlib
import typing
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_private
from ..errors import StateError
from .board import board, progress
from .board.calls import Activity, Report, Waiter
from .mesh import Axis, has_processes
from .transport import (
    VALUES,
    ByRank,
    Handle,
    Kind,
    Transport,
    as_bytes,
    communication_error,
    failed_before,
    group_destroyed,
)

_BEGINS = "parameters or gradients"

# torch 2.13 renamed them; 2.11 and 2.12 have the older names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LOST = (
    "  An optimizer step that was waiting on the device has then used incomplete gradients: do not "
    "save this rank's shards."
)


class BackendTransport(Transport, Waiter):
    """Uses the backend's asynchronous collectives. A wait on a stream device only orders streams,
    so that ranks that wait are seen by what they have begun."""

    def __init__(self, axis: Axis, device: torch.device, small: torch.device | None = None) -> None:
        """device: with its index, because otherwise all ranks of a host would use the first one.
        small: the device of small collectives, if another."""
        super().__init__(axis, device)
        self.values_device = small or device
        assert axis.group is not None
        self.group = weakref.ref(axis.group)
        default = _torch_private.default_device_of_backend(axis.group)
        self.takes_host_values = default.type == "cpu"
        has_names = _torch_private.is_registered(axis.group)
        backends = dist.get_backend_config(axis.group) if has_names else ""  # "cpu:gloo,cuda:nccl"
        self.coalesces = "cuda:nccl" in backends or "cuda:fake" in backends
        name = f"{axis.group.group_name}/{device.type}" if has_names else ""
        self.activity = Activity(name, axis.rank, axis.members, has_tags=False)
        self._failure = ""
        self._stepped: torch.Event | None = None  # before the last step of an optimizer
        if has_names and has_processes(axis.group):
            board.watch(self)

    def _open_group(self) -> dist.ProcessGroup:
        """Return the process group. Raises StateError if it is destroyed, or has failed."""
        group = self.group()
        if group is None:
            raise group_destroyed()
        if self._failure:
            self.require_working()
        return group

    # -- failing, and for the board

    @property
    def has_failed(self) -> bool:
        return bool(self._failure)

    @property
    def is_connected(self) -> bool:
        return not self._failure

    def require_working(self) -> None:
        if self._failure:
            progress.raise_soon(None)  # the wait has told it
            raise failed_before(self._failure, self.rank, self.members)

    def before_step(self) -> None:
        if self.device.type not in ("cpu", "meta"):
            self._stepped = torch.accelerator.current_stream(self.device).record_event()

    def end_wait(self) -> None:
        report, group, device = self.activity.diagnosis, self.group(), self.device
        if report is None or group is None or self._failure:
            return
        self._failure = report.cause or str(report)
        if self._stepped is not None and not self._stepped.query():
            self._failure += f"\n{_LOST}"
        on_streams = device.type not in ("cpu", "meta")
        device_waits = on_streams and not torch.accelerator.current_stream(device).query()
        if device_waits:  # the host may be in any code, even in a wait that returns when aborted
            first = "Communication between the ranks can never end, and was aborted."
            progress.raise_soon(communication_error(first, self._failure, self.rank, self.members))
        group.abort()  # otherwise a wait of the host, or the next call, raises the error

    def close(self, report: Report | None) -> None:
        group = self.group()
        if report is not None and not self._failure:
            self._failure = f"another communication of this process failed: {report}"
            if group is not None:
                group.abort()  # or what was begun would hold the device, and the exit

    @contextlib.contextmanager
    def _call(self, call: int | str, what: str = _BEGINS) -> Iterator[dist.ProcessGroup]:
        """Count a call of the backend (its tag, or what it is), and give its process group."""
        self.activity.begin(call)
        try:
            yield self._open_group()
        except RuntimeError as error:
            self._fail(what, error)

    def _fail(self, what: str, error: RuntimeError) -> typing.NoReturn:
        """Raise ``error``, of a call of the backend, so that it says what was waited for; all
        communication of this process has failed then."""
        if isinstance(error, (StateError, torch.OutOfMemoryError)):
            raise error
        report = self.activity.diagnosis
        got = str(report.cause or report) if report else f"an error of the backend ({error})"
        first = f"Waiting for {what} failed."
        self._failure = self._failure or f"{first} {got}"
        progress.raise_soon(None)
        board.give_up(self, report or Report({}, self._failure, self.activity.global_rank))
        advice = ""
        if "Duplicate GPU" in str(error):
            advice = "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), or pass device_id"
        raise communication_error(first, got, self.rank, self.members, advice=advice) from error

    def sum_of(self, values: Tensor, what: str) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM, what)

    def max_of(self, values: Tensor, what: str) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX, what)

    def _reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        with _torch_private.uncounted(), self._call(what, what) as group:
            dist.all_reduce(values, op=op, group=group)
        return values

    def broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        with _torch_private.uncounted(), self._call(f"a broadcast of {what}", what) as group:
            works = [
                dist.broadcast(tensor, group_src=0, group=group, async_op=True)
                for tensor in as_bytes(tensors)
            ]
            for work in filter(None, works):
                work.wait()

    def exchange(self, sent: Tensor, sizes: Sequence[tuple[int, int]], what: str) -> Tensor:
        sends, receives = ([*each] for each in zip(*sizes, strict=True))
        received = sent.new_empty(sum(receives))
        with _torch_private.uncounted(), self._call(f"an exchange of {what}", what) as group:
            dist.all_to_all_single(received, sent, receives, sends, group=group)
        return received

    def begin_gather(self, own: Tensor, full: Tensor, segments: ByRank, tag: int) -> Handle:
        own = self._sendable(own, full, segments)
        if tag != VALUES:
            self.traffic.add(Kind.GATHER, own.nbytes * (self.ranks - 1))
        with self._call(tag) as group:
            return Handle([], held=(self._start_gather(group, full, own), own))

    def begin_gathers(
        self, gathers: Sequence[tuple[Tensor, Tensor, ByRank]], tag: int = 0
    ) -> Handle:
        owns = [self._sendable(*gather) for gather in gathers]
        self.traffic.add(Kind.GATHER, sum(own.nbytes for own in owns) * (self.ranks - 1))
        fulls = [full for _, full, _ in gathers]
        with self._call(tag) as group:
            return Handle([], held=(_torch_private.start_all_gathers(group, fulls, owns), owns))

    def _sendable(self, own: Tensor, full: Tensor, segments: ByRank) -> Tensor:
        if own.dtype is full.dtype and own.device == full.device:
            return own
        # cast and move it into this rank's segment, and send it from there
        return segments[self.rank].copy_(own, non_blocking=True)

    def end_gather(self, handle: Handle, what: str) -> None:
        self._wait(handle, what)

    def _wait(self, handle: Handle, what: str) -> None:
        if self._failure:
            self.require_working()
        try:
            handle.held[0].wait()
        except RuntimeError as error:
            self._fail(what, error)

    def begin_reduce(self, buffer: Tensor, segments: ByRank, tag: int) -> Handle:
        total = torch.empty_like(segments[0])
        self.traffic.add(Kind.REDUCE, total.nbytes * (self.ranks - 1))
        with self._call(tag + Kind.REDUCE) as group:
            return Handle([], (total,), (self._start_reduce(group, total, buffer), buffer))

    def _start_gather(self, group: dist.ProcessGroup, full: Tensor, own: Tensor) -> dist.Work:
        return _torch_private.start_all_gather(group, full, own)

    def _start_reduce(self, group: dist.ProcessGroup, total: Tensor, buffer: Tensor) -> dist.Work:
        return _torch_private.start_reduce_scatter(group, total, buffer)

    def end_reduce(
        self, handle: Handle, own: Tensor, dtype: torch.dtype, what: str, divisor: Tensor | None
    ) -> Tensor:
        self._wait(handle, what)
        total = handle.received[0]
        return total if divisor is None else total.to(dtype).div_(divisor)

    def begin_all_reduce(self, total: Tensor, tag: int, divisor: Tensor | None = None) -> Handle:
        ranks = self.ranks
        self.traffic.add(Kind.REPLICATE, 2 * (ranks - 1) * total.nbytes // ranks)
        # it was counted when the reduction began
        with _torch_private.uncounted(), self._call(tag + Kind.REPLICATE) as group:
            work = dist.all_reduce(total, group=group, async_op=True)
            return Handle([], held=(work, total), divisor=divisor)

    def end_all_reduce(self, handle: Handle, total: Tensor, what: str) -> None:
        self._wait(handle, what)
        if handle.divisor is not None:
            total.div_(handle.divisor)


class PythonGroupTransport(BackendTransport):
    """Uses torch's public collectives, as BackendTransport's need a backend in C++: those of one
    tensor where the group has them, otherwise those of lists, which all groups have."""

    def _start_gather(self, group: dist.ProcessGroup, full: Tensor, own: Tensor) -> dist.Work:
        if full.dtype.is_complex:
            full, own = torch.view_as_real(full), torch.view_as_real(own)
        if _defines(group, "all_gather_single", "_allgather_base"):
            return _work(_all_gather(full, own, group=group, async_op=True))
        parts = list(full.chunk(self.ranks))
        return _work(dist.all_gather(parts, own, group=group, async_op=True))

    def _start_reduce(self, group: dist.ProcessGroup, total: Tensor, buffer: Tensor) -> dist.Work:
        if total.dtype.is_complex:
            total, buffer = torch.view_as_real(total), torch.view_as_real(buffer)
        if _defines(group, "reduce_scatter_single", "_reduce_scatter_base"):
            return _work(_reduce_scatter(total, buffer, group=group, async_op=True))
        parts = list(buffer.chunk(self.ranks))
        return _work(dist.reduce_scatter(total, parts, group=group, async_op=True))


def _defines(group: dist.ProcessGroup, *methods: str) -> bool:
    """True if the class of a process group overrides a method that needs a backend in C++."""
    return any(
        getattr(type(group), name, None) is not getattr(dist.ProcessGroup, name, None)
        for name in methods
    )


def _work(work: dist.Work | None) -> dist.Work:
    """Narrow the type: torch returns None only in a process outside the group."""
    assert work is not None
    return work
