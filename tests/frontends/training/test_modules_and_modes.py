"""Torch's own modules, and modes around them: autocast, parametrizations.
Modules that read parameters of others are in test_entry_points."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from fsdp_compat import ShardingStrategy
from tests.support.models import DIM, NUM_TOKENS, Block, Stack, chain
from tests.support.pairwise import each_value, pairwise
from tests.support.parity import (
    backward,
    both_forms,
    both_strategies,
    make_pair,
    one_backward,
    square,
    tokens,
    train,
)
from tests.support.ranks import on_ranks


class SparseEmbedding(nn.Module):
    """Its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(NUM_TOKENS, DIM, sparse=True), Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens))


class Copies(nn.Sequential):
    """Blocks made by deepcopy."""

    def __init__(self) -> None:
        block = Block()
        super().__init__(block, copy.deepcopy(block), copy.deepcopy(block))


class Parametrized(nn.Module):
    """A linear layer whose weight is computed from other parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        wrap = {
            "old weight_norm": weight_norm,
            "weight_norm": parametrizations.weight_norm,
            "spectral_norm": parametrizations.spectral_norm,
            "orthogonal": parametrizations.orthogonal,
        }[kind]
        self.linear = wrap(nn.Linear(DIM, DIM))
        self.train(kind != "spectral_norm")  # the power iteration depends on the number of calls

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def _under_autocast(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = square(m, x)
    return backward(loss)


CASES: dict[str, dict[str, Any]] = {
    "sparse gradients": {
        "build": SparseEmbedding,
        "units": (nn.Embedding, Block),
        "batch": tokens,
    },
    "autocast": {"build": Stack, "step": _under_autocast, "num_steps": 4},
    "modules made by deepcopy": {"build": Copies},
}
for _kind in ("old weight_norm", "weight_norm", "spectral_norm", "orthogonal"):
    CASES[_kind] = {
        "build": partial(chain, *[partial(Parametrized, _kind)] * 2),
        "units": (Parametrized,),
    }


@pairwise
@both_forms
@both_strategies
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
@on_ranks("num_ranks")
def test_modules_and_modes_train_as_unsharded(
    case: str, num_ranks: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of weight_norm
        train(**CASES[case], **options)


# -- a forward of an instance


def _scaled(forward: Any, x: Tensor) -> Tensor:
    return forward(x) * 1.5


def _scale_outputs(model: nn.Module) -> nn.Module:
    """Set a forward on the instance, around the one it had, as hooks of other libraries do."""
    for block in model.blocks:
        block.up.forward = partial(_scaled, block.up.forward)
    return model


@each_value
@both_forms
@pytest.mark.parametrize("when", ["before wrapping", "before every step", "twice at once"])
@on_ranks(2)
def test_an_instance_may_have_a_forward_of_its_own(when: str, use_orig_params: bool) -> None:
    scales = when == "before wrapping"
    pair = make_pair(
        lambda: _scale_outputs(Stack()) if scales else Stack(), use_orig_params=use_orig_params
    )
    for _ in range(2):
        for _ in range({"before wrapping": 0, "before every step": 1, "twice at once": 2}[when]):
            _scale_outputs(pair.plain)
            _scale_outputs(pair.model)
        forwards = [block.up.forward for block in pair.model.blocks]
        pair.step(one_backward)
        assert [block.up.forward for block in pair.model.blocks] == forwards
