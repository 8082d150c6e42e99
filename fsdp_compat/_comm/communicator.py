"""The only door to collectives: what travels along one mesh axis, how much of it, and for how long
it is waited for.

Three transports stand behind one interface. gloo gets point-to-point exchange on connections of its
own (exchange.py), with a tag per (group, kind), so that ranks that differ in order get an error
instead of each other's data; every other backend gets its own collectives; process groups that are
written in Python get torch's public ones. What gloo's transport waits for is watched (watch.py):
ranks that wait for each other for ever get an error within seconds."""

from __future__ import annotations

import typing
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .. import _torch_private
from .gloo import GlooTransport
from .mesh import Axis, axis_of, is_in_python
from .native import (
    Collectives,
    Communicator,
    Handle,
    Kind,
    ProcessGroupTransport,
    PublicCollectives,
    Traffic,
    TransportBase,
    all_gather,
    defines,
    gather_in_group,
    start_gather_in_python,
)

__all__ = [
    "Communicator",
    "Kind",
    "Handle",
    "Traffic",
    "communicator",
    "gather_in_group",
    "max_in_group",
]


# torch 2.13 renamed it; 2.11 and 2.12 have the older name only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Started:
    """A collective under way."""

    __slots__ = ("divisor", "keep", "total", "work")

    def __init__(
        self,
        work: dist.Work,
        keep: torch.Tensor,
        total: torch.Tensor | None = None,
        divisor: torch.Tensor | None = None,
    ) -> None:
        """keep: what stays until it has ended. total: what it fills."""
        self.work, self.keep, self.total, self.divisor = work, keep, total, divisor


class SingleRank(TransportBase):
    """An axis of one rank: nothing travels."""

    def new_tag(self) -> int:
        return 0

    def begin_gather(
        self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        full.copy_(own)
        return Handle([])

    def end_gather(self, pending: Handle, what: str) -> None:
        pass

    def begin_reduce(
        self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        return Handle([])

    def end_reduce(
        self,
        pending: Handle,
        own: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        total = own.to(dtype, copy=True)
        return total if divisor is None else total.div_(divisor)

    def shares(self, numel: int, dtype: torch.dtype) -> bool:
        return False

    def begin_all_reduce(
        self, total: torch.Tensor, tag: int, divisor: torch.Tensor | None = None
    ) -> Handle:
        if divisor is not None:
            total.div_(divisor)
        return Handle([])

    def continue_all_reduce(
        self, pending: Handle, total: torch.Tensor, tag: int, what: str
    ) -> Handle:
        return pending

    def end_all_reduce(self, pending: Handle, total: torch.Tensor, what: str) -> None:
        pass

    def wait_readers(self, what: str) -> None:
        pass

    def flush_sends(self, what: str) -> None:
        pass

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        return flags

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max_of(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        pass

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def gather_objects(self, value: object) -> list[typing.Any]:
        return [value]


class NativeTransport(ProcessGroupTransport):
    """The backend's own collectives, asynchronous. On a stream device a wait orders streams; the
    CPU never waits."""

    def _run(self, what: str, collective: Callable[[Collectives], None]) -> None:
        try:
            collective(PublicCollectives(self.group))
        except RuntimeError as error:
            raise self._error(
                f"{what[0].upper()}{what[1:]} failed.", f"an error of the backend ({error})"
            ) from error

    def begin_gather(
        self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> _Started:
        if (
            own.dtype is not full.dtype or own.device != full.device
        ):  # it is cast and moved into its place, and sent from there
            own = segments[self.rank].copy_(own, non_blocking=True)
        self.traffic.add(Kind.GATHER, own.nbytes * (self.ranks - 1))
        return _Started(self._start_gather(full, own), own)

    def end_gather(self, pending: _Started, what: str) -> None:
        pending.work.wait()

    def begin_reduce(
        self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> _Started:
        total = torch.empty_like(segments[0])
        self.traffic.add(Kind.REDUCE, total.nbytes * (self.ranks - 1))
        return _Started(self._start_reduce(total, buffer), buffer, total)

    def _start_gather(self, full: torch.Tensor, own: torch.Tensor) -> dist.Work:
        return _torch_private.start_all_gather(self.group, full, own)

    def _start_reduce(self, total: torch.Tensor, buffer: torch.Tensor) -> dist.Work:
        return _torch_private.start_reduce_scatter(self.group, total, buffer)

    def end_reduce(
        self,
        pending: _Started,
        own: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pending.work.wait()
        total = pending.total
        assert total is not None
        total = total if total.dtype is dtype else total.to(dtype)
        return total if divisor is None else total.div_(divisor)

    def shares(self, numel: int, dtype: torch.dtype) -> bool:
        return False

    def begin_all_reduce(
        self, total: torch.Tensor, tag: int, divisor: torch.Tensor | None = None
    ) -> _Started:
        ranks = self.ranks
        self.traffic.add(Kind.REPLICATE, 2 * (ranks - 1) * total.nbytes // ranks)
        return _Started(
            _work(dist.all_reduce(total, group=self.group, async_op=True)), total, None, divisor
        )

    def continue_all_reduce(
        self, pending: _Started, total: torch.Tensor, tag: int, what: str
    ) -> _Started:
        return pending

    def end_all_reduce(self, pending: _Started, total: torch.Tensor, what: str) -> None:
        pending.work.wait()
        if pending.divisor is not None:
            total.div_(pending.divisor)

    def wait_readers(self, what: str) -> None:
        pass  # a collective that was waited for has read its source

    def flush_sends(self, what: str) -> None:
        pass  # a collective that was waited for has read its source

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        full = own.new_empty(self.ranks * own.numel())
        all_gather(full, own.contiguous(), group=self.group)
        return full


class PythonGroupTransport(NativeTransport):
    """A process group that is written in Python, through torch's public collectives, which call its
    methods. What ``_Native`` calls looks for a backend in C++, which such a group lacks."""

    def _start_gather(self, full: torch.Tensor, own: torch.Tensor) -> dist.Work:
        return start_gather_in_python(self.group, full, own)

    def _start_reduce(self, total: torch.Tensor, buffer: torch.Tensor) -> dist.Work:
        if total.dtype.is_complex:
            total, buffer = torch.view_as_real(total), torch.view_as_real(buffer)
        if defines(self.group, "reduce_scatter_single", "_reduce_scatter_base"):
            return _work(_reduce_scatter(total, buffer, group=self.group, async_op=True))
        return _work(
            dist.reduce_scatter(
                total, list(buffer.chunk(self.ranks)), group=self.group, async_op=True
            )
        )

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        return gather_in_group(self.group, own.contiguous())


def _work(work: dist.Work | None) -> dist.Work:
    """Narrow the type: None is the answer for a process that is not in the group, which was ruled
    out before."""
    assert work is not None
    return work


_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = (
    weakref.WeakKeyDictionary()
)


def communicator(axis: Axis, device: torch.device) -> Communicator:
    """Return what sends tensors of ``device`` along an axis; one per process group, however many
    units use it.

    Collective: every rank of the axis, the first time it is asked for (gloo gets connections of its
    own then). Raises StateError if communication along the axis has failed before.
    """
    if axis.group is None:
        return typing.cast(Communicator, SingleRank(axis))
    found = _communicators.setdefault(axis.group, {})
    if device.type not in found:
        found[device.type] = typing.cast(Communicator, _transport(axis.group, device)(axis))
    found[device.type].require_working()
    return found[device.type]


def _transport(
    group: dist.ProcessGroup, device: torch.device
) -> type[GlooTransport | NativeTransport]:
    if is_in_python(group):
        return PythonGroupTransport
    return (
        GlooTransport
        if device.type == "cpu" and _torch_private.is_gloo(group, device)
        else NativeTransport
    )


def max_in_group(group: dist.ProcessGroup, value: torch.Tensor) -> torch.Tensor:
    """Return the elementwise maximum over all ranks of ``value``, whatever device it is on and the
    group takes. Collective."""
    axis = axis_of(group)
    if axis.ranks == 1:
        return value
    if is_in_python(group):
        takes = [value.device.type]  # nobody knows better
    else:
        takes = [
            pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")
        ]  # "cpu:gloo,cuda:nccl"
    found = value.clone() if value.device.type in takes else value.to(takes[0])
    return communicator(axis, found.device).max_of(found).to(value.device)
