"""Several backwards per update: with and without no_sync, and what happens to gradients between
them."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compat._comm.transport import Kind
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block, Stack, Switch
from tests.support.pairwise import each_value
from tests.support.parity import (
    accumulates,
    assert_same_values,
    backward,
    both_forms,
    make_pair,
    no_sync,
    seeded,
    square,
    train,
    whole_gradients,
)
from tests.support.ranks import on_ranks, run_ranks


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
        (4, ShardingStrategy.HYBRID_SHARD),
    ],
)
@on_ranks("num_ranks")
def test_any_pattern_of_synchronised_backwards_adds_up_all_gradients(
    num_ranks: int, strategy: ShardingStrategy, pattern: str, use_orig_params: bool
) -> None:
    replicas = 2 if strategy is ShardingStrategy.HYBRID_SHARD else 1
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    train(Stack, step=partial(accumulates, pattern), replicas=replicas, **options)


def _forward_under_no_sync_backward_outside(m: nn.Module, x: Tensor) -> Tensor:
    with no_sync(m):
        first = backward(square(m, x))
        second = square(m, x * 2)
    return first + backward(second)


@both_forms
@on_ranks(2)
def test_no_sync_applies_to_the_backward_not_the_forward(use_orig_params: bool) -> None:
    step = _forward_under_no_sync_backward_outside
    train(Stack, step=step, use_orig_params=use_orig_params)


def _uses_a_unit_in_the_first_pass_only(m: nn.Module, x: Tensor) -> Tensor:
    with no_sync(m):
        first = backward(m(x, "ab").pow(2).mean())
    return first + backward(m(x, "a").pow(2).mean())


@both_forms
@on_ranks(2)
def test_parameters_used_only_in_an_unsynchronised_backward_are_reduced_by_the_next_one(
    use_orig_params: bool,
) -> None:
    train(Switch, step=_uses_a_unit_in_the_first_pass_only, use_orig_params=use_orig_params)


@each_value
@both_forms
@pytest.mark.parametrize("before", ["n", "nn", "sn"])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_zero_grad_drops_unsynchronised_gradients(
    set_to_none: bool, before: str, use_orig_params: bool
) -> None:
    """before: patterns of backwards whose gradients zero_grad drops."""
    pair = make_pair(Stack, use_orig_params=use_orig_params)
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


@both_forms
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_zero_grad_clears_units_that_the_next_backward_does_not_use(
    set_to_none: bool, use_orig_params: bool
) -> None:
    pair = make_pair(Switch, use_orig_params=use_orig_params)
    for _ in range(2):
        batches = pair.batches()
        for x in batches:
            pair.plain(x, "ab").pow(2).mean().backward()
        with pair.model.no_sync():
            pair.model(batches[pair.rank], "ab").pow(2).mean().backward()
        for optim in (pair.plain_optim, pair.optim):
            optim.zero_grad(set_to_none=set_to_none)
        for x in batches:
            pair.plain(x, "a").pow(2).mean().backward()
        pair.average_plain_gradients()
        pair.model(batches[pair.rank], "a").pow(2).mean().backward()
        pair.compare_and_update()


@on_ranks(2)
def test_gradients_scaled_in_place_between_backwards_keep_unsynchronised_ones() -> None:
    """No rank's part of a gradient is zero."""
    pair = make_pair(Stack)
    batches = pair.batches()
    own = batches[pair.rank]
    for x in batches:
        square(pair.plain, x).backward()
    for p in pair.plain.parameters():
        p.grad.mul_(0.5)
    for x in batches:
        square(pair.plain, x * 2).backward()
        square(pair.plain, x * 3).backward()
    pair.average_plain_gradients()

    square(pair.model, own).backward()
    with pair.model.no_sync():
        square(pair.model, own * 2).backward()
    for p in pair.model.parameters():
        p.grad.mul_(0.5)
    square(pair.model, own * 3).backward()
    pair.compare_and_update()


class Table(nn.Module):
    """With 2 ranks the second one holds rows whose gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(6, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rows[0]


class Optional(nn.Module):
    """``use``: whether the table is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = Table(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.last(self.table(x) if use else x)


def _zeroes_on_one_rank(use_orig_params: bool) -> tuple[int, list[float]]:
    """Return the number of reduced groups, and the table's gradient before and after."""
    pair = make_pair(Optional, (Table,), use_orig_params=use_orig_params)
    x, shard = torch.ones(2, DIM), pair.model._runtime.groups[0].shard
    pair.model(x, True).sum().backward()
    with pair.model.no_sync():
        pair.model(x, True).sum().backward()
    for p in pair.model.parameters():
        p.grad.mul_(0.5)  # it was zero for the table on the second rank, and it is zero
    (parameter,) = pair.model.table.parameters()
    seen = [parameter.grad.flatten()[0].item()]
    shard.traffic.clear()
    pair.model(x, False).sum().backward()
    seen.append(parameter.grad.flatten()[0].item())
    return shard.traffic.counts[Kind.REDUCE], seen


@both_forms
def test_what_is_zero_on_one_rank_does_not_change_what_is_reduced(use_orig_params: bool) -> None:
    (first, seen), (second, zeros) = run_ranks(2, _zeroes_on_one_rank, use_orig_params)
    assert first == second == 2
    assert seen[0] and seen[1] / seen[0] == pytest.approx(2)  # half of the unsynchronised gradient
    assert zeros == [0, 0]


@both_forms
@on_ranks(2)
def test_grad_does_not_contain_gradients_of_no_sync_before_they_are_reduced(
    use_orig_params: bool,
) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = make_pair(Stack, mixed_precision=precision, use_orig_params=use_orig_params).model
    with model.no_sync():
        square(model, torch.randn(4, DIM)).backward()
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()
    square(model, torch.randn(4, DIM)).backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("front_end", ["flat", "original", "rows"])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_hooks_on_gradients_from_before_and_after_wrapping_change_them(
    ranks: int, front_end: str
) -> None:
    """Those from before see whole gradients before the reduction, as with DDP; those from after
    see what this rank has of a reduced gradient."""
    plain, inner = seeded(partial(Stack, 2)), seeded(partial(Stack, 2))
    mask = torch.ones(2 * DIM, DIM).index_fill(0, torch.tensor([0, 3]), 0)
    for model in (plain, inner):
        model.blocks[0].up.weight.register_hook(lambda grad: grad * mask)
        removed = model.blocks[1].up.weight.register_hook(torch.zeros_like)
    if front_end == "rows":
        for block in inner.blocks:
            fully_shard(block)
        sharded: Any = fully_shard(inner)
    else:
        sharded = FSDP(
            inner,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=front_end == "original",
        )
    removed.remove()  # of the sharded model alone
    plain.blocks[1].up.weight._backward_hooks.clear()
    for model in (plain, sharded):
        for p in model.blocks[1].parameters():
            p.register_hook(lambda grad: -2 * grad)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with no_sync(sharded):
            for model in (plain, sharded):
                backward(square(model, x))
        for model in (plain, sharded):
            backward(square(model, x))
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_values(whole_gradients(sharded), expected, "gradient")
