"""Sums of gradients over ranks are in rank order, in a wide dtype, and equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from tests.support.models import GradientIs
from tests.support.ranks import on_ranks

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(
    ("ranks", "values", "dtype", "reduce_dtype", "expected"),
    [
        (3, [1e8, 1.0, -1e8], FP32, FP32, 0.0),  # (1e8 + 1) - 1e8: the 1 is lost
        (3, [1.0, 1e8, -1e8], FP32, FP32, 0.0),
        (4, [1e8, 0.0, -1e8, 1.0], FP32, FP32, 1.0),
        (3, [256.0, 1.0, 1.0], BF16, BF16, 258.0),  # added up in bfloat16, each 1 would be lost
        (3, [256.0, 1.0, 1.0], FP32, BF16, 258.0),
    ],
)
@on_ranks("ranks")
def test_sums_are_in_rank_order_and_equal_on_all_ranks(
    ranks: int,
    values: list[float],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    expected: float,
    strategy: str,
) -> None:
    """41 elements: no number of ranks divides them."""
    model: Any = FullyShardedDataParallel(
        GradientIs(41, dtype),
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(reduce_dtype=reduce_dtype),
    )
    model(torch.full((41,), values[dist.get_rank()])).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        grad = model.weight.grad
        assert grad.dtype == dtype
        assert set(grad.tolist()) == {
            float(torch.tensor(expected, dtype=FP32).div(ranks).to(dtype))
        }
