"""Methods other than forward run with unsharded parameters if they are registered; otherwise an
error says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateError, register_fsdp_forward_method
from tests.support.cases import about
from tests.support.models import (
    DIM,
    NUM_TOKENS,
    Block,
    Inner,
    Outer,
    chain,
    encoder_layer,
    made_of,
)
from tests.support.pairwise import each_value
from tests.support.parity import (
    GRADIENT_MODES,
    Pair,
    assert_close,
    backward,
    both_forms,
    make_pair,
    sequences,
)
from tests.support.parity import tokens as some_tokens
from tests.support.ranks import on_ranks

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID, _ = ShardingStrategy
UNITS, LINEAR = (Outer, Inner), partial(nn.Linear, DIM, DIM)


class Decoder(nn.Module):
    """Generates like Hugging Face models: the inner module's method calls ``self`` in a loop."""

    stop = -1

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, DIM)
        self.layers = nn.ModuleList(Outer() for _ in range(3))
        self.extra = Inner()  # forward does not use it
        self.head = nn.Linear(DIM, NUM_TOKENS)

    def encode(self, tokens: Tensor) -> Tensor:
        """Encodes."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.cumsum(-2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))

    def sampled(self, tokens: Tensor, num_new: int) -> Iterator[Tensor]:
        for _ in range(num_new):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], -1)
            yield tokens

    def generate(self, tokens: Tensor, num_new: int) -> Tensor:
        """Raises in the round that ``stop`` names, after the call of a unit."""
        for number, more in enumerate(self.sampled(tokens, num_new)):
            if number == self.stop:
                self.layers[1](self.embed(tokens))
                raise ValueError("enough")
            tokens = more
        return tokens

    def other_order(self, tokens: Tensor, num_rounds: int) -> Tensor:
        """Units in another order, one twice, one unused by forward, one only at first."""
        x = self.embed(tokens)
        for number in range(num_rounds):
            for index in (2, 0, 2, 1) if number == 0 else (2, 0, 2):
                x = self.layers[index](x)
            x = x + self.extra(x)
        return self.head(x)

    def inner_units(self, tokens: Tensor, which: str) -> Tensor:
        """Call units inside units without the outer ones, as ``which`` says."""
        x = self.embed(tokens)
        for number in map(int, which):
            x = self.layers[number].first(x)
        return x

    def stages(self, tokens: Tensor, num_stages: int) -> Iterator[Tensor]:
        x = self.embed(tokens)
        if num_stages < 0:
            raise ValueError("a negative number")
        for layer in self.layers[:num_stages]:
            x = layer(x)
            yield x

    def scores(self, tokens: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        """Reads parameters without calling their modules."""
        hidden = F.embedding(tokens, self.embed.weight) + self.head.bias.sum()
        return {"scores": hidden @ self.head.weight.T * scale, "norm": self.head.weight.norm()}


def tokens(seed: int = 0) -> Tensor:
    return some_tokens(torch.Generator().manual_seed(seed))


def pair_of(*methods: str, synced: bool | None = None, **options: Any) -> Pair:
    """Return a pair whose sharded model has registered methods. Collective."""
    pair = make_pair(Decoder, UNITS, batch=some_tokens, **options)
    for method in methods:
        register_fsdp_forward_method(pair.model, method, synced=synced)
    return pair


# -- registered methods equal the unwrapped ones


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "synced", "use_orig_params"),
    [
        (2, NO_SHARD, None, False),
        (2, FULL_SHARD, False, False),
        (3, SHARD_GRAD_OP, True, True),
        (4, HYBRID, None, True),
    ],
)
@on_ranks("num_ranks")
def test_a_registered_method_returns_what_it_returned_unwrapped(
    num_ranks: int, strategy: ShardingStrategy, synced: bool | None, use_orig_params: bool
) -> None:
    """Each rank may make any number of calls in a synced method, as it is without gradients."""
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    options |= {"replicas": 2} if num_ranks == 4 else {}
    pair = pair_of("generate", "other_order", "inner_units", "scores", synced=synced, **options)
    plain, model, rank, own = pair.plain, pair.model, pair.rank, tokens(pair.rank)
    for mode, context in GRADIENT_MODES.items():
        model.train(mode == "grad")
        any_number = synced or (synced is None and mode != "grad")
        with about(mode), context():
            number = (2, 0, 4, 1)[rank] if any_number else 3
            assert torch.equal(model.generate(own, number), plain.generate(own, num_new=number))
            number = (1, 3, 0, 2)[rank] if any_number else 2
            assert_close(model.other_order(own, number), plain.other_order(own, number), "order")
            which = ("0212", "", "11", "2")[rank] if any_number else "0212"
            got, expected = (m.inner_units(own, which=which) for m in (model, plain))
            assert_close(got, expected, "inner_units")
            for key, value in model.scores(tokens=own, scale=0.5).items():
                assert_close(value, plain.scores(own, scale=0.5)[key], key)
            assert_close(model(own), plain(own), "forward")
        if mode != "grad":
            pair.assert_idle()
    pair.step(as_a_user=True)
    with torch.no_grad():
        number = 2 if synced is False else rank + 1
        assert torch.equal(model.generate(own, number), plain.generate(own, number))


# -- gradients


CALLER = made_of(  # calls methods of a nested wrapper inside the root's forward
    lambda m, x: m.head(m.body.encode(m.body.generate(x, 2))),
    body=Decoder,
    head=partial(nn.Linear, DIM, 2),
)


@each_value
@both_forms
@pytest.mark.parametrize("synced", [None, True, False])
@on_ranks(2)
def test_registered_method_of_a_nested_wrapper_works_inside_forward(
    synced: bool | None, use_orig_params: bool
) -> None:
    units = (Decoder, *UNITS)
    pair = make_pair(CALLER, units, batch=some_tokens, use_orig_params=use_orig_params)
    for name in ("generate", "encode"):
        register_fsdp_forward_method(pair.model.body, name, synced=synced)
    pair.compare_outputs()
    with torch.no_grad():
        own = tokens(pair.rank)  # the nested instance without its root
        assert torch.equal(pair.model.body.generate(own, 2), pair.plain.body.generate(own, 2))
    pair.assert_idle()
    pair.step()


# -- exceptions


@on_ranks(3)
def test_an_exception_in_a_synced_method_on_one_rank_leaves_the_others_running() -> None:
    pair = pair_of("generate", use_orig_params=True)
    plain, model, rank, own = pair.plain, pair.model, pair.rank, tokens(pair.rank)
    for stopping, stop in ((1, 0), (0, 1), (2, 2)):
        model.module.stop = stop if rank == stopping else -1
        with about((stopping, stop)), torch.no_grad():
            if rank == stopping:
                with pytest.raises(ValueError, match="enough"):
                    model.generate(own, 4)
            else:  # the method returns normally
                assert torch.equal(model.generate(own, 4), plain.generate(own, 4))
        model.module.stop = -1
        pair.assert_idle()
        with torch.no_grad():
            assert torch.equal(model.generate(own, rank), plain.generate(own, rank))
        pair.step(as_a_user=True)


# -- registration


@on_ranks(2)
def test_registered_generator_runs_every_step_unsharded() -> None:
    pair = pair_of("sampled", "stages")
    plain, model = pair.plain, pair.model
    with torch.no_grad():
        expected = list(plain.sampled(tokens(), 3))
        for got, wanted in zip(model.sampled(tokens(), 3), expected, strict=True):
            assert torch.equal(got, wanted)
            pair.assert_idle()  # between yields the caller may do anything with the model
            assert_close(model(got), plain(wanted), "forward between two steps")
        assert torch.equal(next(model.sampled(tokens(), 3)), expected[0])  # and is left early
        assert torch.equal(list(model.sampled(tokens(), 3))[-1], expected[-1])
        with pytest.raises(ValueError, match="negative"):
            list(model.stages(tokens(), -1))
    pair.assert_idle()
    pair.step(lambda m, x: backward(sum(y.pow(2).mean() for y in m.stages(x, 3))), zeros=True)
    pair.step(as_a_user=True)


# -- without registration: the error


REMEDIES = ("call the FullyShardedDataParallel itself", "summon_full_params")
REMEDIES += ("register_fsdp_forward_method",)


def assert_refuses(use: Callable[[], Any], parameter: str, unit: str) -> None:
    """Using a sharded weight raises an error with its name, the unit and the three remedies."""
    with pytest.raises(StateError) as caught:
        use()
    for word in (repr(parameter), unit, *REMEDIES):
        assert word in str(caught.value)


MODES: dict[str, Callable[[], Any]] = {
    **GRADIENT_MODES,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@both_forms
@on_ranks(2)
def test_sharded_parameters_raise_outside_forward(use_orig_params: bool) -> None:
    pair = pair_of(use_orig_params=use_orig_params)
    model, plain = pair.model, pair.plain
    inner, x = model.module, torch.randn(2, DIM)
    head, layer, first = inner.head, inner.layers[1], inner.layers[1].first
    uses: list[tuple[Callable[[], Any], str]] = [
        (lambda: inner(tokens()), "embed.weight"),
        (lambda: model.encode(tokens()), "embed.weight"),
        (lambda: model.generate(tokens(), 1), "embed.weight"),
        (lambda: head(x), "head.weight"),
        (lambda: layer.module.middle(x), "middle.weight"),
        (lambda: layer.module(x), "middle.weight"),
        (lambda: first.up(x), "up.weight"),
        (lambda: first.module(x), "norm.weight"),
    ]
    if not use_orig_params:  # otherwise it is the user's own parameter, which holds a part
        uses += [
            (lambda: F.linear(x, head.weight), "head.weight"),
            (lambda: head.bias + torch.randn(NUM_TOKENS), "head.bias"),
            (lambda: torch.randn(NUM_TOKENS) + head.bias, "head.bias"),
            (lambda: head.weight[0], "head.weight"),
            (lambda: head.weight.data, "head.weight"),
            (lambda: head.weight.copy_(torch.zeros(NUM_TOKENS, DIM)), "head.weight"),
            (lambda: nn.init.zeros_(head.weight), "head.weight"),
            (lambda: list(head.weight), "head.weight"),
            (lambda: len(head.weight), "head.weight"),
            (lambda: float(head.bias), "head.bias"),
            (lambda: torch.stack([head.bias]), "head.bias"),
            (lambda: inner.scores(tokens()), "embed.weight"),
        ]
    units = dict.fromkeys(("embed", "head"), "the root unit (a Decoder)")
    units |= {"middle": "unit 'layers.1'", **dict.fromkeys(("up", "norm"), "'layers.1.first'")}
    for training in (True, False):
        model.train(training)
        for name, context in MODES.items():
            with about((training, name)), context():
                for number, (use, parameter) in enumerate(uses):
                    with about(number):
                        assert_refuses(use, parameter, units[parameter.split(".")[0]])
                if name != "autocast":
                    assert_close(model(tokens()), plain(tokens()), "after the errors")
    model.train()
    pair.step(as_a_user=True)


# How a forward uses another unit, and the parameter that is refused.
USES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "call": (lambda unit, x: unit(x), ""),
    "weight": (lambda unit, x: F.linear(x, unit.up.weight), "up.weight"),
    "bias": (lambda unit, x: x.sum() + unit.down.bias, "down.bias"),
    "module": (lambda unit, x: unit.up(x), "up.weight"),
    "after": (lambda unit, x: unit.up(unit(x)), "up.weight"),
}


READS = made_of(
    lambda m, x: USES[m.use][0](m.inner, m.outer(x)), inner=Block, outer=LINEAR, use=lambda: "call"
)


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@on_ranks(2)
def test_parameters_of_another_unit_raise_inside_forward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    pair = make_pair(READS, use_orig_params=use_orig_params, sharding_strategy=strategy)
    x = torch.randn(DIM, DIM)
    for use, (_, parameter) in list(USES.items())[1:]:
        pair.model.module.use = use
        for mode, context in GRADIENT_MODES.items():
            with about((use, mode)), context():
                assert_refuses(partial(pair.model, x), parameter, "unit 'inner'")
                # its unit may be whole for backward, but is not shown
                if mode != "grad" and use != "after":
                    pair.assert_idle()
        pair.model.module.use = "call"
        assert_close(pair.model(x), pair.plain(x), "after the error")
        pair.step()


# -- modules of torch that read parameters of others


ENCODER = partial(nn.TransformerEncoder, encoder_layer(), 2)
LSTM, GRU = (
    partial(chain, LINEAR, partial(kind, DIM, DIM, num_layers=2, batch_first=True))
    for kind in (nn.LSTM, nn.GRU)
)
MODULES: list[Any] = [
    (encoder_layer, (nn.LayerNorm, nn.MultiheadAttention)),
    (ENCODER, (nn.TransformerEncoderLayer, nn.MultiheadAttention, nn.Linear)),
    (ENCODER, (nn.Linear, nn.LayerNorm)),
    (LSTM, (nn.LSTM,)),
    (GRU, (nn.GRU, nn.Linear)),
    (partial(nn.MultiheadAttention, DIM, 2, batch_first=True), ()),
]


def _first_output(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    is_attention = isinstance(getattr(model, "module", model), nn.MultiheadAttention)
    output = model(*[x] * (3 if is_attention else 1), **options)
    return output[0] if isinstance(output, tuple) else output


@each_value
@both_forms
@pytest.mark.parametrize("number", range(len(MODULES)))
@on_ranks(2)
def test_torch_modules_that_read_parameters_of_others_equal_unsharded(
    number: int, use_orig_params: bool
) -> None:
    build, units = MODULES[number]
    pair = make_pair(build, units, batch=sequences, use_orig_params=use_orig_params)
    plain, model = pair.plain, pair.model
    assert (len(FSDP.fsdp_modules(model)) > 1) is bool(units)
    x = sequences(torch.Generator().manual_seed(dist.get_rank()))
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    inputs: list[dict[str, Tensor]] = [{}]
    if isinstance(plain, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        inputs.append({"src_key_padding_mask": mask})
    for training in (True, False):
        model.train(training)
        plain.train(training)
        for mode, context in GRADIENT_MODES.items():
            for kwargs in inputs:
                with about((training, mode, list(kwargs))), context():
                    # masked positions are undefined
                    keep = ~mask if kwargs else torch.ones_like(mask)
                    got, wanted = (_first_output(m, x, **kwargs)[keep] for m in (model, plain))
                    assert_close(got, wanted, "output")
                if mode != "grad":
                    pair.assert_idle()
    if units == (nn.LSTM,):
        assert_refuses(lambda: model[1].module(x), "weight_ih_l0", "unit '1'")
    if not units:
        assert_refuses(lambda: model.module(x, x, x), "in_proj_weight", "the root unit")
        assert_refuses(lambda: model.module.out_proj(x), "out_proj.weight", "the root unit")
    pair.step(lambda m, x: backward(_first_output(m, x).pow(2).mean()))
