"""FSDP_USE_FULL_PREC_IN_EVAL: units in evaluation mode compute in the dtype of their shards."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy
from tests.support.models import DIM, Block, Shifted, Stack, chain
from tests.support.pairwise import each_value
from tests.support.parity import (
    assert_close,
    both_forms,
    make_pair,
    square,
    vectors,
    whole_gradients,
)
from tests.support.ranks import on_ranks

FP32, BF16 = torch.float32, torch.bfloat16
LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=BF16)

both_strategies = pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (1, ShardingStrategy.FULL_SHARD),
        (2, ShardingStrategy.SHARD_GRAD_OP),
    ],
)


on_evaluating_ranks = partial(on_ranks, environment={"FSDP_USE_FULL_PREC_IN_EVAL": "1"})


def _own_batch() -> Tensor:
    return vectors(torch.Generator().manual_seed(dist.get_rank()))


def _averages(*models: nn.Module) -> dict[str, Tensor]:
    """The averages over the ranks of the sum of the gradients of unsharded models. Collective."""
    found = {}
    for name, _ in models[0].named_parameters():
        total = torch.stack([each.get_parameter(name).grad.float() for each in models]).sum(0)
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


def _assert_gradients(model: nn.Module, expected: dict[str, Tensor], what: str = "") -> None:
    """Collective."""
    for name, grad in whole_gradients(model).items():
        assert grad is not None
        assert_close(grad, expected[name], f"{what}: gradient of {name}")


LINEAR, NORM = partial(nn.Linear, DIM, DIM), partial(nn.BatchNorm1d, DIM)


@pytest.mark.parametrize(
    ("build", "num_ranks", "strategy", "use_orig_params"),
    [
        (partial(Stack, 2), 2, ShardingStrategy.FULL_SHARD, False),
        (partial(chain, LINEAR, NORM, Shifted), 2, ShardingStrategy.SHARD_GRAD_OP, True),
    ],
)
@on_evaluating_ranks("num_ranks")
def test_full_precision_eval_is_bit_equal_to_unsharded(
    build: Any, num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Even buffers that bf16 could not hold, and statistics of a batch norm."""
    options = {"use_orig_params": use_orig_params, "allow_unused_units": use_orig_params}
    options |= {"mixed_precision": LOW, "sharding_strategy": strategy}
    pair = make_pair(build, **options)
    model, plain = pair.model, pair.plain.eval()
    for step in range(3):
        plain.load_state_dict(model.state_dict())
        x, other = pair.batches()[pair.rank], pair.batches()[pair.rank]
        for context in (torch.no_grad, torch.inference_mode):
            model.eval()
            with context():
                assert torch.equal(model(x), plain(x)), f"step {step}: not the output in float32"
            assert {b.dtype for n, b in model.named_buffers() if "shift" in n} <= {FP32}
            pair.assert_idle()
            model.train()
        square(model, other).backward()
        assert {b.dtype for n, b in model.named_buffers() if "shift" in n} <= {BF16}
        pair.assert_idle()
        pair.optim.step()
        pair.optim.zero_grad()


def _adds_gradients_of_both_modes(model: FSDP, x: Tensor) -> None:
    """A parameter has gradients in two dtypes when post-backward takes them."""
    grads, losses = [], []
    for mode in (True, False):
        model.train(mode)
        square(model, x).backward()
        grads.append(whole_gradients(model))
        model.zero_grad()
        losses.append(square(model, x))
    model.train()
    (losses[0].float() + losses[1]).backward()
    for name, found in whole_gradients(model).items():
        one, other = grads[0][name], grads[1][name]
        rounding = float((one.abs() + other.abs()).max()) * torch.finfo(BF16).eps
        torch.testing.assert_close(found, one + other, rtol=0.0, atol=rounding, msg=name)


@each_value
@both_forms
@both_strategies
@pytest.mark.parametrize("reduce_dtype", [FP32, BF16])
@on_evaluating_ranks("num_ranks")
def test_evaluation_with_gradients_computes_them_in_full_precision(
    reduce_dtype: torch.dtype, num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """They are still reduced in ``reduce_dtype``."""
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce_dtype)
    pair = make_pair(partial(Stack, 2), mixed_precision=precision, **options)
    model, plain, x = pair.model, pair.plain, _own_batch()
    square(plain, x).backward()
    for p in plain.parameters():
        p.grad = p.grad.to(reduce_dtype).float()
    expected = _averages(plain)
    for mode in (False, True, False):
        model.train(mode)
        square(model, x).backward()
        if not mode:
            _assert_gradients(model, expected)
        pair.assert_idle()
        model.zero_grad()
    _adds_gradients_of_both_modes(model, x)


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.seen = self.linear.weight.dtype, x.dtype
        dtype = BF16 if self.inner.training else FP32
        return self.inner(h.to(dtype)).to(h.dtype)


@each_value
@both_forms
@both_strategies
@on_evaluating_ranks("num_ranks")
def test_each_unit_computes_in_the_precision_of_its_own_mode(
    num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    pair = make_pair(Sees, mixed_precision=LOW, **options)
    model, x = pair.model, _own_batch()
    for outer, inner in [(True, False), (False, True), (True, True), (False, False), (True, False)]:
        model.train(outer)
        model.module.inner.train(inner)
        pair.copy_parameters()
        plain = copy.deepcopy(pair.plain)
        outer_dtype, inner_dtype = (BF16 if mode else FP32 for mode in (outer, inner))
        plain.linear.to(outer_dtype)
        plain.inner.to(inner_dtype).train(inner)
        expected, got, what = plain(x.to(outer_dtype)), model(x), f"outer {outer}, inner {inner}"
        assert got.dtype == expected.dtype == outer_dtype
        assert torch.equal(got, expected), what
        assert model.module.seen == (outer_dtype, outer_dtype)
        model.train(not outer)  # the mode in backward has no effect
        for out in (got, expected):
            out.float().pow(2).mean().backward()
        _assert_gradients(model, _averages(plain), what)
        pair.assert_idle()
        pair.optim.step()
        pair.optim.zero_grad()
