"""Several backwards per update: with and without no_sync, and what happens to gradients between
them."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat import MixedPrecision, ShardingStrategy
from tests.support.fully_sharded import sharded_as
from tests.support.messages import Messages
from tests.support.models import DIM, Stack, Switch
from tests.support.pairwise import each_value
from tests.support.parity import (
    accumulates,
    assert_same_values,
    backward,
    both_forms,
    make_pair,
    no_sync,
    seeded,
    train,
    whole_gradients,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import MESSAGES

BF16, FP32 = torch.bfloat16, torch.float32


@each_value
@both_forms
@pytest.mark.parametrize("pattern", ["nns", "sns", "ssns"])
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


def _uses(units: str, m: nn.Module, x: Tensor) -> Tensor:
    return backward(m(x, units).pow(2).mean())


@each_value
@both_forms
@pytest.mark.parametrize("before", ["n", "nn", "sn"])
@pytest.mark.parametrize("after", ["ab", "a"])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_zero_grad_drops_gradients_of_no_sync_even_where_the_next_backward_has_none(
    set_to_none: bool, after: str, before: str, use_orig_params: bool
) -> None:
    pair = make_pair(Switch, use_orig_params=use_orig_params)
    for _ in range(2):
        x = 3 * pair.batches()[pair.rank]
        for model, optim in ((pair.plain, pair.plain_optim), (pair.model, pair.optim)):
            for letter in before:
                with no_sync(model) if letter == "n" else contextlib.nullcontext():
                    _uses("ab", model, x)
            optim.zero_grad(set_to_none=set_to_none)
        pair.step(partial(_uses, after))


class Lookup(nn.Module):
    """Only row 0 of the table has a gradient: none of the rows of the second of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(6, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        row = self.table(torch.zeros(1, dtype=torch.int64)) if use else 1.0
        return self.last(x * row).sum()


def _zeroes_on_one_rank(use_orig_params: bool) -> tuple[list[int], list[float]]:
    """Return the sizes of the gradients that the last backward sends, and an element of the
    table's gradient before and after it."""
    options = {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)}
    options |= {"use_orig_params": use_orig_params}
    model = make_pair(Lookup, (nn.Embedding,), **options).model
    x = torch.ones(2, DIM)
    backward(model(x, True))
    with model.no_sync():
        backward(model(x, True))
    for p in model.parameters():
        p.grad.mul_(0.5)  # the table's was zero on the second rank, and still is
    (parameter,) = model.table.parameters()
    loss, seen = model(x, False), [parameter.grad.flatten()[0].item()]
    with Messages() as messages:
        backward(loss)
    return messages.sent[FP32], [*seen, parameter.grad.flatten()[0].item()]


@both_forms
def test_what_is_zero_on_one_rank_does_not_change_what_is_reduced(use_orig_params: bool) -> None:
    (first, seen), (second, zeros) = run_ranks(
        2, _zeroes_on_one_rank, use_orig_params, environment=MESSAGES
    )
    assert sorted(first) == sorted(second) == [6 * DIM // 2, (DIM + 1) * DIM // 2]
    assert seen[0] and seen[1] / seen[0] == pytest.approx(2)  # half of the unsynchronised gradient
    assert zeros == [0, 0]


@each_value
@pytest.mark.parametrize("front_end", ["flat", "original", "ours"])
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
    removed = inner.blocks[1].up.weight.register_hook(torch.zeros_like)
    sharded = sharded_as(front_end, inner)
    removed.remove()
    for model in (plain, sharded):
        for p in model.blocks[1].parameters():
            p.register_hook(lambda grad: -2 * grad)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
    for model in (plain, sharded):
        for _ in range(2):
            accumulates("ns", model, x)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_values(whole_gradients(sharded), expected, "gradient")
