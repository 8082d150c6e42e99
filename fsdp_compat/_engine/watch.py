"""The watch: finds ranks that wait for each other for ever, and says who waits for what from whom.

A thread beside the main one looks at what the main thread waits for. When that has been the same for ``PATIENCE`` seconds it posts
it in the store of the default process group, together with how often this rank has begun what (per line and tag), and follows the
posts of others from rank to rank. A rank *lacks* what is waited for while it has begun it less often than the one that waits.

Why what it finds is true, however old a post is: a rank that waits begins nothing, so one that lacks something and waits begins it
after its own wait has ended. Each wait of the chain therefore ends after the next one does, and in a circle no wait can be the
first to end. The same holds for a chain that ends at a rank which has given the connections up. A rank that computes posts nothing,
and what is on its way was begun; so neither a slow rank nor a slow network is ever taken for a circle.

A wait in gloo cannot be ended from inside its process, but the rank that it waits for can end it, with a message that has the tag
and no content. So a rank that knows its wait to be vain asks for that. Then it raises, and gives all its connections up: they
close, and who waits for one of them finds the reason in the store. Each member of a line gives up each generation of it once at
most, which is how they agree on the generation with which they connect anew.

The same thread answers others who ask what this process is doing (pulse.py), so that a rank that has not come can be told from one
that never will. It has a connection to the store of its own: another thread may be waiting in the other one.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import sys
import textwrap
import threading
import time
import typing
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist

from . import pulse, torch_private

__all__ = [
    "ARRIVAL",
    "TOGETHER",
    "Answer",
    "Board",
    "Line",
    "Report",
    "Wait",
    "Waiting",
    "add",
    "board",
    "give_up",
    "why",
]

PATIENCE = 5.0  # seconds in the same wait before others hear of it
LOOK_S = 1.0  # at most, between two looks of the thread
FORGOTTEN_S = 10.0  # without a question: nobody wants to know any more

ARRIVAL = -1  # in place of a tag: the wait for a member to connect
TOGETHER = -2  # likewise: a collective that all members take part in

# ((tag, number, nbytes, num_receives), index of the work, what); only its identity counts here
Waiting = tuple[tuple[int, int, int, int], int, str]


@dataclasses.dataclass(frozen=True)
class Wait:
    """What a rank waits for, in words that other ranks understand."""

    rank: int  # global, of the one that waits
    peers: tuple[int, ...]  # global: it goes on when all of them have begun the same
    line: str
    generation: int
    member: int  # of the line: the one that waits
    tag: int
    number: int  # how often it has begun this itself
    nbytes: int
    sends: bool
    text: str


class Line(typing.Protocol):
    """Connections along one axis, as the watch sees them."""

    name: str  # the same on all members
    generation: int
    rank: int
    members: tuple[int, ...]
    counts: dict[int, int]  # by tag: how often this rank has begun it on this generation
    waiting: Waiting | None  # another object for every wait
    diagnosis: Report | None  # of a wait that can never end; it is set before the wait is
    many_threads: bool

    @property
    def is_alive(self) -> bool:
        """True while its process group is."""

    def describe(self, waiting: Waiting) -> Wait: ...

    def release(self, member: int, tag: int, nbytes: int, sends: bool) -> None:
        """End the wait of another member, which knows that it was in vain."""

    def forget(self) -> None:
        """Give the connections up, with everything that travels on them."""

    def close(self) -> None:
        """Let go of the connections, as there is nobody left to give them up to: their process group was destroyed."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Why a rank has given its connections up."""

    circle: bool  # ranks wait for each other; else a time limit or a broken connection
    lines: dict[int, str]  # by global rank: what it waits for

    def __str__(self) -> str:
        return "; ".join(self.lines[rank] for rank in sorted(self.lines))


@dataclasses.dataclass(frozen=True)
class _Post:
    """A wait, and what its rank had begun when it was in it."""

    wait: Wait
    counts: dict[str, tuple[int, dict[int, int]]]  # by line: generation, counts

    def lacks(self, wait: Wait) -> bool:
        generation, counts = self.counts.get(wait.line, (0, {}))
        return (generation, counts.get(wait.tag, 0)) < (wait.generation, wait.number)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a process says that it is doing."""

    number: int  # of the question that it answers
    text: str  # as in "is at train.py:41 in main()"
    idle_s: float  # for how long it has made no progress; 0.0 in a wait that the watch knows
    ended: bool = False  # its program, or the process group it was in


class Board:
    """What ranks tell each other by way of the store. No method blocks."""

    def __init__(self, store: torch_private.Store) -> None:
        self._store = store

    def _get(self, key: str) -> bytes:
        return self._store.compare_set(f"fsdp_compat/{key}", "", "")  # `get` waits for what is not there

    def _set(self, key: str, value: object) -> None:
        self._store.set(f"fsdp_compat/{key}", "" if value is None else json.dumps(value))

    def post(self, rank: int, post: _Post | None) -> None:
        self._set(f"post/{rank}", post and dataclasses.astuple(post))

    def post_of(self, rank: int) -> _Post | None:
        text = self._get(f"post/{rank}")
        if not text:
            return None
        (rank, peers, *rest), begun = json.loads(text)
        counts = {line: (gen, {int(tag): n for tag, n in of.items()}) for line, (gen, of) in begun.items()}
        return _Post(Wait(rank, tuple(peers), *rest), counts)

    def break_line(self, line: Line, report: Report) -> None:
        self._set(f"broken/{line.name}/{line.generation}/{line.members[line.rank]}", [report.circle, report.lines])

    def why_broken(self, line: str, generation: int, rank: int) -> Report | None:
        """What a member said when it gave up this generation of the line."""
        text = self._get(f"broken/{line}/{generation}/{rank}")
        if not text:
            return None
        circle, lines = json.loads(text)
        return Report(circle, {int(rank): line for rank, line in lines.items()})

    def ask_for_release(self, wait: Wait, of: int) -> None:
        request = [wait.line, wait.generation, wait.member, wait.tag, wait.nbytes, wait.sends]
        self._set(f"release/{of}/{self._store.add(f'fsdp_compat/releases/{of}', 1)}", request)

    def requests(self, rank: int, seen: int) -> Iterator[tuple[int, list[typing.Any]]]:
        """Yield the requests to ``rank`` after the first ``seen``, each with its number."""
        for number in range(seen + 1, self._store.add(f"fsdp_compat/releases/{rank}", 0) + 1):
            text = self._get(f"release/{rank}/{number}")
            if not text:  # counted, and not written yet
                return
            yield number, json.loads(text)

    def ask(self, rank: int) -> int:
        """Ask a rank what it is doing; return the number of the question. Who waits asks again and again."""
        return self._store.add(f"fsdp_compat/asked/{rank}", 1)

    def num_asked(self, rank: int) -> int:
        return self._store.add(f"fsdp_compat/asked/{rank}", 0)

    def answer(self, rank: int, answer: Answer | None) -> None:
        self._set(f"answer/{rank}", answer and dataclasses.astuple(answer))

    def answer_of(self, rank: int) -> Answer | None:
        text = self._get(f"answer/{rank}")
        return Answer(*json.loads(text)) if text else None

    def arrive(self, line: Line) -> None:
        self._store.set(f"fsdp_compat/arrived/{line.name}/{line.generation}/{line.members[line.rank]}", "1")

    def have_arrived(self, line: Line, ranks: Iterable[int]) -> bool:
        return self._store.check([f"fsdp_compat/arrived/{line.name}/{line.generation}/{rank}" for rank in ranks])


def board() -> Board | None:
    """Return the board of the ranks of the world, or None where there is no process group any more."""
    store = torch_private.default_store()
    return None if store is None else Board(store)


class _Doorkeeper:
    """Answers for this process, in one process group of the world."""

    def __init__(self, world: dist.ProcessGroup, store: torch_private.Store) -> None:
        self.world = weakref.ref(world)
        self.board = Board(torch_private.second_connection(store))
        self._rank = dist.get_rank()
        self._num_answered = 0
        self._answered_at = 0.0
        self._pulse: pulse.Pulse | None = None  # while others ask
        self.board.answer(self._rank, None)

    def answer(self, lines: Sequence[Line]) -> None:
        number = self.board.num_asked(self._rank)
        now = time.monotonic()
        if number == self._num_answered:
            if now - self._answered_at > FORGOTTEN_S:
                self._pulse = None
            return
        self._num_answered, self._answered_at = number, now
        if self._pulse is None:
            self._pulse = pulse.Pulse()
        idle_s, text = self._pulse.idle_s(), f"is at {pulse.place()}"
        line = next((line for line in lines if line.waiting is not None), None)
        waiting = None if line is None else line.waiting
        if line is not None and waiting is not None:
            self._pulse, idle_s, text = None, 0.0, line.describe(waiting).text.removeprefix(f"rank {self._rank} ")
        self.board.answer(self._rank, Answer(number, text, idle_s))

    def leave(self, text: str) -> None:
        """Say that nobody needs to wait for this process any more."""
        with contextlib.suppress(Exception):
            self.board.answer(self._rank, Answer(0, text, 0.0, ended=True))


class _Watch:
    """The thread of one process, and what it remembers. It lives while there are lines."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # around everything that ranks tell each other
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._seen: Waiting | None = None
        self._since = 0.0  # monotonic seconds
        self._posted: int | None = None  # the global rank under which a post stands
        self._door: _Doorkeeper | None = None
        # By default group: how many requests for a release were answered.
        self._num_answered: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

    def add(self, line: Line) -> None:
        with self.lock:
            self._lines.add(line)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True, name="fsdp_compat watch")
                self._thread.start()

    def lines(self) -> list[Line]:
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
            self._door.leave("has ended" + (f" with {type(error).__name__}: {textwrap.shorten(str(error), 200)}" if error else ""))

    def _run(self) -> None:
        while not self._stop.wait(min(LOOK_S, PATIENCE / 5)):
            with self.lock:
                lines = self.lines()
                for line in set(self._lines).difference(lines):  # whoever holds a model keeps its lines
                    line.close()
                if not lines:  # torch may hold groups, and so lines, that are destroyed
                    self._thread = None
                with contextlib.suppress(Exception):  # the store is gone, or the process group is going
                    self._at_door(lines)
                if not lines:
                    return
                with contextlib.suppress(Exception):
                    self._look(lines)

    def _at_door(self, lines: Sequence[Line]) -> None:
        """Answer those who ask what this process is doing."""
        world, store = dist.group.WORLD, torch_private.default_store()
        if self._door is not None and self._door.world() is not world:
            door, self._door = self._door, None
            door.leave("has destroyed its process groups")
        if self._door is None and lines and world is not None and store is not None:
            self._door = _Doorkeeper(world, store)
        if self._door is not None:
            self._door.answer(lines)

    def _board(self) -> Board | None:
        """The thread's own."""
        return self._door.board if self._door is not None else board()

    def _look(self, lines: Sequence[Line]) -> None:
        line = next((line for line in lines if line.waiting is not None), None)
        waiting = None if line is None else line.waiting
        if waiting is not self._seen:
            self._seen, self._since = waiting, time.monotonic()
            self.withdraw()
        elif line is not None and waiting is not None and time.monotonic() - self._since >= PATIENCE:
            self._long_wait(lines, line, waiting)

    def withdraw(self) -> None:
        """The caller has the lock."""
        if self._posted is not None:
            rank, self._posted = self._posted, None
            here = self._board()
            if here is not None:
                here.post(rank, None)

    def _long_wait(self, lines: Sequence[Line], line: Line, waiting: Waiting) -> None:
        here = self._board()
        if here is None or any(line.many_threads for line in lines):
            return
        wait = line.describe(waiting)
        own = _Post(wait, {line.name: (line.generation, dict(line.counts)) for line in lines})
        if line.waiting is not waiting:  # it has gone on, and the counts may be of later
            return
        if self._posted is None:
            self._posted = wait.rank
            here.post(wait.rank, own)
        self._answer(here, lines, wait.rank)
        if line.diagnosis is None:
            report = _doom(here, own)
            if report is not None:
                line.diagnosis = report
                for other in lines:
                    here.break_line(other, report)
                if wait.tag not in (ARRIVAL, TOGETHER):
                    here.ask_for_release(wait, wait.peers[0])

    def _answer(self, here: Board, lines: Sequence[Line], rank: int) -> None:
        """Release those that wait for this rank in vain."""
        world = dist.group.WORLD
        if world is None:
            return
        for number, (name, generation, *message) in here.requests(rank, self._num_answered.get(world, 0)):
            self._num_answered[world] = number
            for line in lines:
                if (line.name, line.generation) == (name, generation):
                    with contextlib.suppress(RuntimeError):
                        line.release(*message)


def _doom(here: Board, own: _Post) -> Report | None:
    """Return why a wait can never end, or None where it may."""
    path: dict[int, _Post] = {}
    done: set[int] = set()  # ranks from which no way leads to a circle

    def texts() -> dict[int, str]:
        return {rank: post.wait.text for rank, post in path.items()}

    def search(post: _Post) -> Report | None:
        wait = post.wait
        path[wait.rank] = post
        for rank in wait.peers:
            given_up = here.why_broken(wait.line, wait.generation, rank)
            if given_up is not None:
                return Report(given_up.circle, {**given_up.lines, **texts()})
            peer = path.get(rank) or (None if rank in done else here.post_of(rank))
            if peer is None or not peer.lacks(wait):
                continue
            if rank in path:
                return Report(True, texts())
            found = search(peer)
            if found is not None:
                return found
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


def add(line: Line) -> None:
    """Watch a line, for as long as somebody else holds it."""
    _watch.add(line)


def why(line: Line) -> Report | None:
    """Return what another member said when it gave the line up."""
    here = board()
    if here is not None:
        with contextlib.suppress(RuntimeError):
            for rank in line.members:
                report = here.why_broken(line.name, line.generation, rank)
                if report is not None and rank != line.members[line.rank]:
                    return report
    return None


def give_up(failed: Line, report: Report) -> None:
    """Give up all connections of this process, and say why: a rank that has left a wait behind is out of step with everybody."""
    with _watch.lock:
        here, lines = board(), _watch.lines()
        if here is not None:
            with contextlib.suppress(RuntimeError):
                for line in lines:
                    here.break_line(line, report)
                _watch.withdraw()
        for line in {*lines, failed}:
            line.forget()
