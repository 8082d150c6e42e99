"""Peaks of memory in a step on a device are those of torch's FSDP2, within 3 %, whatever passes
between the units and whichever of them ranks use."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp_compat
from tests.support.emulated import nccl
from tests.support.order import Allocate, Free
from tests.support.ranks import on_ranks
from tests.support.twin import FLAT, FULLY_SHARD, sharded

WIDTH = 64
SLACK = 1.03


@dataclasses.dataclass
class Packed:
    value: torch.Tensor


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda x: x, lambda x: x),
    "tuple": (lambda x: (x,), lambda packed: packed[0]),
    "nested": (lambda x: {"states": [(x, 1)]}, lambda packed: packed["states"][0][0]),
    "dataclass": (Packed, lambda packed: packed.value),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.unpack: Callable[[Any], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor, condition: Any = None) -> torch.Tensor:
        y = x + self.down(torch.relu(self.up(x)))
        return y if condition is None else y + self.unpack(condition)


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))


class Conditioned(Model):
    """All blocks share an input that needs gradients."""

    def __init__(self, blocks: int, container: str) -> None:
        super().__init__(blocks)
        self.pack, unpack = CONTAINERS[container]
        for block in self.blocks:
            block.unpack = unpack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.pack(self.last(x))
        x = self.first(x)
        for block in self.blocks:
            x = block(x, condition)
        return x


class Recomputed(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def peak_of(model: Model, front_end: str, library: Any = fsdp_compat, **options: Any) -> int:
    """Return the most bytes that a step allocates beyond what it begins with."""
    nccl.use()
    device = torch.device("emulated", 0)
    with nccl.group_of(8), nccl.answering(lambda tensor, op: None):
        how: dict[str, Any] = {"units": (Block,), "device_id": device, "library": library}
        wrapped = sharded(model, front_end, **how, **options)
        for _ in range(3):
            gc.collect()
            with nccl.recording() as recording:
                wrapped(torch.randn(2, 3, WIDTH).to(device)).sum().backward()
            wrapped.zero_grad()
    live = peak = 0
    for each in recording.happenings:
        if isinstance(each, (Allocate, Free)):
            begin, end = each.range
            live += end - begin if isinstance(each, Allocate) else begin - end
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("blocks", [4, 8, 16])
@pytest.mark.parametrize("container", list(CONTAINERS))
@on_ranks(1)
def test_inputs_that_blocks_share_in_containers(
    emulated_device: str, container: str, blocks: int
) -> None:
    limit = SLACK * peak_of(Conditioned(blocks, "tensor"), FULLY_SHARD, torch_fsdp)
    for front_end in (FLAT, FULLY_SHARD):
        assert peak_of(Conditioned(blocks, container), front_end) <= limit


@pytest.mark.parametrize("blocks", [4, 8, 16])
@on_ranks(1)
def test_units_that_some_ranks_do_not_use(emulated_device: str, blocks: int) -> None:
    limit = SLACK * peak_of(Recomputed(blocks), FULLY_SHARD, torch_fsdp)
    for front_end in (FLAT, FULLY_SHARD):
        assert peak_of(Recomputed(blocks), front_end, allow_unused_units=True) <= limit
