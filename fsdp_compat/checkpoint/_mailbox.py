"""What the ranks of one call tell each other by way of the store, on a connection of its own, from
any thread.

A call goes in turns. In each, every rank *posts* one text, some of them read the texts, and one
*verdict* ends the turn for all. A verdict is written once, by compare-and-set: by the first rank
when it has what it needs; or, with the reason why that can never be, by any rank that leaves early
or finds that another one has ended. So all ranks end a turn alike, and none waits for one that does
not come. A slow rank is waited for until the time limit of the process group.

Everything has names that only this call has, and is deleted when all have read it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import _torch_private
from ..errors import StateError
from ._processes import Inquiry, Members

__all__ = ["RankLost", "StoreMailbox"]

PAUSE_S = 0.2  # at most, between two looks at the store; longer with more than 1,000 ranks
EXIT_S = 10.0  # for which a process whose program has failed waits for others before it ends


class RankLost(Exception):
    """A rank that others wait for has ended, left or not come. The text says which, and why."""


class StoreMailbox:
    """One call's texts in the store."""

    def __init__(self, members: Members, name: str, timeout_s: float) -> None:
        """name: the same on all ranks, and never used before."""
        self._members, self._timeout_s = members, timeout_s
        self._connection: _torch_private.Store | None = None
        home = _torch_private.default_store()
        if home is None:
            raise StateError(
                "the process group of this module was destroyed before a checkpoint was saved or "
                "loaded"
            )
        self._home = home  # held: on one rank it serves all
        try:
            self._connection = members.connections.pop()
        except IndexError:
            self._connection = _torch_private.second_connection(home)
        self._store = _torch_private.under_prefix(
            self._connection, f"fsdp_compat/checkpoint/{name}"
        )
        self._turn = 0  # the first to which this rank still owes something
        self._posted: list[str] = []
        self._is_over = False

    def post(self, text: str, role: str = "rank") -> None:
        """Say this rank's part of the turn, once as a rank, and once more in any other role that it
        has."""
        key = self._key(role, self._members.number)
        self._posted.append(key)
        self._store.set(key, text)

    def read(self, numbers: Iterable[int], role: str = "rank") -> list[str]:
        """Return what these ranks post in this turn, when they have. Raises RankLost."""
        return self._read({self._key(role, number): number for number in numbers}, self._turn)

    def conclude(self, work: Callable[[], object]) -> Any:
        """Do this rank's ``work`` of the turn; when all have, return on all ranks what it returned
        (JSON) on the first one.

        Collective. Raises RankLost on all ranks if one of them does not get through its work.
        """
        turn = self._turn
        key = f"{turn}/verdict"
        try:
            value = work()
            if self._members.number == 0:
                verdict = self._decide(key, {"value": value})
            else:
                self._turn = turn + 1
                verdict = json.loads(self._read({key: 0}, turn)[0])
        except RankLost as lost:
            verdict = self._decide(key, {"lost": str(lost)})
        self._turn = turn + 1
        if "lost" in verdict:
            self.close()
            raise RankLost(verdict["lost"])
        self._clear(key)
        return verdict["value"]

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """The call is over, and all ranks know it. A second call does nothing."""
        self._is_over = True
        if self._connection is not None:
            self._members.connections.append(self._connection)
            self._connection = None

    def leave(self, error: BaseException) -> None:
        """This rank does not go on with the call: no other one is to wait for it, unless the call
        is over."""
        if self._is_over:
            return
        why = f"{self._members.describe(self._members.number)} left with {type(error).__name__}"
        lost = {"lost": f"{why}: {error}" if str(error) else why}
        if self._decide(f"{self._turn}/verdict", lost) != lost:  # that turn has ended well
            self._decide(f"{self._turn + 1}/verdict", lost)

    # -- in the store

    def _key(self, role: str, number: int, turn: int | None = None) -> str:
        return f"{self._turn if turn is None else turn}/{role}/{number}"

    def _decide(self, key: str, verdict: dict[str, Any]) -> dict[str, Any]:
        """End a turn with a verdict, unless it has one; return the one that it has."""
        try:
            found: dict[str, Any] = json.loads(
                self._store.compare_set(key, "", json.dumps(verdict))
            )
        except RuntimeError as error:
            return {"lost": verdict.get("lost", self._unreachable(error))}
        return found

    def _clear(self, key: str) -> None:
        """This rank has read a verdict: take its own posts back, and the last one the verdict,
        too."""
        try:
            for posted in self._posted:
                self._store.delete_key(posted)
            if self._store.add(f"{key}/reads", 1) == self._members.count:
                self._store.delete_key(key)
                self._store.delete_key(f"{key}/reads")
        except RuntimeError:  # the store went with the process that had it; everything was said
            pass
        self._posted.clear()

    def _read(self, owed: dict[str, int], turn: int) -> list[str]:
        """Return the texts under keys, when they are there. owed: the ranks that write them. Raises
        RankLost."""
        keys = list(owed)
        try:
            self._wait(keys, owed, turn)
            return [text.decode() for text in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise RankLost(self._unreachable(error)) from error

    def _wait(self, keys: Sequence[str], owed: dict[str, int], turn: int) -> None:
        """A waiting request would be one message, but it blocks interrupts, and torch warns when
        its time is over."""
        started, looked_at, inquiry = time.monotonic(), 0.0, Inquiry(self._members, self._home)
        exit_at: float | None = None
        longest_pause_s = min(max(PAUSE_S, self._members.count / 5000), 2.0)
        while not self._store.check(list(keys)):
            now = time.monotonic()
            if now - max(looked_at, started) >= 1.0:
                looked_at = now
                keys = self._absent(keys)
                if not keys:
                    return
                self._require_hope(turn, [owed[key] for key in keys], inquiry)
                if now - started > self._timeout_s:
                    raise RankLost(
                        f"{self._names(owed[key] for key in keys)} gave no word within "
                        f"{self._timeout_s:g} s"
                    )
                if _program_has_failed():
                    exit_at = now + EXIT_S if exit_at is None else exit_at
                    if now > exit_at:
                        own = self._members.describe(self._members.number)
                        raise RankLost(
                            f"{own} ends, as its program has failed, before "
                            f"{self._names(owed[key] for key in keys)}"
                        )
            time.sleep(min(longest_pause_s, max(1e-4, (now - started) / 10)))

    def _require_hope(self, turn: int, missing: list[int], inquiry: Inquiry) -> None:
        """Raise RankLost if one of the ranks that the turn waits for has ended, or the turn has."""
        ended = (
            self._members.ended_here()
        )  # whoever waits looks at its own machine, also for others that cannot
        gone = [
            number
            for number in ended
            if number in missing or self._absent([self._key("rank", number, turn)])
        ]
        if gone and not self._store.check([f"{turn}/verdict"]):
            raise RankLost(f"{self._names(gone)} has ended")
        silent = inquiry.silent(missing)
        if silent:
            raise RankLost(f"{self._names(silent)} has given no sign of life")
        if self._turn == turn and self._store.check([f"{turn}/verdict"]):
            raise RankLost("another rank has ended the turn")

    def _absent(self, keys: Sequence[str]) -> list[str]:
        """Return which of ``keys`` are not there: few, as a rule."""
        if not keys or self._store.check(list(keys)):
            return []
        half = len(keys) // 2
        return list(keys) if not half else self._absent(keys[:half]) + self._absent(keys[half:])

    def _names(self, numbers: Iterable[int]) -> str:
        names = [self._members.describe(number) for number in numbers]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def _unreachable(self, error: RuntimeError) -> str:
        self._connection = None  # nobody is to use it again
        return (
            "the store of the process group cannot be reached, which ends with the process "
            f"that serves it ({error})"
        )


def _program_has_failed() -> bool:
    """True if the main thread has ended with an error, so that the process waits for other threads
    alone."""
    return getattr(sys, "last_value", None) is not None and not threading.main_thread().is_alive()
