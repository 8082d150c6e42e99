"""CPUOffload(offload_params=True) keeps shards apart from the compute device, even if both are the
CPU, and changes nothing else. Models of every kind train with it in training/test_training."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_compat
from fsdp_compat import (
    CPUOffload,
    FullStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.beside_torch import trained
from tests.support.models import DIM, Stack
from tests.support.pairwise import each_value, pairwise
from tests.support.parity import (
    Pair,
    assert_close,
    assert_same_values,
    both_forms,
    make_pair,
    one_backward,
    square,
)
from tests.support.ranks import on_ranks

OFFLOAD: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=True)}
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID, HYBRID_ZERO2 = ShardingStrategy


@each_value
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks("num_ranks")
def test_every_dtype_gives_the_same_bits_as_without_offload(
    num_ranks: int, use_orig_params: bool
) -> None:
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for precision in (
        None,
        low,
        {"param_dtype": torch.float16},
        {"reduce_dtype": torch.bfloat16},
        {**low, "keep_low_precision_grads": True},
    ):
        options = {"precision": precision, "use_orig_params": use_orig_params, "pattern": "sns"}
        one, other = (
            trained(fsdp_compat, with_state=True, **options, **offload) for offload in ({}, OFFLOAD)
        )
        assert_same_values(other, one, str(precision), 0.0)
        assert [value.dtype for value in other.values()] == [value.dtype for value in one.values()]


# -- where data is kept


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


# -- summon_full_params and state dicts


@each_value
@both_forms
@pytest.mark.parametrize(
    ("num_ranks", "strategy"), [(1, FULL_SHARD), (2, FULL_SHARD), (2, NO_SHARD)]
)
@on_ranks("num_ranks")
def test_summon_full_params_exposes_copies_and_writes_back_on_request(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    pair = make_pair(Stack, sharding_strategy=strategy, use_orig_params=use_orig_params, **OFFLOAD)
    copies = num_ranks if strategy is NO_SHARD else 1
    is_whole = copies == num_ranks  # then the shown values are the only ones
    for rank0_only, to_cpu, writeback, with_grads in itertools.product((False, True), repeat=4):
        if writeback and rank0_only:
            continue
        for each in (pair.plain, pair.model):
            square(each, torch.ones(2, DIM)).backward()
        options = {"rank0_only": rank0_only, "offload_to_cpu": to_cpu, "with_grads": with_grads}
        with FSDP.summon_full_params(pair.model, writeback=writeback, **options):
            if not rank0_only or pair.rank == 0:
                shown = dict(pair.model.named_parameters())
                for name, p in pair.plain.named_parameters():
                    assert_close(shown[name], p, name)
                    assert (shown[name].grad is not None) == with_grads
                    if with_grads:
                        assert_close(shown[name].grad, p.grad, f"gradient of {name}")
                with torch.no_grad():
                    for p in shown.values():
                        p.add_(0.01)
                        if with_grads:
                            p.grad.mul_(0.5)
        stays = writeback or (is_whole and (copies == 1 or not rank0_only))
        for p in pair.plain.parameters() if stays else ():
            p.data.add_(0.01)
            p.grad.mul_(0.5 if with_grads else 1)
        pair.compare_parameters()
        pair.compare_gradients()
        pair.compare_and_update()


@each_value
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks("num_ranks")
def test_training_continues_unchanged_after_saving_and_loading(
    num_ranks: int, use_orig_params: bool
) -> None:
    for kind, config in (
        ("FULL_STATE_DICT", FullStateDictConfig(offload_to_cpu=use_orig_params)),
        ("SHARDED_STATE_DICT", ShardedStateDictConfig(offload_to_cpu=not use_orig_params)),
    ):
        pair, later = (
            make_pair(Stack, seed=seed, use_orig_params=use_orig_params, **OFFLOAD)
            for seed in range(2)
        )
        for each in (pair, later):
            each.optim = torch.optim.Adam(each.model.parameters(), 0.01)
        model, x = pair.model, torch.ones(2, DIM) * (1 + pair.rank)
        _train(pair, x)
        with FSDP.state_dict_type(model, StateDictType[kind], config):
            state = copy.deepcopy(model.state_dict())
            optim_state = copy.deepcopy(FSDP.optim_state_dict(model, pair.optim))
        with FSDP.state_dict_type(later.model, StateDictType[kind], config):
            later.model.load_state_dict(state)
            loaded = FSDP.optim_state_dict_to_load(later.model, later.optim, optim_state)
            later.optim.load_state_dict(loaded)
        for each in (pair, later):
            for _ in range(2):
                _train(each, x)
        assert_same_values(later.model.state_dict(), model.state_dict(), kind, 0.0)


def _train(pair: Pair, x: Tensor) -> None:
    one_backward(pair.model, x)
    pair.optim.step()
    pair.optim.zero_grad()
