"""Torch's own modules, and modes around them: autocast, torch.compile, parametrizations, RNNs,
attention, bf16."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, NUM_TOKENS, Block, Blocks, Stack, chain, encoder_layer
from tests.support.pairwise import each_value
from tests.support.parity import (
    Pair,
    assert_close,
    backward,
    both_forms,
    both_strategies,
    make_pair,
    one_backward,
    sequences,
    square,
    tokens,
    train,
)
from tests.support.ranks import on_ranks, run_ranks


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


class Recurrent(nn.Module):
    """An RNN also keeps its weights in a list."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = kind(DIM, DIM, num_layers=2, batch_first=True), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Attention(nn.Module):
    """nn.MultiheadAttention reads the weight of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.block = nn.MultiheadAttention(DIM, 2, batch_first=True), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.attention(x, x, x)[0])


def _trains(*args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of weight_norm
        train(*args, **kwargs)


@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sparse_gradients_of_an_embedding_are_reduced(
    num_ranks: int, use_orig_params: bool
) -> None:
    units = (nn.Embedding, Block)
    run_ranks(
        num_ranks, _trains, SparseEmbedding, units, batch=tokens, use_orig_params=use_orig_params
    )


def _under_autocast(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = square(m, x)
    return backward(loss)


@each_value
@both_forms
@both_strategies
def test_autocast_casts_the_weights_of_this_step(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    run_ranks(2, _trains, Stack, step=_under_autocast, num_steps=4, **options)


# -- torch.compile


@both_forms
@on_ranks(2, timeout=120)
def test_units_may_be_compiled(use_orig_params: bool) -> None:
    pair = make_pair(Stack, use_orig_params=use_orig_params)
    for block in pair.model.blocks:
        block.compile(backend="aot_eager")
    for _ in range(3):
        pair.step(one_backward)


@both_forms
@on_ranks(2, timeout=120)
def test_compiled_modules_may_be_units(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    plain = Blocks(compiled=False)
    torch.manual_seed(0)
    model = Blocks(compiled=True)
    policy = ModuleWrapPolicy({type(model.blocks[0])})
    pair = Pair(plain, FSDP(model, auto_wrap_policy=policy, use_orig_params=use_orig_params))
    assert len(FSDP.fsdp_modules(pair.model)) == 3
    for _ in range(3):
        pair.step(one_backward)


# -- modules of torch


@both_forms
def test_deepcopied_modules_are_units_of_their_own(use_orig_params: bool) -> None:
    run_ranks(2, _trains, Copies, use_orig_params=use_orig_params)


@each_value
@both_forms
@pytest.mark.parametrize("kind", ["old weight_norm", "weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights_train_as_unsharded(kind: str, use_orig_params: bool) -> None:
    build = partial(chain, partial(Parametrized, kind), partial(Parametrized, kind))
    run_ranks(2, _trains, build, (Parametrized,), use_orig_params=use_orig_params)


@each_value
@both_forms
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks_train_as_unsharded(
    kind: type[nn.RNNBase], use_orig_params: bool
) -> None:
    run_ranks(
        2,
        _trains,
        partial(Recurrent, kind),
        (kind,),
        batch=sequences,
        use_orig_params=use_orig_params,
    )


@both_forms
def test_an_attention_may_be_a_unit(use_orig_params: bool) -> None:
    run_ranks(
        2,
        _trains,
        Attention,
        (nn.MultiheadAttention, Block),
        batch=sequences,
        use_orig_params=use_orig_params,
    )


@both_forms
@on_ranks(2)
def test_the_fast_path_of_a_transformer_layer_sees_whole_weights(use_orig_params: bool) -> None:
    """In eval mode a layer reads its children's weights without calling them."""
    build = partial(chain, encoder_layer, encoder_layer)
    pair = train(
        build, (nn.TransformerEncoderLayer,), batch=sequences, use_orig_params=use_orig_params
    )
    x = sequences(torch.Generator().manual_seed(1))
    pair.plain.eval()
    pair.model.eval()
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with context():
            assert_close(pair.model(x), pair.plain(x), f"output with {context.__name__}")
    pair.step(one_backward, batch=sequences)


# -- a forward of an instance


def _scaled(forward: Any, x: Tensor) -> Tensor:
    return forward(x) * 1.5


def _scale_outputs(model: nn.Module) -> nn.Module:
    """Set a forward on the instance, around the one it had, as hooks of other libraries do."""
    for block in model.blocks:
        block.up.forward = partial(_scaled, block.up.forward)
    return model


def _forwards_of_instances(model: nn.Module) -> list[Any]:
    return [block.up.forward for block in model.blocks]


@each_value
@both_forms
@pytest.mark.parametrize("when", ["before wrapping", "before every step", "twice at once"])
@on_ranks(2)
def test_an_instance_may_have_a_forward_of_its_own(when: str, use_orig_params: bool) -> None:
    before = when == "before wrapping"
    pair = make_pair(
        lambda: _scale_outputs(Stack()) if before else Stack(), use_orig_params=use_orig_params
    )
    for _ in range(2):
        if not before:
            _scale_outputs(pair.plain)
            _scale_outputs(pair.model)
        if when == "twice at once":
            _scale_outputs(pair.plain)
            _scale_outputs(pair.model)
        forwards = _forwards_of_instances(pair.model)
        pair.step(one_backward)
        assert _forwards_of_instances(pair.model) == forwards
