"""Replicated shards: with any mesh, given in any way, training equals unsharded training and all
ranks agree bit for bit."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.models import (
    DIM,
    Block,
    FrozenInCheckpoint,
    Inner,
    Lora,
    Outer,
    Stack,
    Tiny,
    chain,
    frozen,
)
from tests.support.parity import (
    Pair,
    accumulates,
    make_pair,
    seeded,
    train,
    whole_gradients,
)
from tests.support.ranks import on_ranks

*_, HYBRID, HYBRID_ZERO2 = ShardingStrategy


# -- ways to pass a mesh of (replicas, shards)


def _as_mesh(replicas: int, shards: int) -> dict[str, Any]:
    return {"device_mesh": init_device_mesh("cpu", (replicas, shards))}


def _as_groups(replicas: int, shards: int) -> dict[str, Any]:
    """(the ranks that shard one copy, the ranks that hold the same part)"""
    grid = torch.arange(replicas * shards).view(replicas, shards).tolist()
    shard, _ = dist.new_subgroups_by_enumeration(grid)
    replica, _ = dist.new_subgroups_by_enumeration(
        [list(column) for column in zip(*grid, strict=True)]
    )
    return {"process_group": (shard, replica)}


def _node_by_node(replicas: int, shards: int) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = str(shards)
    return {}


def _as_part_of_a_larger_mesh(replicas: int, shards: int) -> dict[str, Any]:
    whole = init_device_mesh(
        "cpu", (replicas, shards, 1), mesh_dim_names=("replicate", "shard", "other")
    )
    return {"device_mesh": whole["replicate", "shard"]}


def _backwards(replicas: int, shards: int) -> dict[str, Any]:
    """The ranks of a copy are neither adjacent nor in order."""
    grid = torch.arange(replicas * shards).flip(0).view(shards, replicas).T
    return {"device_mesh": DeviceMesh("cpu", grid)}


WAYS = [_as_mesh, _as_groups, _node_by_node, _as_part_of_a_larger_mesh, _backwards]


# -- training


# Nested, frozen, partly frozen, recomputed and tiny units.
UNITS = {Outer, Inner, Block, FrozenInCheckpoint, Lora, Tiny}
EVERYTHING = partial(
    chain,
    *(Outer, partial(frozen, Block), FrozenInCheckpoint),
    *(partial(Lora, DIM), Tiny, partial(nn.Linear, DIM, 3)),
)


def _assert_equal_on_all_ranks(values: dict[str, Tensor | None], what: str) -> None:
    """Assert equality on all ranks bit for bit. Collective."""
    own = {name: None if value is None else value.tolist() for name, value in values.items()}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for rank, theirs in enumerate(found):
        for name, value in own.items():
            assert theirs[name] == value, (
                f"{what} of {name} differ between ranks {dist.get_rank()} and {rank}"
            )


def _assert_shard_group(model: FSDP, replicas: int, shards: int, adjacent: bool) -> None:
    found, rank = dist.get_process_group_ranks(model.process_group), dist.get_rank()
    if adjacent:
        assert found == list(range(rank // shards * shards, (rank // shards + 1) * shards))
    else:
        assert sorted(found) == list(range(rank % replicas, replicas * shards, replicas))


@pytest.mark.parametrize(("strategy", "use_orig_params"), [(HYBRID, False), (HYBRID_ZERO2, True)])
@on_ranks(4)
def test_a_mesh_given_in_any_way_trains_as_unsharded_with_bit_equal_ranks(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    for way in WAYS[int(use_orig_params) :: 2]:
        pair = make_pair(EVERYTHING, UNITS, **way(2, 2), **options)
        _assert_shard_group(pair.model, 2, 2, adjacent=way is not _backwards)
        pair.backwards(partial(accumulates, "sns"))
        _assert_equal_on_all_ranks(whole_gradients(pair.model), f"{way.__name__}: the gradients")
        pair.compare_and_update(as_a_user=True)
        _assert_equal_on_all_ranks(pair.model.state_dict(), f"{way.__name__}: the values")
        state = FSDP.optim_state_dict(pair.model, pair.optim)["state"]
        trainable = {name for name, p in pair.plain.named_parameters() if p.requires_grad}
        assert trainable == state.keys()
        momenta = {name: value["momentum_buffer"] for name, value in state.items()}
        _assert_equal_on_all_ranks(momenta, "the momenta")


# -- other meshes


@on_ranks(4)
def test_wrappers_created_by_hand_share_the_groups_of_nodes() -> None:
    _node_by_node(2, 2)
    plain, model = seeded(Stack), seeded(Stack)
    numbers = []
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, sharding_strategy=HYBRID)
        # private, but the only list of all groups
        numbers.append(len(dist.distributed_c10d._world.pg_map))
    pair = Pair(plain, FSDP(model, sharding_strategy=HYBRID))
    numbers.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(numbers)) == 1
    assert numbers[0] <= 3  # the world, and this rank's two
    for _ in range(2):
        pair.step()


@pytest.mark.parametrize(
    ("shape", "names", "strategies"),
    [
        ((2, 2), ("data", "tensor"), ("SHARD_GRAD_OP",)),
        ((2, 1, 2), None, ("FULL_SHARD", "NO_SHARD")),
    ],
    ids=str,
)
@on_ranks(4)
def test_plain_strategy_shards_over_the_first_mesh_dimension(
    shape: tuple[int, ...], names: tuple[str, ...] | None, strategies: tuple[str, ...]
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for strategy in strategies:
        options: dict[str, Any] = {"device_mesh": mesh}
        assert_as_torch(partial(trained, strategy=strategy, **options), strategy)
        model = FSDP(Stack(), sharding_strategy=ShardingStrategy[strategy], **options)
        assert len(dist.get_process_group_ranks(model.process_group)) == shape[0]


@pytest.mark.parametrize("strategy", [HYBRID, HYBRID_ZERO2])
@on_ranks(2)
def test_a_mesh_of_one_dimension_is_one_copy(strategy: ShardingStrategy) -> None:
    """Where torch raises."""
    options = {"sharding_strategy": strategy, "device_mesh": init_device_mesh("cpu", (2,))}
    pair = train(EVERYTHING, UNITS, **options)
    _assert_shard_group(pair.model, 1, 2, adjacent=True)
