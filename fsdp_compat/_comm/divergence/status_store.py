"""What ranks tell each other through the store of the default process group. All of its keys are
here."""

from __future__ import annotations

import ast
import dataclasses
import time
import typing
from collections.abc import Sequence

from ... import _torch_private
from ..environment import idle_limit_s
from .processes import Process
from .waits import Report, Wait


@dataclasses.dataclass(frozen=True)
class Post:
    """A wait, and what its rank had begun by then."""

    wait: Wait
    counts: dict[str, dict[int, int]]  # by name of the activity and by tag

    def lacks(self, wait: Wait) -> bool:
        """True if this rank had not yet begun what ``wait`` waits for."""
        return self.counts.get(wait.name, {}).get(wait.tag, 0) < wait.number


@dataclasses.dataclass(frozen=True)
class Answer:
    """A process's answer to the question what it is doing."""

    number: int  # of the question that it answers
    text: str  # as in "is at train.py:41 in main()"
    idle_s: float  # how long it has been in one wait; 0.0 in a wait that deadlock.py watches
    ended: bool = False  # its program, or the process group that the question was about
    since_s: float = 0.0  # how long all questions have found the same text


class StatusStore:
    """Reads and writes the status of ranks. No method waits for another rank."""

    def __init__(self, store: _torch_private.Store) -> None:
        self._store = store

    def _get(self, key: str) -> typing.Any:
        """Return a value, or None, by one request: ``get`` would wait for a missing key."""
        text = self._store.compare_set(f"fsdp_compat/{key}", "", "").decode()
        return ast.literal_eval(text) if text else None

    def _set(self, key: str, value: object) -> None:
        self._store.set(f"fsdp_compat/{key}", repr(value))

    # -- waits and failures

    def post(self, rank: int, post: Post | None) -> None:
        """Publish the wait of a rank, or withdraw it (None)."""
        self._set(f"post/{rank}", post and dataclasses.astuple(post))

    def post_of(self, rank: int) -> Post | None:
        value = self._get(f"post/{rank}")
        return value and Post(Wait(*value[0]), value[1])

    def report_failure(self, name: str, rank: int, report: Report) -> None:
        """Publish that the communication ``name`` failed on a rank. The first report counts."""
        value = repr((rank, dataclasses.astuple(report)))
        self._store.compare_set(f"fsdp_compat/failed/{name}", "", value)

    def failure_of(self, name: str, *, except_of: int | None = None) -> Report | None:
        """Return the report of the first rank on which ``name`` failed, if not ``except_of``."""
        value = self._get(f"failed/{name}")
        return None if value is None or value[0] == except_of else Report(*value[1])

    # -- rendezvous, see store_rendezvous.py

    def count(self, name: str) -> int:
        """Return how often this was called for a name before, on all ranks together."""
        return self._store.add(f"fsdp_compat/count/{name}", 1) - 1

    def arrive(self, name: str, number: int, rank: int, call: str, value: int) -> int:
        """Publish the call of a rank, and add to the counter of a rendezvous; return the sum."""
        self._set(f"call/{name}/{rank}", [number, call])
        return self._store.add(f"fsdp_compat/sum/{name}/{number}", value)

    def call_of(self, name: str, number: int, rank: int) -> str:
        """Return the call of a rank, or "" if it has not arrived or has gone on."""
        posted, call = self._get(f"call/{name}/{rank}") or (0, "")
        return call if posted == number else ""

    def sum_of(self, name: str, number: int) -> int:
        return int(self._get(f"sum/{name}/{number}"))  # an add of 0 would make a FileStore grow

    def tell_missing(self, name: str, number: int, ranks: Sequence[int]) -> None:
        """Publish the ranks that a rendezvous waits for."""
        self._set(f"missing/{name}", [number, *ranks])

    def missing_in(self, name: str, number: int) -> list[int]:
        """Return the ranks that a rendezvous waits for, as far as one of its ranks has asked."""
        about, *ranks = self._get(f"missing/{name}") or [0]
        return ranks if about == number else []

    def replace_sum(self, name: str, number: int, before: int, value: int) -> int:
        """Compare the counter with ``before`` (0: not there) and set it. Return its value now."""
        key = f"fsdp_compat/sum/{name}/{number}"
        return int(self._store.compare_set(key, str(before or ""), str(value)))

    def forget(self, name: str, number: int, *, was_refused: bool) -> None:
        """Delete the counter of a rendezvous, and the reason if it was refused."""
        self._store.delete_key(f"fsdp_compat/sum/{name}/{number}")
        if was_refused:
            self._store.delete_key(f"fsdp_compat/failed/{name}/{number}")

    # -- questions and answers

    def ask(self, rank: int) -> int:
        """Ask a rank what it is doing, repeatedly while waiting. Return the question's number."""
        return self._store.add(f"fsdp_compat/asked/{rank}", 1)

    def num_asked(self, rank: int) -> int:
        """Return how often a rank was asked since it introduced itself."""
        return int(self._get(f"asked/{rank}"))

    def answer(self, rank: int, answer: Answer | None) -> None:
        self._set(f"answer/{rank}", answer and dataclasses.astuple(answer))

    def answer_of(self, rank: int) -> Answer | None:
        value = self._get(f"answer/{rank}")
        return value and Answer(*value)

    def introduce(self, rank: int, process: Process | None) -> None:
        """Publish which process of which host a rank is. It has answered nothing yet."""
        self._store.compare_set(f"fsdp_compat/asked/{rank}", "", "0")
        self._set(f"process/{rank}", process and dataclasses.astuple(process))
        self.answer(rank, None)

    def is_gone(self, rank: int) -> bool:
        """True if the process of a rank of this host is known to have ended."""
        value, own = self._get(f"process/{rank}"), Process.own()
        process = value and Process(*value)
        return bool(process and own and own.machine == process.machine and process.has_ended())

    def fate_of(self, rank: int) -> str:
        """Return why a rank has gone, as far as that is known."""
        answer = self.answer_of(rank)
        if answer is not None and answer.ended:
            return f"rank {rank} {answer.text}"
        if self.is_gone(rank):
            return f"the process of rank {rank} was killed, or runs another program now (exec)"
        return f"rank {rank} closed its connection"


def status_store() -> StatusStore | None:
    """Return the status store of the default process group, or None if there is no such group."""
    store = _torch_private.default_store()
    return None if store is None else StatusStore(store)


class MissingRanks:
    """What a waiting rank knows about the missing ones, from their threads' answers."""

    def __init__(self, store: StatusStore, name: str) -> None:
        """name: of the connections that the call will use."""
        self._store, self._name = store, name
        # by rank: number of its last answer, and when that was received
        self._last: dict[int, tuple[int, float]] = {}

    def ask(self, rank: int) -> tuple[str, bool]:
        """Return what a missing rank is doing, in words, and whether to stop waiting for it."""
        number, now = self._store.ask(rank), time.monotonic()
        answer = self._store.answer_of(rank)
        if answer is not None and answer.ended:
            return f"it {answer.text}", True
        failed = self._store.failure_of(self._name)
        if failed is not None:
            return f"its communication has failed ({failed})", True
        last, since = self._last.setdefault(rank, (number - 1, now))
        if answer is None or answer.number <= last:  # nothing new
            if self._store.is_gone(rank):
                return "its process ended without a message, as a killed one does", True
            return f"it has not answered for {now - since:.0f} s", False
        self._last[rank] = (answer.number, now)
        is_idle = answer.idle_s >= idle_limit_s()
        if is_idle:
            duration = f", and has made no progress for {answer.idle_s:.0f} s"
        else:
            duration = f", for at least {answer.since_s:.1f} s" if answer.since_s else ""
        return f"it {answer.text}{duration}", is_idle
