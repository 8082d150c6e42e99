"""Several backwards per update: with and without no_sync, and what happens to gradients between
them."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat import MixedPrecision, ShardingStrategy
from tests.support.models import DIM, RareRows, Stack, Switch, chain
from tests.support.pairwise import each_value
from tests.support.parity import (
    Turn,
    accumulates,
    backward,
    both_forms,
    make_pair,
    one_backward,
    square,
    trains,
)
from tests.support.ranks import run_ranks


@each_value
@both_forms
@pytest.mark.parametrize("pattern", ["ns", "nns", "sns", "ssns", "snnss"])
@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (1, ShardingStrategy.FULL_SHARD),
        (2, ShardingStrategy.FULL_SHARD),
        (2, ShardingStrategy.SHARD_GRAD_OP),
        (2, ShardingStrategy.NO_SHARD),
    ],
)
def test_any_pattern_of_synchronised_backwards_adds_up_all_gradients(
    num_ranks: int, strategy: ShardingStrategy, pattern: str, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    run_ranks(num_ranks, trains, Stack, step=partial(accumulates, pattern), num_steps=2, **options)


def test_replicas_accumulate_too() -> None:
    run_ranks(4, trains, Stack, step=partial(accumulates, "nns"), replicas=2)


def _forward_under_no_sync_backward_outside(m: nn.Module, x: Tensor, turn: Turn) -> Tensor:
    with turn.no_sync():
        first = backward(square(m, x))
        second = square(m, x * 2)
    return first + backward(second)


@both_forms
def test_no_sync_applies_to_the_backward_not_the_forward(use_orig_params: bool) -> None:
    run_ranks(
        2,
        trains,
        Stack,
        step=_forward_under_no_sync_backward_outside,
        use_orig_params=use_orig_params,
    )


def _uses_a_unit_in_the_first_pass_only(m: nn.Module, x: Tensor, turn: Turn) -> Tensor:
    with turn.no_sync():
        first = backward(m(x, "ab").pow(2).mean())
    return first + backward(m(x, "a").pow(2).mean())


@both_forms
def test_parameters_used_only_in_an_unsynchronised_backward_are_reduced_by_the_next_one(
    use_orig_params: bool,
) -> None:
    run_ranks(
        2, trains, Switch, step=_uses_a_unit_in_the_first_pass_only, use_orig_params=use_orig_params
    )


def _clears_gradients_between(set_to_none: bool, before: str, **options: Any) -> None:
    """before: patterns of backwards whose gradients zero_grad drops."""
    pair = make_pair(Stack, **options)
    for _ in range(3):
        batches = pair.batches()
        for x in batches:
            square(pair.plain, x).backward()
        pair.average_plain_gradients()
        x = batches[pair.rank]
        for letter in before:
            with pair.model.no_sync() if letter == "n" else contextlib.nullcontext():
                square(pair.model, x * 3).backward()
        pair.optim.zero_grad(set_to_none=set_to_none)
        square(pair.model, x).backward()
        pair.compare_and_update()


@each_value
@both_forms
@pytest.mark.parametrize("before", ["n", "nn", "sn"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_unsynchronised_gradients(
    set_to_none: bool, before: str, use_orig_params: bool
) -> None:
    run_ranks(2, _clears_gradients_between, set_to_none, before, use_orig_params=use_orig_params)


def _use_row(model: nn.Module, x: Tensor, row: int) -> Tensor:
    return model[0](x, row).pow(2).mean()


def _scales_gradients_between(**options: Any) -> None:
    """Where a rank's part of a gradient is empty or zero, scaling looks the same as zero_grad."""
    pair = make_pair(partial(chain, RareRows), (RareRows,), **options)
    batches = pair.batches()
    for x in batches:
        _use_row(pair.plain, x, 0).backward()
    for p in pair.plain.parameters():
        p.grad.mul_(0.5 / pair.ranks)
    later = copy.deepcopy(pair.plain)
    later.zero_grad()
    for x in batches:
        (_use_row(later, x * 2, 5) + _use_row(later, x, 1)).backward()
    for p, q in zip(pair.plain.parameters(), later.parameters(), strict=True):
        p.grad += q.grad / pair.ranks

    own = batches[pair.rank]
    _use_row(pair.model, own, 0).backward()
    with pair.model.no_sync():
        _use_row(pair.model, own * 2, 5).backward()
    for p in pair.model.parameters():
        p.grad.mul_(0.5)
    _use_row(pair.model, own, 1).backward()
    pair.compare_and_update()


@both_forms
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_scaled_in_place_between_backwards_keep_unsynchronised_ones(
    num_ranks: int, use_orig_params: bool
) -> None:
    run_ranks(num_ranks, _scales_gradients_between, use_orig_params=use_orig_params)


def _keeps_whole_gradients_under_no_sync() -> tuple[int, int]:
    pair = make_pair(Stack)
    groups = pair.model._runtime.groups
    with pair.model.no_sync():
        square(pair.model, torch.randn(4, DIM)).backward()
    held = sum(group.resident_nbytes for group in groups)
    pair.optim.zero_grad()
    pair.step(one_backward)
    return held, sum(group.shard.ranks * group.store.shard.nbytes for group in groups)


def test_under_no_sync_gradients_are_kept_whole_and_parameters_are_not() -> None:
    for held, whole in run_ranks(2, _keeps_whole_gradients_under_no_sync):
        assert held == whole


def _grads_under_no_sync(use_orig_params: bool) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = make_pair(Stack, mixed_precision=precision, use_orig_params=use_orig_params).model
    with model.no_sync():
        square(model, torch.randn(4, DIM)).backward()
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()
    square(model, torch.randn(4, DIM)).backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@both_forms
def test_grad_does_not_contain_gradients_of_no_sync_before_they_are_reduced(
    use_orig_params: bool,
) -> None:
    run_ranks(2, _grads_under_no_sync, use_orig_params)
