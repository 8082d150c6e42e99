"""Thousands of simulated ranks around the code that talks to the store, to count what they ask of
it: requests and bytes.

    with many_ranks.simulated() as clock:
        cost = many_ranks.late(1024, clock)

Every rank has objects of its own, and the code that runs is that of a rank: only the clock, the
place in the user's program and the store are not real."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import json
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
from fsdp_compat._comm.divergence import deadlock, progress, status_store, store_rendezvous
from fsdp_compat._comm.divergence.status_store import Answer, StatusStore
from fsdp_compat._comm.divergence.store_rendezvous import Attempt, StoreRendezvous
from fsdp_compat._comm.divergence.waits import Activity
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
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextlib.contextmanager
def simulated() -> Iterator[Clock]:
    """Put a clock that the simulation moves into the modules that look at one."""
    clock = Clock()
    with contextlib.ExitStack() as stack:
        for module in (deadlock, status_store, store_rendezvous):
            stack.enter_context(mock.patch.object(module, "time", clock))
        stack.enter_context(mock.patch.object(progress, "location", lambda: "train.py:5 in main()"))
        yield clock


class CountingStore:
    """A store in memory that counts requests and bytes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: collections.Counter[str] = collections.Counter()
        self.nbytes = 0

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
    attempts: list[Attempt],
    arrivals: list[float],
    every: Callable[[int], None] | None,
) -> list[str]:
    """Let ranks arrive, and poll until the rendezvous ends for them. every: what the thread of a
    rank does each second. Return the errors."""
    start, errors = clock.now, list[str]()
    events = [(start + at, rank, "arrive") for rank, at in enumerate(arrivals)]
    heapq.heapify(events)
    waiting = set(range(len(attempts)))
    while waiting:
        clock.now, rank, kind = heapq.heappop(events)
        attempt = attempts[rank]
        if kind == "look" and every is not None:
            if rank in waiting:
                every(rank)
                heapq.heappush(events, (clock.now + deadlock.LOOK_S, rank, "look"))
            continue
        if kind == "arrive":
            attempt.arrive()
            if every is not None:
                heapq.heappush(events, (clock.now + deadlock.LOOK_S, rank, "look"))
        else:
            attempt.poll()
        try:
            is_over = attempt.look()
        except StateError as error:
            errors.append(str(error))
            is_over = True
        if is_over:
            waiting.discard(rank)
        else:
            heapq.heappush(events, (clock.now + attempt.pause_s, rank, "poll"))
    return errors


def _cost(store: CountingStore, errors: list[str]) -> Cost:
    return Cost(store.requests.total(), store.nbytes, tuple(dict.fromkeys(errors)))


def meet(ranks: int, clock: Clock, last: str = "state_dict()") -> Cost:
    """A rendezvous to which all ranks come. last: the call of the last rank."""
    store = CountingStore()
    calls = ["state_dict()"] * (ranks - 1) + [last]
    rendezvous = _rendezvous(store, ranks)
    attempts = [Attempt(*each, 1, "0") for each in zip(rendezvous, calls, strict=True)]
    arrivals = [SKEW_S * rank / ranks for rank in range(ranks)]
    return _cost(store, _run(clock, attempts, arrivals, None))


def refused(ranks: int, clock: Clock) -> Cost:
    """A rendezvous in which the last rank makes another call."""
    return meet(ranks, clock, "apply()")


def late(ranks: int, clock: Clock, late_s: float = 30.0) -> Cost:
    """A rendezvous to which one rank comes late, while the others look for circles."""
    store = CountingStore()
    rendezvous = _rendezvous(store, ranks)
    attempts = [Attempt(each, "state_dict()", 1, "0") for each in rendezvous]
    status = StatusStore(store)
    status.answer(ranks - 1, Answer(0, "is at train.py:9 in main()", 0.0))
    searches = [deadlock.Search() for _ in rendezvous]

    def look(rank: int) -> None:
        searches[rank].look([rendezvous[rank]], status)

    arrivals = [SKEW_S * rank / ranks for rank in range(ranks - 1)] + [late_s]
    return _cost(store, _run(clock, attempts, arrivals, look))


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
