"""CPUOffload(offload_params=True) keeps shards apart from the compute device, even if both are the
CPU, and changes nothing else."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._engine.gradients import LARGE
from tests.support.memory import group_nbytes
from tests.support.models import (
    DIM,
    Block,
    Lora,
    Odd,
    Recomputed,
    RecomputesBlocks,
    Stack,
    Tiny,
    chain,
    frozen,
)
from tests.support.pairwise import each_value, pairwise
from tests.support.parity import (
    Pair,
    accumulates_mean,
    assert_close,
    assert_same_values,
    backward,
    both_forms,
    make_pair,
    one_backward,
    square,
    train,
    vectors,
    wide_vectors,
)
from tests.support.ranks import on_ranks

OFFLOAD: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=True)}
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID, HYBRID_ZERO2 = ShardingStrategy


# -- training


WIDTH = 264
assert WIDTH * WIDTH > LARGE


def _wide(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


LINEAR, LARGE_LINEAR = partial(nn.Linear, DIM, DIM), partial(nn.Linear, WIDTH, WIDTH)
FROZEN, SNS = partial(frozen, Block), partial(accumulates_mean, "sns")
CASES: dict[str, Callable[..., object]] = {
    "kept": partial(train, Stack, step=SNS, sharding_strategy=SHARD_GRAD_OP),
    "replicated": partial(train, Stack, step=SNS, sharding_strategy=NO_SHARD),
    "smaller than ranks": partial(train, partial(chain, LINEAR, Odd, Tiny, LINEAR), (Odd, Tiny)),
    "large": partial(train, partial(chain, *[LARGE_LINEAR] * 2), (nn.Linear,), SNS, batch=_wide),
    "frozen in part": partial(train, partial(chain, *[Lora] * 3), (Lora,), batch=wide_vectors),
    "frozen units": partial(train, partial(chain, FROZEN, Block, FROZEN)),
    "recomputed": partial(train, partial(Stack, 3, partial(Recomputed, False)), (Recomputed,)),
    "reentrant": partial(train, partial(Stack, 3, partial(Recomputed, True)), (Recomputed,)),
    "two recomputed": partial(train, partial(RecomputesBlocks, Block, False, 2)),
    "two reentrant": partial(train, partial(RecomputesBlocks, Block, True, 2)),
}


@each_value
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@on_ranks("num_ranks")
def test_models_of_every_kind_train_as_unsharded(
    case: str, num_ranks: int, use_orig_params: bool
) -> None:
    """Hybrid strategies are in parity/test_matrix."""
    CASES[case](use_orig_params=use_orig_params, as_a_user=True, **OFFLOAD)


@each_value
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks("num_ranks")
def test_every_dtype_gives_the_same_bits_as_without_offload(
    num_ranks: int, use_orig_params: bool
) -> None:
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    options = {"use_orig_params": use_orig_params}
    # One rank without offload gives original parameters their gradients one by one: their norms add
    # up in another order.
    can_clip = not (use_orig_params and dist.get_world_size() == 1)
    for fields in (
        {},
        low,
        {"param_dtype": torch.float16},
        {"reduce_dtype": torch.bfloat16},
        {**low, "keep_low_precision_grads": True},
    ):
        one, other = (
            _values(can_clip, mixed_precision=MixedPrecision(**fields), **options, **offload)
            for offload in ({}, OFFLOAD)
        )
        assert [value.dtype for value in one] == [value.dtype for value in other]
        assert all(map(torch.equal, one, other)), fields


def _values(can_clip: bool, **options: Any) -> list[Tensor]:
    """Losses, gradients, norms and parameters of a training with accumulated gradients."""
    pair = make_pair(Stack, **options)
    model, optim = pair.model, pair.optim
    generator, values = torch.Generator().manual_seed(dist.get_rank()), list[Tensor]()
    for letter in "sns":
        with model.no_sync() if letter == "n" else contextlib.nullcontext():
            values.append(backward(square(model, vectors(generator))))
        if letter == "s":
            values += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            values += [model.clip_grad_norm_(0.05)] if can_clip else []
            optim.step()
            optim.zero_grad()
            values += [value.clone() for value in model.state_dict().values()]
    with torch.no_grad():
        return [*values, model.eval()(torch.ones(2, DIM))]


# -- where data is kept


@pairwise
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_full_parameters_gradients_and_state_dicts_do_not_view_the_shard(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """On one rank the unsharded parameters could alias the shard, but not with offload."""
    torch.manual_seed(0)
    model = FSDP(Stack(2), None, strategy, use_orig_params=use_orig_params, **OFFLOAD)
    group = model._runtime.groups[0]
    shard = group.store.shard
    homes = range(shard.data_ptr(), shard.data_ptr() + shard.nbytes)
    found = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        found.append(module.weight.data_ptr() in homes)

    model.module.stem.register_forward_hook(look)
    loss = square(model, torch.ones(2, DIM))
    loss.backward()
    assert found == [False] and group_nbytes(group) == 0
    for p in model.parameters():
        assert p.data_ptr() in homes or p.numel() == 0
        assert p.grad is None or p.grad.data_ptr() not in homes
    values = shard.clone()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    assert torch.equal(shard, values)
    state = model.state_dict()
    for value in state.values():
        value.zero_()
    assert torch.equal(shard, values), "the state dict is a view of the shard"


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
    copies = dist.get_world_size() if strategy is NO_SHARD else 1
    is_whole = copies == dist.get_world_size()  # then the shown values are the only ones
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
    full, sharded = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    for kind, config in (
        (full, FullStateDictConfig(offload_to_cpu=use_orig_params)),
        (sharded, ShardedStateDictConfig(offload_to_cpu=not use_orig_params)),
    ):
        pair, later = (
            make_pair(Stack, seed=seed, use_orig_params=use_orig_params, **OFFLOAD)
            for seed in range(2)
        )
        for each in (pair, later):
            each.optim = torch.optim.Adam(each.model.parameters(), 0.01)
        model, x = pair.model, torch.ones(2, DIM) * (1 + pair.rank)
        _train(pair, x)
        with FSDP.state_dict_type(model, kind, config):
            state = copy.deepcopy(model.state_dict())
            optim_state = copy.deepcopy(FSDP.optim_state_dict(model, pair.optim))
        with FSDP.state_dict_type(later.model, kind, config):
            later.model.load_state_dict(state)
            loaded = FSDP.optim_state_dict_to_load(later.model, later.optim, optim_state)
            later.optim.load_state_dict(loaded)
        for each in (pair, later):
            for _ in range(2):
                _train(each, x)
        assert_same_values(later.model.state_dict(), model.state_dict(), kind.name, 0.0)


def _train(pair: Pair, x: Tensor) -> None:
    one_backward(pair.model, x)
    pair.optim.step()
    pair.optim.zero_grad()
