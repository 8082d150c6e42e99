"""The engine trains a model as one process would, over every store: losses, gradients and
parameters stay equal, and between steps only shards, gradients and optimizer state hold memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat._comm.mesh import Mesh, mesh_from_device_mesh, mesh_from_group, replicated
from fsdp_compat._engine.gradients import LARGE
from tests.support.engine_build import STORES, shard
from tests.support.models import (
    DIM,
    Block,
    Odd,
    Outer,
    Recomputed,
    RecomputesBlocks,
    Stack,
    Tiny,
    chain,
)
from tests.support.pairwise import each_value
from tests.support.parity import Pair, assert_idle, seeded, square
from tests.support.ranks import on_ranks, run_ranks


class Lone(nn.Module):
    """A single parameter, whose rows no number of ranks from 2 to 4 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(7, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight.T) @ self.weight


class Mixed(nn.Module):
    """Groups of two dtypes, and of frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.frozen = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.wide, self.back = nn.Linear(DIM, 3).double(), nn.Linear(3, DIM)
        self.frozen.requires_grad_(False)
        self.back.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.wide(self.frozen(self.single(x)).double()).to(x.dtype))


class Large(nn.Module):
    """One parameter that is large enough for its own hook."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LARGE // DIM + 3, DIM))
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.mean(0) + self.bias


class Tied(nn.Module):
    """A weight of the root's stem that the head also uses, one that two blocks share, and one of a
    single block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.one, self.two = Block(), Block()
        self.head.weight = self.stem.weight
        self.two.up.weight = self.one.up.weight
        self.one.norm.bias = self.one.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.stem(x))))


def _stack(*makes: Callable[[], nn.Module]) -> nn.Module:
    model = Stack(0)
    model.blocks.extend(make() for make in makes)
    return model


# between modules whose outputs grow, so that rounding errors do not
NORMAL = partial(nn.LayerNorm, DIM, elementwise_affine=False)
UNITS = (Block, Outer, Odd, Tiny, Lone, Mixed, Large)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": Stack,
    "nested": partial(_stack, Outer, Block, Outer),
    "tied": Tied,
    "odd": partial(_stack, Odd, NORMAL, Tiny, Lone, NORMAL, Odd),
    "mixed": partial(_stack, Mixed, Block, Mixed),
    "large": partial(_stack, Large, Block, Large),
    "bare root": partial(chain, Block, Block, nn.Tanh, Block),
    "one unit": Block,
    "recomputed inside": partial(Stack, 3, partial(Recomputed, False)),
    "recomputed outside": partial(RecomputesBlocks, Outer, False),
    "recomputed outside, reentrant": partial(RecomputesBlocks, Outer, True),
}


def mesh_of(shape: str) -> Mesh:
    if shape == "hybrid":
        return mesh_from_device_mesh(init_device_mesh("cpu", (2, 2)), strategy="HYBRID_SHARD")
    return replicated(mesh_from_group(None)) if shape == "replicated" else mesh_from_group(None)


def train(model: str, kind: str, shape: str = "sharded", **options: Any) -> None:
    build = MODELS[model]
    sharded = seeded(build)
    runtime = shard(sharded, UNITS, kind, mesh_of(shape), **options)
    pair = Pair(seeded(build), sharded, runtime=runtime)
    for _ in range(2):
        pair.step()


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_as_one_process(model: str, reshard: bool, kind: str) -> None:
    run_ranks(2, train, model, kind, reshard_after_forward=reshard)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("ranks", "model", "shape"),
    [
        (3, "odd", "sharded"),
        (3, "tied", "sharded"),
        (1, "mixed", "sharded"),
        (1, "odd", "sharded"),
        (2, "odd", "replicated"),
        (2, "mixed", "replicated"),
        (4, "odd", "hybrid"),
    ],
)
def test_meshes_of_all_shapes_train_as_one_process(
    ranks: int, model: str, shape: str, kind: str
) -> None:
    run_ranks(ranks, train, model, kind, shape)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_only_the_first_unit_of_backward_stays_unsharded(reshard: bool, kind: str) -> None:
    model: Any = MODELS["nested"]()
    runtime = shard(model, UNITS, kind, mesh_of("sharded"), reshard_after_forward=reshard)
    inside: list[str] = []

    def labels(holds: Callable[[Any], bool]) -> list[str]:
        return [unit.label for unit in runtime.units if holds(unit)]

    model.blocks[1].up.register_forward_hook(
        lambda *_: inside.extend(labels(lambda unit: unit.view.shows_unsharded))
    )
    loss = square(model, torch.ones(4, DIM))
    root, everything = "the root unit (a Stack)", labels(lambda unit: True)
    assert len(everything) == 8
    assert inside == [root, "unit 'blocks.1'"]
    full = labels(lambda unit: unit.residency.name == "UNSHARDED")
    assert full == ([root] if reshard else everything)
    assert labels(lambda unit: unit.view.shows_unsharded) == []
    loss.backward()
    assert_idle(runtime)
