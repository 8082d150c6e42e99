"""Calls that all ranks have to make: they meet in the store first, so that ranks that diverge get
an error instead of a hang.

    meet(call, groups)            when it returns, all ranks that ``groups`` are spread over are in
    ``call``; else StateError on all with together(call, groups):  the same, and what is called
    inside does not meet again expect(groups)                once, when the groups are made: the
    constructor does it

``call`` is the name that users know, such as "state_dict"; ``groups`` are the engine's groups whose
parts the call is about to put together: the ranks of one copy meet. With ``copies=True`` those that
hold the other copies (hybrid strategies, NO_SHARD) come, too. Without groups, or with one rank,
nothing is sent: a call that does not communicate does not meet.

How ranks meet. All meetings of one set of ranks are numbered. A rank writes down what it calls and
from where, and adds to the meeting's counter: 1, and the checksum of the call (with the number of
the model among those of these ranks) above the bits of the count. So one addition says how many are
here and whether all of them call the same; who is not the last reads the counter until it says so.
That is one round trip to the store for the last rank, however many there are; the longer it takes,
the rarer it is read.

Who does not come. Those who are here, above all the first one, ask those who are missing what they
are doing; the watch's thread answers (watch.py, pulse.py). A rank that makes progress, waits for
others in a way that the watch knows, or does not answer (it is stopped, or a long call into C keeps
the interpreter) is waited for until the time limit of the process group. One that has made no
progress for ``watch.idle_limit_s()``, whose communication has failed, whose program has ended or
whose process is gone ends the meeting. A meeting is also a wait that the watch sees: if a missing
rank waits for one that is here, that is a circle.

How it ends. Either the counter gets complete or somebody puts a negative number in its place, by
compare-and-set: never both. Then all who are in the meeting get the error. Nothing was sent, so
nothing is given up: they can go on. A rank that comes later finds the meeting closed and goes on to
the next number, where those who were refused come next; if they do not come, it is refused there.
The last rank of a complete meeting removes the counters of those before, which nobody can be
reading: so the store does not grow.

Two environment variables, which all ranks have to see alike: FSDP_COMPAT_MEET=0 switches meetings
off, FSDP_COMPAT_MEET_TIMEOUT is for how many seconds a missing rank may be idle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from .. import _torch_private
from .._comm import deadlock, progress
from .._comm.communicator import Communicator
from ..errors import StateError, explain
from .group import Group

__all__ = ["is_on", "nested", "register", "require_all_ranks"]

ASK_S = 1.0  # at most, between two questions to a missing rank
_NUM_ASKED = 64  # at most, of those who are missing
PAUSE_S = 0.2  # at most, between two looks at the counter

_COUNT_BITS, _CALL_BITS = (
    18,
    24,
)  # together with as many again for a sum over all ranks they fit into the store's 64 bits
_CLOSED = -(1 << 61)  # whatever is added afterwards, it stays negative


def is_on() -> bool:
    """False where FSDP_COMPAT_MEET=0 has switched meetings off."""
    return os.environ.get("FSDP_COMPAT_MEET", "1") != "0"


_NOT_PROCESSES = (
    "fake",
    "threaded",
)  # backends of torch whose ranks do not exist, or are threads of one process


class _Inquiry:
    """What a rank that waits at a meeting knows about those who are missing."""

    def __init__(self, board: deadlock.StatusStore, line: str) -> None:
        """line: the communication that the meeting is for."""
        self._board, self._line = board, line
        self._heard: dict[
            int, tuple[int, float]
        ] = {}  # by rank: number of the last answer, when it came

    def of(self, rank: int) -> tuple[str, bool]:
        """Ask a missing rank once more; return what it does, in words, and whether it is in vain to
        wait for it."""
        number, now = self._board.ask(rank), time.monotonic()
        answer = self._board.answer_of(rank)
        if answer is not None and answer.ended:
            return f"it {answer.text}", True
        failed = self._board.why_broken(self._line, rank)
        if failed is not None:
            return f"its communication has failed ({failed})", True
        last, at = self._heard.setdefault(rank, (number - 1, now))
        if answer is None or answer.number <= last:  # nothing new
            if self._board.is_gone(rank):
                return "its process has ended without a word, as one that was killed does", True
            return f"it has given no sign of life for {now - at:.0f} s", False
        self._heard[rank] = (answer.number, now)
        idle = answer.idle_s >= deadlock.idle_limit_s()
        return f"it {answer.text}" + (
            f", and has made no progress for {answer.idle_s:.0f} s" if idle else ""
        ), idle


class _RollCall:
    """The meetings of one set of ranks, in one process group of the world: a line of the watch,
    without connections."""

    def __init__(self, members: tuple[int, ...], store: _torch_private.Store) -> None:
        """Every member makes one, in each world."""
        world = dist.group.WORLD
        assert world is not None
        self._world, self._store = weakref.ref(world), store
        self.members, self.rank = members, members.index(dist.get_rank())
        self._timeout_s = _torch_private.group_timeout(world).total_seconds()
        ranks = hashlib.sha1(repr(members).encode()).hexdigest()[:16]
        # A store may outlive a world, and begin the next one with the keys of the last.
        world_number = (store.add(f"fsdp_compat/worlds/{ranks}", 1) - 1) // len(members)
        self.name = f"meetings/{ranks}/{world_number}"
        self.counts: dict[int, int] = {}
        self.thread = 0  # that has met last
        self.waiting: deadlock.Waiting | None = None
        self.diagnosis: deadlock.Report | None = None
        self.num_groups = 0  # that were expected: the same on all members
        self._next = 1  # number of the next meeting, unless it is closed by then
        self._last = 0  # the last complete one
        self._lock = threading.Lock()
        deadlock.add(self)

    def meet(self, call: str, number: int, line: str) -> None:
        """number: of the first group that the call is about, among all that are spread over these
        ranks. line: of its ranks."""
        if not self._lock.acquire(blocking=False):
            raise self._error(
                f"{call}() was called while another thread of this rank waits for other ranks.",
                f"rank {self.members[self.rank]} called {call}() from a second thread",
            )
        try:
            self._meet(f"{call}()", zlib.crc32(f"{call}() {number}".encode()), line)
        finally:
            self.waiting = self.diagnosis = None
            self._lock.release()

    def _meet(self, call: str, checksum: int, line: str) -> None:
        rank, self.thread, value = (
            self.members[self.rank],
            threading.get_ident(),
            _value_of(checksum),
        )
        turn, self.diagnosis = self._next, None
        try:
            while True:
                turn = self._next
                self._store.set(
                    self._key(f"post/{rank}"), f"{turn} called {call} at {progress.place()}"
                )
                total = self._store.add(self._key(str(turn)), value)
                self._next += 1
                if total > 0:  # else it was closed before this rank came
                    break
            self.counts[deadlock.RENDEZVOUS] = turn
            if total == len(self.members) * value:
                self._clear(turn)
            else:
                self.waiting = (deadlock.RENDEZVOUS, turn, 0, 0), 0, call
                self._wait(call, turn, total, value, line)
            self._last = turn
        except RuntimeError as error:
            if isinstance(error, StateError):
                raise
            raise self._error(
                _FIRST.format(call), f"rank {rank} cannot reach the store ({error})"
            ) from error
        except BaseException as error:  # above all an interrupt, while others wait here
            with contextlib.suppress(RuntimeError):
                self._close(
                    turn, value, {rank: f"rank {rank} left {call} with {type(error).__name__}"}
                )
            raise

    def _wait(self, call: str, turn: int, total: int, value: int, line: str) -> None:
        started = asked_at = time.monotonic()
        num_here = total & ((1 << _COUNT_BITS) - 1)
        inquiry, ask_s = (
            _Inquiry(deadlock.StatusStore(self._store), line),
            min(ASK_S, deadlock.idle_limit_s() / 5),
        )
        if num_here > 1:  # somebody asks already, and may die while it waits
            ask_s *= 5 * max(1, len(self.members) / 64)
        found: dict[int, str] | None = None  # why it is in vain to wait, by rank that is missing
        if total != num_here * value:
            found = dict.fromkeys(self._missing(turn), "")
        while found is None and total != len(self.members) * value:
            now = time.monotonic()
            if total < 0:
                raise self._as_told(call, turn)
            if self.diagnosis is not None:
                self._close(turn, value, self.diagnosis.lines)
            elif now - started > self._timeout_s:
                found = {
                    rank: f": the time limit of {self._timeout_s:g} s is over"
                    for rank in self._missing(turn)
                }
                break
            elif now - asked_at > ask_s:
                asked_at = now
                missing = self._missing(turn)
                answers = {rank: inquiry.of(rank) for rank in missing[:_NUM_ASKED]}
                if any(vain for _, vain in answers.values()):
                    found = dict.fromkeys(missing, "") | {
                        rank: f": {text}" for rank, (text, _) in answers.items()
                    }
                    break
            time.sleep(min(PAUSE_S, max(5e-5, (now - started) / 10)))
            total = self._store.add(self._key(str(turn)), 0)
        if found is not None:
            lines = {rank: f"rank {rank} has not come{why}" for rank, why in found.items()}
            for rank in self.members:
                if rank not in found:
                    lines[rank] = f"rank {rank} {self._post(turn, rank) or 'came'}"
            if not self._close(turn, value, lines):  # it has got complete meanwhile
                return
            raise self._as_told(call, turn)

    def _as_told(self, call: str, turn: int) -> StateError:
        """The error of a meeting that was closed, in the words of who has closed it: the same on
        all its ranks."""
        text, end = "", time.monotonic() + 2.0
        while not text and time.monotonic() < end:
            text = self._store.compare_set(self._key(f"why/{turn}"), "", "").decode()
            time.sleep(0.001)
        lines = {int(rank): line for rank, line in json.loads(text or "{}").items()}
        rank = self.members[self.rank]
        lines.setdefault(rank, f"rank {rank} called {call} at {progress.place()}")
        return self._error(_FIRST.format(call), str(deadlock.Report(False, lines)))

    def _error(self, first: str, got: str) -> StateError:
        return StateError(
            explain(
                first,
                expected=f"the same call on each of the ranks {list(self.members)}, of the same "
                "model, in the same order",
                got=got,
                where=f"rank {self.members[self.rank]}, at {progress.place()}",
                fix="make the call on every rank, whatever one of them does with the result; if a "
                "rank decides about it, let all "
                "follow one decision (broadcast it). Nothing was sent: every rank can go on. "
                "FSDP_COMPAT_MEET=0 switches this "
                "check off",
            )
        )

    # -- in the store

    def _key(self, what: str) -> str:
        return f"fsdp_compat/{self.name}/{what}"

    def _post(self, turn: int, rank: int) -> str:
        """What a member called and from where, or nothing if it has not come."""
        number, _, text = (
            self._store.compare_set(self._key(f"post/{rank}"), "", "").decode().partition(" ")
        )
        return text if number == str(turn) else ""

    def _missing(self, turn: int) -> list[int]:
        return [rank for rank in self.members if not self._post(turn, rank)]

    def _close(self, turn: int, value: int, lines: dict[int, str]) -> bool:
        """Let a meeting never take place, and say why by rank; return False if it has taken place
        already."""
        key, found, closed = (
            self._key(str(turn)),
            "",
            str(_CLOSED - self.rank),
        )  # by this rank, not by another one
        while True:
            now = self._store.compare_set(key, found, closed).decode()
            if now == closed:
                self._store.set(self._key(f"why/{turn}"), json.dumps(lines))
                return True
            if int(now) < 0:
                return True
            if int(now) == len(self.members) * value:
                return False
            found = now

    def _clear(self, turn: int) -> None:
        """All have come to this meeting, so nobody looks at those before any more."""
        with contextlib.suppress(RuntimeError):
            for before in range(max(self._last, 1), turn):
                self._store.delete_key(self._key(str(before)))
                if before > self._last:
                    self._store.delete_key(self._key(f"why/{before}"))

    # -- for the watch

    is_connected = False

    @property
    def is_alive(self) -> bool:
        return dist.group.WORLD is not None and self._world() is dist.group.WORLD

    def describe(self, waiting: deadlock.Waiting) -> deadlock.Wait:
        (tag, number, _, _), _, what = waiting
        rank = self.members[self.rank]
        peers = tuple(r for r in self.members if r != rank)
        text = f"rank {rank} waits in {what} for the ranks {list(peers)}, at {progress.place()}"
        return deadlock.Wait(rank, peers, self.name, tag, number, text)

    def end_wait(self) -> None:
        """Nobody needs it: who waits looks at its diagnosis."""

    def fail(self, report: deadlock.Report) -> None:
        """Nothing can fail: it has no connections."""

    def close(self) -> None:
        """It has no connections."""


_FIRST = "The ranks did not come together in {}."


def _value_of(checksum: int) -> int:
    """What each member of a meeting adds to its counter."""
    return 1 + ((checksum & ((1 << _CALL_BITS) - 1)) << _COUNT_BITS)


# By world, and by members.
_roll_calls: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...], _RollCall | None]
] = weakref.WeakKeyDictionary()
# By group, and by name of the roll call: its number among the groups that are spread over the same
# ranks.
_numbers: weakref.WeakKeyDictionary[Group, dict[str, int]] = weakref.WeakKeyDictionary()


class _Depth(threading.local):
    value = 0


_depth = _Depth()  # in how many calls that have met this thread is


def _roll_call(members: tuple[int, ...]) -> _RollCall | None:
    world, store = dist.group.WORLD, _torch_private.default_store()
    if world is None or store is None:
        return None
    found = _roll_calls.setdefault(world, {})
    if members not in found:
        found[members] = (
            None if dist.get_backend(world) in _NOT_PROCESSES else _RollCall(members, store)
        )
    return found[members]


def _wires(groups: Iterable[Group], copies: bool) -> Iterator[tuple[Communicator, Group]]:
    """Yield what sends for ``groups``, each once, with the first group that it sends for."""
    seen: set[int] = set()
    for group in groups:
        for wire in (group.shard, *group.tensor_parallel, *([group.replica] if copies else [])):
            if wire.ranks > 1 and id(wire) not in seen:
                seen.add(id(wire))
                yield wire, group


def _number(group: Group, roll_call: _RollCall) -> int:
    its = _numbers.setdefault(group, {})
    if roll_call.name not in its:
        roll_call.num_groups += 1
        its[roll_call.name] = roll_call.num_groups
    return its[roll_call.name]


def register(groups: Iterable[Group]) -> None:
    """Number groups, and let this process answer those who will wait for it. All ranks of the
    groups, in the same order."""
    if is_on():
        deadlock.idle_limit_s()  # a bad one is said now, on every rank, and not when one waits
        progress.follow()
        for group in groups:
            for wire, _ in _wires([group], copies=True):
                roll_call = _roll_call(wire.members)
                if roll_call is not None:
                    _number(group, roll_call)


def require_all_ranks(call: str, groups: Iterable[Group], *, copies: bool = False) -> None:
    """Return when all ranks that ``groups`` are spread over have come to the same call; see above.
    Collective.

    Raises StateError, on all of them, as soon as that can never be.
    """
    wires = list(_wires(groups, copies))
    for wire, _ in wires:
        wire.require_working()
    if not wires or _depth.value or not is_on():
        return
    progress.follow()
    wires.sort(
        key=lambda pair: (-pair[0].ranks, pair[0].members)
    )  # one order on all ranks, or they would wait in a circle
    met: list[frozenset[int]] = []
    for wire, group in wires:
        if len(wires) > 1 and any(ranks.issuperset(wire.members) for ranks in met):
            continue
        roll_call = _roll_call(wire.members)
        if roll_call is not None:
            roll_call.meet(call, _number(group, roll_call), wire.name)
            met.append(frozenset(wire.members) if len(wires) > 1 else frozenset())


@contextlib.contextmanager
def nested(call: str, groups: Iterable[Group], *, copies: bool = False) -> Iterator[None]:
    """Meet; what is called inside does not meet again. Collective."""
    require_all_ranks(call, groups, copies=copies)
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
