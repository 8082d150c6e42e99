"""``fully_shard`` beside other ways to distribute a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate

import fsdp_compat
from tests.support.fully_sharded import api, whole
from tests.support.ranks import run_ranks
from tests.support.same_host import MAPPED, MESSAGES

EITHER = pytest.mark.parametrize("environment", [MAPPED, MESSAGES], ids=["mapped", "messages"])
WIDTH = 8


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def batch(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


# -- replicate


def replicates() -> str:
    """Two steps of a model that is replicated around a sharded module. Returns what is said to a
    replicated sharded module."""
    model, ranks = make(), dist.get_world_size()
    plain = copy.deepcopy(model)
    api.fully_shard(model[2])
    replicate(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(2):
        model(batch(dist.get_rank())).square().sum().backward()
        for rank in range(ranks):
            (plain(batch(rank)).square().sum() / ranks).backward()
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None
            torch.testing.assert_close(whole(own.grad), expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError) as raised:
        replicate(model[2])
    return str(raised.value)


@EITHER
def test_replicate_leaves_sharded_parts_alone(environment: dict[str, str]) -> None:
    for message in run_ranks(2, replicates, environment=environment):
        assert "already managed by `fully_shard`" in message


def shards_around_shards() -> None:
    """The registry that replicate reads has torch's fully_shard, too: no other one is meant."""
    model = api.fully_shard(make()[2])
    api.fully_shard(nn.Sequential(model))


def test_sharded_modules_are_not_taken_for_those_of_torch() -> None:
    run_ranks(1, shards_around_shards)


# -- FullyShardedDataParallel


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (None, "use the module as it is: fully_shard has sharded it"),
        (2, "apply fully_shard to this module, too"),
    ],
)
def test_wrapping_says_what_to_do_about_sharded_modules(part: int | None, message: str) -> None:
    run_ranks(1, wraps, part, message)


def wraps(part: int | None, message: str) -> None:
    model = make()
    api.fully_shard(model if part is None else model[part])
    with pytest.raises(ValueError, match=message):
        fsdp_compat.FullyShardedDataParallel(model)
