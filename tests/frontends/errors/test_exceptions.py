"""After an exception in forward or backward on all ranks, training continues as if nothing had
happened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from tests.support.models import DIM, Block, Fragile, FragileInside, chain
from tests.support.pairwise import each_value
from tests.support.parity import (
    Pair,
    backward,
    both_forms,
    both_strategies,
    make_pair,
    one_backward,
    square,
    train,
)
from tests.support.ranks import on_ranks


def _fragile(model: nn.Module) -> Fragile:
    return next(module for module in model.modules() if isinstance(module, Fragile))


def _build(kind: type[Fragile]) -> nn.Module:
    return chain(Block, kind, Block, Block)


def _raise_in_forward(error: type[BaseException], pair: Pair) -> None:
    fragile = _fragile(pair.model)
    fragile.fault_in_forward = error
    with pytest.raises(error, match="forward"):
        square(pair.model, torch.randn(2, DIM))
    fragile.fault_in_forward = None


def _raise_in_backward(pair: Pair) -> None:
    fragile = _fragile(pair.model)
    loss = square(pair.model, torch.randn(2, DIM))
    fragile.fault_in_backward = True
    with pytest.raises(ValueError, match="backward"):
        loss.backward(retain_graph=True)
    fragile.fault_in_backward = False


FAULTS: dict[str, Callable[[Pair], None]] = {
    "in forward": partial(_raise_in_forward, ValueError),
    "interrupted": partial(_raise_in_forward, KeyboardInterrupt),  # module hooks do not run
    "in backward": _raise_in_backward,
}


@each_value
@both_forms
@both_strategies
@pytest.mark.parametrize("kind", [Fragile, FragileInside])
@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_states_are_right_and_training_goes_on_after_an_exception(
    fault: str, kind: type[Fragile], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    pair = train(partial(_build, kind), (Block, kind), num_steps=2, **options)
    for _ in range(2):
        FAULTS[fault](pair)
        pair.optim.zero_grad()
        pair.assert_state_equal()
        with FSDP.summon_full_params(pair.model):
            pass
        pair.assert_idle()
        FAULTS[fault](pair)
        pair.optim.zero_grad()
        pair.step(one_backward)


@each_value
@both_forms
@both_strategies
@on_ranks(2)
def test_a_backward_repeated_after_an_exception_gives_its_own_gradients_only(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    pair = make_pair(
        partial(_build, Fragile),
        (Block, Fragile),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )

    def step(m: nn.Module, x: Tensor) -> Tensor:
        parameters = list(m.parameters())
        before = [p.grad for p in parameters]  # of other ranks' batches, on the unsharded copy
        for p in parameters:
            p.grad = None
        loss = square(m, x)
        _fragile(m).fault_in_backward = True
        with contextlib.suppress(ValueError):
            loss.backward(retain_graph=True)
        _fragile(m).fault_in_backward = False
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        return backward(loss)

    for _ in range(3):
        pair.step(step)
