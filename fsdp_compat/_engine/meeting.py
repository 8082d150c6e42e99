"""Calls that all ranks have to make: they meet in the store first, so that ranks that diverge get an error instead of a hang.

    meet(call, groups)            when it returns, all ranks that ``groups`` are spread over are in ``call``; else StateError on all
    with together(call, groups):  the same, and what is called inside does not meet again
    expect(groups)                once, when the groups are made: the constructor does it

``call`` is the name that users know, such as "state_dict"; ``groups`` are the engine's groups whose parts the call is about to put
together: the ranks of one copy meet. With ``copies=True`` those that hold the other copies (hybrid strategies, NO_SHARD) come, too.
Without groups, or with one rank, nothing is sent: a call that does not communicate does not meet.

How ranks meet. All meetings of one set of ranks are numbered. A rank writes down what it calls and from where, and adds to the
meeting's counter: 1, and the checksum of the call (with the number of the model among those of these ranks) above the bits of the
count. So one addition says how many are here and whether all of them call the same; who is not the last reads the counter until it
says so. That is two round trips to the store for each rank, however many there are; the longer it takes, the rarer it is read.

Who does not come. The first one to arrive asks those who are missing what they are doing; the watch's thread answers (watch.py,
pulse.py). A rank that makes progress, or waits for others in a way that the watch knows, is waited for until the time limit of the
process group. One that has made none for ``LIMIT_S``, whose program has ended, or that gives no answer for three times as long (a
thread gets no turn while a long call into C keeps the interpreter), ends the meeting. A meeting is also a wait that the watch
sees: if a missing rank waits for one that is here, that is a circle, and both get its error.

How it ends. Either the counter gets complete or somebody puts a negative number in its place, by compare-and-set: never both. Who
does that gives up all its connections as after any circle (watch.py): who is in the meeting, who comes to it later, and who waits
for this rank somewhere else, are told the same. Each rank goes on to the next *generation* of meetings, which begin at number 1
again. A counter is used again three meetings later, when nobody can be reading it; so the store does not grow.

Two environment variables, which all ranks have to see alike: FSDP_COMPAT_MEET=0 switches meetings off, FSDP_COMPAT_MEET_TIMEOUT is
``LIMIT_S``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import typing
import weakref
import zlib
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from ..errors import StateError, UsageError, explain
from . import pulse, torch_private, watch
from .collectives import Communicator
from .unit import Group

__all__ = ["LIMIT_S", "ON", "expect", "meet", "together"]


def _limit_s(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise UsageError(
        explain(
            "The environment variable FSDP_COMPAT_MEET_TIMEOUT is not a time.",
            expected="a positive number of seconds",
            got=repr(text),
            where="the environment of this process",
            fix="set it to a number of seconds, alike on all ranks, or unset it for 10",
        )
    )


ON = os.environ.get("FSDP_COMPAT_MEET", "1") != "0"
LIMIT_S = _limit_s(os.environ.get("FSDP_COMPAT_MEET_TIMEOUT", "10"))  # without progress, before a missing rank is given up
ASK_S = 1.0  # at most, between two questions to a missing rank
PAUSE_S = 0.2  # at most, between two looks at the counter

_COUNT_BITS, _CALL_BITS = 18, 24  # together with as many again for a sum over all ranks they fit into the store's 64 bits
_CLOSED = -(1 << 61)  # whatever is added afterwards, it stays negative
_NUM_COUNTERS = 3

_NOT_PROCESSES = ("fake", "threaded")  # backends of torch whose ranks do not exist, or are threads of one process


class _Inquiry:
    """What the first one at a meeting knows about those who are missing."""

    def __init__(self, board: watch.Board) -> None:
        self._board = board
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: number of the last answer, when it came

    def of(self, rank: int) -> tuple[str, bool]:
        """Ask a missing rank once more; return what it does, in words, and whether it is in vain to wait for it."""
        number, now = self._board.ask(rank), time.monotonic()
        answer = self._board.answer_of(rank)
        if answer is not None and answer.ended:
            return f"it {answer.text}", True
        last, at = self._heard.setdefault(rank, (number - 1, now))
        if answer is None or answer.number <= last:  # nothing new
            silent_s = now - at
            return f"it has given no sign of life for {silent_s:.0f} s", silent_s > 3 * LIMIT_S
        self._heard[rank] = (answer.number, now)
        idle = answer.idle_s >= LIMIT_S
        return f"it {answer.text}" + (f", and has made no progress for {answer.idle_s:.0f} s" if idle else ""), idle


class _RollCall:
    """The meetings of one set of ranks, in one process group of the world: a line of the watch, without connections."""

    def __init__(self, members: tuple[int, ...], store: torch_private.Store) -> None:
        """Every member makes one, in each world."""
        world = dist.group.WORLD
        assert world is not None
        self._world, self._store = weakref.ref(world), store
        self.members, self.rank = members, members.index(dist.get_rank())
        self._timeout_s = torch_private.group_timeout(world).total_seconds()
        ranks = hashlib.sha1(repr(members).encode()).hexdigest()[:16]
        # A store may outlive a world, and begin the next one with the keys of the last.
        world_number = (store.add(f"fsdp_compat/worlds/{ranks}", 1) - 1) // len(members)
        self.name = f"meetings/{ranks}/{world_number}"
        self.generation = 0
        self.counts: dict[int, int] = {}
        self.waiting: watch.Waiting | None = None
        self.diagnosis: watch.Report | None = None
        self.many_threads = False
        self._threads = [0]  # those that meet, in the order in which they did
        self.num_groups = 0  # that were expected: the same on all members
        self._value: int | None = None  # while in a meeting: what each member adds to its counter
        watch.add(self)

    def meet(self, call: str, number: int) -> None:
        """number: of the first group that the call is about, among all that are spread over these ranks."""
        thread = threading.get_ident()
        if thread != self._threads[-1]:
            self.many_threads |= thread in self._threads
            self._threads.append(thread)
        turn = self.counts[watch.TOGETHER] = self.counts.get(watch.TOGETHER, 0) + 1
        self._value = 1 + ((zlib.crc32(f"{call} {number}".encode()) & ((1 << _CALL_BITS) - 1)) << _COUNT_BITS)
        call = f"{call}()"
        try:
            self._store.set(self._post_key(turn, self.members[self.rank]), f"{turn} called {call} at {pulse.place()}")
            self._store.set(self._counter_key(turn + 1), "0")  # before this meeting is complete, so before anybody adds to that
            total = self._store.add(self._counter_key(turn), self._value)
            if not self._is_complete(total):
                self.waiting = (watch.TOGETHER, turn, 0, 0), 0, call
                self._wait(call, turn, total)
        except RuntimeError as error:
            if isinstance(error, StateError):
                raise
            self._fail(call, {self.members[self.rank]: f"rank {self.members[self.rank]} cannot reach the store ({error})"}, error)
        except BaseException as error:  # above all an interrupt, while others wait here
            if self._close(turn):
                rank = self.members[self.rank]
                watch.give_up(self, watch.Report(True, {rank: f"rank {rank} left {call} with {type(error).__name__}"}))
            raise
        finally:
            self.waiting = self._value = None

    def _wait(self, call: str, turn: int, total: int) -> None:
        assert self._value is not None
        started = asked_at = time.monotonic()
        num_here = total & ((1 << _COUNT_BITS) - 1) if total > 0 else 0
        inquiry = _Inquiry(watch.Board(self._store)) if num_here == 1 else None
        if total != num_here * self._value and num_here:
            self._end(call, turn, {rank: "" for rank in self._missing(turn)})
            return
        while not self._is_complete(total):
            now = time.monotonic()
            if total < 0:
                self._raise_as_told(call, ", which others had given up" if num_here == 0 else "")
            if self.diagnosis is not None:
                self._fail(call, self.diagnosis.lines)
            if now - started > self._timeout_s:
                self._end(call, turn, {rank: f": the time limit of {self._timeout_s:g} s is over" for rank in self._missing(turn)})
                return
            if inquiry is not None and now - asked_at > min(ASK_S, LIMIT_S / 5):
                asked_at = now
                found = {rank: inquiry.of(rank) for rank in self._missing(turn)}
                if any(vain for _, vain in found.values()):
                    self._end(call, turn, {rank: f": {text}" for rank, (text, _) in found.items()})
                    return
            time.sleep(min(PAUSE_S, max(5e-5, (now - started) / 10)))
            total = self._store.add(self._counter_key(turn), 0)

    def _end(self, call: str, turn: int, missing: dict[int, str]) -> None:
        """Give the meeting up, unless it has got complete meanwhile. missing: why, by rank."""
        if not self._close(turn):
            return
        lines = {rank: f"rank {rank} has not come{why}" for rank, why in missing.items()}
        for rank in self.members:
            if rank not in missing:
                lines[rank] = f"rank {rank} {self._post(turn, rank) or 'came'}"
        self._fail(call, lines)

    def _raise_as_told(self, call: str, late: str) -> typing.NoReturn:
        """Another member has given the meeting up, and says why as soon as it has found the words. late: of who comes later."""
        report, end, rank = None, time.monotonic() + 2.0, self.members[self.rank]
        board = watch.Board(self._store)
        while report is None and time.monotonic() < end:
            closer = self._store.compare_set(self._key("closed by"), "", "")
            report = board.why_broken(self.name, self.generation, int(closer)) if closer else None
            time.sleep(0.001)
        lines = dict(report.lines) if report is not None else {}
        if late or rank not in lines:
            lines[rank] = f"rank {rank} called {call} at {pulse.place()}{late}"
        self._fail(call, lines)

    def _fail(self, call: str, lines: dict[int, str], cause: BaseException | None = None) -> typing.NoReturn:
        rank = self.members[self.rank]
        report = watch.Report(True, lines)
        watch.give_up(self, report)
        raise StateError(
            explain(
                f"The ranks did not come together in {call}.",
                expected=f"the same call on each of the ranks {list(self.members)}, of the same model, in the same order",
                got=str(report),
                where=f"rank {rank}, at {pulse.place()}",
                fix="make the call on every rank, whatever one of them does with the result; if a rank decides about it, let all "
                "follow one decision (broadcast it). FSDP_COMPAT_MEET=0 switches this check off",
            )
        ) from cause

    # -- in the store

    def _key(self, what: str) -> str:
        return f"fsdp_compat/{self.name}/{self.generation}/{what}"

    def _counter_key(self, turn: int) -> str:
        return self._key(str(turn % _NUM_COUNTERS))

    def _post_key(self, turn: int, rank: int) -> str:
        return self._key(f"{turn % _NUM_COUNTERS}/{rank}")

    def _post(self, turn: int, rank: int) -> str:
        """What a member called and from where, or nothing if it has not come."""
        number, _, text = self._store.compare_set(self._post_key(turn, rank), "", "").decode().partition(" ")
        return text if number == str(turn) else ""

    def _missing(self, turn: int) -> list[int]:
        return [rank for rank in self.members if not self._post(turn, rank)]

    def _is_complete(self, total: int) -> bool:
        return self._value is not None and total == len(self.members) * self._value

    def _close(self, turn: int) -> bool:
        """Let a meeting never take place; return False if it has already."""
        key, found = self._counter_key(turn), ""
        while True:
            now = self._store.compare_set(key, found, str(_CLOSED)).decode()
            if int(now) < 0:
                return True
            if self._is_complete(int(now)):
                return False
            found = now

    # -- for the watch

    @property
    def is_alive(self) -> bool:
        return dist.group.WORLD is not None and self._world() is dist.group.WORLD

    def describe(self, waiting: watch.Waiting) -> watch.Wait:
        (tag, number, nbytes, _), _, what = waiting
        rank = self.members[self.rank]
        peers = tuple(r for r in self.members if r != rank)
        text = f"rank {rank} waits in {what} for the ranks {list(peers)}, at {pulse.place()}"
        return watch.Wait(rank, peers, self.name, self.generation, self.rank, tag, number, nbytes, False, text)

    def release(self, member: int, tag: int, nbytes: int, sends: bool) -> None:
        """Nobody needs it: who waits looks up by itself."""

    def forget(self) -> None:
        turn = self.counts.get(watch.TOGETHER, 0) + (self._value is None)  # that it is in, or would come to next
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key("closed by"), str(self.members[self.rank]))
            self._close(turn)
        self.generation += 1
        self.counts.clear()
        self.diagnosis = None

    def close(self) -> None:
        """It has no connections of its own."""


# By world, and by members.
_roll_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _RollCall | None]] = weakref.WeakKeyDictionary()
# By group, and by name of the roll call: its number among the groups that are spread over the same ranks.
_numbers: weakref.WeakKeyDictionary[Group, dict[str, int]] = weakref.WeakKeyDictionary()


class _Depth(threading.local):
    value = 0


_depth = _Depth()  # in how many calls that have met this thread is


def _roll_call(members: tuple[int, ...]) -> _RollCall | None:
    world, store = dist.group.WORLD, torch_private.default_store()
    if world is None or store is None:
        return None
    found = _roll_calls.setdefault(world, {})
    if members not in found:
        found[members] = None if dist.get_backend(world) in _NOT_PROCESSES else _RollCall(members, store)
    return found[members]


def _wires(groups: Iterable[Group], copies: bool) -> Iterator[tuple[Communicator, Group]]:
    """Yield what sends for ``groups``, each once, with the first group that it sends for."""
    seen: set[int] = set()
    for group in groups:
        for wire in (group.shard, *group.beyond, *([group.replica] if copies else [])):
            if wire.ranks > 1 and id(wire) not in seen:
                seen.add(id(wire))
                yield wire, group


def _number(group: Group, roll_call: _RollCall) -> int:
    its = _numbers.setdefault(group, {})
    if roll_call.name not in its:
        roll_call.num_groups += 1
        its[roll_call.name] = roll_call.num_groups
    return its[roll_call.name]


def expect(groups: Iterable[Group]) -> None:
    """Number groups, and let this process answer those who will wait for it. All ranks of the groups, in the same order."""
    if ON:
        pulse.follow()
        for group in groups:
            for wire, _ in _wires([group], copies=True):
                roll_call = _roll_call(wire.members)
                if roll_call is not None:
                    _number(group, roll_call)


def meet(call: str, groups: Iterable[Group], *, copies: bool = False) -> None:
    """Return when all ranks that ``groups`` are spread over have come to the same call; see above. Collective.

    Raises StateError, on all of them, as soon as that can never be.
    """
    if not ON or _depth.value:
        return
    wires = list(_wires(groups, copies))
    if not wires:
        return
    pulse.follow()
    wires.sort(key=lambda pair: (-pair[0].ranks, pair[0].members))  # one order on all ranks, or they would wait in a circle
    met: list[frozenset[int]] = []
    for wire, group in wires:
        if len(wires) > 1 and any(ranks.issuperset(wire.members) for ranks in met):
            continue
        roll_call = _roll_call(wire.members)
        if roll_call is not None:
            roll_call.meet(call, _number(group, roll_call))
            met.append(frozenset(wire.members) if len(wires) > 1 else frozenset())


@contextlib.contextmanager
def together(call: str, groups: Iterable[Group], *, copies: bool = False) -> Iterator[None]:
    """Meet; what is called inside does not meet again. Collective."""
    meet(call, groups, copies=copies)
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
