"""Parameters without gradients: frozen, unused, toggled, of integer dtype; and several dtypes in
one unit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateError
from tests.support.models import DIM, Block, FrozenInCheckpoint, Lora, Stack, Switch, chain, frozen
from tests.support.pairwise import each_value
from tests.support.parity import (
    backward,
    both_forms,
    both_strategies,
    make_pair,
    one_backward,
    square,
    train,
    trains,
    wide_vectors,
)
from tests.support.ranks import on_ranks, run_ranks


class SpareParameter(Block):
    """Has parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 5)


class ManyDtypes(Block):
    """float32, bfloat16 and int8 in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(
            torch.randint(-128, 127, (5, 3), dtype=torch.int8), requires_grad=False
        )
        self.low = nn.Parameter(torch.randn(6).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.codes.float().mean() + self.low.float().mean()


def _two_backwards(m: nn.Module, x: Tensor) -> Tensor:
    loss = square(m, x)
    loss.backward(retain_graph=True)
    return backward(loss)


@each_value
@both_forms
@pytest.mark.parametrize("step", [one_backward, _two_backwards])
def test_frozen_weights_beside_trainable_ones_are_unsharded_when_backward_needs_them(
    step: Any, use_orig_params: bool
) -> None:
    run_ranks(
        2,
        trains,
        partial(chain, Lora, Lora, Lora),
        (Lora,),
        step,
        batch=wide_vectors,
        use_orig_params=use_orig_params,
    )


@both_forms
def test_a_frozen_part_that_is_recomputed_last_is_unsharded(use_orig_params: bool) -> None:
    build = partial(chain, *[FrozenInCheckpoint] * 3)
    run_ranks(2, trains, build, (FrozenInCheckpoint,), use_orig_params=use_orig_params)


@both_forms
def test_frozen_units_between_trainable_ones_pass_gradients_on_and_have_none(
    use_orig_params: bool,
) -> None:
    build = partial(chain, Block, partial(frozen, Block), Block, partial(frozen, Block))
    run_ranks(2, trains, build, use_orig_params=use_orig_params)


@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_unused_parameter_beside_used_ones_counts_as_zero(
    num_ranks: int, use_orig_params: bool
) -> None:
    run_ranks(
        num_ranks,
        trains,
        partial(Stack, 3, SpareParameter),
        (SpareParameter,),
        use_orig_params=use_orig_params,
    )


def _uses(letters: str, m: nn.Module, x: Tensor) -> Tensor:
    return backward(m(x, letters).pow(2).mean())


@each_value
@both_forms
@pytest.mark.parametrize("allow_unused_units", [False, True])
@on_ranks(2)
def test_a_unit_that_no_rank_uses_has_no_gradient(
    allow_unused_units: bool, use_orig_params: bool
) -> None:
    options = {"allow_unused_units": allow_unused_units, "use_orig_params": use_orig_params}
    pair = train(Switch, step=partial(_uses, "a"), **options)
    pair.step(partial(_uses, "ab"))
    pair.step(
        partial(_uses, "a")
    )  # no gradient, though the optimizer has momentum: it must not move


@both_strategies
@on_ranks(2)
def test_requires_grad_may_be_toggled_with_original_parameters(strategy: ShardingStrategy) -> None:
    options = {"sharding_strategy": strategy}
    pair = train(Stack, use_orig_params=True, **options)
    for trainable in (False, False, True, True):
        for model in (pair.plain, pair.model):
            model.blocks[1].up.weight.requires_grad_(trainable)
            for p in model.blocks[2].parameters():
                p.requires_grad_(trainable)
        with torch.no_grad():
            pair.model(torch.randn(2, DIM))
        pair.step(one_backward)


@on_ranks(2)
def test_freezing_some_of_a_flat_parameter_raises_and_whole_units_follow() -> None:
    pair = train(Stack)
    block, inner = pair.model.module.blocks[0], pair.model.module.blocks[0].module.up

    def assigns() -> None:
        inner.weight.requires_grad = False

    def in_summon() -> None:
        with FSDP.summon_full_params(pair.model):
            inner.requires_grad_(False)

    for freeze in (partial(inner.requires_grad_, False), assigns, in_summon):
        with pytest.raises(StateError, match="use_orig_params=True"):
            freeze()
    inner.requires_grad_(True)  # as it is
    assert all(p.requires_grad for p in pair.model.parameters())
    block.requires_grad_(False)
    pair.plain.blocks[0].requires_grad_(False)
    pair.step(one_backward)
    with FSDP.summon_full_params(pair.model):
        block.requires_grad_(True)
        pair.model.module.blocks[1].requires_grad_(False)
    pair.plain.blocks[0].requires_grad_(True)
    pair.plain.blocks[1].requires_grad_(False)
    pair.step(one_backward)


def _random_vectors(dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(4, dim, generator=generator)


@each_value
@both_forms
@pytest.mark.parametrize("large", [False, True])
@on_ranks(2)
def test_a_unit_that_was_wrapped_frozen_may_be_made_trainable(
    large: bool, use_orig_params: bool
) -> None:
    """Parameters that are frozen when wrapped and trainable later; one of 64K elements has its own
    gradient hook."""
    dim = 192 if large else DIM
    make = partial(Block, dim)
    pair = make_pair(partial(chain, partial(frozen, make), make), use_orig_params=use_orig_params)
    batch = partial(_random_vectors, dim)
    pair.step(one_backward, batch=batch)
    for model in (pair.plain, pair.model):
        for p in model[0].parameters():
            p.requires_grad_(True)
    for _ in range(2):
        pair.step(one_backward, batch=batch)


@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_unit_may_have_float32_bfloat16_and_int8_parameters(
    num_ranks: int, use_orig_params: bool
) -> None:
    run_ranks(
        num_ranks,
        trains,
        partial(Stack, 2, ManyDtypes),
        (ManyDtypes,),
        use_orig_params=use_orig_params,
    )
