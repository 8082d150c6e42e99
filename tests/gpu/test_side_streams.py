"""What runs beside computation on a device: gradients are copied and reduced on other streams than
the one that computes, reductions over replicas run while backward goes on, and the host waits for
nothing. Only orders and streams are looked at; ``tests/benchmarks/simulated.py`` has the times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.emulated import nccl
from tests.support.fully_sharded import NotedAllGather
from tests.support.order import (
    HOST,
    DeviceSync,
    EventSync,
    Happening,
    Op,
    Record,
    StreamSync,
    Wait,
)
from tests.support.ranks import on_ranks
from tests.support.twin import sharded

RANKS = 4  # two nodes of two where gradients are also reduced over replicas
WIDTH = 320  # parameters of so many rows and columns are large ones
BLOCKS = 4
SHARDING = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
EVERY = [
    ("flat", "NO_SHARD"),
    *((name, how) for name in ("flat", "fully_shard") for how in SHARDING),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses_spare = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.relu(self.up(x))
        return self.spare(y) if self.uses_spare else y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.backward_begins: dict[int, int] = {}  # of a block: how much had happened then
        self.happenings: list[Happening] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            x.register_hook(lambda _, index=index: self._begins(index))
        return x.square().mean()

    def _begins(self, index: int) -> None:
        self.backward_begins[index] = len(self.happenings)


class Step:
    """What happens in a step, after one that allocates and records orders."""

    def __init__(
        self,
        front_end: str,
        strategy: str = "FULL_SHARD",
        *,
        uses_spare: bool = True,
        prepare: Callable[[Any], None] = lambda model: None,
        **options: Any,
    ) -> None:
        """prepare: changes the settings of a unit, for each block. options: of ``sharded``."""
        nccl.use()
        device = torch.device("emulated", 0)
        with nccl.group_of(RANKS):
            torch.manual_seed(0)
            plain, x = Model(), torch.randn(2, WIDTH).to(device)
            how: dict[str, Any] = {"units": (Block,), "device_id": device}
            model = sharded(plain, front_end, strategy, **how, **options)
            for block in plain.blocks:
                prepare(block)
            model(x).backward()
            model.zero_grad()
            for block in plain.blocks:
                block.uses_spare = uses_spare
            self.computing = torch.accelerator.current_stream().stream_id
            with nccl.recording() as recording:
                self.happenings = plain.happenings = recording.happenings
                model(x).backward()
            self.backward_begins = plain.backward_begins
            self.unordered = recording.unordered()
            self.gradients = [param.grad for param in model.parameters()]

    def places_of(self, kind: str = "") -> list[int]:
        """Return where collectives, or those of a kind, are among the happenings."""
        return [
            index
            for index, each in enumerate(self.happenings)
            if isinstance(each, nccl.Collective) and kind in ("", each.name)
        ]

    def writer_before(self, place: int) -> Op:
        """Return what has last written what the collective there reads."""
        collective = self.happenings[place]
        assert isinstance(collective, Op)
        begin, end = collective.reads[0]
        for each in reversed(self.happenings[:place]):
            if isinstance(each, Op) and any(b < end and begin < e for b, e in each.writes):
                return each
        raise AssertionError("nothing has written it")

    def host_waits(self) -> list[int]:
        """Return where the host waits for the device."""
        kinds = (EventSync, StreamSync, DeviceSync)
        return [index for index, each in enumerate(self.happenings) if isinstance(each, kinds)]


# -- reductions


def assert_start_while_backward_goes_on(step: Step, kind: str) -> None:
    places = step.places_of(kind)
    assert len(places) >= BLOCKS
    for order, block in enumerate(reversed(range(2, BLOCKS))):
        assert places[order] < step.backward_begins[block - 2]


@pytest.mark.parametrize(
    ("front_end", "strategy"),
    [("flat", "NO_SHARD"), ("flat", "HYBRID_SHARD"), ("fully_shard", "HYBRID_SHARD")],
)
@on_ranks(1)
def test_all_reduces_over_replicas_start_while_backward_goes_on(
    emulated_device: str, front_end: str, strategy: str
) -> None:
    assert_start_while_backward_goes_on(Step(front_end, strategy), nccl.ALL_REDUCE)


@pytest.mark.parametrize(
    ("front_end", "strategy"), [case for case in EVERY if case[1] != "HYBRID_SHARD"]
)
@on_ranks(1)
def test_gradients_are_copied_on_another_stream_until_all_is_computed(
    emulated_device: str, front_end: str, strategy: str
) -> None:
    step = Step(front_end, strategy)
    kind = nccl.ALL_REDUCE if strategy == "NO_SHARD" else nccl.REDUCE_SCATTER
    places = step.places_of(kind)
    assert len(places) >= BLOCKS
    *before, last = (step.writer_before(place).stream for place in places)
    assert step.computing not in before and HOST not in before
    assert last == step.computing  # nothing is left to compute, and the activations are gone


# -- what users replace


class Gather(NotedAllGather):
    """An all-gather of the user that notes its streams."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: set[int] = set()

    def __call__(self, **arguments: Any) -> Any:
        self.streams.add(torch.accelerator.current_stream().stream_id)
        return super().__call__(**arguments)


@on_ranks(1)
def test_all_gathers_of_the_user_run_beside_computation(emulated_device: str) -> None:
    gather = Gather()
    step = Step("fully_shard", prepare=lambda unit: unit.set_custom_all_gather(gather))
    assert gather.streams and step.computing not in gather.streams
    assert step.unordered == []


@on_ranks(1)
def test_hooks_on_streams_of_their_own_run_beside_backward(emulated_device: str) -> None:
    nccl.use()
    stream = torch.Stream(device=torch.device("emulated", 0))

    def hook(total: torch.Tensor) -> None:
        total.mul_(0.5)

    step = Step("fully_shard", prepare=lambda unit: unit.set_all_reduce_hook(hook, stream=stream))
    assert step.unordered == []
    records = [each for each in step.happenings if isinstance(each, Record)]
    events = {each.event for each in records if each.stream == stream.stream_id}
    waits = [
        index
        for index, each in enumerate(step.happenings)
        if isinstance(each, Wait) and each.event in events
    ]
    # the hook of the last block is waited for when the block before has gone through backward
    assert waits and min(waits) > step.backward_begins[BLOCKS - 2]


# -- the host


@pytest.mark.parametrize(
    ("front_end", "strategy", "offload", "uses_spare"),
    [
        *((*case, offload, True) for case in EVERY for offload in (False, True)),
        ("flat", "FULL_SHARD", False, False),
        ("fully_shard", "FULL_SHARD", False, False),
    ],
)
@on_ranks(1)
def test_the_host_waits_at_the_end_of_backward_if_at_all(
    emulated_device: str, front_end: str, strategy: str, offload: bool, uses_spare: bool
) -> None:
    """It does for copies to it, and for parameters that this rank has not used."""
    step = Step(front_end, strategy, offload=offload, uses_spare=uses_spare)
    last = step.places_of()[-1]
    places = step.host_waits()
    if offload or (front_end == "fully_shard" and not uses_spare):
        assert min(places) > last
    else:
        assert places == []


@pytest.mark.parametrize("front_end", ["flat", "fully_shard"])
@on_ranks(1)
def test_units_that_ranks_need_not_use_are_reduced_in_turn_without_a_wait(
    emulated_device: str, front_end: str
) -> None:
    step = Step(front_end, allow_unused_units=True)
    assert step.host_waits() == [] and step.unordered == []
    assert_start_while_backward_goes_on(step, nccl.REDUCE_SCATTER)
