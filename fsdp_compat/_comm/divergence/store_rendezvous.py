"""A rendezvous of ranks in the store of the default process group.

``rendezvous_of(members).meet(call, ...)`` returns on all members when each has called it with the
same arguments, and raises StateError on all of them as soon as that can no longer happen.

Counting. The rendezvous of one set of ranks are numbered. A rank writes its call and location into
the store, and adds one value to the counter of the current number: 1 in the low bits, and a
checksum of the call above them. So one atomic add gives both the number of arrivals and whether the
calls match; all but the last rank then poll the counter, less often the longer it takes.

Missing ranks. Waiting ranks (mainly the first to arrive) ask the missing ranks what they are doing;
the thread of deadlock.py answers for them. The wait continues, at most for the time limit of the
process group, while a missing rank works (progress.py), waits in a way that deadlock.py sees, or is
stopped. It ends when a missing rank has been in another wait for ``idle_limit_s()``, when its
communication has failed, or when it has ended. deadlock.py watches a rendezvous, too: if a missing
rank waits for one that has arrived, that is a cycle.

The end. Either the counter becomes complete, or one rank replaces it with a negative number by a
compare-and-set; never both. In the second case every rank of the rendezvous gets the error. Nothing
was sent, so all can go on. A rank that arrives later finds the counter closed and takes the next
number, as the refused ranks do. The last rank of a complete rendezvous deletes the earlier
counters, so that the store does not grow.

Many ranks. The requests of all W ranks together grow no faster than W log W: only the first ranks
to arrive ask for up to ``MAX_ASKED`` missing ones; more than ``FEW`` ranks poll less often; and
only the rank that closes a rendezvous reads all calls, and names a few."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import threading
import time
import weakref
import zlib
from collections.abc import Callable

import torch.distributed as dist

from ... import _torch_private
from ...errors import StateError
from ..environment import checks_calls, idle_limit_s
from ..mesh import MAX_NAMED, named
from . import deadlock, progress
from .status_store import MissingRanks, StatusStore
from .waits import MAX_ASKED, RENDEZVOUS, Activity, Report, Wait, Waiter, Waiting

ASK_S = 1.0  # longest pause between two questions to a missing rank
PAUSE_S = 0.2  # longest pause between two polls of the counter, with up to FEW ranks
FEW = 256  # more ranks poll less often each, so that all together poll as often

# The sums of both over all ranks fit into the store's 64 bits.
_COUNT_BITS, _CALL_BITS = 18, 24
_CLOSED = -(1 << 61)  # stays negative, whatever late ranks add

# backends of torch whose ranks do not exist or are threads of one process
_NOT_PROCESSES = ("fake", "threaded")


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
        self.activity, self.store, self.timeout_s = activity, StatusStore(store), timeout_s
        self.group = group
        self.next = 1  # number of the next rendezvous, unless it is closed by then
        self.last_complete = 0
        self.missing: tuple[int, ...] = ()  # global ranks, when this rank last asked
        self._lock = threading.Lock()

    @property
    def many(self) -> float:
        """The factor by which many ranks pause longer between two polls."""
        return max(1.0, len(self.activity.members) / FEW)

    def meet(self, call: str, subject: object, name: str) -> None:
        """Wait until all members have arrived. Collective: the members. call: as errors show it.
        subject: what it is made on, for all. name: of the connections that it will use."""
        rank = self.activity.global_rank
        attempt = Attempt(self, call, subject, name)
        progress.follow()
        if not self._lock.acquire(blocking=False):
            raise self.error(
                f"{call} was called while another thread of this rank waits for other ranks.",
                f"rank {rank} called {call} from a second thread",
            )
        try:
            attempt.run()
        except StateError:
            raise
        except RuntimeError as error:
            first = f"The check that all ranks called {call} failed."
            raise self.error(first, f"rank {rank} cannot reach the store ({error})") from error
        except BaseException as error:  # usually an interrupt, while other ranks wait here
            with contextlib.suppress(RuntimeError):
                attempt.close({rank: f"rank {rank} left {call} with {type(error).__name__}"})
            raise
        finally:
            self.activity.waiting = self.activity.diagnosis = None
            self.missing = ()
            self._lock.release()

    def error(self, first: str, got: str) -> StateError:
        members = self.activity.members
        return StateError.of(
            first,
            expected=f"the same call, of the same model and in the same order, on all of the "
            f"ranks {named(members)}",
            got=got,
            where=f"rank {self.activity.global_rank}, at {progress.location()}",
            fix="make the call on every rank, or broadcast one rank's decision about it. Nothing "
            "was sent, so every rank can go on. FSDP_COMPAT_MEET=0 disables this check",
        )

    # -- for deadlock detection (waits.py)

    def describe(self, waiting: Waiting) -> Wait:
        (tag, number, _), _, what = waiting
        rank, missing = self.activity.global_rank, self.missing
        awaited = f"the ranks {named(missing)}" if missing else "other ranks"
        text = f"rank {rank} waits in {what} for {awaited}, at {progress.location()}"
        return Wait(rank, missing, self.activity.name, tag, number, text)


class Attempt:
    """One rank's attempt to complete a rendezvous."""

    def __init__(self, rendezvous: StoreRendezvous, call: str, subject: object, name: str) -> None:
        self._rendezvous, self._store = rendezvous, rendezvous.store
        self._activity, self._name = rendezvous.activity, rendezvous.activity.name
        self._call = call
        checksum = zlib.crc32(f"{call} {subject}".encode()) & ((1 << _CALL_BITS) - 1)
        self._value = 1 + (checksum << _COUNT_BITS)  # what each member adds to the counter
        self._number = rendezvous.next
        self._total = 0  # of the counter
        self._missing_ranks = MissingRanks(self._store, name)
        # ranks not yet seen to arrive
        self._absent = collections.deque(rendezvous.activity.others)
        self._doing: dict[int, str] = {}  # by missing rank: what it was doing when last asked
        self._started = self._asked_at = time.monotonic()
        self._ask_s, self._limit_s = min(ASK_S, idle_limit_s() / 5), rendezvous.timeout_s

    def run(self) -> None:
        """Return when all members have arrived. Raises StateError if they never will."""
        self.arrive()
        while not self.look():
            time.sleep(self.pause_s)
            self.poll()

    @property
    def pause_s(self) -> float:
        """How long to wait before the next poll."""
        waited_s, many = time.monotonic() - self._started, self._rendezvous.many
        return min(PAUSE_S * many, max(5e-5 * many, waited_s / 10))

    def poll(self) -> None:
        self._total = self._store.sum_of(self._name, self._number)

    def look(self) -> bool:
        """Return True if all members have arrived. Asks about missing ranks, and closes the
        rendezvous if they will never come. Raises StateError if it is closed."""
        if self._is_complete(self._total):
            self._rendezvous.last_complete = self._number
            return True
        if self._total < 0:  # in the words of the rank that closed it
            raise self._refusal()
        diagnosis = self._activity.diagnosis
        if diagnosis is not None:
            self.close(diagnosis.lines)
        elif self._is_pointless():
            self.close({})
        return False

    def arrive(self) -> None:
        """Add this rank to the next rendezvous that is not closed."""
        rendezvous, activity, name = self._rendezvous, self._activity, self._name
        activity.thread, activity.diagnosis = threading.get_ident(), None
        rank, call = activity.global_rank, f"called {self._call} at {progress.location()}"
        while self._total <= 0:
            self._number = rendezvous.next
            self._total = self._store.arrive(name, self._number, rank, call, self._value)
            rendezvous.next += 1
        activity.counts[RENDEZVOUS] = self._number
        if self._is_complete(self._total):
            self._forget_earlier()
            return
        num_before = min(self._num_arrived() - 1, 10)  # these ranks ask already, but may die
        self._ask_s *= 5**num_before
        self._limit_s += num_before
        activity.waiting = (RENDEZVOUS, self._number, 0), 0, self._call

    def close(self, known: dict[int, str]) -> None:
        """Close the rendezvous, unless it is complete or closed. known: why, for some ranks."""
        own = _CLOSED - self._activity.rank  # says which rank has closed it
        before = self._total
        while before != own:
            if before < 0 or self._is_complete(before):
                return
            before = self._store.replace_sum(self._name, self._number, before, own)
        # no other rank can arrive any more
        self._store.report_failure(self._key(), self._activity.global_rank, self._reason(known))

    def _reason(self, known: dict[int, str]) -> Report:
        """Return why the rendezvous is closed: what a few ranks that differ have called, or do."""
        members = self._activity.members
        calls = {rank: self._call_of(rank) for rank in members}
        texts = {
            rank: call or f"has not arrived{self._doing.get(rank, '')}"
            for rank, call in calls.items()
        }
        different = {text: rank for rank, text in reversed(texts.items())}
        chosen = list(dict.fromkeys([*known, *different.values(), *members]))[:MAX_NAMED]
        lines = {rank: f"rank {rank} {texts[rank]}" for rank in sorted(chosen)} | known
        more = len(members) - len(lines)
        absent = sum(not call for rank, call in calls.items() if rank not in lines)
        cause = f"; {more} more ranks, {absent} of which have not arrived" if more else ""
        return Report(lines, cause)

    def _is_complete(self, total: int) -> bool:
        return total == len(self._activity.members) * self._value

    def _num_arrived(self) -> int:
        return self._total & ((1 << _COUNT_BITS) - 1)

    def _is_pointless(self) -> bool:
        """True if a missing rank will never come. Asks the missing ranks from time to time."""
        now, limit_s = time.monotonic(), self._rendezvous.timeout_s
        if self._total != self._num_arrived() * self._value:  # the calls differ
            return True
        if now - self._started > self._limit_s:
            over = f"the time limit of {limit_s:g} s is over"
            for rank in self._missing():
                doing = self._doing.get(rank, "").removeprefix(": ")
                self._doing[rank] = f": {over}; {doing}" if doing else f": {over}"
            return True
        if now - self._asked_at <= self._ask_s:
            return False
        self._asked_at = now
        missing = self._missing()
        answers = {rank: self._missing_ranks.ask(rank) for rank in missing}
        self._doing = {rank: f": {text}" for rank, (text, _) in answers.items()}
        if missing != self._rendezvous.missing:
            self._store.tell_missing(self._name, self._number, missing)
            self._rendezvous.missing = missing
        return any(is_pointless for _, is_pointless in answers.values())

    def _refusal(self) -> StateError:
        """Return the error of a closed rendezvous, in the words of the rank that closed it."""
        ranks = len(self._activity.members)
        report, end = None, time.monotonic() + 2.0 + ranks / 500  # the closing rank reads all calls
        while report is None and time.monotonic() < end:
            time.sleep(0.001 * self._rendezvous.many)
            report = self._store.failure_of(self._key())
        rank = self._activity.global_rank
        own = {rank: f"rank {rank} called {self._call} at {progress.location()}"}
        report = report or Report({})
        first = f"Not all ranks called {self._call}."
        return self._rendezvous.error(first, f"{Report(own | report.lines)}{report.cause}")

    def _key(self) -> str:
        return f"{self._name}/{self._number}"

    def _call_of(self, rank: int) -> str:
        return self._store.call_of(self._name, self._number, rank)

    def _missing(self) -> tuple[int, ...]:
        """Return up to MAX_ASKED ranks that have not been seen to arrive."""
        missing: list[int] = []
        while self._absent and len(missing) < MAX_ASKED:
            rank = self._absent.popleft()
            if not self._call_of(rank):
                missing.append(rank)
        self._absent.extendleft(reversed(missing))
        return tuple(missing)

    def _forget_earlier(self) -> None:
        """Delete the earlier counters: every rank has arrived here, so none reads them."""
        last = self._rendezvous.last_complete
        with contextlib.suppress(RuntimeError):
            for number in range(max(last, 1), self._number):
                self._store.forget(self._name, number, was_refused=number > last)


# By default process group; by members and purpose.
_rendezvous: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[tuple[int, ...], str], StoreRendezvous | None]
] = weakref.WeakKeyDictionary()


def rendezvous_of(members: tuple[int, ...], purpose: str = "calls") -> StoreRendezvous | None:
    """Return the rendezvous of a set of global ranks for a purpose; None if FSDP_COMPAT_MEET=0
    disables the check, or if the ranks are not processes that share a store."""
    world, store = dist.group.WORLD, _torch_private.default_store()
    if world is None or store is None or not checks_calls():
        return None
    found, key = _rendezvous.setdefault(world, {}), (members, purpose)
    if key not in found:
        found[key] = None
        if dist.get_backend(world) not in _NOT_PROCESSES:
            name = hashlib.sha1(repr(key).encode()).hexdigest()[:16]
            # a store may outlive a default process group, and then holds its keys
            name += f"/{StatusStore(store).count(name) // len(members)}"
            activity = Activity(name, members.index(dist.get_rank()), members)
            timeout_s = _torch_private.group_timeout(world).total_seconds()
            made = found[key] = StoreRendezvous(activity, store, timeout_s, weakref.ref(world))
            deadlock.watch(made)
    return found[key]
