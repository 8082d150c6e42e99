"""Messages between the ranks of one call, from any thread, through a connection of their own to the
process group's store.

A call consists of turns. In each turn every rank *posts* one text, some ranks read the texts, and
one *verdict* ends the turn for all. It is written once, by compare-and-set: by the first rank when
it has the texts it needs; or, with the reason for the failure, by any rank that leaves early or
notices that another has ended. So a turn ends alike on all ranks, and no rank waits for one that
will not come. A slow rank is waited for until the timeout of the process group.

Keys are unique to the call, and deleted once all ranks have read them."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ... import _torch_private
from ..._text import joined
from ...errors import StateError
from .processes import Inquiry, Members

PAUSE_S = 0.2  # longest interval between two polls; longer with more than 1,000 ranks
CHUNK = 512  # keys in a request, for which torch needs time by the square of their number
EXIT_S = 10.0  # how long a process whose program has failed waits for the others before it ends


class RankLost(Exception):
    """A rank that others wait for has ended, left, or did not arrive, as the text says."""


class StoreMailbox:
    """The messages of one call."""

    def __init__(self, members: Members, name: str, timeout_s: float) -> None:
        """name: the same on all ranks, and unique to the call."""
        self._members, self._timeout_s = members, timeout_s
        self._connection: _torch_private.Store | None = None
        default = _torch_private.default_store()
        if default is None:
            raise StateError.of(
                "The process group of this module was destroyed.",
                expected="checkpoints to be saved and loaded before destroy_process_group",
                got="no default process group",
                where=f"{name}, on rank {members.number}",
                fix="wrap the model again after init_process_group",
            )
        self._default_store = default  # kept alive: on one rank it is the server of all
        try:
            self._connection = members.connections.pop()
        except IndexError:
            self._connection = _torch_private.second_connection(default)
        prefix = f"fsdp_compat/checkpoint/{name}"
        self._store = _torch_private.under_prefix(self._connection, prefix)
        self._turn = 0  # the first turn that this rank has not completed
        self._posted: list[str] = []
        self._is_over = False

    def post(self, text: str, role: str = "rank") -> None:
        """Post this rank's text of the turn: one for each role that it has."""
        key = self._key(role, self._members.number)
        self._posted.append(key)
        self._store.set(key, text)

    def read(self, numbers: Iterable[int], role: str = "rank") -> list[str]:
        """Wait for the texts of these ranks in this turn and return them. Raises RankLost."""
        return self._read({self._key(role, number): number for number in numbers}, self._turn)

    def conclude(self, work: Callable[[], object]) -> Any:
        """Do ``work`` of the turn, wait for the verdict, and return what the first rank's ``work``
        returned (JSON). Collective. Raises RankLost on all ranks if one does not finish."""
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
        """End the call on this rank, once all ranks know that it is over. May be called again."""
        self._is_over = True
        if self._connection is not None:
            self._members.connections.append(self._connection)
            self._connection = None

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks not to wait for this one, unless the call is over."""
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
        """Write the verdict of a turn, unless it has one; return the verdict that counts."""
        try:
            found = self._store.compare_set(key, "", json.dumps(verdict))
        except RuntimeError as error:
            return {"lost": verdict.get("lost", self._unreachable(error))}
        decided: dict[str, Any] = json.loads(found)
        return decided

    def _clear(self, key: str) -> None:
        """Delete this rank's posts, and, as the last rank that read the verdict, the verdict."""
        try:
            for posted in self._posted:
                self._store.delete_key(posted)
            if self._store.add(f"{key}/reads", 1) == self._members.count:
                self._store.delete_key(key)
                self._store.delete_key(f"{key}/reads")
        except RuntimeError:  # the process with the store has ended; nothing is left to delete
            pass
        self._posted.clear()

    def _read(self, owed: dict[str, int], turn: int) -> list[str]:
        """Wait for the texts under keys. owed: the rank that writes each. Raises RankLost."""
        keys = list(owed)
        try:
            self._wait(keys, owed, turn)
            return [text.decode() for some in _chunks(keys) for text in self._store.multi_get(some)]
        except RuntimeError as error:
            raise RankLost(self._unreachable(error)) from error

    def _wait(self, keys: Sequence[str], owed: dict[str, int], turn: int) -> None:
        """Poll until all keys exist: a blocking request would block interrupts."""
        started = looked_at = time.monotonic()
        inquiry, left = Inquiry(self._members, self._default_store), _chunks(keys)
        exit_at: float | None = None
        longest_pause_s = min(max(PAUSE_S, self._members.count / 5000), 2.0)
        while left:
            if self._store.check(left[-1]):
                left.pop()
                continue
            now = time.monotonic()
            if now - looked_at >= 1.0:
                looked_at = now
                missing = [owed[key] for key in self._absent(left[-1])]
                self._require_living_ranks(turn, missing, inquiry)
                if missing and now - started > self._timeout_s:
                    raise RankLost(
                        f"{self._names(missing)} did not answer within {self._timeout_s:g} s"
                    )
                if _program_has_failed():
                    exit_at = now + EXIT_S if exit_at is None else exit_at
                    if now > exit_at:
                        own = self._members.describe(self._members.number)
                        raise RankLost(
                            f"{own} ends because its program has failed, while waiting for "
                            f"{self._names(missing)}"
                        )
            time.sleep(min(longest_pause_s, max(1e-4, (now - started) / 10)))

    def _require_living_ranks(self, turn: int, missing: list[int], inquiry: Inquiry) -> None:
        """Raise RankLost if a rank that the turn waits for has ended, or if the turn has."""
        # Each rank checks the processes of its own machine, and so for ranks on other machines.
        ended = self._members.ended_here()
        gone = [
            number
            for number in ended
            if number in missing or self._absent([self._key("rank", number, turn)])
        ]
        if gone and not self._store.check([f"{turn}/verdict"]):
            raise RankLost(f"{self._names(gone)} has ended")
        silent = inquiry.silent(missing)
        if silent:
            raise RankLost(f"{self._names(silent)} has not answered for too long")
        if self._turn == turn and self._store.check([f"{turn}/verdict"]):
            raise RankLost("another rank has given up")

    def _absent(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that do not exist: usually few."""
        if not keys or self._store.check(list(keys)):
            return []
        half = len(keys) // 2
        return list(keys) if not half else self._absent(keys[:half]) + self._absent(keys[half:])

    def _names(self, numbers: Iterable[int]) -> str:
        return joined([self._members.describe(number) for number in numbers], 8, ", ")

    def _unreachable(self, error: RuntimeError) -> str:
        self._connection = None  # not to be used again
        return (
            "the store of the process group cannot be reached: the process that serves it may have "
            f"ended ({error})"
        )


def _chunks(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[start : start + CHUNK]) for start in range(0, len(keys), CHUNK)]


def _program_has_failed() -> bool:
    """Return whether the main thread failed, and only other threads keep the process alive."""
    return getattr(sys, "last_value", None) is not None and not threading.main_thread().is_alive()
