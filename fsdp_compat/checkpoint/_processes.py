"""Which processes take part, and which of them have ended.

A process that is killed says nothing. Whether it still runs is certain only on its own machine;
there, the others look it up. Of a process on another machine that is silent, deadlock detection may
know (deadlock.py); and a rank on that machine that takes part, too, tells everybody (_mailbox.py).
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

from .. import _torch_private
from .._comm.processes import Process
from .._comm.status_store import StatusStore

__all__ = ["Inquiry", "Members", "members_of", "own_facts"]

ASK_S = 1.0  # at least, between two questions to a silent rank on another machine
# without an answer; a thread gets no turn to answer while a long call into C keeps the interpreter
SILENCE_S = 30.0


class Members:
    """The ranks of a model, as processes."""

    def __init__(
        self, name: str, number: int, ranks: list[int], processes: list[Process | None]
    ) -> None:
        """name: the same on all of them, and nobody else's. ranks: global, by number."""
        self.name, self.number, self.ranks = name, number, ranks
        self.num_calls = 0  # that they have made together
        self.connections: list[
            _torch_private.Store
        ] = []  # to the store, which nobody uses: to open many in a row takes seconds
        own = processes[number]
        self._here = {
            other: process
            for other, process in enumerate(processes)
            if process is not None
            and own is not None
            and other != number
            and process.machine == own.machine
        }

    @property
    def count(self) -> int:
        return len(self.ranks)

    def is_here(self, number: int) -> bool:
        """True if a rank's process can be seen from this one."""
        return number in self._here

    def ended_here(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended."""
        return [number for number, process in self._here.items() if process.has_ended()]

    def describe(self, number: int) -> str:
        process = self._here.get(number)
        return f"rank {self.ranks[number]}" + (
            "" if process is None else f" (process {process.pid})"
        )


class Inquiry:
    """What one wait has found out about silent ranks on other machines."""

    def __init__(self, members: Members, store: _torch_private.Store) -> None:
        self._members, self._store = members, store
        self._board: StatusStore | None = None
        self._asked_at = time.monotonic()
        self._heard: dict[
            int, tuple[int, float]
        ] = {}  # by number: of the last answer, and when it came

    def silent(self, missing: list[int]) -> list[int]:
        """Ask the missing ranks of other machines once more; return those that have given no answer
        for too long."""
        now, own = time.monotonic(), self._members.number
        missing = [
            number for number in missing if number != own and not self._members.is_here(number)
        ]
        if not missing or now - self._asked_at < max(ASK_S, self._members.count / 500):
            return []
        self._asked_at = now
        if self._board is None:
            self._board = StatusStore(_torch_private.second_connection(self._store))
        if (
            self._silence_s(own, now) > SILENCE_S / 2
        ):  # questions are not answered here, so they are not elsewhere
            self._heard = {own: self._heard[own]}
            return []
        return [number for number in missing if self._silence_s(number, now) > SILENCE_S]

    def _silence_s(self, number: int, now: float) -> float:
        assert self._board is not None
        rank = self._members.ranks[number]
        question, answer = self._board.ask(rank), self._board.answer_of(rank)
        last, since = self._heard.setdefault(number, (question - 1, now))
        if answer is not None and (
            answer.number > last or answer.ended
        ):  # it may go on with a save after that
            self._heard[number] = max(answer.number, last), now
            return 0.0
        return now - since


def members_of(facts: list[list[Any]], number: int) -> Members:
    """Make the members from what each has said of itself: a name, its global rank, its process."""
    processes = [None if process is None else Process(*process) for _, _, process in facts]
    return Members(facts[0][0], number, [rank for _, rank, _ in facts], processes)


def own_facts(rank: int) -> list[Any]:
    """Return what this process says of itself, see ``members_of``. rank: global."""
    process = Process.own()
    return [uuid.uuid4().hex, rank, None if process is None else dataclasses.astuple(process)]
