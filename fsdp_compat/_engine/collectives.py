"""The only caller of collectives: what travels along one mesh axis, how much of it, and for how long it is waited for.

Two transports stand behind one interface. gloo gets point-to-point exchange on connections of its own, with a tag per (group,
kind), so that ranks that differ in order get an error instead of each other's data; every other backend gets its own collectives.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import typing
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import StateError, explain
from . import torch_private
from .mesh import Axis

# torch 2.13 renamed them; 2.11 and 2.12 have the older names only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = ["Communicator", "Kind", "Traffic", "communicator", "gather_in_group"]


class Kind(enum.IntEnum):
    """What a message carries. With the tag of its group it makes the tag of a message."""

    GATHER = 0
    REDUCE = 1
    REPLICATE = 2
    REPLICATE_BACK = 3


@dataclasses.dataclass
class Traffic:
    """What one rank has sent along one axis: numbers of collectives and bytes, by kind."""

    counts: collections.Counter[Kind] = dataclasses.field(default_factory=collections.Counter)
    nbytes: collections.Counter[Kind] = dataclasses.field(default_factory=collections.Counter)

    def add(self, kind: Kind, nbytes: int) -> None:
        self.counts[kind] += 1
        self.nbytes[kind] += nbytes

    def clear(self) -> None:
        self.counts.clear()
        self.nbytes.clear()


class Pending:
    """Something on its way: the works to wait for, and the tensors that must stay until then."""

    __slots__ = ("keep", "parts", "works")

    def __init__(self, works: list[dist.Work], parts: list[torch.Tensor] | None = None, keep: object = None) -> None:
        self.works, self.parts, self.keep = works, parts or [], keep


class Communicator(typing.Protocol):
    """Communication along one axis. Every method but ``drain`` and ``new_tag`` is a collective of the axis.

    ``what`` names, for an error, what a wait was for.
    """

    rank: int
    ranks: int
    members: tuple[int, ...]  # global ranks
    traffic: Traffic

    def new_tag(self) -> int:
        """Return a tag of its own for a group; all ranks ask in the same order."""

    def begin_gather(self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        """Send ``own`` [S] to all; ``full`` [ranks * S], in ``segments``, receives. ``own`` stays unchanged until ``drain``."""

    def end_gather(self, pending: Pending, what: str) -> None:
        """``full`` is readable afterwards (on a stream device: by what is enqueued afterwards)."""

    def begin_reduce(self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        """Send segment r of ``buffer`` [ranks * S] to rank r."""

    def end_reduce(self, pending: Pending, own: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Return the sum [S] over the ranks in ``dtype``, a new tensor; then the buffer may be freed. ``own``: the own segment."""

    def begin_total(self, total: torch.Tensor, tag: int) -> Pending:
        """Begin to add ``total`` up over the ranks, in place: every rank ends with the same bits."""

    def continue_total(self, pending: Pending, total: torch.Tensor, tag: int, what: str) -> Pending:
        """The second of three steps. All groups take it before any takes the third."""

    def end_total(self, pending: Pending, what: str) -> None: ...

    def drain(self, what: str) -> None:
        """Wait until the peers have taken everything that this rank has sent."""

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        """flags: uint8 [n]. Return their maximum over the ranks."""

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over the ranks, in place where it can be."""

    def max_of(self, values: torch.Tensor) -> torch.Tensor: ...

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """The first rank of the axis sends; the tensors of the others, which are contiguous, are overwritten."""

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        """Return [ranks * S] from every rank's ``own`` [S], waited for."""

    def gather_objects(self, value: object) -> list[typing.Any]:
        """Return every rank's picklable ``value``, in rank order. For plans and errors, never for tensors of size."""


class _AnyRanks:
    """An axis in numbers. It does not hold the axis's process group: the cache of communicators hangs on that one's life."""

    def __init__(self, axis: Axis) -> None:
        self.rank, self.ranks, self.members, self.traffic = axis.rank, axis.ranks, axis.members, Traffic()


class _Alone(_AnyRanks):
    """An axis of one rank: nothing travels."""

    def new_tag(self) -> int:
        return 0

    def begin_gather(self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        full.copy_(own)
        return Pending([])

    def end_gather(self, pending: Pending, what: str) -> None:
        pass

    def begin_reduce(self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        return Pending([])

    def end_reduce(self, pending: Pending, own: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
        return own.to(dtype, copy=True)

    def begin_total(self, total: torch.Tensor, tag: int) -> Pending:
        return Pending([])

    def continue_total(self, pending: Pending, total: torch.Tensor, tag: int, what: str) -> Pending:
        return pending

    def end_total(self, pending: Pending, what: str) -> None:
        pass

    def drain(self, what: str) -> None:
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


class _Grouped(_AnyRanks):
    """What both real transports share: the small synchronous collectives."""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        assert axis.group is not None
        self._group = weakref.ref(axis.group)
        self._tags = itertools.count(1)

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise StateError("the process group of this module was destroyed; wrap the model again after init_process_group")
        return group

    def new_tag(self) -> int:
        return len(Kind) * next(self._tags)

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        return self.max_of(flags)

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def max_of(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]  # backends do not know every dtype
        works = [dist.broadcast(tensor, group_src=0, group=self.group, async_op=True) for tensor in raw]
        for work in works:
            if work is not None:
                work.wait()

    def gather_objects(self, value: object) -> list[typing.Any]:
        found: list[typing.Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.group)
        return found


class _Native(_Grouped):
    """The backend's own collectives, asynchronous. On a stream device a wait orders streams; the CPU never waits."""

    def begin_gather(self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        self.traffic.add(Kind.GATHER, own.nbytes * (self.ranks - 1))
        if torch.compiler.is_compiling():  # which traces public functions only
            return Pending([_work(_all_gather(full, own, group=self.group, async_op=True))], keep=own)
        return Pending([torch_private.start_all_gather(self.group, full, own)], keep=own)

    def end_gather(self, pending: Pending, what: str) -> None:
        for work in pending.works:
            work.wait()

    def begin_reduce(self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        self.traffic.add(Kind.REDUCE, segments[0].nbytes * (self.ranks - 1))
        total = torch.empty_like(segments[0])
        if torch.compiler.is_compiling():
            return Pending([_work(_reduce_scatter(total, buffer, group=self.group, async_op=True))], [total], buffer)
        return Pending([torch_private.start_reduce_scatter(self.group, total, buffer)], [total], buffer)

    def end_reduce(self, pending: Pending, own: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
        for work in pending.works:
            work.wait()
        total = pending.parts[0]
        return total if total.dtype is dtype else total.to(dtype)

    def begin_total(self, total: torch.Tensor, tag: int) -> Pending:
        ranks = self.ranks
        self.traffic.add(Kind.REPLICATE, 2 * (ranks - 1) * total.nbytes // ranks)
        return Pending([_work(dist.all_reduce(total, group=self.group, async_op=True))], keep=total)

    def continue_total(self, pending: Pending, total: torch.Tensor, tag: int, what: str) -> Pending:
        return pending

    def end_total(self, pending: Pending, what: str) -> None:
        for work in pending.works:
            work.wait()

    def drain(self, what: str) -> None:
        pass  # a collective that was waited for has read its source

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        full = own.new_empty(self.ranks * own.numel())
        _all_gather(full, own.contiguous(), group=self.group)
        return full


class _PointToPoint(_Grouped):
    """Exchange by sends and receives, for gloo.

    A send is read when the peer takes it, so its source is kept until ``drain`` and must not change before. Every wait has the time
    limit of the process group: without one a point-to-point wait ignores it and may last for ever.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self.timeout = torch_private.group_timeout(self.group)
        self._wires = torch_private.gloo_of_its_own(self.group, axis.rank, axis.ranks, self.timeout)
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []
        ranks, rank = axis.ranks, axis.rank
        # The peers in the order in which they are served: every rank begins with another one.
        self._peers = [((rank - step) % ranks, (rank + step) % ranks) for step in range(1, ranks)]

    def begin_gather(self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        self.traffic.add(Kind.GATHER, own.nbytes * (self.ranks - 1))
        receives = [self._receive(segments[source], source, tag) for source, _ in self._peers]
        for _, target in self._peers:
            self._sends.append((self._send(own, target, tag), own))
        segments[self.rank].copy_(own)  # sends read `own`, never `full`: freeing `full` need not wait for slow peers
        return Pending(receives)

    def end_gather(self, pending: Pending, what: str) -> None:
        self._wait(pending.works, what)

    def begin_reduce(self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        tag += Kind.REDUCE
        self.traffic.add(Kind.REDUCE, segments[0].nbytes * (self.ranks - 1))
        parts = [own if r == self.rank else torch.empty_like(own) for r, own in enumerate(segments)]
        works = [self._receive(parts[source], source, tag) for source, _ in self._peers]
        works += [self._send(segments[target], target, tag) for _, target in self._peers]
        return Pending(works, parts, buffer)

    def end_reduce(self, pending: Pending, own: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
        self._wait(pending.works, what)
        return _sum_in_rank_order(pending.parts, self.rank, dtype)

    def begin_total(self, total: torch.Tensor, tag: int) -> Pending:
        tag += Kind.REPLICATE
        pieces, ranks = self._pieces(total), self.ranks
        self.traffic.add(Kind.REPLICATE, 2 * (ranks - 1) * total.nbytes // ranks)
        own = pieces[self.rank]
        parts = [own if r == self.rank else torch.empty_like(own) for r in range(ranks)]
        works = [self._receive(parts[source], source, tag) for source, _ in self._peers]
        works += [self._send(pieces[target], target, tag) for _, target in self._peers]
        return Pending(works, parts, total)

    def continue_total(self, pending: Pending, total: torch.Tensor, tag: int, what: str) -> Pending:
        tag += Kind.REPLICATE_BACK
        self._wait(pending.works, what)
        pieces = self._pieces(total)
        own = pieces[self.rank]
        own.copy_(_sum_in_rank_order(pending.parts, self.rank, total.dtype))
        works = [self._receive(pieces[source], source, tag) for source, _ in self._peers]
        works += [self._send(own, target, tag) for _, target in self._peers]
        return Pending(works, keep=total)

    def end_total(self, pending: Pending, what: str) -> None:
        self._wait(pending.works, what)

    def drain(self, what: str) -> None:
        sends, self._sends = self._sends, []
        self._wait([work for work, _ in sends], what)

    def gather_now(self, own: torch.Tensor) -> torch.Tensor:
        own = own.contiguous()
        full = own.new_empty(self.ranks * own.numel())
        pending = self.begin_gather(own, full, full.chunk(self.ranks), 0)
        self.end_gather(pending, "a gather of state")
        self.drain("a gather of state")
        return full

    def _pieces(self, total: torch.Tensor) -> list[torch.Tensor]:
        size = -(-total.numel() // self.ranks)
        return [total[r * size : (r + 1) * size] for r in range(self.ranks)]

    def _send(self, tensor: torch.Tensor, target: int, tag: int) -> dist.Work:
        return self._wires.send([tensor], target, tag)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> dist.Work:
        return self._wires.recv([tensor], source, tag)

    def _wait(self, works: Sequence[dist.Work], what: str) -> None:
        for work in works:
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                raise StateError(
                    explain(
                        f"Waiting for {what} failed.",
                        expected="every rank to use the same units in the same order, and to be alive",
                        got=f"no message within {self.timeout.total_seconds():g} s, or a broken connection ({error})",
                        where=f"rank {self.rank} of {self.ranks} (global ranks {list(self.members)})",
                        fix="look for a rank that raised, or that skipped a unit; ranks that may use different units need "
                        "allow_unused_units=True",
                    )
                ) from error


def _work(work: dist.Work | None) -> dist.Work:
    """Narrow the type: None is the answer for a process that is not in the group, which was ruled out before."""
    assert work is not None
    return work


def _sum_in_rank_order(parts: list[torch.Tensor], rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Add ``parts`` in rank order, so that all ranks get the same bits; ``parts[rank]`` is not written to, the others may be."""
    if parts[0].dtype != dtype:
        total = parts[0].to(dtype)
        rest = parts[1:]
    else:  # the received one of the first two takes the sum: no pass of its own for a copy
        total = torch.add(parts[0], parts[1], out=parts[1] if rank == 0 else parts[0])
        rest = parts[2:]
    for part in rest:
        total.add_(part)
    return total


_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = weakref.WeakKeyDictionary()


def communicator(axis: Axis, device: torch.device) -> Communicator:
    """Return what sends tensors of ``device`` along an axis; one per process group, however many units use it.

    Collective: every rank of the axis, the first time it is asked for (gloo gets connections of its own then).
    """
    if axis.group is None:
        return typing.cast(Communicator, _Alone(axis))
    found = _communicators.setdefault(axis.group, {})
    if device.type not in found:
        transport = _PointToPoint if torch_private.is_gloo(axis.group, device) else _Native
        found[device.type] = typing.cast(Communicator, transport(axis))
    return found[device.type]


def gather_in_group(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Return [ranks * n] from every rank's ``own`` [n], over any process group. Collective."""
    full = own.new_empty(dist.get_world_size(group) * own.numel())
    _all_gather(full, own, group=group)
    return full
