"""``fully_shard`` beside other ways to distribute a model."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import fsdp_compat
from tests.support.fully_sharded import OURS, TORCH, Library, api, pair_of, shard_all
from tests.support.models import (
    DIM,
    Block,
    ForwardProducts,
    RecomputesBlocks,
    saves_everything,
)
from tests.support.pairwise import each_value
from tests.support.parity import assert_same_values, square, whole_gradients
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import MAPPED, MESSAGES, mapped_or_sent
from tests.support.transports import own_collectives


def make() -> Any:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))


# -- replicate


@mapped_or_sent
@on_ranks(2)
def test_replicate_leaves_sharded_parts_alone(environment: dict[str, str]) -> None:
    """Two steps of a model that is replicated around a sharded module."""

    def shard(model: Any) -> Any:
        api.fully_shard(model[2])
        return replicate(model)

    pair = pair_of(make, shard)
    for _ in range(2):
        pair.backwards()
        assert_same_values(whole_gradients(pair.model), whole_gradients(pair.plain), "gradient")
        for optimizer in (pair.optim, pair.plain_optim):
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(pair.model[2])
    # The registry that replicate reads has torch's fully_shard, too: no other one is meant.
    around = api.fully_shard(nn.Sequential(api.fully_shard(make()[2])))
    for model, advice in ((around, "use the module as it is"), (nn.Sequential(around), "as well")):
        with pytest.raises(ValueError, match=advice):
            fsdp_compat.FullyShardedDataParallel(model)


# -- CommDebugMode


def counts_of(library: Library, shape: tuple[int, ...]) -> list[dict[str, int]]:
    """Collectives of each pass of a step and of one without sync; a unit has two dtypes."""
    model: Any = nn.Sequential(*(make() for _ in range(3)))
    model[1].register_parameter("codes", nn.Parameter(torch.ones(6).bfloat16(), False))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for module in (*model, model):
        library.fully_shard(module, mesh=mesh)
    counts = []
    for is_reduced in (True, False):
        model.set_requires_gradient_sync(is_reduced)
        with CommDebugMode() as forward:
            loss = model(torch.ones(4, DIM)).sum()
        with CommDebugMode() as mode:
            loss.backward()
        for each in (forward, mode):
            counts.append({str(name): n for name, n in each.get_comm_counts().items()})
        assert mode.get_total_counts() == sum(counts[-1].values())
        assert mode.generate_comm_debug_tracing_table(noise_level=2)
    return counts


def compare_counts(shape: tuple[int, ...], is_native: bool) -> None:
    with own_collectives(is_native):
        ours, torchs = counts_of(OURS, shape), counts_of(TORCH, shape)
    # The unit that backward uses first is kept, once a backward has shown which it is.
    ours[3]["c10d._allgather_base_"] += 1
    assert ours == torchs
    assert ours[0] == {"c10d._allgather_base_": 3}  # the root has no parameters
    assert ours[1]["c10d._reduce_scatter_base_"] == 3


@pytest.mark.parametrize(
    ("shape", "environment", "is_native"),
    [((2,), MAPPED, False), ((2, 2), MESSAGES, False), ((2,), MESSAGES, True)],
)
def test_comm_debug_mode_counts_what_torchs_fsdp2_counts(
    shape: tuple[int, ...], environment: dict[str, str], is_native: bool
) -> None:
    run_ranks(math.prod(shape), compare_counts, shape, is_native, environment=environment)


# -- selective activation checkpointing


class AddsZeros(Block):
    """Calls an operator that the engine calls at the end of a forward, too, to keep rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.zeros(x.shape[-1]))


def counts_products(model: nn.Module, x: Tensor) -> Tensor:
    """A step in which backward computes no product of the forward again."""
    loss = square(model, x)
    with ForwardProducts() as products:
        loss.backward()
    assert products.number == 0
    return loss.detach()


@each_value
@mapped_or_sent
@pytest.mark.parametrize(("ranks", "reshard_after_forward"), [(2, True), (4, 2)])
@on_ranks("ranks")
def test_a_checkpoint_saves_what_its_policy_says(
    ranks: int, reshard_after_forward: Any, environment: Any
) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, saves_everything)
    build = functools.partial(RecomputesBlocks, AddsZeros, False, 2, context_fn=contexts)
    shard = functools.partial(shard_all, reshard_after_forward=reshard_after_forward)
    pair = pair_of(build, shard)
    for _ in range(3):
        pair.step(counts_products)
