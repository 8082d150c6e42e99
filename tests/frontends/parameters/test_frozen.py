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
from tests.support.pairwise import each_value, pairwise
from tests.support.parity import (
    backward,
    both_forms,
    both_strategies,
    one_backward,
    train,
    two_backwards,
)
from tests.support.ranks import on_ranks


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


CASES: dict[str, tuple[Any, ...]] = {
    "frozen weights beside trainable ones": (partial(chain, *[partial(Lora, DIM)] * 3), (Lora,)),
    "two backwards": (partial(chain, *[partial(Lora, DIM)] * 3), (Lora,), two_backwards),
    "recomputed last": (partial(chain, *[FrozenInCheckpoint] * 3), (FrozenInCheckpoint,)),
    "units between trainable ones": (partial(chain, *[Block, partial(frozen, Block)] * 2),),
    "an unused parameter beside used ones": (partial(Stack, 3, SpareParameter), (SpareParameter,)),
    "float32, bfloat16 and int8": (partial(Stack, 2, ManyDtypes), (ManyDtypes,)),
}


@pairwise
@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
@on_ranks("num_ranks")
def test_units_with_parameters_without_gradients_train_as_unsharded(
    case: str, num_ranks: int, use_orig_params: bool
) -> None:
    train(*CASES[case], use_orig_params=use_orig_params)


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
    pair.step(partial(_uses, "a"))  # the optimizer has momentum: without a gradient b stays


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
