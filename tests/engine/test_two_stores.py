"""Models with unusual parameters and units train as in one process, over every layout of shards:
losses, gradients and parameters stay equal, and nothing else holds memory between steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import ShardingStrategy
from tests.support.fully_sharded import OURS, pair_of, shard_all
from tests.support.models import (
    DIM,
    Block,
    Odd,
    Stack,
    Tiny,
)
from tests.support.pairwise import each_value
from tests.support.parity import make_pair
from tests.support.ranks import on_ranks


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
UNITS = (Block, Odd, Tiny, Lone, Mixed)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "odd": partial(_stack, Odd, NORMAL, Tiny, Lone, NORMAL, Odd),
    "mixed": partial(_stack, Mixed, Block, Mixed),
}


LAYOUTS = ("flat", "original", "rows")


def train(model: str, layout: str, shape: str, reshard: bool) -> None:
    """shape: of the mesh: "sharded", "replicated" or "hybrid"."""
    build, is_whole = MODELS[model], shape == "replicated"
    if layout == "rows":
        options: dict[str, Any] = {"reshard_after_forward": reshard, "library": OURS}
        if shape != "sharded":
            sizes = (dist.get_world_size(), 1) if is_whole else (2, 2)
            options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        classes = () if model == "tied" else UNITS  # calls of fully_shard share no parameter
        pair = pair_of(build, partial(shard_all, classes=classes, **options))
    else:
        kept = ShardingStrategy.NO_SHARD if is_whole else ShardingStrategy.SHARD_GRAD_OP
        strategy = ShardingStrategy.FULL_SHARD if reshard and not is_whole else kept
        options = {"replicas": 2} if shape == "hybrid" else {"sharding_strategy": strategy}
        pair = make_pair(build, UNITS, use_orig_params=layout == "original", **options)
    for _ in range(2):
        pair.step()


@each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("ranks", "model", "shape", "reshard"),
    [
        (2, "mixed", "sharded", False),
        (3, "odd", "sharded", True),
        (2, "tied", "sharded", True),
        (1, "mixed", "sharded", True),
        (1, "odd", "sharded", True),
        (2, "odd", "replicated", True),
        (4, "odd", "hybrid", True),
    ],
)
@on_ranks("ranks")
def test_meshes_of_all_shapes_train_as_one_process(
    ranks: int, model: str, shape: str, reshard: bool, layout: str
) -> None:
    train(model, layout, shape, reshard)
