"""Sharded training equals unsharded training with every strategy, world size and shape of
parameters. What a step costs is in tests/engine/test_counts.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from fsdp_compat import BackwardPrefetch, ShardingStrategy
from tests.support.models import (
    DIM,
    Head,
    Inner,
    Odd,
    Outer,
    Stack,
    Tiny,
    Transformer,
    chain,
)
from tests.support.pairwise import each_value, pairwise
from tests.support.parity import both_forms, tokens, train, vectors
from tests.support.ranks import on_ranks, run_ranks

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID, HYBRID_ZERO2 = ShardingStrategy


class TiedInside(nn.Module):
    """Two modules of one unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def _trains_and_returns_state(*args: Any, **kwargs: Any) -> dict[str, list[float]]:
    pair = train(*args, **kwargs)
    return {name: value.flatten().tolist() for name, value in pair.model.state_dict().items()}


@pairwise
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@on_ranks("num_ranks")
def test_a_stack_of_blocks_trains_as_unsharded(
    num_ranks: int,
    use_orig_params: bool,
    strategy: ShardingStrategy,
    prefetch: BackwardPrefetch | None,
) -> None:
    options = {"sharding_strategy": strategy, "backward_prefetch": prefetch}
    train(Stack, as_a_user=True, use_orig_params=use_orig_params, **options)


@each_value
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@on_ranks("num_ranks")
def test_units_inside_of_units_train_as_unsharded_on_any_number_of_ranks(
    num_ranks: int, use_orig_params: bool
) -> None:
    train(partial(Stack, 2, Outer), (Outer, Inner), use_orig_params=use_orig_params)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (HYBRID, {"replicas": 2, "use_orig_params": False}),
        (HYBRID_ZERO2, {"replicas": 2, "use_orig_params": True}),
        (NO_SHARD, {}),
    ],
    ids=["two replicas", "two replicas, kept", "four replicas"],
)
def test_replicas_train_as_unsharded_and_stay_bit_equal(
    strategy: ShardingStrategy, options: dict[str, Any]
) -> None:
    build, units = partial(Stack, 2, Outer), (Outer, Inner)
    states = run_ranks(
        4, _trains_and_returns_state, build, units, sharding_strategy=strategy, **options
    )
    assert all(state == states[0] for state in states)


def _sizes() -> nn.Module:
    """Scalars, empty parameters, and fewer elements than ranks."""
    return chain(partial(nn.Linear, DIM, DIM), Odd, Tiny, partial(nn.Linear, DIM, 7))


@both_forms
@pytest.mark.parametrize(
    ("num_ranks", "build", "units", "batch"),
    [
        (2, _sizes, (Odd, Tiny, nn.Linear), vectors),
        (4, _sizes, (Odd, Tiny, nn.Linear), vectors),
        (2, Transformer, (nn.TransformerEncoderLayer, nn.Embedding, Head), tokens),
        (2, partial(chain, TiedInside, TiedInside), (TiedInside,), vectors),
    ],
    ids=["sizes, 2 ranks", "sizes, 4 ranks", "tied across units", "tied inside a unit"],
)
@on_ranks("num_ranks")
def test_sizes_and_ties_train_as_unsharded(
    num_ranks: int, build: Any, units: Any, batch: Any, use_orig_params: bool
) -> None:
    train(build, units, batch=batch, use_orig_params=use_orig_params)
