"""What a rank that waits finds out about the ranks that it waits for. The thread of deadlock.py
answers on these."""

from __future__ import annotations

import logging
import time

from ..environment import idle_limit_s, warn_after_s
from .status_store import StatusStore
from .waits import Wait

MAX_ASKED = 64  # of the missing ranks
_MAX_NAMED = 4  # in a warning

_logger = logging.getLogger("fsdp_compat.waits")


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


class LongWait:
    """Warns about one wait of this process, at growing intervals."""

    def __init__(self) -> None:
        self._first_s = self._next_s = warn_after_s()  # seconds of waiting; 0: no warnings
        self._inquiry: Inquiry | None = None

    def is_due(self, waited_s: float) -> bool:
        """True some time before a warning, so that the missing ranks can answer until then."""
        return self._first_s > 0 and waited_s >= self._next_s - self._first_s / 2

    def look(self, wait: Wait, waited_s: float, store: StatusStore) -> None:
        """Ask what the missing ranks are doing and, when it is time, warn. Only if ``is_due``."""
        self._inquiry = self._inquiry or Inquiry(store, wait.name)
        posts = {rank: store.post_of(rank) for rank in wait.peers[:MAX_ASKED]}
        missing = [rank for rank, post in posts.items() if post is None or post.lacks(wait)]
        found = [f"rank {rank}: {self._inquiry.of(rank)[0]}" for rank in missing]
        if waited_s < self._next_s:
            return
        while self._next_s <= waited_s:
            self._next_s *= 2
        lines = [*found[:_MAX_NAMED], *(["and others"] if len(found) > _MAX_NAMED else [])]
        _logger.warning(
            "For %.1f s %s.\n%s  Every rank must run the same forwards and "
            "backwards. Common mistakes: a rank has one batch less than the others, or one rank "
            "evaluates alone. The next warning comes in %.1f s (FSDP_COMPAT_WARN_AFTER).",
            waited_s,
            wait.text,
            "".join(f"  {line}\n" for line in lines),
            self._next_s - waited_s,
        )
