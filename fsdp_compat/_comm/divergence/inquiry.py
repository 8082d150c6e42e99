"""What a rank that waits finds out about the ranks that it waits for. The thread of deadlock.py
answers on these."""

from __future__ import annotations

import time

from ..environment import idle_limit_s
from .status_store import StatusStore

MAX_ASKED = 64  # of the missing ranks


class Inquiry:
    """What a waiting rank knows about the missing ones."""

    def __init__(self, store: StatusStore, name: str) -> None:
        """name: of the connections that the call will use."""
        self._store, self._name = store, name
        # by rank: number of its last answer, and when that was received
        self._last: dict[int, tuple[int, float]] = {}

    def of(self, rank: int) -> tuple[str, bool]:
        """Ask a missing rank once more. Return what it does, in words, and whether waiting for it
        is pointless."""
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
