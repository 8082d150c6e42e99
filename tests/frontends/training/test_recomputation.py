"""Activation checkpointing inside units, around one, around several, around parts of them and
around the whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from fsdp_compat import CPUOffload, ShardingStrategy
from tests.support.cases import about
from tests.support.models import (
    Block,
    ForwardProducts,
    Inner,
    Outer,
    Recomputed,
    RecomputesBlocks,
    Stack,
    made_of,
    saves_products,
)
from tests.support.pairwise import each_value
from tests.support.parity import backward, both_forms, both_strategies, square, train
from tests.support.ranks import on_ranks


def saves_nothing(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _drops_an_output(reentrant: bool, m: Any, x: Tensor) -> Tensor:
    """A checkpoint with two outputs, one of which reaches the loss."""

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        a = m.a(x)
        return a, m.c(m.b(x))

    return checkpoint(region, m.stem(x), use_reentrant=reentrant)[0]


def _recomputes_twice(reentrant: bool, m: Any, x: Tensor) -> Tensor:
    x = checkpoint(m.a, m.stem(x), use_reentrant=reentrant)
    return checkpoint(m.a, x, use_reentrant=reentrant)


def _of_blocks(forward: Callable[..., Tensor], reentrant: bool) -> tuple[Any, ...]:
    parts = dict.fromkeys(("stem", "a", "b", "c"), Block)
    return (made_of(lambda m, x: forward(reentrant, m, x), **parts),)


def _recomputes_everything(reentrant: bool, m: nn.Module, x: Tensor) -> Tensor:
    return backward(checkpoint(lambda x: square(m, x), x.requires_grad_(), use_reentrant=reentrant))


CASES: dict[str, Callable[[bool], tuple[Any, ...]]] = {  # reentrant -> arguments for train()
    "inside of units": lambda r: (partial(Stack, 3, partial(Recomputed, r)), (Recomputed,)),
    "around one unit": lambda r: (partial(RecomputesBlocks, Block, r, 1),),
    "around several units": lambda r: (partial(RecomputesBlocks, Block, r, 2),),
    "around units in units": lambda r: (partial(RecomputesBlocks, Outer, r, 2), (Outer, Inner)),
    "inside and around": lambda r: (
        partial(RecomputesBlocks, partial(Recomputed, r), r),
        (Recomputed,),
    ),
    "an output dropped": partial(_of_blocks, _drops_an_output),
    "a unit in two checkpoints": partial(_of_blocks, _recomputes_twice),
    "around the root": lambda r: (Stack, (Block,), partial(_recomputes_everything, r)),
}


@each_value
@both_forms
@both_strategies
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_wherever_activations_are_recomputed_training_equals_unsharded(
    reentrant: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    for number, (name, case) in enumerate(CASES.items()):
        offload = CPUOffload((number + use_orig_params) % 2 == 0)
        with about(name), set_checkpoint_early_stop(number % 3 > 0):
            train(*case(reentrant), cpu_offload=offload, **options)


def _selective(policy: Any) -> dict[str, Any]:
    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


def _counts_products(
    expected: int, around: dict[str, Any] | None, m: nn.Module, x: Tensor
) -> Tensor:
    """expected: recomputed products. around: arguments of a checkpoint of the model."""
    if around is None:
        loss = square(m, x)
    else:
        loss = checkpoint(square, m, x, use_reentrant=False, **around)
    with ForwardProducts() as products:
        loss.backward()
    assert products.number == expected
    return loss.detach()


@each_value
@both_forms
@both_strategies
@on_ranks(2)
def test_a_checkpoint_saves_what_its_policy_says(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    for policy in (saves_products, saves_nothing):
        how = _selective(policy)
        # A recomputation ends before its last product, which backward does not need.
        for build, recomputed, around in (
            (partial(Stack, 3, partial(Recomputed, False, **how)), 3, None),
            (partial(RecomputesBlocks, Block, False, 1, **how), 4, None),
            (partial(RecomputesBlocks, Block, False, 2, **how), 6, None),
            (Stack, 8, how),
        ):
            expected = recomputed if policy is saves_nothing else 0
            step = partial(_counts_products, expected, around)
            with about((policy, recomputed)):
                train(build, step=step, **options)
