"""What ranks tell each other through the store of the default process group. All of its keys are
here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import time
import typing
from collections.abc import Sequence

from ... import _torch_private
from ..environment import idle_limit_s
from .calls import Report, Wait
from .processes import Process
from .verdict import State

# An unchanged post is renewed that often, by its number: less than half of the silence after which
# a checkpoint takes a rank of another machine for lost.
RENEW_S = 8.0
LOST_S = 6 * RENEW_S  # after it, the rank of a post that was not renewed was stopped, or lost
FRESH_S = 30.0  # after it, states are no news: while ranks stand still, they are told every 5 s
_axes_of = functools.lru_cache(ast.literal_eval)  # parsing takes long, and most ranks do the same


@dataclasses.dataclass(frozen=True)
class Post:
    """What a rank does that has begun nothing for some seconds."""

    doing: str  # as in "is at train.py:41 in main()"
    since: float  # time.time() when it began its last call
    idle_s: float = 0.0  # how long it has been in one wait that the board cannot see into
    ended: bool = False  # its program, or its process groups
    # By name of an activity: how often each tag was used, the calls begun, and the last of them.
    axes: dict[str, tuple[dict[int | str, int], int, list[str]]] = dataclasses.field(
        default_factory=dict
    )
    use: str = ""  # what it did last with a unit
    number: int = 0  # periods of RENEW_S in time.time(): it grows while its process is alive
    wait: Wait | None = None

    @property
    def is_killed(self) -> bool:
        """True if another rank has posted this: what a rank posts last names its axes, if it has
        begun any call."""
        return self.ended and not self.axes

    @property
    def is_alive(self) -> bool:
        """False once its rank has ended, or renews it no more."""
        return not self.ended and time.time() - self.number * RENEW_S < LOST_S

    def lacks(self, wait: Wait) -> bool:
        """True if this rank had not yet begun what ``wait`` waits for."""
        return self.axes.get(wait.name, ({}, 0, []))[0].get(wait.tag, 0) < wait.number


class StatusStore:
    """Reads and writes the status of ranks. No method waits for another rank."""

    def __init__(self, store: _torch_private.Store) -> None:
        self._store = store
        self._processes: dict[int, Process] = {}  # of ranks, as far as they were read

    def _get(self, key: str) -> typing.Any:
        """Return a value, or None, by one request: ``get`` would wait for a missing key."""
        text = self._store.compare_set(f"fsdp_compat/{key}", "", "").decode()
        return ast.literal_eval(text) if text else None

    def _get_all(self, keys: Sequence[str]) -> list[typing.Any]:
        """Return values, or None, by two requests if all keys are there."""
        full = [f"fsdp_compat/{key}" for key in keys]
        if not (full and self._store.check(full)):
            return [self._get(key) for key in keys]
        return [ast.literal_eval(text.decode() or "None") for text in self._store.multi_get(full)]

    def _set(self, key: str, value: object) -> None:
        self._store.set(f"fsdp_compat/{key}", repr(value))

    # -- posts

    def post(self, rank: int, post: Post | None) -> None:
        """Publish what a rank does, or that it goes on (None)."""
        axes: typing.Any = post and repr(post.axes)  # as text, for `_axes_of`
        post = post and dataclasses.replace(post, axes=axes)
        self._set(f"post/{rank}", post and dataclasses.astuple(post))

    def post_of(self, rank: int) -> Post | None:
        return _post(self._get(f"post/{rank}"))

    def posts_of(self, ranks: Sequence[int]) -> dict[int, Post | None]:
        found = self._get_all([f"post/{rank}" for rank in ranks])
        return dict(zip(ranks, map(_post, found), strict=True))

    def tell_states(self, name: str, part: int, states: Sequence[State]) -> None:
        """Publish what a part of an axis's ranks does."""
        self._set(f"states/{name}/{part}", (time.time(), [*map(dataclasses.astuple, states)]))

    def states_of(self, name: str, groups: Sequence[tuple[int, ...]]) -> list[State]:
        """Return what the ranks of all parts do. Those of a part without news are silent."""
        found = self._get_all([f"states/{name}/{part}" for part in range(len(groups))])
        states = []
        for group, value in zip(groups, found, strict=True):
            is_new = value is not None and time.time() - value[0] < FRESH_S
            states += [State(*each) for each in value[1]] if is_new else [State(group, len(group))]
        return states

    def warn(self, text: str) -> None:
        """Let all ranks that stand still log a warning."""
        self._set("warning", [time.time(), text])

    def warning(self) -> tuple[float, str]:
        """Return the last warning, and its time.time()."""
        at, text = self._get("warning") or (0.0, "")
        return at, text

    # -- failures

    def report_failure(self, name: str, rank: int, report: Report) -> None:
        """Publish that the communication ``name`` failed on a rank. The first report counts."""
        value = repr((rank, dataclasses.astuple(report)))
        self._store.compare_set(f"fsdp_compat/failed/{name}", "", value)

    def forget_failure(self, name: str) -> None:
        """Forget that of an earlier process group of this name: a store may outlive them."""
        self._store.set(f"fsdp_compat/failed/{name}", "")

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

    def calls_of(self, name: str, number: int, ranks: Sequence[int]) -> dict[int, str]:
        """Return the calls of ranks: "" of one that has not arrived, or has gone on."""
        found = self._get_all([f"call/{name}/{rank}" for rank in ranks])
        calls = [each[1] if each and each[0] == number else "" for each in found]
        return dict(zip(ranks, calls, strict=True))

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

    def forget(self, name: str, number: int) -> None:
        """Delete the counter of a rendezvous, and the reason if it was refused."""
        for kind in ("sum", "failed"):
            self._store.delete_key(f"fsdp_compat/{kind}/{name}/{number}")

    # -- processes

    def introduce(self, rank: int, process: Process | None) -> None:
        """Publish which process of which host a rank is. It has told nothing yet."""
        self._set(f"process/{rank}", process and dataclasses.astuple(process))
        self.post(rank, None)

    def is_gone(self, rank: int) -> bool:
        """True if the process of a rank of this host is known to have ended."""
        if rank not in self._processes:
            value = self._get(f"process/{rank}")
            if not value:
                return False
            self._processes[rank] = Process(*value)
        process = self._processes[rank]
        if not process.has_ended():
            return False
        own = Process.own()  # another machine has other processes with the same ids
        return own is not None and own.machine == process.machine

    def fate_of(self, rank: int) -> str:
        """Return why a rank has gone, as far as that is known."""
        post = self.post_of(rank)
        if post is not None and post.ended:
            return f"rank {rank} {post.doing}"
        if self.is_gone(rank):
            return f"rank {rank} {KILLED}"
        return f"rank {rank} closed its connection"

    def ask_of(self, rank: int, name: str) -> tuple[str, bool]:
        """Return what a missing rank is doing, in words, and whether it will never come. name: of
        the connections that the call will use."""
        post, failed = self.post_of(rank), self.failure_of(name)
        if post is not None and post.ended:
            return f"it {post.doing}", True
        if failed is not None:
            return f"its communication has failed ({failed})", True
        if post is None:
            is_gone = self.is_gone(rank)
            return f"it {KILLED if is_gone else 'goes on, or is stopped'}", is_gone
        if post.idle_s >= idle_limit_s():
            return f"it {post.doing}, and has made no progress for {post.idle_s:.0f} s", True
        return f"it {post.doing}, and has begun nothing for {time.time() - post.since:.0f} s", False


KILLED = "was killed, or runs another program now (exec)"


def _post(value: typing.Any) -> Post | None:
    if value is None:
        return None
    stored: typing.Any = Post(*value)  # its axes are text, its wait is a tuple
    wait = stored.wait and Wait(*stored.wait)
    post: Post = dataclasses.replace(stored, axes=_axes_of(stored.axes), wait=wait)
    return post


def status_store() -> StatusStore | None:
    """Return the status store of the default process group, or None if there is no such group."""
    store = _torch_private.default_store()
    return None if store is None else StatusStore(store)
