"""The processes of a model's ranks, and which of them have ended.

A killed process sends nothing, and only processes on its machine can tell whether it still runs. So
ranks check the processes of their own machine (`_mailbox`), and ask ranks on other machines for a
sign of life through the status store."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

from ... import _torch_private
from ..._comm.board.processes import Process
from ..._comm.board.status_store import StatusStore

ASK_S = 1.0  # shortest interval between two questions to a silent rank on another machine
# A rank that has not answered for this long counts as ended. A long call into C that holds the
# interpreter's lock delays answers.
SILENCE_S = 30.0


class Members:
    """The ranks of a model, as processes."""

    def __init__(self, facts: list[list[Any]], number: int) -> None:
        """facts: of each rank, see ``own_facts``. number: of this one."""
        self.name: str = facts[0][0]  # unique
        self.number, self.ranks = number, [rank for _, rank, _ in facts]  # global ranks
        processes = [None if process is None else Process(*process) for *_, process in facts]
        self.num_calls = 0  # that all of them have made
        # Idle connections to the store, for reuse: opening many in a row takes seconds.
        self.connections: list[_torch_private.Store] = []
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
        """Return whether a rank's process is on this machine."""
        return number in self._here

    def ended_here(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended."""
        return [number for number, process in self._here.items() if process.has_ended()]

    def describe(self, number: int) -> str:
        process = self._here.get(number)
        where = "" if process is None else f" (process {process.pid})"
        return f"rank {self.ranks[number]}{where}"


class Inquiry:
    """Finds silent ranks on other machines during one wait."""

    def __init__(self, members: Members, store: _torch_private.Store) -> None:
        self._members, self._store = members, store
        self._status_store: StatusStore | None = None
        self._asked_at = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: number and time of its last post

    def silent(self, missing: list[int]) -> list[int]:
        """Return missing ranks on other machines that have posted nothing for too long: a rank that
        writes stands still for the board, which renews its post."""
        now, own = time.monotonic(), self._members.number
        missing = [
            number for number in missing if number != own and not self._members.is_here(number)
        ]
        if not missing or now - self._asked_at < max(ASK_S, self._members.count / 500):
            return []
        self._asked_at = now
        if self._status_store is None:
            self._status_store = StatusStore(_torch_private.second_connection(self._store))
        if self._silence_s(own, now) > SILENCE_S / 2:
            # This rank does not see its own posts either, so silence proves nothing.
            self._heard = {own: self._heard[own]}
            return []
        return [number for number in missing if self._silence_s(number, now) > SILENCE_S]

    def _silence_s(self, number: int, now: float) -> float:
        assert self._status_store is not None
        post = self._status_store.post_of(self._members.ranks[number])
        last, since = self._heard.setdefault(number, (0, now))
        # A rank that has ended its training may still be writing.
        if post is not None and (post.number != last or post.ended):
            self._heard[number] = post.number, now
            return 0.0
        return now - since


def own_facts(rank: int) -> list[Any]:
    """Return a unique name, the global rank, and the process of this rank."""
    process = Process.own()
    return [uuid.uuid4().hex, rank, None if process is None else dataclasses.astuple(process)]
