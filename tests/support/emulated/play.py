"""A player of recorded programs: when each operation would run on a device whose streams run at the
same time, and how much memory a caching allocator would reserve. Pure and deterministic.

The host enqueues in the program's order and takes time for it; the work of a stream runs in order;
works that run at the same time slow each other down by what they share
(``cost_model.speeds``). Each stream has a pool, which keeps what it has once reserved.
A block with readers (``record_stream``) goes back to its pool when their work has ended and the
host allocates or frees something. Fragmentation is not modelled."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.support.cost_model import Work, speeds
from tests.support.order import (
    HOST,
    Allocate,
    DeviceSync,
    EventSync,
    Forget,
    Free,
    Happening,
    Op,
    Record,
    StreamSync,
    Wait,
)

_EPSILON_S = 1e-13


class Ran(NamedTuple):
    """An operation, and when it ran."""

    op: Op
    start: float
    end: float


@dataclasses.dataclass
class Played:
    seconds: float = 0.0  # until all work has ended
    ran: list[Ran] = dataclasses.field(default_factory=list)
    marks: list[float] = dataclasses.field(default_factory=list)  # when the host reached each
    # Bytes: the most that all pools held at once, above the least, and the sum of what each did.
    active: int = 0
    reserved: int = 0


class _Recorded(NamedTuple):
    token: int


class _Awaited(NamedTuple):
    token: int


@dataclasses.dataclass
class _Running:
    op: Op
    work: Work
    start: float
    left: float  # seconds at full speed


class _Pool:
    def __init__(self) -> None:
        self.now = self.most = self.least = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most, self.least = max(self.most, self.now), min(self.least, self.now)


_Entry = tuple[Op, Work] | _Recorded | _Awaited


class _Player:
    def __init__(self, cost_of: Callable[[Op], Work], enqueue_s: float, event_s: float) -> None:
        self.played = Played()
        self.now = 0.0
        self.host = 0.0  # when the host is free
        self.blocked: list[int] = []  # tokens that the host waits for
        self._cost_of, self._enqueue_s, self._event_s = cost_of, enqueue_s, event_s
        self._queues: dict[int, deque[_Entry]] = {}
        self.running: dict[int, _Running] = {}  # by stream
        self._last_token = 0
        self._events: dict[int, int] = {}  # the token of an event's last record
        self._reached: set[int] = set()  # tokens
        self._pools: dict[int, _Pool] = {}
        self._all = _Pool()
        self._waiting: list[tuple[Free, list[int]]] = []  # with the tokens of their readers

    # -- the host

    @property
    def host_is_ready(self) -> bool:
        return self.host <= self.now + _EPSILON_S and not self.is_blocked

    @property
    def is_blocked(self) -> bool:
        return any(token not in self._reached for token in self.blocked)

    def take(self, happening: Happening) -> None:
        """The host does the next thing."""
        self.blocked = []
        match happening:
            case Op(stream=stream) if stream != HOST:
                self._queue(stream).append((happening, self._cost_of(happening)))
                self._spend(self._enqueue_s)
            case Record(event, stream):
                self._events[event] = self._mark(stream)
                self._spend(self._event_s)
            case Wait(event, stream):
                if event in self._events:
                    self._queue(stream).append(_Awaited(self._events[event]))
                self._spend(self._event_s)
            case EventSync(event):
                self.blocked = [self._events[event]] if event in self._events else []
            case StreamSync(stream):
                self.blocked = [self._mark(stream)]
            case DeviceSync():
                self.blocked = [self._mark(stream) for stream in self._queues]
            case Allocate(stream, (begin, end)):
                self._reclaim()
                self._add(stream, end - begin)
            case Free(readers=readers) if readers:
                self._waiting.append((happening, [self._mark(stream) for stream in readers]))
                self._reclaim()
            case Free(stream, (begin, end)):
                self._reclaim()
                self._add(stream, begin - end)
            case Forget() | Op():
                pass

    def _spend(self, seconds: float) -> None:
        self.host = max(self.host, self.now) + seconds

    def _queue(self, stream: int) -> deque[_Entry]:
        return self._queues.setdefault(stream, deque())

    def _mark(self, stream: int) -> int:
        self._last_token += 1
        self._queue(stream).append(_Recorded(self._last_token))
        return self._last_token

    # -- memory

    def _add(self, stream: int, nbytes: int) -> None:
        self._pools.setdefault(stream, _Pool()).add(nbytes)
        self._all.add(nbytes)

    def _reclaim(self) -> None:
        waiting, self._waiting = self._waiting, []
        for free, tokens in waiting:
            if self._reached.issuperset(tokens):
                self._add(free.stream, free.range[0] - free.range[1])
            else:
                self._waiting.append((free, tokens))

    # -- the device

    def start(self) -> bool:
        """Start what can start; return whether anything did, or was reached."""
        moved = False
        for stream, queue in self._queues.items():
            while queue and stream not in self.running:
                match queue[0]:
                    case _Recorded(token):
                        self._reached.add(token)
                    case _Awaited(token):
                        if token not in self._reached:
                            break
                    case (op, work):
                        if work.seconds > 0:
                            self.running[stream] = _Running(op, work, self.now, work.seconds)
                queue.popleft()
                moved = True
        return moved

    def advance(self, *, has_more: bool) -> None:
        """Let time pass until a work ends, or the host is free."""
        running = list(self.running.items())
        rates = speeds([each.work.demand for _, each in running])
        steps = [each.left / rate for (_, each), rate in zip(running, rates, strict=True)]
        if has_more and not self.is_blocked and self.host > self.now:
            steps.append(self.host - self.now)
        if not steps:
            raise RuntimeError("a wait that does not end")
        step = min(steps)
        self.now += step
        for (stream, each), rate in zip(running, rates, strict=True):
            each.left -= step * rate
            if each.left <= _EPSILON_S:
                self.played.ran.append(Ran(each.op, each.start, self.now))
                del self.running[stream]

    def finish(self) -> Played:
        if any(self._queues.values()):
            raise RuntimeError("a wait that does not end")
        self.played.seconds = self.now
        self.played.active = self._all.most - self._all.least
        self.played.reserved = sum(pool.most - pool.least for pool in self._pools.values())
        return self.played


def play(
    program: Sequence[Happening],
    cost_of: Callable[[Op], Work],
    *,
    enqueue_s: float = 0.0,
    event_s: float = 0.0,
    marks: Sequence[int] = (),
) -> Played:
    """Return when the work of a program runs.

    enqueue_s: how long the host is busy after it has enqueued an operation. event_s: the same for a
    record or a wait. marks: indices in the program, in order: the host's time there, after its
    waits, is reported.
    """
    player = _Player(cost_of, enqueue_s, event_s)
    position, left = 0, deque(marks)
    while True:
        moved = True
        while moved:
            moved = False
            while player.host_is_ready:
                while left and left[0] <= position:
                    player.played.marks.append(player.now)
                    left.popleft()
                if position >= len(program):
                    break
                player.take(program[position])
                position += 1
                moved = True
            moved = player.start() or moved
        if not player.running and position >= len(program) and not left:
            return player.finish()
        player.advance(has_more=position < len(program) or bool(left))
