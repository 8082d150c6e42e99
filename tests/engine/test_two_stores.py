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
from fsdp_compat._engine.gathering import Prefetch
from fsdp_compat._engine.gradients import LARGE
from tests.support.engine_build import STORES, shard
from tests.support.models import (
    DIM,
    Block,
    FragileInside,
    Odd,
    Outer,
    Recomputed,
    RecomputesBlocks,
    Stack,
    Tiny,
    chain,
)
from tests.support.pairwise import each_value
from tests.support.parity import (
    Pair,
    assert_idle,
    backward,
    one_backward,
    seeded,
    square,
    two_backwards,
)
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


class Fork(nn.Module):
    """Two branches that do not depend on each other, run in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.order = nn.ModuleList((Block(), Block())), (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = {index: self.branches[index](x) for index in self.order}
        return found[0] + 2 * found[1]


def _stack(*makes: Callable[[], nn.Module]) -> nn.Module:
    model = Stack(0)
    model.blocks.extend(make() for make in makes)
    return model


# between modules whose outputs grow, so that rounding errors do not
NORMAL = partial(nn.LayerNorm, DIM, elementwise_affine=False)
UNITS = (Block, Outer, Odd, Tiny, Lone, Mixed, Large, FragileInside)

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
    "fragile": partial(Stack, 3, FragileInside),
}


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return backward((model(x) * model(x.flip(0) * 0.5)).mean())


def mesh_of(shape: str) -> Mesh:
    if shape == "hybrid":
        return mesh_from_device_mesh(init_device_mesh("cpu", (2, 2)), strategy="HYBRID_SHARD")
    return replicated(mesh_from_group(None)) if shape == "replicated" else mesh_from_group(None)


def pair_of(
    build: Callable[[], nn.Module], kind: str, shape: str = "sharded", **options: Any
) -> Pair:
    """Return a Pair over stores of ``kind``."""
    model = seeded(build)
    runtime = shard(model, UNITS, kind, mesh_of(shape), **options)
    return Pair(seeded(build), model, runtime=runtime)


def train(
    model: str,
    kind: str,
    shape: str = "sharded",
    step: Any = one_backward,
    num_steps: int = 2,
    **options: Any,
) -> None:
    pair = pair_of(MODELS[model], kind, shape, **options)
    for _ in range(num_steps):
        pair.step(step)


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "fragile"])
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


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("forward_prefetch", [True, False])
@pytest.mark.parametrize("backward_prefetch", list(Prefetch))
def test_prefetching_changes_no_number(
    backward_prefetch: Prefetch, forward_prefetch: bool, kind: str
) -> None:
    options = {"forward_prefetch": forward_prefetch, "backward_prefetch": backward_prefetch}
    run_ranks(2, train, "nested", kind, **options)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("model", "step"),
    [("recomputed outside", two_forwards), ("tied", two_forwards), ("nested", two_backwards)],
)
def test_gradients_of_two_forwards_or_two_backwards_add_up(
    model: str, step: Any, kind: str
) -> None:
    run_ranks(2, train, model, kind, step=step)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("shape", ["sharded", "replicated"])
@on_ranks(2, timeout=30, group_timeout=10)
def test_different_unit_orders_on_ranks_do_not_deadlock(shape: str, kind: str) -> None:
    pair = pair_of(Fork, kind, shape, allow_unused_units=True)
    pair.model.order = (0, 1) if pair.rank == 0 else (1, 0)
    for _ in range(2):
        pair.step()


# -- accumulation


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("shape", "model"),
    [("sharded", "nested"), ("sharded", "mixed"), ("sharded", "large"), ("replicated", "odd")],
)
@on_ranks(2)
def test_no_sync_gradients_are_reduced_by_the_next_backward(
    shape: str, model: str, kind: str
) -> None:
    pair = pair_of(MODELS[model], kind, shape)
    assert pair.runtime is not None
    for _ in range(2):
        with pair.runtime.no_sync():
            pair.backwards()
            pair.backwards()
        pair.step()


@pytest.mark.parametrize("kind", STORES)
@on_ranks(2)
def test_several_synchronised_backwards_add_up(kind: str) -> None:
    pair = pair_of(MODELS["nested"], kind)
    for _ in range(2):
        pair.step(update=False)
        pair.assert_idle()
        pair.step(update=False)
        pair.step()


@pytest.mark.parametrize("kind", STORES)
@on_ranks(2)
def test_zeroed_gradients_are_dropped_from_the_buffer(kind: str) -> None:
    pair = pair_of(MODELS["blocks"], kind)
    assert pair.runtime is not None
    with pair.runtime.no_sync():
        pair.backwards()
    for optimizer in (pair.plain_optim, pair.optim):
        optimizer.zero_grad()
    pair.step()


# -- exceptions


def fails(pair: Pair, model: Any, where: str) -> None:
    fragile, x = model.blocks[1], pair.batches()[pair.rank]
    fragile.fault_in_forward = ValueError if where == "forward" else None
    fragile.fault_in_backward = where == "backward"
    with pytest.raises(ValueError, match=where):
        square(model, x).backward()
    fragile.fault_in_forward, fragile.fault_in_backward = None, False


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_training_continues_after_an_exception(where: str, reshard: bool, kind: str) -> None:
    pair = pair_of(MODELS["fragile"], kind, reshard_after_forward=reshard)
    for step in range(3):
        if step:
            fails(pair, pair.model, where)
            pair.optim.zero_grad()
        pair.step()


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_rest_frees_memory_left_by_an_exception(where: str, kind: str) -> None:
    pair = pair_of(MODELS["fragile"], kind)
    fails(pair, pair.model, where)
    assert pair.runtime is not None
    pair.runtime.reshard_all()
    pair.assert_idle()
    pair.compare_parameters()


# -- shown parameters and memory


@pytest.mark.parametrize("kind", STORES)
@on_ranks(2)
def test_forward_without_grad_keeps_nothing(kind: str) -> None:
    pair = pair_of(MODELS["nested"], kind)
    pair.compare_outputs()
    pair.assert_idle()  # kept for a backward that cannot come


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
