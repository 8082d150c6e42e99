"""The only caller of collectives: what travels along one mesh axis, how much of it, and for how long it is waited for.

Two transports stand behind one interface. gloo gets point-to-point exchange on connections of its own, with a tag per (group,
kind), so that ranks that differ in order get an error instead of each other's data; every other backend gets its own collectives.
What gloo's transport waits for is watched (watch.py): ranks that wait for each other for ever get an error within seconds.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import itertools
import pickle
import time
import typing
import weakref
from collections.abc import Iterator, Sequence
from threading import get_ident

import torch
import torch.distributed as dist

from ..errors import StateError, explain
from . import pulse, torch_private, watch
from .mesh import Axis
from .storage import memory_of

# torch 2.13 renamed them; 2.11 and 2.12 have the older names only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = ["Communicator", "Kind", "Traffic", "communicator", "gather_in_group", "max_in_group"]


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


_Post = tuple[int, int, int, int]  # tag, number of its use, nbytes of a message, num_receives (works: receives come before sends)


class Pending:
    """Something on its way: the works to wait for, and the tensors that must stay until then."""

    __slots__ = ("__weakref__", "keep", "lost", "parts", "post", "works")

    def __init__(
        self, works: list[dist.Work], parts: list[torch.Tensor] | None = None, keep: object = None, post: _Post = (0, 0, 0, 0)
    ) -> None:
        self.works, self.parts, self.keep, self.post = works, parts or [], keep, post
        self.lost = False  # its connections were given up: it will never arrive


class Communicator(typing.Protocol):
    """Communication along one axis. Every method but ``drain`` and ``new_tag`` is a collective of the axis.

    ``what`` names, for an error, what a wait was for. A wait that fails raises StateError; what was on its way then is *lost*, on
    all axes: to wait for it returns at once, without data, and whatever is begun afterwards goes over new connections.
    """

    rank: int
    ranks: int
    members: tuple[int, ...]  # global ranks
    traffic: Traffic
    generation: int  # how often its connections were given up

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
        self.generation = 0


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

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Around a collective of the group that is waited for."""
        try:
            yield
        except RuntimeError as error:
            raise self._error(f"{what[0].upper()}{what[1:]} failed.", f"an error of the backend ({error})") from error

    def _error(self, first: str, got: str) -> StateError:
        return StateError(
            explain(
                first,
                expected="every rank to use the same units in the same order, and to be alive",
                got=got,
                where=f"rank {self.rank} of {self.ranks} (global ranks {list(self.members)})",
                fix="look for a rank that raised, or that skipped a unit; ranks that may use different units need "
                "allow_unused_units=True",
            )
        )

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        return self.max_of(flags)

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        with self._together("a sum over the ranks"):
            dist.all_reduce(values, group=self.group)
        return values

    def max_of(self, values: torch.Tensor) -> torch.Tensor:
        with self._together("a maximum over the ranks"):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]  # backends do not know every dtype
        with self._together(f"a broadcast of {what}"):
            works = [dist.broadcast(tensor, group_src=0, group=self.group, async_op=True) for tensor in raw]
            for work in works:
                if work is not None:
                    work.wait()

    def gather_objects(self, value: object) -> list[typing.Any]:
        packed = bytearray(pickle.dumps(value))  # torch's own all_gather_object needs numpy
        device = torch_private.default_device_of_backend(self.group)
        with self._together("an exchange of what each rank holds"):
            sizes = gather_in_group(self.group, torch.tensor([len(packed)], device=device)).tolist()
            longest = max(sizes)
            own = torch.zeros(longest, dtype=torch.uint8, device=device)
            own[: len(packed)] = torch.frombuffer(packed, dtype=torch.uint8).to(device)
            full = gather_in_group(self.group, own).cpu()
        return [pickle.loads(memory_of(full[r * longest : r * longest + size])) for r, size in enumerate(sizes)]


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
    """Exchange by sends and receives, for gloo: a line of the watch.

    A send is read when the peer takes it, so its source is kept until ``drain`` and must not change before. Every wait has the time
    limit of the process group: without one a point-to-point wait ignores it and may last for ever.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self.timeout = torch_private.group_timeout(self.group)
        self.name = str(self.group.group_name)
        self.generation = 0  # how often connections were given up
        self.counts: dict[int, int] = {}
        self.waiting: watch.Waiting | None = None
        self.diagnosis: watch.Report | None = None
        self.many_threads = False
        self._thread, self._threads = 0, set[int]()  # that begun something last; all that did
        self._wires: typing.Any = None  # while there are no connections
        self._open: dict[int, weakref.ref[Pending]] = {}  # by id: an exception may leave one behind
        self._sends: list[tuple[list[dist.Work], torch.Tensor, _Post]] = []
        self._releases: list[tuple[dist.Work, torch.Tensor]] = []
        self._names: dict[int, str] = {}  # by tag: what was waited for last
        ranks, rank = axis.ranks, axis.rank
        # The peers in the order in which they are served: every rank begins with another one.
        self._peers = [((rank - step) % ranks, (rank + step) % ranks) for step in range(1, ranks)]
        watch.add(self)
        self._connect()

    def begin_gather(self, own: torch.Tensor, full: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        nbytes = own.nbytes
        self.traffic.add(Kind.GATHER, nbytes * (self.ranks - 1))
        number = self._begin(tag)
        receives: list[dist.Work] = []
        sends: list[dist.Work] = []
        try:
            wires, peers = self._wires, self._peers
            receives += [wires.recv([segments[source]], source, tag) for source, _ in peers]
            sends += [wires.send([own], target, tag) for _, target in peers]
        except RuntimeError as error:
            receives.clear()
            self._fail(self._names.get(tag, "parameters"), error)
        self._sends.append((sends, own, (tag, number, nbytes, 0)))
        segments[self.rank].copy_(own)  # sends read `own`, never `full`: freeing `full` need not wait for slow peers
        pending = Pending(receives, None, None, (tag, number, nbytes, len(receives)))
        self._open[id(pending)] = weakref.ref(pending)
        return pending

    def end_gather(self, pending: Pending, what: str) -> None:
        self._names[pending.post[0]] = what
        self._end(pending, what)

    def begin_reduce(self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int) -> Pending:
        tag += Kind.REDUCE
        self.traffic.add(Kind.REDUCE, segments[0].nbytes * (self.ranks - 1))
        return self._exchange(segments, tag, buffer)

    def end_reduce(self, pending: Pending, own: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
        if pending.lost:
            total = own.to(dtype, copy=True)
            _lost_totals.append(weakref.ref(total))
            return total
        self._end(pending, what)
        return _sum_in_rank_order(pending.parts, self.rank, dtype)

    def begin_total(self, total: torch.Tensor, tag: int) -> Pending:
        if _lost_totals and _is_lost(total):
            pending = Pending([])
            pending.lost = True
            return pending
        tag += Kind.REPLICATE
        self.traffic.add(Kind.REPLICATE, 2 * (self.ranks - 1) * total.nbytes // self.ranks)
        return self._exchange(self._pieces(total), tag, total)

    def continue_total(self, pending: Pending, total: torch.Tensor, tag: int, what: str) -> Pending:
        if pending.lost:
            return pending
        tag += Kind.REPLICATE_BACK
        self._end(pending, what)
        pieces = self._pieces(total)
        own = pieces[self.rank]
        own.copy_(_sum_in_rank_order(pending.parts, self.rank, total.dtype))
        return self._exchange([own] * self.ranks, tag, total, pieces)

    def end_total(self, pending: Pending, what: str) -> None:
        self._end(pending, what)

    def drain(self, what: str) -> None:
        for works, _, post in self._sends:
            self._wait(works, post, what)
        self._sends.clear()

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

    def _exchange(
        self, outgoing: Sequence[torch.Tensor], tag: int, keep: torch.Tensor, incoming: list[torch.Tensor] | None = None
    ) -> Pending:
        """Send ``outgoing[r]`` to rank r and receive from it into ``incoming[r]``, by default new memory like the own part.

        ``outgoing[0]`` is the longest.
        """
        number, rank = self._begin(tag), self.rank
        works: list[dist.Work] = []
        own = outgoing[rank]
        parts = incoming or [own if r == rank else torch.empty_like(own) for r in range(self.ranks)]
        try:
            wires, peers = self._wires, self._peers
            works += [wires.recv([parts[source]], source, tag) for source, _ in peers]
            works += [wires.send([outgoing[target]], target, tag) for _, target in peers]
        except RuntimeError as error:
            works.clear()
            self._fail("gradients", error)
        pending = Pending(works, parts, keep, (tag, number, outgoing[0].nbytes, len(peers)))
        self._open[id(pending)] = weakref.ref(pending)
        return pending

    # -- what every exchange goes through

    def _begin(self, tag: int) -> int:
        """Something is begun: return how often it was, on these connections. All members count alike."""
        if self._wires is None:
            self._connect()
        thread = get_ident()
        if thread != self._thread:
            self.many_threads |= thread in self._threads  # one moves to another thread for good, two take turns
            self._threads.add(thread)
            self._thread = thread
        number = self.counts[tag] = self.counts.get(tag, 0) + 1
        return number

    def _end(self, pending: Pending, what: str) -> None:
        if not pending.lost:
            self._open.pop(id(pending), None)
            self._wait(pending.works, pending.post, what)

    def _wait(self, works: list[dist.Work], post: _Post, what: str) -> None:
        waiting, timeout = None, self.timeout
        failure: RuntimeError | None = None
        try:
            for index, work in enumerate(works):
                self.waiting = waiting = post, index, what
                work.wait(timeout)
                if self.diagnosis is not None:
                    break
            else:
                self.waiting = None
                return
        except RuntimeError as error:
            failure = error
        except BaseException:
            self.waiting = None
            raise
        self.waiting = None
        del work  # a traceback would keep it, and with it the connections
        works.clear()
        self._fail(what if post[3] else self._names.get(post[0], what), failure, waiting)

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        # The watch cannot end such a wait; it tells those who wait for this rank.
        number = self._begin(watch.TOGETHER)
        self.waiting = waiting = (watch.TOGETHER, number, 0, 0), 0, what
        failure = None
        try:
            yield
        except RuntimeError as error:
            failure = error
        finally:
            self.waiting = None
        if failure is not None or self.diagnosis is not None:
            self._fail(what, failure, waiting)

    def _connect(self) -> None:
        """Collective. Connect, or connect anew where connections were given up."""
        here, others = watch.board(), [rank for rank in self.members if rank != self.members[self.rank]]
        if here is None:
            raise StateError("the process group of this module was destroyed; wrap the model again after init_process_group")
        what, waiting, failure = "the other ranks to connect", None, None
        try:
            self.counts[watch.ARRIVAL] = 1
            here.arrive(self)
            end, pause_s = time.monotonic() + self.timeout.total_seconds(), 0.0005
            while not here.have_arrived(self, others):
                index = next((i for i, (peer, _) in enumerate(self._peers) if not here.have_arrived(self, [self.members[peer]])), 0)
                if waiting is None or waiting[1] != index:
                    self.waiting = waiting = (watch.ARRIVAL, 1, 0, self.ranks), index, what
                if self.diagnosis is not None:
                    break
                if time.monotonic() > end or here.why_broken(self.name, self.generation, self.members[self._peers[index][0]]):
                    raise RuntimeError("a rank did not come")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            else:
                self._wires = torch_private.gloo_of_its_own(self.group, self.rank, self.ranks, self.timeout, self.generation)
        except RuntimeError as error:
            failure = error
        finally:
            self.waiting = None
        if self._wires is None:
            self._fail(what, failure, waiting)

    def _fail(self, what: str, error: RuntimeError | None, waiting: watch.Waiting | None = None) -> typing.NoReturn:
        """A wait was in vain: give up all connections, and raise the error that says why."""
        report = self.diagnosis or watch.why(self) or watch.Report(False, {})
        if waiting is not None:
            wait = self.describe(waiting)
            report = dataclasses.replace(report, lines={**report.lines, wait.rank: wait.text})
        watch.give_up(self, report)
        if report.circle:
            raise self._error(f"Waiting for {what} can never end: ranks wait for each other.", str(report)) from error
        silence = f"no message within {self.timeout.total_seconds():g} s, or a broken connection ({error})"
        raise self._error(f"Waiting for {what} failed.", "; ".join(filter(None, [silence, str(report)]))) from error

    # -- for the watch

    @property
    def is_alive(self) -> bool:
        group = self._group()
        return group is not None and torch_private.is_registered(group)

    def describe(self, waiting: watch.Waiting) -> watch.Wait:
        (tag, number, nbytes, num_receives), index, what = waiting
        if not num_receives:  # what is drained was gathered under a name of its own
            what = self._names.get(tag, what)
        rank, sends = self.members[self.rank], index >= num_receives
        if tag == watch.TOGETHER:
            peers = tuple(r for r in self.members if r != rank)
            text = f"rank {rank} waits in {what} for ranks {list(peers)}"
        else:
            peer = self._peers[index - num_receives][1] if sends else self._peers[index][0]
            peers = (self.members[peer],)
            text = f"rank {rank} waits for " + (f"rank {peers[0]} to take {what}" if sends else f"{what} from rank {peers[0]}")
            if tag == watch.ARRIVAL:
                text = f"rank {rank} waits for rank {peers[0]} to connect"
        text += f", at {pulse.place()}"
        return watch.Wait(rank, peers, self.name, self.generation, self.rank, tag, number, nbytes, sends, text)

    def release(self, member: int, tag: int, nbytes: int, sends: bool) -> None:
        if self._wires is not None:  # a message may be shorter than the memory it goes to
            scratch = torch.empty(nbytes if sends else 0, dtype=torch.uint8, device="cpu")
            transfer = self._wires.recv if sends else self._wires.send
            self._releases.append((transfer([scratch], member, tag), scratch))

    def forget(self) -> None:
        """Connections close when nothing holds them any more, and that includes the works."""
        for reference in self._open.values():
            pending = reference()
            if pending is not None:
                pending.works.clear()
                pending.lost = True
        self._open.clear()
        for works, _, _ in self._sends:
            works.clear()
        self._sends.clear()
        self._releases.clear()
        self.generation += 1  # also of connections that were not used since: others have heard that they are given up
        self.counts.clear()
        self._wires = self.diagnosis = None


# What a reduction goes on with after its connections were given up, until it has come to its end.
_lost_totals: list[weakref.ref[torch.Tensor]] = []


def _is_lost(total: torch.Tensor) -> bool:
    _lost_totals[:] = [reference for reference in _lost_totals if reference() is not None]
    return any(reference() is total for reference in _lost_totals)


def _work(work: dist.Work | None) -> dist.Work:
    """Narrow the type: None is the answer for a process that is not in the group, which was ruled out before."""
    assert work is not None
    return work


def _sum_in_rank_order(parts: list[torch.Tensor], rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Add ``parts`` in rank order, so that all ranks get the same bits; ``parts[rank]`` is not written to, the others may be.

    In fp32 at least: in bf16 a 1 would be lost beside 256 already.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if parts[0].dtype != wide:
        total = parts[0].to(wide)
        rest = parts[1:]
    else:  # the received one of the first two takes the sum: no pass of its own for a copy
        total = torch.add(parts[0], parts[1], out=parts[1] if rank == 0 else parts[0])
        rest = parts[2:]
    for part in rest:
        total.add_(part)
    return total.to(dtype)


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


def max_in_group(group: dist.ProcessGroup, value: torch.Tensor) -> torch.Tensor:
    """Return the elementwise maximum over all ranks of ``value``, whatever device it is on and the group takes. Collective."""
    if dist.get_world_size(group) == 1:
        return value
    takes = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]  # device types: "cpu:gloo,cuda:nccl"
    found = value.clone() if value.device.type in takes else value.to(takes[0])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.to(value.device)
