"""CPUOffload(offload_params=True) keeps shards apart from the compute device, even if both are the
CPU, and changes nothing else. Models of every kind train with it in training/test_training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_compat import (
    CPUOffload,
    ShardingStrategy,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.models import DIM, Stack
from tests.support.pairwise import each_value, pairwise
from tests.support.parity import (
    both_forms,
    make_pair,
    square,
)
from tests.support.ranks import on_ranks

OFFLOAD: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=True)}
FULL_SHARD, _, NO_SHARD, *_ = ShardingStrategy


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pairwise
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_full_parameters_gradients_and_state_dicts_do_not_view_the_shard(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """On one rank the unsharded parameters could alias the shard, but not with offload."""
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model, whole = make_pair(Stack, **options, **OFFLOAD).model, set[int]()
    shards = {_storage(p) for p in model.parameters() if p.numel()}
    model.module.stem.register_forward_hook(lambda m, *_: whole.add(_storage(m.weight)))
    square(model, torch.ones(2, DIM)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert not shards & {*whole, *map(_storage, grads)}
    before = [p.detach().clone() for p in model.parameters()]
    for value in (*grads, *model.state_dict().values()):
        value.zero_()
    assert all(map(torch.equal, model.parameters(), before))


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("to_cpu", [False, True])
@on_ranks(2)
def test_summon_full_params_writes_back_on_request(
    to_cpu: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    pair = make_pair(Stack, sharding_strategy=strategy, use_orig_params=use_orig_params, **OFFLOAD)
    for writeback in (True, False, True):
        pair.step(as_a_user=True)
        pair.backwards()
        options = {"writeback": writeback, "offload_to_cpu": to_cpu, "with_grads": True}
        with FSDP.summon_full_params(pair.model, **options), torch.no_grad():
            shown = [*pair.model.parameters()]
            stays = writeback or strategy is NO_SHARD  # whose values are the only ones
            for p in [*shown, *pair.plain.parameters()] if stays else shown:
                p.add_(0.01)
                p.grad.mul_(0.5)
        pair.compare_parameters()
        pair.compare_and_update()
