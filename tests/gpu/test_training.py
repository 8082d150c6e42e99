"""Sharded models train as the unsharded one on a device with streams, where transfers take time and
early reads return NaN.

With several ranks this process is rank 0 of a group that moves nothing (tests/support/twin.py);
with one it is all of a real group."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)

from fsdp_compat import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_compat._engine.gradients import LARGE
from tests.support.models import Block, Inner, Outer, Stack, chain
from tests.support.ranks import run_ranks
from tests.support.twin import Step, twin_of

pytestmark = pytest.mark.gpu

NUM_STEPS = 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = {
    "fp32": None,
    "bf16 summed in fp32": MixedPrecision(param_dtype=BF16, reduce_dtype=FP32),
    "bf16": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16),
    "fp16 summed in fp32": MixedPrecision(param_dtype=FP16, reduce_dtype=FP32),
}
STRATEGIES = [  # and whether the shards are on the CPU
    (ShardingStrategy.FULL_SHARD, False),
    (ShardingStrategy.FULL_SHARD, True),
    (ShardingStrategy.SHARD_GRAD_OP, False),
    (ShardingStrategy.NO_SHARD, False),
]
WIDE = LARGE // 8


class Wide(nn.Module):
    """A block whose matrices are large enough that each gradient moves on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDE), nn.Linear(WIDE, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


wide_stack = functools.partial(chain, *[Wide] * 4)
nested = functools.partial(Stack, 2, Outer)


def checkpointed(module: nn.Module) -> nn.Module:
    apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, Block))
    return module


def trains(*arguments: Any, how: Step | None = None, **options: Any) -> None:
    """Take steps with a twin: see ``twin_of``."""
    with twin_of(*arguments, **options) as twin:
        for _ in range(NUM_STEPS):
            twin.step(how)


def train(*arguments: Any, **options: Any) -> None:
    run_ranks(1, trains, *arguments, **options)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(("strategy", "offload"), STRATEGIES)
def test_strategies_in_all_precisions(
    device: str,
    strategy: ShardingStrategy,
    offload: bool,
    precision: str,
    use_orig_params: bool,
    ranks: int,
) -> None:
    options = {
        "sharding_strategy": strategy,
        "cpu_offload": CPUOffload(offload_params=offload),
        "mixed_precision": PRECISIONS[precision],
        "use_orig_params": use_orig_params,
    }
    train(device, ranks, **options)


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
)
def test_replicas_of_shards(device: str, strategy: ShardingStrategy) -> None:
    train(device, 8, sharding_strategy=strategy, mesh=(2, 4))


@pytest.mark.parametrize("limit_all_gathers", [True, False])
@pytest.mark.parametrize(
    "prefetch", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]
)
@pytest.mark.parametrize("build", [nested, wide_stack])
def test_prefetching_of_nested_units_and_of_large_gradients(
    device: str, build: Any, prefetch: BackwardPrefetch | None, limit_all_gathers: bool
) -> None:
    options = {"backward_prefetch": prefetch, "limit_all_gathers": limit_all_gathers}
    train(device, 8, build, (Outer, Inner, Wide), **options)


@pytest.mark.parametrize(
    ("ranks", "how", "offload"),
    [(8, Step(backwards=3), False), (8, Step(backwards=3), True), (1, Step(max_norm=0.05), False)],
)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_several_backwards_and_clipping(
    device: str, use_orig_params: bool, ranks: int, how: Step, offload: bool
) -> None:
    options = {"cpu_offload": CPUOffload(offload_params=offload)}
    train(device, ranks, how=how, use_orig_params=use_orig_params, **options)


@pytest.mark.parametrize("unit", [CheckpointWrapper, Block])
@pytest.mark.parametrize("precision", ["fp32", "bf16 summed in fp32"])
def test_recomputation_inside_of_units_and_around_them(
    device: str, precision: str, unit: type[nn.Module]
) -> None:
    options = {"mixed_precision": PRECISIONS[precision], "units": (unit,), "prepare": checkpointed}
    train(device, 8, **options)
