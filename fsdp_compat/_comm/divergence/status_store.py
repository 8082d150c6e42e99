"""What ranks tell each other through the store of the default process group, beside the messages
that they exchange."""

from __future__ import annotations

import dataclasses
import json

from ... import _torch_private
from .processes import Process
from .waits import Activity, Report, Wait

__all__ = ["Answer", "Post", "StatusStore", "status_store"]


@dataclasses.dataclass(frozen=True)
class Post:
    """A wait, and what its rank had begun at that time."""

    wait: Wait
    counts: dict[str, dict[int, int]]  # by name of the activity and by tag

    def lacks(self, wait: Wait) -> bool:
        """True if this rank had not yet begun what ``wait`` waits for."""
        return self.counts.get(wait.name, {}).get(wait.tag, 0) < wait.number


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a process says that it is doing."""

    number: int  # of the question that it answers
    text: str  # as in "is at train.py:41 in main()"
    idle_s: float  # how long it has been in one wait; 0.0 in a wait that deadlock.py watches
    ended: bool = False  # its program, or the process group that the question was about
    since_s: float = 0.0  # how long every question has found the same text


class StatusStore:
    """Reads and writes the status of ranks. No method waits for another rank."""

    def __init__(self, store: _torch_private.Store) -> None:
        self._store = store
        self._processes: dict[int, Process] = {}  # by rank, those that were looked up

    def _get(self, key: str) -> str:
        key = f"fsdp_compat/{key}"
        # `get` waits for a key that does not exist
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _set(self, key: str, value: object) -> None:
        self._store.set(f"fsdp_compat/{key}", "" if value is None else json.dumps(value))

    # -- waits and failures

    def post(self, rank: int, post: Post | None) -> None:
        """Publish the wait of a rank, or withdraw it (None)."""
        self._set(f"post/{rank}", post and dataclasses.astuple(post))

    def post_of(self, rank: int) -> Post | None:
        text = self._get(f"post/{rank}")
        if not text:
            return None
        (rank, peers, *rest), begun = json.loads(text)
        counts = {name: {int(tag): n for tag, n in of.items()} for name, of in begun.items()}
        return Post(Wait(rank, tuple(peers), *rest), counts)

    def report_failure(self, activity: Activity, report: Report) -> None:
        """Tell all members that the connections of this rank have failed. The first report counts,
        as the others may be its consequences."""
        value = json.dumps([activity.global_rank, *dataclasses.astuple(report)])
        self._store.compare_set(f"fsdp_compat/failed/{activity.name}", "", value)

    def failure_of(self, name: str, *, except_of: int | None = None) -> Report | None:
        """Return what the first member whose connections of this name failed has reported, unless
        that is the rank ``except_of``."""
        text = self._get(f"failed/{name}")
        if not text:
            return None
        rank, is_circle, lines, *rest = json.loads(text)
        lines = {int(rank): line for rank, line in lines.items()}
        return None if rank == except_of else Report(is_circle, lines, *rest)

    # -- questions and answers

    def ask(self, rank: int) -> int:
        """Ask a rank what it is doing; return the number of the question. Ask again as long as you
        wait."""
        return self._store.add(f"fsdp_compat/asked/{rank}", 1)

    def num_asked(self, rank: int, before: int) -> int:
        """Return how often a rank was asked. before: the result of the last call; an unchanged
        number costs one request."""
        key = f"fsdp_compat/asked/{rank}"
        return int(self._store.get(key)) if before or self._store.check([key]) else 0

    def answer(self, rank: int, answer: Answer | None) -> None:
        self._set(f"answer/{rank}", answer and dataclasses.astuple(answer))

    def answer_of(self, rank: int) -> Answer | None:
        text = self._get(f"answer/{rank}")
        return Answer(*json.loads(text)) if text else None

    def introduce(self, rank: int, process: Process | None) -> None:
        """Publish which process of which host a rank is."""
        self._set(f"process/{rank}", process and dataclasses.astuple(process))

    def is_gone(self, rank: int) -> bool:
        """True if the process of a rank is known to have ended. Only ranks on its host can tell."""
        if rank not in self._processes:
            text = self._get(f"process/{rank}")
            if not text:
                return False
            self._processes[rank] = Process(*json.loads(text))
        return self._processes[rank].is_known_to_have_ended()

    def fate_of(self, rank: int) -> str:
        """Return why a rank is not there any more, as far as that is known."""
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
