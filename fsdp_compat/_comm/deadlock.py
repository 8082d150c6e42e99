"""The watch: finds ranks that wait for each other for ever, and says who waits for what from whom.

A thread beside the main one looks at what the main thread waits for. When that has been the same
for ``PATIENCE`` seconds, it posts the wait in the store of the default process group, together with
how often this rank has begun what (per line and tag), and follows the posts of others from rank to
rank. A rank *lacks* what is waited for while it has begun it less often than the one that waits.

Why what it finds is true, however old a post is: a rank that waits begins nothing, so one that
lacks something and waits begins it after its own wait has ended. Each wait of the chain therefore
ends after the next one does, and in a circle no wait can be the first to end. The same holds for a
chain that ends at a rank whose communication has failed. A rank that computes posts nothing, and
what is on its way was begun; so neither a slow rank nor a slow network is ever taken for a circle.
It needs one thread that communicates: while several do, nothing is searched.

Who gets the error. A rank that waits in a rendezvous (meeting.py) has sent nothing yet. If a circle
passes through such ranks, they alone are refused, and the others' waits go on: whoever was refused
can still do what they wait for. In any other circle every wait is ended with the connections that
it waits on, and communication has failed: see ``give_up``.

The same thread answers others who ask what this process is doing (pulse.py), so that a rank that
has not come can be told from one that never will. It has a connection to the store of its own:
another thread may be waiting in the other one. While nobody asks and nothing waits, it makes one
request, which only reads, every ``quiet_s()`` seconds."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import sys
import textwrap
import threading
import time
import typing
import weakref
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from .. import _torch_private
from ..errors import UsageError, explain
from . import progress
from .processes import Process

__all__ = [
    "ARRIVAL",
    "RENDEZVOUS",
    "TOGETHER",
    "Answer",
    "StatusStore",
    "Connection",
    "Report",
    "Wait",
    "Waiting",
    "add",
    "board",
    "give_up",
    "idle_limit_s",
    "why",
]

PATIENCE = 5.0  # seconds in the same wait before others hear of it
LOOK_S = 1.0  # at most, between two looks of the thread
FORGOTTEN_S = 10.0  # without a question: nobody wants to know any more

ARRIVAL = -1  # in place of a tag: the wait for a member to connect
TOGETHER = -2  # likewise: a collective of all members
RENDEZVOUS = -3  # likewise: a rendezvous, in which nothing has been sent yet

# ((tag, number, nbytes, num_receives), index of the work, what); only its identity counts here
Waiting = tuple[tuple[int, int, int, int], int, str]


@functools.cache
def _told_limit_s(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise UsageError(
        explain(
            "The environment variable FSDP_COMPAT_MEET_TIMEOUT is not a time.",
            expected="a positive number of seconds",
            got=repr(text),
            where="the environment of this process",
            fix="set it to a number of seconds, the same on all ranks, or unset it for 10",
        )
    )


def idle_limit_s() -> float:
    """Return for how many seconds a rank that others wait for may be idle:
    FSDP_COMPAT_MEET_TIMEOUT, by default 10.

    Raises UsageError for a text that is not a time.
    """
    return _told_limit_s(os.environ.get("FSDP_COMPAT_MEET_TIMEOUT", "10"))


def quiet_s() -> float:
    """Seconds between two looks at the store while nobody asks and nothing waits."""
    with contextlib.suppress(UsageError):  # who makes the call that needs it raises
        return min(10.0, idle_limit_s())
    return 10.0


@dataclasses.dataclass(frozen=True)
class Wait:
    """What a rank waits for, in words that other ranks understand."""

    rank: int  # global, of the one that waits
    peers: tuple[int, ...]  # global: it goes on when all of them have begun the same
    line: str
    tag: int
    number: int  # how often it has begun this itself
    text: str

    @property
    def can_be_refused(self) -> bool:
        """True if nothing was sent: an error here leaves every rank able to go on."""
        return self.tag == RENDEZVOUS


class Connection(typing.Protocol):
    """Communication along one axis, as the watch sees it."""

    name: str  # the same on all members
    rank: int
    members: tuple[int, ...]
    counts: dict[int, int]  # by tag: how often this rank has begun it
    thread: int  # that has begun something last, 0 if none has
    waiting: Waiting | None  # another object for every wait
    diagnosis: Report | None  # of a wait that can never end; it is set before the wait is

    @property
    def is_alive(self) -> bool:
        """True while its process group is."""

    @property
    def is_connected(self) -> bool:
        """True while it has connections that can fail."""

    def describe(self, waiting: Waiting) -> Wait: ...

    def end_wait(self) -> None:
        """End the wait of the main thread with an error, from the watch's thread."""

    def fail(self, report: Report) -> None:
        """Close the connections, with everything that travels on them; every later use raises and
        says why."""

    def close(self) -> None:
        """Close the connections, as there is nobody left to fail for: their process group was
        destroyed."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Why communication has failed."""

    circle: (
        bool  # ranks wait for each other; else a time limit, a broken connection or an interrupt
    )
    lines: dict[int, str]  # by global rank: what it waits for

    def __str__(self) -> str:
        return "; ".join(self.lines[rank] for rank in sorted(self.lines))


@dataclasses.dataclass(frozen=True)
class _Post:
    """A wait, and what its rank had begun when it was in it."""

    wait: Wait
    counts: dict[str, dict[int, int]]  # by line and tag

    def lacks(self, wait: Wait) -> bool:
        return self.counts.get(wait.line, {}).get(wait.tag, 0) < wait.number


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a process says that it is doing."""

    number: int  # of the question that it answers
    text: str  # as in "is at train.py:41 in main()"
    idle_s: float  # for how long it has made no progress; 0.0 in a wait that the watch knows
    ended: bool = False  # its program, or the process group it was in


class StatusStore:
    """What ranks tell each other by way of the store. No method waits for another rank."""

    def __init__(self, store: _torch_private.Store) -> None:
        self._store = store

    def _get(self, key: str) -> str:
        key = f"fsdp_compat/{key}"
        return (
            self._store.get(key).decode() if self._store.check([key]) else ""
        )  # `get` alone waits for what is not there

    def _set(self, key: str, value: object) -> None:
        self._store.set(f"fsdp_compat/{key}", "" if value is None else json.dumps(value))

    def post(self, rank: int, post: _Post | None) -> None:
        self._set(f"post/{rank}", post and dataclasses.astuple(post))

    def post_of(self, rank: int) -> _Post | None:
        text = self._get(f"post/{rank}")
        if not text:
            return None
        (rank, peers, *rest), begun = json.loads(text)
        counts = {line: {int(tag): n for tag, n in of.items()} for line, of in begun.items()}
        return _Post(Wait(rank, tuple(peers), *rest), counts)

    def break_line(self, line: Connection, report: Report) -> None:
        self._set(f"broken/{line.name}/{line.members[line.rank]}", [report.circle, report.lines])

    def why_broken(self, line: str, rank: int) -> Report | None:
        """What a member said when communication along a line failed for it."""
        text = self._get(f"broken/{line}/{rank}")
        if not text:
            return None
        circle, lines = json.loads(text)
        return Report(circle, {int(rank): line for rank, line in lines.items()})

    def ask(self, rank: int) -> int:
        """Ask a rank what it is doing; return the number of the question. Who waits asks again and
        again."""
        return self._store.add(f"fsdp_compat/asked/{rank}", 1)

    def num_asked(self, rank: int, before: int) -> int:
        """Return how often a rank was asked, which was ``before`` at the last look. One request
        where nothing is new."""
        key = f"fsdp_compat/asked/{rank}"
        return int(self._store.get(key)) if before or self._store.check([key]) else 0

    def answer(self, rank: int, answer: Answer | None) -> None:
        self._set(f"answer/{rank}", answer and dataclasses.astuple(answer))

    def answer_of(self, rank: int) -> Answer | None:
        text = self._get(f"answer/{rank}")
        return Answer(*json.loads(text)) if text else None

    def introduce(self, rank: int) -> None:
        """Say which process of which host this rank is."""
        own = Process.own()
        self._set(f"process/{rank}", own and dataclasses.astuple(own))

    def is_gone(self, rank: int) -> bool:
        """True if the process of a rank is known to have ended: others can tell on its own host."""
        text = self._get(f"process/{rank}")
        return bool(text) and Process(*json.loads(text)).is_known_to_have_ended()

    def arrive(self, line: Connection) -> None:
        self._store.set(f"fsdp_compat/arrived/{line.name}/{line.members[line.rank]}", "1")

    def have_arrived(self, line: Connection, ranks: Iterable[int]) -> bool:
        return self._store.check([f"fsdp_compat/arrived/{line.name}/{rank}" for rank in ranks])


def board() -> StatusStore | None:
    """Return the board of the ranks of the world, or None where there is no process group any
    more."""
    store = _torch_private.default_store()
    return None if store is None else StatusStore(store)


class _Doorkeeper:
    """Answers for this process, in one process group of the world."""

    def __init__(self, world: dist.ProcessGroup, store: _torch_private.Store) -> None:
        self.world = weakref.ref(world)
        self.board = StatusStore(_torch_private.second_connection(store))
        self._rank = dist.get_rank()
        self._num_answered = 0
        self._answered_at = self._looked_at = -FORGOTTEN_S
        self._pulse = progress.Progress()
        self.board.answer(self._rank, None)

    def answer(self, lines: Sequence[Connection]) -> None:
        idle_s = (
            self._pulse.idle_s()
        )  # looked at without a question, too: whoever asks hears how long it has been
        line = next((line for line in lines if line.waiting is not None), None)
        waiting = None if line is None else line.waiting
        if waiting is not None:
            self._pulse, idle_s = progress.Progress(), 0.0
        now = time.monotonic()
        if now - self._answered_at > FORGOTTEN_S and now - self._looked_at < quiet_s():
            return
        self._looked_at = now
        number = self.board.num_asked(self._rank, self._num_answered)
        if number == self._num_answered:
            return
        self._num_answered, self._answered_at = number, now
        text = f"is at {progress.place()}"
        if line is not None and waiting is not None:
            text = line.describe(waiting).text.removeprefix(f"rank {self._rank} ")
        self.board.answer(self._rank, Answer(number, text, idle_s))

    def leave(self, text: str) -> None:
        """Say that nobody needs to wait for this process any more."""
        with contextlib.suppress(Exception):
            self.board.answer(self._rank, Answer(0, text, 0.0, ended=True))


class _Watch:
    """The thread of one process, and what it remembers. It lives while there are lines."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # around everything that ranks tell each other
        self._lines: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._seen: Waiting | None = None
        self._since = 0.0  # monotonic seconds
        self._posted: int | None = None  # the global rank under which a post stands
        self._door: _Doorkeeper | None = None
        self._introduced: weakref.WeakSet[dist.ProcessGroup] = (
            weakref.WeakSet()
        )  # worlds that know this process

    def add(self, line: Connection) -> None:
        with self.lock:
            self._lines.add(line)
            world, here = dist.group.WORLD, board()
            if world is not None and here is not None and world not in self._introduced:
                self._introduced.add(world)
                here.introduce(dist.get_rank())
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="fsdp_compat watch"
                )
                self._thread.start()

    def lines(self) -> list[Connection]:
        """Those whose process groups are alive. The caller has the lock."""
        return [line for line in self._lines if line.is_alive]

    def end(self) -> None:
        """The interpreter ends: a thread that came back from a call then would take it down."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)
        with contextlib.suppress(Exception):
            self._at_door(self.lines())  # that may be its first time
        if self._door is not None:
            error = getattr(sys, "last_value", None)  # that the interpreter has printed
            self._door.leave(
                "has ended"
                + (
                    f" with {type(error).__name__}: {textwrap.shorten(str(error), 200)}"
                    if error
                    else ""
                )
            )

    def _run(self) -> None:
        while not self._stop.wait(min(LOOK_S, PATIENCE / 5)):
            with self.lock:
                lines = self.lines()
                for line in set(self._lines).difference(
                    lines
                ):  # whoever holds a model keeps its lines
                    line.close()
                if not lines:  # torch may hold groups, and so lines, that are destroyed
                    self._thread = None
                with contextlib.suppress(
                    Exception
                ):  # the store is gone, or the process group is going
                    self._at_door(lines)
                if not lines:
                    return
                with contextlib.suppress(Exception):
                    self._look(lines)

    def _at_door(self, lines: Sequence[Connection]) -> None:
        """Answer those who ask what this process is doing."""
        world, store = dist.group.WORLD, _torch_private.default_store()
        if self._door is not None and self._door.world() is not world:
            door, self._door = self._door, None
            door.leave("has destroyed its process groups")
        if self._door is None and lines and world is not None and store is not None:
            self._door = _Doorkeeper(world, store)
        if self._door is not None:
            self._door.answer(lines)

    def _board(self) -> StatusStore | None:
        """The thread's own."""
        return self._door.board if self._door is not None else board()

    def _look(self, lines: Sequence[Connection]) -> None:
        alive = {thread.ident for thread in threading.enumerate()}
        if len({line.thread for line in lines} & alive) > 1:
            lines = []  # while one thread waits, another may begin what others wait for
        line = next((line for line in lines if line.waiting is not None), None)
        waiting = None if line is None else line.waiting
        if waiting is not self._seen:
            self._seen, self._since = waiting, time.monotonic()
            self.withdraw()
        elif (
            line is not None and waiting is not None and time.monotonic() - self._since >= PATIENCE
        ):
            self._long_wait(lines, line, waiting)

    def withdraw(self) -> None:
        """The caller has the lock."""
        if self._posted is not None:
            rank, self._posted = self._posted, None
            here = self._board()
            if here is not None:
                here.post(rank, None)

    def _long_wait(self, lines: Sequence[Connection], line: Connection, waiting: Waiting) -> None:
        here = self._board()
        if here is None:
            return
        own = _Post(line.describe(waiting), {line.name: dict(line.counts) for line in lines})
        if line.waiting is not waiting:  # it has gone on, and the counts may be of later
            return
        if self._posted is None:
            self._posted = own.wait.rank
            here.post(own.wait.rank, own)
        if line.diagnosis is not None:
            return
        report = _find_cycle(here, own)
        if report is not None and line.waiting is waiting:
            line.diagnosis = report
            if not own.wait.can_be_refused:
                for other in lines:  # first: whoever loses a connection looks here for the reason
                    if other.is_connected:
                        here.break_line(other, report)
            line.end_wait()


def _find_cycle(here: StatusStore, own: _Post) -> Report | None:
    """Return why a wait can never end, or None where it may."""
    path: dict[int, _Post] = {}  # in the order of the search
    done: set[int] = set()  # ranks from which no way leads to a circle

    def texts() -> dict[int, str]:
        return {rank: post.wait.text for rank, post in path.items()}

    def search(post: _Post) -> Report | None:
        wait = post.wait
        path[wait.rank] = post
        for rank in wait.peers:
            failed = None if wait.can_be_refused else here.why_broken(wait.line, rank)
            if failed is not None:
                return Report(failed.circle, {**failed.lines, **texts()})
            peer = path.get(rank) or (None if rank in done else here.post_of(rank))
            if peer is None or not peer.lacks(wait):
                continue
            if rank not in path:
                found = search(peer)
                if found is not None:
                    return found
                continue
            ranks = list(path)
            refused = [
                rank for rank in ranks[ranks.index(rank) :] if path[rank].wait.can_be_refused
            ]
            if not refused or own.wait.rank in refused:
                return Report(True, texts())
        del path[wait.rank]
        done.add(wait.rank)
        return None

    return search(own)


_watch = _Watch()


def _start_afresh() -> None:
    """In a forked process: threads do not come along, and the lock may be another one's."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_start_afresh)
atexit.register(lambda: _watch.end())


def add(line: Connection) -> None:
    """Watch a line, for as long as somebody else holds it."""
    _watch.add(line)


def why(line: Connection) -> Report | None:
    """Return what another member said when communication along the line failed for it."""
    here = board()
    if here is not None:
        with contextlib.suppress(RuntimeError):
            for rank in line.members:
                report = here.why_broken(line.name, rank)
                if report is not None and rank != line.members[line.rank]:
                    return report
    return None


def give_up(failed: Connection, report: Report) -> None:
    """Communication of this process has failed: a rank that has left a wait behind is out of step
    with everybody.

    All its connections are closed, and stay so; who waits for one of them gets an error, and finds
    the reason in the store.
    """
    with _watch.lock:
        here, lines = board(), {failed, *_watch.lines()}
        if here is not None:
            with contextlib.suppress(RuntimeError):
                for line in lines:
                    if line.is_connected:
                        here.break_line(line, report)
                _watch.withdraw()
        for line in lines:
            if line.is_connected:
                line.fail(report)
