"""Thousands of simulated ranks around the code that talks to the store, to count what they ask of
it: requests and bytes.

    with many_ranks.simulated() as clock:
        cost = many_ranks.late(1024, clock)

Every rank has objects of its own, and the code that runs is that of a rank: only the clock, the
place in the user's program, its process and the store are not real."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import json
import math
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel, StateError, _torch_private, fully_shard
from fsdp_compat._comm.board import board, progress, status_store, store_rendezvous
from fsdp_compat._comm.board.calls import Activity, Waiter
from fsdp_compat._comm.board.processes import Process
from fsdp_compat._comm.board.status_store import RENEW_S, Post, StatusStore
from fsdp_compat._comm.board.store_rendezvous import StoreRendezvous
from fsdp_compat._state.units import units_of
from fsdp_compat.checkpoint._live.model import named_groups
from fsdp_compat.checkpoint._live.optimizers import SharedOptimizer
from fsdp_compat.checkpoint._live.snapshot import Snapshot
from fsdp_compat.checkpoint._ranks.mailbox import StoreMailbox
from fsdp_compat.checkpoint._ranks.ranks import Ranks
from fsdp_compat.checkpoint._save import _proposal
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import Block
from tests.support.programs import launch

SKEW_S = 0.02  # between the first arrival and the last
HEADER_NBYTES = 9  # of a request or an answer


class Clock:
    """In the place of the time module."""

    def __init__(self) -> None:
        self.now, self.place = 1000.0, "train.py:5 in main()"  # of the rank that runs now

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextlib.contextmanager
def simulated() -> Iterator[Clock]:
    """Put a clock that the simulation moves into the modules that look at one."""
    clock = Clock()
    fakes: list[tuple[Any, str, Any]] = [
        (progress, "location", lambda: clock.place),
        (progress.Progress, "idle_s", lambda self: 0.0),
        (Process, "has_ended", lambda self: False),
        *((module, "time", clock) for module in (board, status_store, store_rendezvous)),
    ]
    with contextlib.ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(mock.patch.object(*fake))
        yield clock


class CountingStore:
    """A store in memory that counts requests and bytes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: collections.Counter[str] = collections.Counter()
        self.nbytes = self.num_read = 0  # num_read: posts, and states of parts

    def _count(self, kind: str, *told: str | bytes) -> None:
        self.requests[kind] += 1
        self.nbytes += HEADER_NBYTES + sum(len(each) for each in told)

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value
        self._count("set", key, value)

    def add(self, key: str, value: int) -> int:
        total = int(self.values.get(key, b"0")) + value
        self.values[key] = str(total).encode()
        self._count("add", key, self.values[key])
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self.values.get(key, b"")
        if found.decode() == expected and desired:
            found = self.values[key] = desired.encode()
        self._count("compare_set", key, expected, desired, found)
        return found

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        self.num_read += len(keys)
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self.values[key] for key in keys]
        self._count("multi_get", *keys, *found)
        return found

    def delete_key(self, key: str) -> bool:
        self._count("delete_key", key)
        return self.values.pop(key, None) is not None


@dataclasses.dataclass
class Cost:
    """What a call of all ranks has cost."""

    requests: int  # of all ranks together
    nbytes: int  # in and out of the store
    messages: tuple[str, ...]  # of errors, each once


def _rendezvous(store: Any, ranks: int) -> list[StoreRendezvous]:
    members = tuple(range(ranks))
    return [
        StoreRendezvous(Activity("rendezvous", rank, members), store, 600.0) for rank in members
    ]


def _run(
    clock: Clock,
    rendezvous: list[StoreRendezvous],
    calls: list[str],
    arrivals: list[float],
    every: Callable[[int], None] | None,
) -> list[str]:
    """Let ranks arrive, and poll until the rendezvous ends for them. every: what the thread of a
    rank does each second. Return the errors."""
    start, errors = clock.now, list[str]()
    events = [(start + at, rank, "arrive") for rank, at in enumerate(arrivals)]
    heapq.heapify(events)
    waiting = set(range(len(rendezvous)))
    while waiting:
        clock.now, rank, kind = heapq.heappop(events)
        own = rendezvous[rank]
        if kind == "look" and every is not None:
            if rank in waiting:
                every(rank)
                heapq.heappush(events, (clock.now + board.LOOK_S, rank, "look"))
            continue
        if kind == "arrive":
            own.arrive(calls[rank], 1, "0")
            if every is not None:
                heapq.heappush(events, (clock.now + board.LOOK_S, rank, "look"))
        else:
            own.poll()
        try:
            is_over = own.is_complete()
        except StateError as error:
            errors.append(str(error))
            is_over = True
        if is_over:
            waiting.discard(rank)
        else:
            heapq.heappush(events, (clock.now + own.pause_s, rank, "poll"))
    return errors


def _cost(store: CountingStore, errors: list[str]) -> Cost:
    return Cost(store.requests.total(), store.nbytes, tuple(dict.fromkeys(errors)))


def meet(ranks: int, clock: Clock, last: str = "state_dict()") -> Cost:
    """A rendezvous to which all ranks come. last: the call of the last rank."""
    store = CountingStore()
    calls = ["state_dict()"] * (ranks - 1) + [last]
    arrivals = [SKEW_S * rank / ranks for rank in range(ranks)]
    return _cost(store, _run(clock, _rendezvous(store, ranks), calls, arrivals, None))


def refused(ranks: int, clock: Clock) -> Cost:
    """A rendezvous in which the last rank makes another call."""
    return meet(ranks, clock, "apply()")


def late(ranks: int, clock: Clock, late_s: float = 30.0) -> Cost:
    """A rendezvous to which one rank comes late, while the others look for circles."""
    store = CountingStore()
    rendezvous = _rendezvous(store, ranks)
    status = StatusStore(store)
    boards = [board.Board(rank, status, ranks) for rank in range(ranks)]
    number = int(clock.time() / RENEW_S)
    status.post(ranks - 1, Post("is at train.py:9 in main()", clock.time(), number=number))

    def look(rank: int) -> None:
        boards[rank].look([rendezvous[rank]])

    arrivals = [SKEW_S * rank / ranks for rank in range(ranks - 1)] + [late_s]
    return _cost(store, _run(clock, rendezvous, ["state_dict()"] * ranks, arrivals, look))


class Member(Waiter):
    """A rank of an axis without tags, as BackendTransport is one, and its board."""

    failure = ""

    def __init__(self, store: Any, rank: int, members: tuple[int, ...], last: str) -> None:
        self.activity = Activity("0/cuda", rank, members, has_tags=False)
        self.board = board.Board(rank, StatusStore(store), len(members))
        for call in [*(f"layers.{number}" for number in range(70)), *filter(None, [last])]:
            self.activity.begin(call)

    @property
    def is_connected(self) -> bool:
        return not self.failure

    def end_wait(self) -> None:
        self.failure = getattr(self.activity.diagnosis, "cause", "")


def stand_still(
    ranks: int, clock: Clock, other: str = "the norm", silent: int = 0, *, last_first: bool = False
) -> tuple[CountingStore, list[Member]]:
    """Ranks that begin the same call, but the last but one ``other``, or nothing. All but the first
    ``silent`` ones then look each second, until all have failed, or one warns, or for 60 s.
    last_first: of each second, the last rank looks first."""
    store, world, start = CountingStore(), tuple(range(ranks)), clock.now
    lasts = ["the norm"] * (ranks - 2) + [other, "the norm"]
    members = [Member(store, rank, world, lasts[rank]) for rank in world]
    store.requests.clear()
    turns = range(ranks)[:: -1 if last_first else 1]
    events = sorted((start + turns[rank] / ranks, rank) for rank in world[silent:])
    while events[0][0] < start + 60.0 and "fsdp_compat/warning" not in store.values:
        clock.now, rank = events[0]
        clock.place = f"train.py:{rank if lasts[rank] != 'the norm' else 5} in main()"
        store.num_read, member = 0, members[rank]
        member.board.look([member])
        assert store.num_read <= board.MAX_READ == 256
        if members[-1].failure and all(each.failure for each in members[silent:]):
            break
        pause_s = member.board._next_look - clock.now  # it does nothing before
        heapq.heapreplace(events, (clock.now + max(1, math.ceil(pause_s)), rank))
    return store, members


def exchange(ranks: int, clock: Clock, value: object = "x" * 2000) -> Cost:
    """The exchange of a save or a load: one text of each rank, and the verdict. Nearly all texts
    are equal."""
    store = CountingStore()
    found = [_ranks(store, number, ranks) for number in range(ranks)]
    for each in found[1:]:
        each.mailbox.post(json.dumps(value))
    found[0].exchange([value, "identity"])
    for each in found[2:]:
        each.mailbox.conclude(lambda: None)
    found[1].exchange(value)
    return _cost(store, [])


def _ranks(store: Any, number: int, count: int) -> Ranks:
    members: Any = types.SimpleNamespace(number=number, count=count, connections=[store])
    with (
        mock.patch.object(_torch_private, "default_store", lambda: store),
        mock.patch.object(_torch_private, "under_prefix", lambda store, prefix: store),
    ):
        mesh: Any = None
        return Ranks("save", number, count, mesh, StoreMailbox(members, "save/1", 600.0))


CALLS = meet, late, refused, exchange


def plans(ranks: int, numbers: list[int], folder: Path) -> dict[str, list[str]]:
    """What ranks of a world of ``ranks`` tell the others in a save, by front end."""
    code = f"from tests.support import many_ranks; print(many_ranks.told({ranks}, {numbers}))"
    (done,) = launch(code, [[]], folder)
    assert not done.code, done.err
    return dict(json.loads(done.out.splitlines()[-1]))


def told(ranks: int, numbers: list[int]) -> str:
    """In a process of its own: what ``plans`` returns, as JSON."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: dict[str, list[str]] = {"flat": [], "original": [], "fully_shard": []}
    for number in numbers:
        dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=ranks)
        for front_end, plans in found.items():
            plans.append(_plan(front_end, number, ranks))
        dist.destroy_process_group()
    return json.dumps(found)


def _plan(front_end: str, number: int, ranks: int) -> str:
    model: nn.Module = nn.Sequential(*(Block(64) for _ in range(3)))
    if front_end == "fully_shard":
        for each in (*model.children(), model):
            fully_shard(each, mesh=init_device_mesh("cpu", (ranks,)))
    else:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=front_end == "original",
        )
    optimizer = torch.optim.AdamW(model.parameters())
    own: Any = types.SimpleNamespace(number=number, count=ranks)
    groups, shared = named_groups(units_of(model)), SharedOptimizer(model, optimizer, own)
    _identity, *rest = _proposal(number, 1, groups, Snapshot(), shared)
    return json.dumps(rest)
