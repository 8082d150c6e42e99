"""After an exception in forward or backward on all ranks, training continues as if nothing had
happened."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat import ShardingStrategy
from tests.support.models import DIM, Block, Fragile, FragileInside, chain
from tests.support.pairwise import each_value
from tests.support.parity import (
    backward,
    both_forms,
    both_strategies,
    make_pair,
    square,
)
from tests.support.ranks import on_ranks

FAULTS: dict[str, type[BaseException]] = {
    "forward": ValueError,
    "interrupted forward": KeyboardInterrupt,  # module hooks do not run
    "backward": ValueError,
}


def _build(kind: type[Fragile] = Fragile) -> nn.Module:
    return chain(Block, kind, Block, Block)


def _raise_once(fault: str, model: nn.Module) -> None:
    fragile = next(module for module in model.modules() if isinstance(module, Fragile))
    fragile.fault_in_backward = fault == "backward"
    fragile.fault_in_forward = None if fault == "backward" else FAULTS[fault]
    with pytest.raises(FAULTS[fault], match=r"forward|backward"):
        square(model, torch.randn(2, DIM)).backward(retain_graph=True)
    fragile.fault_in_backward, fragile.fault_in_forward = False, None


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
    pair = make_pair(partial(_build, kind), (Block, kind), **options)
    for _ in range(2):
        pair.step()
        _raise_once(fault, pair.model)
        pair.optim.zero_grad()
        pair.assert_state_equal()
        pair.assert_idle()
        _raise_once(fault, pair.model)
        pair.optim.zero_grad()
        pair.step()


@both_forms
@on_ranks(2)
def test_a_backward_repeated_after_an_exception_gives_its_own_gradients_only(
    use_orig_params: bool,
) -> None:
    kept = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if use_orig_params else {}
    pair = make_pair(_build, (Block, Fragile), use_orig_params=use_orig_params, **kept)

    def step(m: nn.Module, x: Tensor) -> Tensor:
        parameters = list(m.parameters())
        before = [p.grad for p in parameters]  # of other ranks' batches, on the unsharded copy
        m.zero_grad()
        (fragile,) = (module for module in m.modules() if isinstance(module, Fragile))
        loss = square(m, x)
        fragile.fault_in_backward = True
        with pytest.raises(ValueError, match="backward"):
            loss.backward(retain_graph=True)
        fragile.fault_in_backward = False
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        return backward(loss)

    for _ in range(3):
        pair.step(step)
