"""Sharded training equals unsharded training with every strategy, world size and kind of module or
parameter. What a step costs is in tests/engine/test_counts.py, modules that read parameters of
others are in test_entry_points."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from fsdp_compat import BackwardPrefetch, CPUOffload, ShardingStrategy
from tests.support.models import (
    DIM,
    NUM_TOKENS,
    Block,
    FrozenInCheckpoint,
    Head,
    Inner,
    Lora,
    Odd,
    Outer,
    Stack,
    Tied,
    Tiny,
    Transformer,
    Unit,
    chain,
    frozen,
    made_of,
)
from tests.support.pairwise import each_value
from tests.support.parity import (
    accumulates_mean,
    backward,
    both_forms,
    square,
    tokens,
    train,
    two_backwards,
    wide_vectors,
)
from tests.support.ranks import on_ranks

FULL_SHARD, _, _, HYBRID, HYBRID_ZERO2 = ShardingStrategy


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "options"),
    [
        (2, FULL_SHARD, {"use_orig_params": True}),
        (3, FULL_SHARD, {}),
        (4, HYBRID, {"replicas": 2}),
        (4, HYBRID_ZERO2, {"replicas": 2, "use_orig_params": True}),
    ],
)
@on_ranks("num_ranks")
def test_units_inside_of_units_and_replicas_train_as_unsharded(
    num_ranks: int, strategy: ShardingStrategy, options: dict[str, Any]
) -> None:
    build, units = partial(Stack, 2, Outer), (Outer, Inner)
    pair = train(build, units, sharding_strategy=strategy, **options)
    for value in pair.model.state_dict().values():  # replicas stay bit-equal
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(value, first)


def _many_dtypes(m: Any, x: Tensor) -> Tensor:
    """The gradient of ``low`` is small: the unsharded copy adds it up in bfloat16."""
    return m.block(x) + 0.01 * m.codes.float().mean() + 0.001 * m.low.float().mean()


MANY_DTYPES = made_of(  # in one unit
    _many_dtypes,
    block=Block,
    codes=lambda: nn.Parameter(torch.arange(-15, 15, 2, dtype=torch.int8), requires_grad=False),
    low=lambda: nn.Parameter(torch.randn(6).bfloat16()),
)
UNUSED = made_of(lambda m, x: m.block(x), block=Block, spare=partial(nn.Linear, 3, 5))
SPARSE = partial(chain, partial(nn.Embedding, NUM_TOKENS, DIM, sparse=True), Block)


def _copies() -> nn.Module:
    block = Block()
    return nn.Sequential(block, copy.deepcopy(block), copy.deepcopy(block))


def _parametrized(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The weight is computed from other parameters."""
    unit = made_of(lambda m, x: m.linear(x).tanh(), linear=lambda: wrap(nn.Linear(DIM, DIM)))()
    # In training the power iteration depends on the number of calls.
    return unit.train(wrap is not parametrizations.spectral_norm)


def _sizes() -> nn.Module:
    """Scalars, empty parameters, and fewer elements than ranks."""
    return chain(partial(nn.Linear, DIM, DIM), Odd, Tiny, partial(nn.Linear, DIM, 7))


def _under_autocast(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = square(m, x)
    return backward(loss)


def _wide(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 264, generator=generator)


# Parameters of 65,536 elements and more have a gradient hook of their own.
LARGE, SNS = partial(chain, *[partial(nn.Linear, 264, 264)] * 2), partial(accumulates_mean, "sns")
LORAS, RECOMPUTED_LAST = (partial(chain, *[unit] * 3) for unit in (Lora, FrozenInCheckpoint))
PARTLY_FROZEN = partial(chain, *[Block, partial(frozen, Block)] * 2)
CASES: dict[str, Callable[..., object]] = {
    "a stack of blocks": partial(train, Stack, as_a_user=True),
    "sizes": partial(train, _sizes, (Odd, Tiny, nn.Linear)),
    "tied across units": partial(
        train, Transformer, (nn.TransformerEncoderLayer, nn.Embedding, Head), batch=tokens
    ),
    "tied inside a unit": partial(train, partial(chain, *[Tied] * 2), (Tied,)),
    "float32, bfloat16 and int8": partial(train, partial(Stack, 2, MANY_DTYPES), (Unit,)),
    "frozen weights beside trainable ones": partial(train, LORAS, (Lora,), batch=wide_vectors),
    "frozen, two backwards": partial(train, LORAS, (Lora,), two_backwards, batch=wide_vectors),
    "frozen, recomputed last": partial(train, RECOMPUTED_LAST, (FrozenInCheckpoint,)),
    "frozen units between trainable ones": partial(train, PARTLY_FROZEN),
    "an unused parameter beside used ones": partial(train, partial(Stack, 3, UNUSED), (Unit,)),
    "sparse gradients": partial(train, SPARSE, (nn.Embedding, Block), batch=tokens),
    "autocast": partial(train, Stack, step=_under_autocast, num_steps=4),
    "modules made by deepcopy": partial(train, _copies),
    "large layers": partial(train, LARGE, (nn.Linear,), SNS, batch=_wide),
    **{
        name: partial(train, partial(chain, *[partial(_parametrized, wrap)] * 2), (Unit,))
        for name, wrap in {
            "old weight_norm": weight_norm,
            "weight_norm": parametrizations.weight_norm,
            "spectral_norm": parametrizations.spectral_norm,
            "orthogonal": parametrizations.orthogonal,
        }.items()
    },
}


@each_value
@both_forms
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3])
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@on_ranks("num_ranks")
def test_modules_and_parameters_of_every_kind_train_as_unsharded(
    case: str,
    num_ranks: int,
    offload: bool,
    prefetch: BackwardPrefetch | None,
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of weight_norm
        CASES[case](
            cpu_offload=CPUOffload(offload),
            backward_prefetch=prefetch,
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
        )
