"""The gloo connections of one axis: connecting, waiting, and failing for good."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import typing
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_private
from .._torch_private import gloo as torch_gloo
from ..errors import StateError
from .board import board, progress
from .board.calls import COLLECTIVE, MAX_ASKED, Activity, MessageId, Report, Wait, Waiter, Waiting
from .board.store_rendezvous import rendezvous_of
from .environment import warn_after_s
from .mesh import Axis, named
from .transport import (
    VALUES,
    Handle,
    Transport,
    Work,
    communication_error,
    failed_before,
    group_destroyed,
)

ACK_TAG = 1 << 24  # added to the tag of a message that is read in place: the tag of its ack

_NOTHING: list[Work] = []
_NO_CONTEXT = contextlib.nullcontext()


def _fails_if_interrupted(method: Callable[..., typing.Any]) -> Callable[..., typing.Any]:
    """Let communication fail if an exception interrupts the method: no rank could know what was
    sent and read. Profilers see the call."""
    name = f"fsdp_compat::{method.__name__}"

    @functools.wraps(method)
    def checked(self: OverConnections, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        try:
            is_seen = _torch_private.is_profiling()
            with torch.profiler.record_function(name) if is_seen else _NO_CONTEXT:
                return method(self, *args, **kwargs)
        except StateError:  # communication has failed, or nothing was begun
            raise
        except BaseException as error:
            if isinstance(error, Exception) and not self.connections.is_connected:
                self.connections.require_open()  # another thread has closed them meanwhile
            self.connections.abandon("its communication", error)
            raise

    return checked


# Methods that end in an exchange with other ranks.
_EXCHANGES = {"begin_gather", "end_gather", "gather_now", "begin_reduce", "continue_reduce"}
_EXCHANGES |= {"end_reduce", "begin_all_reduce", "continue_all_reduce", "end_all_reduce"}
_EXCHANGES |= {"broadcast", "settle", "map_shards", "begin_barrier", "end_barrier"}


class OverConnections(Transport):
    """A transport over gloo connections, which fails when they do, and when an exception interrupts
    a method of a subclass that communicates."""

    def __init_subclass__(cls) -> None:
        for name in _EXCHANGES & vars(cls).keys():
            setattr(cls, name, _fails_if_interrupted(vars(cls)[name]))

    def __init__(self, axis: Axis, device: torch.device, connections: GlooConnections) -> None:
        super().__init__(axis, device)
        self.connections, self.activity = connections, connections.activity

    @property
    def has_failed(self) -> bool:
        return not self.connections.is_connected

    def require_working(self) -> None:
        self.connections.require_open()

    @_fails_if_interrupted
    def exchange(self, sent: Tensor, sizes: Sequence[tuple[int, int]], what: str) -> Tensor:
        connections, rank = self.connections, self.rank
        sends, receives = ([*each] for each in zip(*sizes, strict=True))
        received = sent.new_empty(sum(receives))
        outgoing, incoming = sent.split(sends), received.split(receives)
        incoming[rank].copy_(outgoing[rank])
        connections.begin(COLLECTIVE)
        connections.transfer(
            [(incoming[source], source) for source, _ in connections.peers if receives[source]],
            [(outgoing[target], target) for _, target in connections.peers if sends[target]],
            what,
        )
        return received


class GlooConnections(Waiter):
    """The connections between the ranks of an axis, and the messages in flight on them, which an
    exception may leave behind: gloo delivers in order, so a message whose receive buffer was freed
    blocks every later one between the two ranks.

    Every wait has the time limit of the process group, which gloo ignores. After a failed wait, or
    an exception in the middle of an exchange, no rank can know which messages have arrived. So
    communication fails for good: all connections of the process are closed (``board.give_up``).
    """

    def __init__(self, axis: Axis, group: dist.ProcessGroup, part: str = "") -> None:
        """Collective: the ranks of the axis. part: names these ranks. Raises UsageError for an
        invalid environment variable."""
        warn_after_s()
        name = f"{group.group_name}/{part}" if part else str(group.group_name)
        self.activity = Activity(name, axis.rank, axis.members)
        self.timeout = _torch_private.group_timeout(group)
        rank, ranks = axis.rank, axis.ranks
        # (source, target) of each step of an exchange: every rank starts with a different peer
        self.peers = [((rank - step) % ranks, (rank + step) % ranks) for step in range(1, ranks)]
        self.unfinished: dict[int, Handle] = {}  # by tag: exchanges that have not ended
        # by tag and number: what peers may still need; not received
        self.sent: dict[tuple[int, int], Handle] = {}
        self.group = weakref.ref(group)
        self.gloo: typing.Any = None  # a ProcessGroupGloo; None before connecting and after closing
        self._awaited: list[typing.Any] = []  # by the communicating thread, now
        self._is_closed, self._failure = False, ""  # failure: "" if the group was destroyed
        self._of_parent: object = None  # in a forked process: what was ``gloo``
        # called when the connections close, with whether communication has failed
        self.on_close: Callable[[bool], None] = lambda has_failed: None
        _all_connections.add(self)
        board.watch(self)
        rendezvous = rendezvous_of(axis.members, name)
        if rendezvous is not None:
            rendezvous.meet("connect() over a process group", "", name)
        self.activity.begin(COLLECTIVE)
        self.activity.waiting = (COLLECTIVE, 1, 0), 0, "connect()"
        try:
            self.gloo = torch_gloo.gloo_of_its_own(group, name, rank, ranks, self.timeout)
        except RuntimeError as error:
            self.fail("connect()", error, str(error))
        except BaseException as error:
            self.abandon("connect()", error)
            raise
        finally:
            self.activity.waiting = None

    @property
    def awaits_readers(self) -> bool:
        """True if a peer may not have read yet what this rank has sent."""
        return bool(self.sent or self.unfinished)

    def require_open(self) -> None:
        """Raise StateError if the connections were closed, or their process group was destroyed."""
        if self.gloo is not None and self.is_alive:
            return
        if not self._failure:
            raise group_destroyed()
        raise failed_before(self._failure, self.activity.rank, self.activity.members)

    def require_thread(self) -> None:
        """Raise StateError if another thread is in the middle of an exchange."""
        activity, thread = self.activity, get_ident()
        if thread != activity.thread and (activity.waiting is not None or self.awaits_readers):
            raise StateError.of(
                "Two threads communicate over one process group at once.",
                expected="one thread at a time, because all ranks must send in the same order",
                got="a call from a second thread during a forward or backward of the first",
                where=f"rank {activity.global_rank}, at {progress.location()}",
                fix="give each model that has its own thread a process group of its own: "
                "process_group=torch.distributed.new_group()",
            )
        activity.thread = thread

    # -- messages

    def begin(self, tag: int) -> int:
        """Count another use of a tag, and return the count. All members count alike."""
        if self.gloo is None:
            self.require_open()
        self.require_thread()
        return self.activity.begin(tag)

    def wait(self, works: list[Work], message: MessageId, what: str) -> None:
        """Wait for the works of a message."""
        self._awaited = works
        try:
            for index, work in enumerate(works):
                self.activity.waiting = message, index, what
                if not work.wait(self.timeout):
                    raise RuntimeError("the connection was closed")
        except RuntimeError as error:
            self.fail(what, error)
        finally:
            self.activity.waiting, self._awaited = None, _NOTHING

    def post(
        self,
        receives: Iterable[tuple[Tensor, int]],
        sends: Iterable[tuple[Tensor, int]],
        tag: int,
        what: str,
    ) -> list[Work]:
        """Begin to receive into tensors from ranks, and to send tensors to ranks."""
        works: list[Work] = []
        try:
            works += [self.gloo.recv([tensor], source, tag) for tensor, source in receives]
            works += [self.gloo.send([tensor], target, tag) for tensor, target in sends]
        except RuntimeError as error:
            works.clear()
            self.fail(what, error)
        return works

    def transfer(
        self, receives: Iterable[tuple[Tensor, int]], sends: Iterable[tuple[Tensor, int]], what: str
    ) -> None:
        """Receive and send as a part of the collective that has begun."""
        message = COLLECTIVE, self.activity.counts[COLLECTIVE], 1
        self.wait(self.post(receives, sends, VALUES, what), message, what)

    # -- failing

    def fail(
        self, what: str, error: RuntimeError | None = None, cause: str = ""
    ) -> typing.NoReturn:
        """Raise a StateError because a wait has failed, or what it has brought is wrong. cause: in
        words; "": from ``error``."""
        activity, waiting = self.activity, self.activity.waiting
        wait = self.describe(waiting or ((COLLECTIVE, 0, 0), 0, ""))  # by default for all peers
        is_lost = not cause and error is not None and not torch_gloo.is_timeout(error)
        if not cause:
            limit_s = self.timeout.total_seconds()
            cause = f"no message within {limit_s:g} s, the time limit of the process group"
        if is_lost:
            cause = "a connection was closed"
        report = activity.diagnosis or board.reason_of(self, wait, is_lost) or Report({}, cause)
        if waiting is not None:
            report = dataclasses.replace(report, lines={**report.lines, wait.rank: wait.text})
        first = f"Waiting for {what} failed: {report.cause}."
        if not report.cause:
            first = f"Waiting for {what} can never end: ranks wait for each other."
        got = str(report) or "no message"
        self._failure, activity.waiting = self._failure or f"{first} {got}", None
        board.give_up(self, report)
        culprit = None if report.culprit == wait.rank else report.culprit
        raise communication_error(first, got, activity.rank, activity.members, culprit) from error

    def abandon(self, what: str, error: BaseException) -> None:
        """Fail because an exception, usually an interrupt, came in the middle of an exchange."""
        if not self._is_closed:
            rank, name = self.activity.global_rank, type(error).__name__
            self._failure = f"rank {rank} left {what} with {name}, at {progress.location()}"
            board.give_up(self, Report({rank: self._failure}, self._failure, rank))

    # -- for the board (board/calls.py)

    @property
    def is_connected(self) -> bool:
        return not self._is_closed

    def describe(self, waiting: Waiting) -> Wait:
        (tag, number, num_receives), index, what = waiting
        activity, members = self.activity, self.activity.members
        if tag == COLLECTIVE:
            after = members[activity.rank + 1 :] + members[: activity.rank]
            peers = tuple(sorted(after[:MAX_ASKED]))  # each rank asks about different ones
            awaited = f"in {what} for ranks {named(sorted(after))}"
        else:
            source, target = self.peers[index]
            peers = (members[source if num_receives else target],)
            awaited = f"for rank {peers[0]} to take part in {what}"
            if num_receives:
                awaited = f"for {what} from rank {peers[0]}"
        text = f"rank {activity.global_rank} waits {awaited}, at {progress.location()}"
        return Wait(activity.global_rank, peers, activity.name, tag, number, text)

    def lost_peer(self, wait: Wait, is_gone: Callable[[int], bool]) -> int | None:
        gloo = self.gloo
        if gloo is None:
            return None
        needed = set(self.activity.others if wait.tag == COLLECTIVE else wait.peers)
        members = enumerate(self.activity.members)
        closed = [p for n, p in members if p in needed and torch_gloo.is_closed(gloo, n)]
        lost = next(iter(closed or filter(is_gone, wait.peers)), None)
        if lost is not None:
            time.sleep(0.1)  # messages that arrived before may be about to end the wait
        return lost

    def end_wait(self) -> None:
        gloo = self.gloo
        if gloo is not None:
            torch_gloo.break_connections(gloo)
        for work in tuple(self._awaited):
            if isinstance(work, dist.Work):
                torch_gloo.abort_wait(work)
            else:
                work.abort()

    def close(self, report: Report | None) -> None:
        """Close for good: nothing is received any more, even if other code holds a message."""
        self._is_closed = True
        # first: peers may still be reading memory that is about to be released
        self.on_close(report is not None)
        if report is not None:
            another = f"another communication of this process failed: {report}"
            self._failure = self._failure or another
            self.end_wait()
        self.gloo = None
        self.unfinished.clear()
        self.sent.clear()
        self.activity.counts.clear()


_all_connections: weakref.WeakSet[GlooConnections] = weakref.WeakSet()


def _close_in_child() -> None:
    """In a forked process: refuse every use, and leave the parent's connections alone."""
    for each in _all_connections:
        each.gloo, each._of_parent, each._is_closed = None, each.gloo, True
        each._failure = "this process was forked from a rank, whose connections it does not have"


os.register_at_fork(after_in_child=_close_in_child)


def any_awaits_readers() -> bool:
    """True if a peer may not have read yet what this process has sent, along any axis."""
    return any(connections.awaits_readers for connections in _all_connections)
