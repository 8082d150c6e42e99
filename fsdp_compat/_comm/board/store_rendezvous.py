"""A rendezvous of ranks in the store of the default process group.

``rendezvous_of(members).meet(call, ...)`` returns on all members when each has called it with the
same arguments, and raises StateError on all of them as soon as that can no longer happen.

Counting. The rendezvous of one set of ranks are numbered. A rank writes its call and location into
the store, and adds one value to the counter of the current number: 1 in the low bits, and a
checksum of the call above them. So one atomic add gives both the number of arrivals and whether the
calls match; all but the last rank then poll the counter, less often the longer it takes.

Missing ranks. Ranks that wait read what the missing ones have posted (``StatusStore.ask_of``), and
go on waiting for those that work, at most for the time limit of the process group. The board ends a
rendezvous whose missing ranks wait for those that have arrived.

The end. Either the counter becomes complete, or one rank replaces it with a negative number by a
compare-and-set; never both. Then every rank gets the error, and all can go on, as nothing was sent.
A rank that arrives later finds the counter closed and takes the next number, as the refused ranks
do.

Many ranks. The requests of all W ranks together grow no faster than W log W: only the first ranks
to arrive ask for up to ``MAX_ASKED`` missing ones; more than ``FEW`` ranks poll less often; and
only the rank that closes a rendezvous reads all calls, and names a few."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ... import _torch_private
from ...errors import StateError
from ..environment import checks_calls, idle_limit_s
from ..mesh import MAX_NAMED, has_processes, named
from . import board, progress
from .calls import MAX_ASKED, RENDEZVOUS, Activity, Report, Wait, Waiter, Waiting
from .status_store import StatusStore

ASK_S = 1.0  # longest pause between two questions to a missing rank
PAUSE_S = 0.2  # longest pause between two polls of the counter, with up to FEW ranks
FEW = 256  # more ranks poll less often each, so that all together poll as often

# The sums of both over all ranks fit into the store's 64 bits.
_COUNT_BITS, _CALL_BITS = 18, 24
_CLOSED = -(1 << 61)  # stays negative, whatever late ranks add


class StoreRendezvous(Waiter):
    """The rendezvous of one set of ranks, in one default process group."""

    def __init__(
        self,
        activity: Activity,
        store: _torch_private.Store,
        timeout_s: float,
        group: Callable[[], dist.ProcessGroup | None] = lambda: None,
    ) -> None:
        """All members must make one. group: a weak reference to the default process group."""
        self.activity, self.group = activity, group
        self._store, self._timeout_s, self._lock = StatusStore(store), timeout_s, threading.Lock()
        self._slower = max(1.0, len(activity.members) / FEW)  # a factor of the pauses of many ranks
        self._last_complete = 0
        # of the current call:
        self._call, self._connections = "", ""
        self._value = 0  # what each member adds to the counter
        self._number = self._total = 0  # of this rendezvous; of its counter
        self._unseen: Sequence[int] = ()  # ranks not yet seen to arrive
        self._started = self._ends_at = self._ask_at = 0.0  # monotonic seconds
        self._ask_s = ASK_S  # between questions

    def meet(self, call: str, subject: object, connections: str) -> None:
        """Wait until all members have arrived. Collective: the members. call: as errors show it.
        subject: what it is made on, for all. connections: the name of those that it will use."""
        rank = self.activity.global_rank
        progress.follow()
        if not self._lock.acquire(blocking=False):
            raise self._error(
                f"{call} was called while another thread of this rank waits for other ranks.",
                f"rank {rank} called {call} from a second thread",
            )
        try:
            self.arrive(call, subject, connections)
            while not self.is_complete():
                time.sleep(self.pause_s)
                self.poll()
        except StateError:
            raise
        except RuntimeError as error:
            first = f"The check that all ranks called {call} failed."
            raise self._error(first, f"rank {rank} cannot reach the store ({error})") from error
        except BaseException as error:  # usually an interrupt, while other ranks wait here
            with contextlib.suppress(RuntimeError):
                self._close({rank: f"rank {rank} left {call} with {type(error).__name__}"})
            raise
        finally:
            self.activity.waiting = self.activity.diagnosis = None
            self._lock.release()

    def arrive(self, call: str, subject: object, connections: str) -> None:
        """Add this rank to the next rendezvous that is not closed."""
        activity, text = self.activity, f"called {call} at {progress.location()}"
        self._ask_s = min(ASK_S, idle_limit_s() / 5)  # or raises UsageError, before it has arrived
        checksum = zlib.crc32(f"{call} {subject}".encode()) % (1 << _CALL_BITS)
        self._total, self._value = -1, 1 + (checksum << _COUNT_BITS)
        self._call, self._connections = call, connections
        activity.thread, activity.diagnosis = threading.get_ident(), None
        while self._total < 0:
            self._number, self._total = self._number + 1, 0
            self._total = self._store.arrive(
                activity.name, self._number, activity.global_rank, text, self._value
            )
        # one that was refused counts, too, as the ranks that come late take the next number
        activity.last.extend([call] * (self._number - activity.total))
        activity.counts[RENDEZVOUS] = activity.total = self._number
        if not self._is_open():  # every rank is here, so none reads the earlier counters
            with contextlib.suppress(RuntimeError):
                for number in range(max(self._last_complete, 1), self._number):
                    self._store.forget(activity.name, number)
            return
        # those that came before ask already, but may die
        num_before = min(self._total % (1 << _COUNT_BITS) - 1, 10)
        self._ask_s *= 5**num_before
        self._started = now = time.monotonic()
        self._ask_at, self._ends_at = now + self._ask_s, now + self._timeout_s + num_before
        self._unseen = activity.others
        activity.waiting = (RENDEZVOUS, self._number, 0), 0, call

    @property
    def pause_s(self) -> float:
        """How long to wait before the next poll."""
        waited_s = time.monotonic() - self._started
        return min(PAUSE_S * self._slower, max(5e-5 * self._slower, waited_s / 10))

    def poll(self) -> None:
        self._total = self._store.sum_of(self.activity.name, self._number)

    def is_complete(self) -> bool:
        """True if all members have arrived. Closes the rendezvous if they will never come, and
        raises StateError once it is closed."""
        if self._is_open():
            diagnosis = self.activity.diagnosis
            reasons = self._reasons() if diagnosis is None else diagnosis.lines
            if reasons is not None:
                self._close(reasons)
        if self._total < 0:
            raise self._refusal()
        if self._is_open():
            return False
        self._last_complete = self._number
        return True

    def _is_open(self) -> bool:
        return 0 <= self._total != len(self.activity.members) * self._value

    # -- missing ranks

    def _reasons(self) -> dict[int, str] | None:
        """Return why the rendezvous will never be complete, for some ranks; None if it may be."""
        if self._total != self._total % (1 << _COUNT_BITS) * self._value:
            return {}  # the calls differ
        now = time.monotonic()
        is_over = now > self._ends_at
        if now < self._ask_at and not is_over:
            return None
        self._ask_at = now + self._ask_s
        calls = self._store.calls_of(self.activity.name, self._number, self._unseen)
        self._unseen = [rank for rank, call in calls.items() if not call]
        missing = self._unseen[:MAX_ASKED]
        self._store.tell_missing(self.activity.name, self._number, missing)
        over = f"the time limit of {self._timeout_s:g} s is over; " if is_over else ""
        reasons = {}
        for rank in missing:
            doing, never_comes = self._store.ask_of(rank, self._connections)
            if never_comes or is_over:
                reasons[rank] = f"rank {rank} has not arrived: {over}{doing}"
        return reasons or None

    def describe(self, waiting: Waiting) -> Wait:
        (tag, number, _), _, what = waiting
        rank, name = self.activity.global_rank, self.activity.name
        missing = [each for each in self._store.missing_in(name, number) if each != rank]
        awaited = f"the ranks {named(missing)}" if missing else "other ranks"
        text = f"rank {rank} waits in {what} for {awaited}, at {progress.location()}"
        return Wait(rank, tuple(missing), name, tag, number, text)

    # -- the end

    def _close(self, reasons: dict[int, str]) -> None:
        """Close the rendezvous, unless it is complete or closed. reasons: for some ranks."""
        activity, number, store = self.activity, self._number, self._store
        own = _CLOSED - activity.rank  # says which rank has closed it
        while self._is_open():
            self._total = store.replace_sum(activity.name, number, self._total, own)
        if self._total != own:
            return
        # no other rank can arrive any more: name a few that differ
        calls = store.calls_of(activity.name, number, activity.members)
        different = {call: rank for rank, call in reversed(calls.items())}
        chosen = [*dict.fromkeys([*reasons, *different.values(), *calls])][:MAX_NAMED]
        lines = {rank: reasons.get(rank) or self._line_of(rank, calls[rank]) for rank in chosen}
        others = [call for rank, call in calls.items() if rank not in lines]
        more = f"; {len(others)} more ranks, {others.count('')} of which have not arrived"
        report = Report(lines, more if others else "")
        store.report_failure(f"{activity.name}/{number}", activity.global_rank, report)

    def _line_of(self, rank: int, call: str) -> str:
        doing = call or f"has not arrived: {self._store.ask_of(rank, self._connections)[0]}"
        return f"rank {rank} {doing}"

    def _refusal(self) -> StateError:
        """Return the error of a closed rendezvous, in the words of the rank that closed it."""
        activity, report = self.activity, None
        # the closing rank reads all calls
        end = time.monotonic() + 2.0 + len(activity.members) / 500
        while report is None and time.monotonic() < end:
            time.sleep(0.001 * self._slower)
            report = self._store.failure_of(f"{activity.name}/{self._number}")
        report = report or Report({})
        own = self._line_of(activity.global_rank, f"called {self._call} at {progress.location()}")
        got = f"{Report({activity.global_rank: own} | report.lines)}{report.cause}"
        return self._error(f"Not all ranks called {self._call}.", got)

    def _error(self, first: str, got: str) -> StateError:
        return StateError.of(
            first,
            expected="the same call, of the same model and in the same order, on all of the ranks "
            f"{named(self.activity.members)}",
            got=got,
            where=f"rank {self.activity.global_rank}, at {progress.location()}",
            fix="make the call on every rank, or broadcast one rank's decision about it. Nothing "
            "was sent, so every rank can go on. FSDP_COMPAT_MEET=0 disables this check",
        )


# By default process group; by members and purpose.
_rendezvous: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[tuple[int, ...], str], StoreRendezvous]
] = weakref.WeakKeyDictionary()


def rendezvous_of(members: tuple[int, ...], purpose: str = "calls") -> StoreRendezvous | None:
    """Return the rendezvous of a set of global ranks for a purpose; None if FSDP_COMPAT_MEET=0
    disables the check, or if the ranks are not processes that share a store."""
    world, store = dist.group.WORLD, _torch_private.default_store()
    if world is None or store is None or not checks_calls():
        return None
    found, key = _rendezvous.setdefault(world, {}), (members, purpose)
    if key not in found and has_processes(world):
        name = hashlib.sha1(repr(key).encode()).hexdigest()[:16]
        # a store may outlive a default process group, and then holds its keys
        name += f"/{StatusStore(store).count(name) // len(members)}"
        activity = Activity(name, members.index(dist.get_rank()), members)
        timeout_s = _torch_private.group_timeout(world).total_seconds()
        found[key] = StoreRendezvous(activity, store, timeout_s, weakref.ref(world))
        board.watch(found[key])
    return found.get(key)
