"""The engine trains a model as one process would, over every store: losses, gradients and
parameters stay equal.

Each case trains a sharded model beside an unsharded copy, which sees the batches of all ranks.
Between steps only shards, gradients and optimizer state hold memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_compat._comm.mesh import Mesh, mesh_from_device_mesh, mesh_from_group, replicated
from fsdp_compat._engine.gathering import Prefetch
from fsdp_compat._engine.gradients import LARGE
from fsdp_compat._engine.runtime import Runtime
from tests.support.engine_build import (
    STORES,
    assert_at_rest,
    full_gradients,
    full_parameters,
    shard,
)
from tests.support.pairwise import each_value
from tests.support.ranks import run_ranks

WIDTH = 6
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 9),
            nn.Linear(9, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Nest(nn.Module):
    """A unit with nested units, and its own parameters used between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.second = Block(), nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(self.first(x)).tanh()) + x


class Odd(nn.Module):
    """Sizes that no number of ranks divides: a scalar, an empty parameter, fewer elements than
    ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.pair = (
            nn.Parameter(torch.tensor(1.5)),
            nn.Parameter(torch.tensor([0.5, -0.25])),
        )
        self.empty, self.one = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(1, 1))
        self.cube = nn.Parameter(0.1 * torch.randn(5, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * self.scale
            + self.pair.sum() * self.one[0]
            + self.empty.sum()
            + (self.cube * x.mean()).sum((0, 1))
        )


class Scalar(nn.Module):
    """A single scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Lone(nn.Module):
    """A single parameter, whose rows no number of ranks from 2 to 4 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(7, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ self.weight.T) @ self.weight


class Mixed(nn.Module):
    """Groups of two dtypes, and of frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide, self.frozen = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 3).double(),
            nn.Linear(WIDTH, WIDTH),
        )
        self.back = nn.Linear(3, WIDTH)
        self.frozen.requires_grad_(False)
        self.back.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.wide(self.frozen(self.single(x)).double()).to(x.dtype))


class Large(nn.Module):
    """One parameter that is large enough for its own hook."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = (
            nn.Parameter(torch.randn(LARGE // WIDTH + 3, WIDTH)),
            nn.Parameter(torch.zeros(WIDTH)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.mean(0) + self.bias


class Stack(nn.Module):
    """A root with its own parameters around blocks."""

    def __init__(self, *blocks: nn.Module, checkpoints: dict[str, Any] | None = None) -> None:
        """checkpoints: arguments of ``checkpoint``, which then runs around every block."""
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList(blocks),
            nn.Linear(WIDTH, 3),
        )
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, **self.checkpoints)
        return self.head(x)


class Recomputed(Block):
    """A block that checkpoints inside its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Tied(nn.Module):
    """A weight of the root's stem that a block and the head also use, and one that two blocks
    share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.head = (
            nn.Linear(WIDTH, WIDTH),
            Block(),
            Block(),
            nn.Linear(WIDTH, WIDTH),
        )
        self.head.weight = self.stem.weight
        self.two.up.weight = self.one.up.weight
        self.one.norm.bias = self.one.norm.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(self.stem(x))))


class Trap(nn.Module):
    """Raises in forward or in backward while it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.armed = nn.Linear(WIDTH, WIDTH), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.armed == "forward":
            raise RuntimeError("sprung")
        if self.armed == "backward":
            x.register_hook(self.spring)
        return x.tanh()

    @staticmethod
    def spring(grad: torch.Tensor) -> None:
        raise RuntimeError("sprung")


class Fork(nn.Module):
    """Two branches that do not depend on each other, run in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.order = nn.ModuleList((Block(), Block())), (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {index: self.branches[index](x) for index in self.order}
        return found[0] + 2 * found[1]


UNITS = (Block, Nest, Odd, Scalar, Lone, Mixed, Large, Trap)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: Stack(Block(), Block(), Block()),
    "nested": lambda: Stack(Nest(), Block(), Nest()),
    "tied": Tied,
    "odd": lambda: Stack(Odd(), Scalar(), Lone(), Odd()),
    "mixed": lambda: Stack(Mixed(), Block(), Mixed()),
    "large": lambda: Stack(Large(), Block(), Large()),
    "bare root": lambda: nn.Sequential(Block(), Block(), nn.Tanh(), Block()),
    "one unit": lambda: Block(),
    "recomputed inside": lambda: Stack(Recomputed(), Block(), Recomputed()),
    "recomputed outside": lambda: Stack(
        Block(), Nest(), Block(), checkpoints={"use_reentrant": False}
    ),
    "recomputed outside, reentrant": lambda: Stack(
        Block(), Nest(), Block(), checkpoints={"use_reentrant": True}
    ),
    "trap": lambda: Stack(Block(), Trap(), Block()),
}


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * model(x.flip(0) * 0.5)).mean()


class Twins:
    """A sharded model and its unsharded copy, each with an optimizer."""

    def __init__(self, model: nn.Module, kind: str, mesh: Mesh, **options: Any) -> None:
        self.reference = copy.deepcopy(model)
        self.sharded = model
        self.runtime: Runtime = shard(model, UNITS, kind, mesh, **options)
        params = [param for group in self.runtime.groups for param, _ in group.store.sharded_params]
        self.steps = (
            torch.optim.SGD(params, lr=0.05, momentum=0.9),
            torch.optim.SGD(self.reference.parameters(), lr=0.05, momentum=0.9),
        )
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def backward(self, step: int, loss_of: Loss = mean_square) -> None:
        """One backward of both; the reference averages over the ranks. Losses are compared."""
        loss = loss_of(self.sharded, batch(step, self.rank))
        losses = [loss_of(self.reference, batch(step, rank)) for rank in range(self.ranks)]
        torch.testing.assert_close(loss, losses[self.rank], rtol=2e-5, atol=1e-6)
        loss.backward()
        (torch.stack(losses).sum() / self.ranks).backward()

    def step(self) -> None:
        """Compare gradients, step both, compare parameters."""
        assert_at_rest(self.runtime)
        found, wanted = (
            full_gradients(self.runtime),
            {n: p.grad for n, p in self.reference.named_parameters()},
        )
        assert found.keys() == wanted.keys()
        for name, grad in found.items():
            other = wanted[name]
            assert (grad is None) == (other is None), name
            torch.testing.assert_close(
                grad,
                other,
                rtol=2e-5,
                atol=1e-6,
                msg=lambda text, name=name: f"gradient of {name}: {text}",
            )
        for optimizer in self.steps:
            optimizer.step()
            optimizer.zero_grad()
        self.compare_parameters()

    def compare_parameters(self) -> None:
        found = full_parameters(self.runtime)
        for name, parameter in self.reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=2e-5, atol=1e-6)


def mesh_of(shape: str) -> Mesh:
    if shape == "hybrid":
        return mesh_from_device_mesh(init_device_mesh("cpu", (2, 2)), strategy="HYBRID_SHARD")
    return replicated(mesh_from_group(None)) if shape == "replicated" else mesh_from_group(None)


def train(
    model: str,
    kind: str,
    shape: str = "sharded",
    loss_of: Loss = mean_square,
    num_steps: int = 2,
    **options: Any,
) -> None:
    twins = Twins(MODELS[model](), kind, mesh_of(shape), **options)
    for step in range(num_steps):
        twins.backward(step, loss_of)
        twins.step()


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "trap"])
def test_two_ranks_train_as_one_process(model: str, reshard: bool, kind: str) -> None:
    run_ranks(2, train, model, kind, reshard_after_forward=reshard)


@pytest.mark.parametrize("kind", STORES)
def test_three_ranks_train_as_one_process(kind: str) -> None:
    for model in ("odd", "tied"):
        run_ranks(3, train, model, kind)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("model", ["mixed", "odd"])
def test_one_rank_trains_as_one_process(model: str, kind: str) -> None:
    run_ranks(1, train, model, kind)


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("model", ["odd", "mixed"])
def test_replicas_train_as_one_process(model: str, kind: str) -> None:
    run_ranks(2, train, model, kind, "replicated")


@pytest.mark.parametrize("kind", STORES)
def test_replicas_of_shards_train_as_one_process(kind: str) -> None:
    run_ranks(4, train, "odd", kind, "hybrid")


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("forward_prefetch", [True, False])
@pytest.mark.parametrize("backward_prefetch", list(Prefetch))
def test_prefetching_changes_no_number(
    backward_prefetch: Prefetch, forward_prefetch: bool, kind: str
) -> None:
    run_ranks(
        2,
        train,
        "nested",
        kind,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
    )


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("model", ["recomputed outside", "tied"])
def test_two_forwards_before_one_backward_add_gradients(model: str, kind: str) -> None:
    run_ranks(2, train, model, kind, loss_of=two_forwards)


def train_in_orders_of_their_own(kind: str, shape: str) -> None:
    twins = Twins(Fork(), kind, mesh_of(shape), allow_unused_units=True)
    twins.sharded.order = (0, 1) if twins.rank == 0 else (1, 0)
    for step in range(2):
        twins.backward(step)
        twins.step()


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("shape", ["sharded", "replicated"])
def test_different_unit_orders_on_ranks_do_not_deadlock(shape: str, kind: str) -> None:
    run_ranks(2, train_in_orders_of_their_own, kind, shape, timeout=30, group_timeout=10)


# -- accumulation


def train_accumulating(kind: str, shape: str, model: str) -> None:
    twins = Twins(MODELS[model](), kind, mesh_of(shape))
    for step in range(2):
        with twins.runtime.no_sync():
            for part in range(2):
                twins.backward(10 * step + part)
        twins.backward(10 * step + 2)
        twins.step()


def train_with_several_backwards(kind: str) -> None:
    twins = Twins(MODELS["nested"](), kind, mesh_of("sharded"))
    for step in range(2):
        for part in range(3):
            twins.backward(10 * step + part)
            assert_at_rest(twins.runtime)
        twins.step()


def train_with_a_retained_graph(kind: str) -> None:
    twins = Twins(MODELS["nested"](), kind, mesh_of("sharded"))
    for step in range(2):
        loss = mean_square(twins.sharded, batch(step, twins.rank))
        other = (
            sum(mean_square(twins.reference, batch(step, rank)) for rank in range(twins.ranks))
            / twins.ranks
        )
        for each in (loss, other):
            each.backward(retain_graph=True)
            each.backward()
        twins.step()


def train_after_an_unsynchronised_backward_that_was_zeroed(kind: str) -> None:
    twins = Twins(MODELS["blocks"](), kind, mesh_of("sharded"))
    with twins.runtime.no_sync():
        twins.backward(0)
    for optimizer in twins.steps:
        optimizer.zero_grad()
    twins.backward(1)
    twins.step()


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("shape", "model"),
    [("sharded", "nested"), ("sharded", "mixed"), ("sharded", "large"), ("replicated", "odd")],
)
def test_no_sync_gradients_are_reduced_by_the_next_backward(
    shape: str, model: str, kind: str
) -> None:
    run_ranks(2, train_accumulating, kind, shape, model)


@pytest.mark.parametrize("kind", STORES)
def test_several_synchronised_backwards_add_up(kind: str) -> None:
    run_ranks(2, train_with_several_backwards, kind)


@pytest.mark.parametrize("kind", STORES)
def test_graph_supports_two_backwards(kind: str) -> None:
    run_ranks(2, train_with_a_retained_graph, kind)


@pytest.mark.parametrize("kind", STORES)
def test_zeroed_gradients_are_dropped_from_the_buffer(kind: str) -> None:
    run_ranks(2, train_after_an_unsynchronised_backward_that_was_zeroed, kind)


# -- exceptions


def train_over_exceptions(kind: str, where: str, reshard: bool) -> None:
    twins = Twins(MODELS["trap"](), kind, mesh_of("sharded"), reshard_after_forward=reshard)
    for step in range(3):
        if step:
            for model in (twins.sharded, twins.reference):
                model.blocks[1].armed = where
                with pytest.raises(RuntimeError, match="sprung"):
                    mean_square(model, batch(9, twins.rank)).backward()
                model.blocks[1].armed = ""
            for optimizer in twins.steps:
                optimizer.zero_grad()
        twins.backward(step)
        twins.step()


def rest_after_an_exception(kind: str, where: str) -> None:
    twins = Twins(MODELS["trap"](), kind, mesh_of("sharded"))
    twins.sharded.blocks[1].armed = where
    with pytest.raises(RuntimeError, match="sprung"):
        mean_square(twins.sharded, batch(0, twins.rank)).backward()
    twins.runtime.rest()
    assert_at_rest(twins.runtime)
    twins.compare_parameters()


@each_value
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_continues_after_an_exception(where: str, reshard: bool, kind: str) -> None:
    run_ranks(2, train_over_exceptions, kind, where, reshard)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_rest_frees_memory_left_by_an_exception(where: str, kind: str) -> None:
    run_ranks(2, rest_after_an_exception, kind, where)


# -- shown parameters and memory


def look_without_grad(kind: str) -> list[bool]:
    twins = Twins(MODELS["nested"](), kind, mesh_of("sharded"))
    with torch.no_grad():
        found = twins.sharded(batch(0, twins.rank))
        torch.testing.assert_close(
            found, twins.reference(batch(0, twins.rank)), rtol=2e-5, atol=1e-6
        )
    assert_at_rest(twins.runtime)  # kept for a backward that cannot come
    return [True]


def residency_through_a_step(kind: str, reshard: bool) -> tuple[list[str], list[bool], list[bool]]:
    """Return, after forward, the unsharded units and whether any is shown; and those shown inside a
    block's forward."""
    model = MODELS["nested"]()
    runtime = shard(model, UNITS, kind, mesh_of("sharded"), reshard_after_forward=reshard)
    inside: list[bool] = []
    model.blocks[1].up.register_forward_hook(
        lambda *_: inside.extend(unit.view.shows_unsharded for unit in runtime.units)
    )
    loss = mean_square(model, batch(0, dist.get_rank()))
    full = [unit.label for unit in runtime.units if unit.residency.name == "UNSHARDED"]
    shown = [unit.view.shows_unsharded for unit in runtime.units]
    loss.backward()
    assert_at_rest(runtime)
    return full, shown, inside


@pytest.mark.parametrize("kind", STORES)
def test_forward_without_grad_keeps_nothing(kind: str) -> None:
    run_ranks(2, look_without_grad, kind)


@pytest.mark.parametrize("kind", STORES)
def test_only_the_first_unit_of_backward_stays_unsharded(
    kind: str,
) -> None:
    root, block = "the root unit (a Stack)", "unit 'blocks.1'"
    inner = [
        f"unit 'blocks.{name}'"
        for name in ("0", "0.first", "0.second", "1", "2", "2.first", "2.second")
    ]
    units = [root, *inner]
    for found in run_ranks(2, residency_through_a_step, kind, True):
        assert found == ([root], [False] * 8, [name in (root, block) for name in units])
    for found in run_ranks(2, residency_through_a_step, kind, False):
        assert found == (units, [False] * 8, [name in (root, block) for name in units])
