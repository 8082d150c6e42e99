"""Methods other than forward run with unsharded parameters if they are registered; otherwise an
error says what to do."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import (
    MixedPrecision,
    ShardingStrategy,
    StateError,
    UsageError,
    register_fsdp_forward_method,
)
from fsdp_compat._comm.transport import Kind
from fsdp_compat._engine.unit import Residency
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.pairwise import each_value
from tests.support.parity import assert_close, both_forms, flat_form, original_form
from tests.support.ranks import run_ranks
from tests.support.sampling import sample

DIM, NUM_TOKENS = 8, 13

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
HYBRID, HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Layer(nn.Module):
    """A unit inside a unit, with a parameter between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.mlp(self.norm(x))


class Decoder(nn.Module):
    """Generates like Hugging Face models: the inner module's method calls ``self`` in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.extra = Mlp()  # forward does not use it
        self.head = nn.Linear(DIM, NUM_TOKENS)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.cumsum(-2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))

    def generate(self, tokens: Tensor, num_new: int) -> Tensor:
        for _ in range(num_new):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], -1)
        return tokens

    def other_order(self, tokens: Tensor, num_rounds: int) -> Tensor:
        """Units from the last to the first, one twice, one that forward does not use, one in the
        first round only."""
        x = self.embed(tokens)
        for number in range(num_rounds):
            for layer in (
                self.layers[2],
                self.layers[0],
                self.layers[2],
                *self.layers[1 : 2 - min(number, 1)],
            ):
                x = layer(x)
            x = x + self.extra(x)
        return self.head(x)

    def inner_units(self, tokens: Tensor, which: str) -> Tensor:
        """Call units inside units without the outer ones, as ``which`` says."""
        x = self.embed(tokens)
        for number in map(int, which):
            x = self.layers[number].mlp(x)
        return x

    def sampled(self, tokens: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], -1)
            yield tokens

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

    @property
    def broken(self) -> Tensor:
        raise AttributeError("nothing of this name")


UNITS = (Layer, Mlp)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def tokens(seed: int = 0, num: int = 2) -> Tensor:
    return torch.randint(NUM_TOKENS, (num, 3), generator=torch.Generator().manual_seed(seed))


def wrapped(*methods: str, synced: bool | None = None, **options: Any) -> FSDP:
    model = FSDP(decoder(), auto_wrap_policy=ModuleWrapPolicy(set(UNITS)), **options)
    for method in methods:
        register_fsdp_forward_method(model, method, synced=synced)
    return model


def assert_idle(model: FSDP, mode: str = "no_grad") -> None:
    """Assert that the call has left nothing behind. After a forward with gradients, backward is
    expected."""
    if mode == "grad":
        return
    for unit in model._runtime.units:
        assert (
            unit.residency is Residency.SHARDED
            and not unit.view.shows_unsharded
            and not unit.running
        ), unit.label
        assert all(group.resident_nbytes == 0 for group in unit.groups), unit.label
        for group in unit.groups:
            assert not any(
                comm.ranks > 1 and comm.connections.sent for comm in (group.shard, group.replica)
            ), f"{unit.label} sends"


def assert_trains(model: FSDP, plain: nn.Module, num_steps: int = 1) -> None:
    """Train both for some steps from the same parameters. Collective."""
    optims = [torch.optim.SGD(module.parameters(), 0.1) for module in (model, plain)]
    for seed in range(num_steps):
        x = tokens(seed)
        for module, optim in zip((model, plain), optims, strict=True):
            module(x).pow(2).mean().backward()
            optim.step()
            optim.zero_grad()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert_close(state[name], value, name)
    assert_idle(model)


GRADIENTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


# -- registered methods equal the unwrapped ones


def _generates(use_orig_params: bool) -> None:
    rank = dist.get_rank()
    cases: list[dict[str, Any]] = [{"sharding_strategy": FULL_SHARD}]
    if dist.get_world_size() == 2:
        cases += [{"sharding_strategy": strategy} for strategy in (SHARD_GRAD_OP, NO_SHARD)]
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        cases = [
            {"sharding_strategy": strategy, "device_mesh": mesh}
            for strategy in (HYBRID, HYBRID_ZERO2)
        ]
    for options in cases:
        plain = decoder()
        model = wrapped(
            "generate",
            "other_order",
            "inner_units",
            "scores",
            use_orig_params=use_orig_params,
            **options,
        )
        for name, context in GRADIENTS.items():
            model.train(name == "grad")
            with about((options, name)), context():
                # With gradients all ranks make the same calls; without, each may make any number.
                number = 3 if name == "grad" else (2, 0, 4, 1)[rank]
                own = tokens(rank)
                assert torch.equal(model.generate(own, number), plain.generate(own, num_new=number))
                number = 2 if name == "grad" else (1, 3, 0, 2)[rank]
                assert_close(
                    model.other_order(own, number), plain.other_order(own, number), "other_order"
                )
                which = "0212" if name == "grad" else ("0212", "", "11", "2")[rank]
                assert_close(
                    model.inner_units(own, which=which),
                    plain.inner_units(own, which),
                    "inner_units",
                )
                for key, value in model.scores(tokens=own, scale=0.5).items():
                    assert_close(value, plain.scores(own, scale=0.5)[key], key)
                assert_close(model(own), plain(own), "forward")
                assert_idle(model, name)
        assert_trains(model, plain)
        with torch.no_grad():
            assert torch.equal(
                model.generate(tokens(rank), rank + 1), plain.generate(tokens(rank), rank + 1)
            )


@pytest.mark.parametrize(
    ("num_ranks", "use_orig_params"), sample([(1, True), (2, False), (3, False), (4, True)], 1, 3)
)
def test_a_registered_method_returns_what_it_returned_unwrapped(
    num_ranks: int, use_orig_params: bool
) -> None:
    run_ranks(num_ranks, _generates, use_orig_params, timeout=120)


def _generates_as_asked(use_orig_params: bool) -> None:
    rank, plain = dist.get_rank(), decoder()
    for synced in (True, False, None):
        model = wrapped("generate", "inner_units", synced=synced, use_orig_params=use_orig_params)
        for name, context in GRADIENTS.items():
            serves = synced or (synced is None and name != "grad")
            with about((synced, name)), context():
                number = rank * 2 if serves else 2
                assert torch.equal(
                    model.generate(tokens(rank), number), plain.generate(tokens(rank), number)
                )
                which = ("012", "", "2")[rank] if serves else "012"
                assert_close(
                    model.inner_units(tokens(rank), which),
                    plain.inner_units(tokens(rank), which),
                    "inner_units",
                )
                assert_idle(model, name)
        assert_trains(model, decoder())


@flat_form
def test_synced_method_allows_different_numbers_of_calls(
    use_orig_params: bool,
) -> None:
    run_ranks(3, _generates_as_asked, use_orig_params)


def _counts_gathers(synced: bool) -> list[int]:
    """The all-gathers of a method that calls forward once, and of one that calls it four times."""
    model = wrapped("generate", synced=synced)
    comms = {id(group.shard): group.shard for group in model._runtime.groups}.values()
    counts = []
    for num_calls in (1, 4):
        for comm in comms:
            comm.traffic.clear()
        with torch.no_grad():
            model.generate(tokens(), num_calls)
        counts.append(sum(comm.traffic.counts[Kind.GATHER] for comm in comms))
    return counts


def test_call_inside_a_synced_method_gathers_each_unit_once() -> None:
    # The root stays whole for all calls. Around it are three layers with an Mlp each, and one Mlp
    # that forward does not use.
    assert run_ranks(2, _counts_gathers, False) == [[1 + 6, 1 + 4 * 6]] * 2
    assert run_ranks(2, _counts_gathers, True) == [[1 + 7, 1 + 4 * 7]] * 2


# -- gradients


def _trains_through_methods(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    rank, ranks, plain = dist.get_rank(), dist.get_world_size(), decoder()
    model = wrapped(
        "encode",
        "other_order",
        "scores",
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
    )
    optims = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in (model, plain)]
    steps: list[Callable[[Any, Tensor], Tensor]] = [
        lambda m, x: m.encode(x).pow(2).mean(),
        lambda m, x: m.other_order(x, 2).pow(2).mean(),
        lambda m, x: m.scores(x)["scores"].pow(2).mean(),
        lambda m, x: m.encode(x).pow(2).mean() + m(x).pow(2).mean(),
        lambda m, x: m(x).pow(2).mean() * m.encode(x).mean(),
    ]
    for number, step in enumerate(steps):
        batches = [tokens(10 * number + r) for r in range(ranks)]
        losses = [step(plain, x) for x in batches]
        (sum(losses) / ranks).backward()
        loss = step(model, batches[rank])
        loss.backward()
        assert_close(loss, losses[rank], f"loss {number}")
        assert_idle(model)
        expected = dict(plain.named_parameters())
        with FSDP.summon_full_params(model, with_grads=True):
            for name, parameter in model.named_parameters():
                grad, wanted = parameter.grad, expected[name].grad
                if grad is not None or wanted is not None:
                    zeros = torch.zeros_like(parameter)
                    assert_close(
                        zeros if grad is None else grad,
                        zeros if wanted is None else wanted,
                        f"step {number}: {name}",
                    )
        for p in plain.parameters():  # momentum depends on it; a unit has gradients as a whole
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for optim in optims:
            optim.step()
            optim.zero_grad()


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
def test_gradients_through_a_registered_method_equal_unsharded(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    run_ranks(2, _trains_through_methods, strategy, use_orig_params)


def _trains_synced(use_orig_params: bool) -> None:
    plain = decoder()
    model = wrapped("encode", synced=True, use_orig_params=use_orig_params)
    for _ in range(2):
        plain.encode(tokens()).pow(2).mean().backward()
        model.encode(tokens()).pow(2).mean().backward()
    expected = dict(plain.named_parameters())
    with FSDP.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            if expected[name].grad is not None:
                assert_close(parameter.grad, expected[name].grad, name)
    assert_idle(model)


@both_forms
def test_synced_method_has_gradients_if_ranks_make_the_same_calls(
    use_orig_params: bool,
) -> None:
    run_ranks(2, _trains_synced, use_orig_params)


class Caller(nn.Module):
    """Calls a method of a nested wrapper inside the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Decoder(), nn.Linear(DIM, 2)

    def forward(self, x: Tensor, num_new: int = 2) -> Tensor:
        x = self.body.generate(x, num_new)
        return self.head(self.body.encode(x))


def _calls_a_method_in_forward(synced: bool | None, use_orig_params: bool) -> None:
    torch.manual_seed(0)
    plain = Caller()
    torch.manual_seed(0)
    model = FSDP(
        Caller(),
        auto_wrap_policy=ModuleWrapPolicy({Decoder, *UNITS}),
        use_orig_params=use_orig_params,
    )
    for name in ("generate", "encode"):
        register_fsdp_forward_method(model.body, name, synced=synced)
    with torch.no_grad():
        assert_close(model(tokens(dist.get_rank())), plain(tokens(dist.get_rank())), "evaluation")
        own = tokens(dist.get_rank())
        assert torch.equal(
            model.body.generate(own, 2), plain.body.generate(own, 2)
        )  # the nested instance without its root
    assert_idle(model)
    for module in (model, plain):
        module(tokens()).pow(2).mean().backward()
    expected = dict(plain.named_parameters())
    with FSDP.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            if expected[name].grad is not None:
                assert_close(parameter.grad, expected[name].grad, name)
    assert_idle(model)


@each_value
@both_forms
@pytest.mark.parametrize("synced", [None, True, False])
def test_registered_method_of_a_nested_wrapper_works_inside_forward(
    synced: bool | None, use_orig_params: bool
) -> None:
    run_ranks(2, _calls_a_method_in_forward, synced, use_orig_params)


# -- exceptions


class Stops(Decoder):
    """Raises in the call and the layer that ``stop`` names."""

    stop: int = -1

    def generate(self, tokens: Tensor, num_new: int) -> Tensor:
        for number in range(num_new):
            if number == self.stop:
                self.layers[1](self.embed(tokens))
                raise ValueError("enough")
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], -1)
        return tokens


def _raises_on_one_rank(use_orig_params: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Stops()
    torch.manual_seed(0)
    model = FSDP(
        Stops(), auto_wrap_policy=ModuleWrapPolicy(set(UNITS)), use_orig_params=use_orig_params
    )
    register_fsdp_forward_method(model, "generate")
    for stopping, stop in ((1, 0), (0, 1), (2, 2)):
        model.module.stop = stop if rank == stopping else -1
        own = tokens(rank)
        with about((stopping, stop)), torch.no_grad():
            if rank == stopping:
                with pytest.raises(ValueError, match="enough"):
                    model.generate(own, 4)
            else:  # the method returns normally
                assert torch.equal(model.generate(own, 4), plain.generate(own, 4))
        model.module.stop = -1
        assert_idle(model)
        with torch.no_grad():
            assert torch.equal(model.generate(own, rank), plain.generate(own, rank))
        assert_trains(model, plain)


@original_form
def test_an_exception_in_a_synced_method_on_one_rank_leaves_the_others_running(
    use_orig_params: bool,
) -> None:
    run_ranks(3, _raises_on_one_rank, use_orig_params)


# -- registration


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def encode(self, x: Tensor) -> Tensor:
        """Encodes."""
        return self.linear(x)

    @staticmethod
    def constant(x: Tensor) -> Tensor:
        return x + 1


def _registers() -> None:
    module = Named()
    register_fsdp_forward_method(module, "encode")  # not wrapped: no effect
    register_fsdp_forward_method(module, "no such method")
    assert "encode" not in vars(module)
    model = FSDP(module)
    for name in ("no_such_method", "linear_", "forward", "state_dict", "parameters", "no_sync"):
        with about(name), pytest.raises(UsageError, match=re.escape(repr(name))):
            register_fsdp_forward_method(model, name)
    for bad in ((model, 3), (3, "encode")):
        with about(bad), pytest.raises(UsageError, match="needs a module and a method name"):
            register_fsdp_forward_method(*bad)
    with pytest.raises(UsageError, match="'yes'"):
        register_fsdp_forward_method(model, "encode", synced="yes")
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "encode", synced=False)  # the last one counts
    register_fsdp_forward_method(model, "constant")
    x = torch.ones(2, DIM)
    assert torch.equal(model.encode(x), model(x))
    assert torch.equal(model.constant(x), x + 1)
    assert "encode" not in vars(module), "the user's own module is as it was"
    assert str(inspect.signature(model.encode)) == "(x: 'Tensor') -> 'Tensor'"


def test_invalid_registration_raises_and_plain_modules_are_unchanged() -> None:
    run_ranks(2, _registers)


def _forwards_an_instance_attribute() -> None:
    """PEFT and other libraries set functions on module instances."""
    plain, inner = decoder(), decoder()
    for module in (plain, inner):
        module.first = lambda x, module=module: module.head(module.embed(x))
    model = FSDP(inner, auto_wrap_policy=ModuleWrapPolicy(set(UNITS)))
    register_fsdp_forward_method(model, "first")
    assert_close(model.first(tokens()), plain.first(tokens()), "a function on the instance")
    with pytest.raises(AttributeError):
        _ = model.broken


def test_function_set_on_the_module_instance_can_be_registered() -> None:
    run_ranks(2, _forwards_an_instance_attribute)


def _yields(use_orig_params: bool) -> None:
    plain = decoder()
    model = wrapped("sampled", "stages", use_orig_params=use_orig_params)
    with torch.no_grad():
        expected = list(plain.sampled(tokens()))
        for got, wanted in zip(model.sampled(tokens()), expected, strict=True):
            assert torch.equal(got, wanted)
            assert_idle(model)  # between yields the caller may do anything with the model
            assert_close(model(got), plain(wanted), "forward between two steps")
        for got in model.sampled(tokens()):  # left early
            assert torch.equal(got, expected[0])
            break
        assert torch.equal(list(model.sampled(tokens()))[-1], expected[-1])
        with pytest.raises(ValueError, match="negative"):
            list(model.stages(tokens(), -1))
    assert_idle(model)
    for module in (model, plain):
        sum(x.pow(2).mean() for x in module.stages(tokens(), 3)).backward()
    grads = {name: p.grad for name, p in plain.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            if grads[name] is not None:
                assert_close(parameter.grad, grads[name], name)
    model.zero_grad()
    plain.zero_grad()
    assert_trains(model, plain)


@flat_form
def test_registered_generator_runs_every_step_unsharded(
    use_orig_params: bool,
) -> None:
    run_ranks(2, _yields, use_orig_params)


def _casts(use_orig_params: bool) -> None:
    plain = decoder()
    model = wrapped(
        "encode",
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    got = model.encode(tokens())
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, copy.deepcopy(plain).bfloat16().encode(tokens()))


@both_forms
def test_a_registered_method_computes_in_the_dtype_of_forward(use_orig_params: bool) -> None:
    run_ranks(2, _casts, use_orig_params)


# -- without registration: the error


class Reads(nn.Module):
    """Its forward reads parameters of another unit through a function."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.outer, self.what = Mlp(), nn.Linear(DIM, DIM), what

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(x)
        if self.what == "weight":
            return F.linear(x, self.inner.up.weight)
        if self.what == "bias":
            return x.sum() + self.inner.down.bias
        if self.what == "scale":
            return self.inner.down.bias * x
        if self.what == "module":
            return self.inner.up(x)
        if self.what == "after":
            x = self.inner(x)
            return self.inner.up(x)
        return self.inner(x)


def assert_refuses(use: Callable[[], Any], parameter: str, unit: str) -> None:
    """Using a sharded weight raises an error with its name, the unit and the three remedies."""
    with pytest.raises(StateError) as caught:
        use()
    text = str(caught.value)
    assert f"{parameter!r}" in text, text
    assert unit in text, text
    for way in (
        "call the FullyShardedDataParallel itself",
        "register_fsdp_forward_method",
        "summon_full_params",
    ):
        assert way in text, text


MODES: dict[str, Callable[[], Any]] = {
    **GRADIENTS,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def _uses_sharded_parameters(use_orig_params: bool) -> None:
    model, plain = wrapped(use_orig_params=use_orig_params), decoder()
    inner, x = model.module, torch.randn(2, DIM)
    root, layer = "the root unit (a Decoder)", "unit 'layers.1'"
    for training in (True, False):
        model.train(training)
        for name, context in MODES.items():
            with about((training, name)), context():
                uses: list[tuple[Callable[[], Any], str, str]] = [
                    (lambda: inner(tokens()), "embed.weight", root),
                    (lambda: model.encode(tokens()), "embed.weight", root),
                    (lambda: model.generate(tokens(), 1), "embed.weight", root),
                    (lambda: inner.head(x), "head.weight", root),
                    (lambda: inner.layers[1].module.norm(x), "norm.weight", layer),
                    (
                        lambda: inner.layers[1].module(x),
                        "scale" if use_orig_params else "norm.weight",
                        layer,
                    ),
                    (lambda: inner.layers[1].mlp.up(x), "up.weight", "unit 'layers.1.mlp'"),
                    (lambda: inner.layers[1].mlp.module(x), "up.weight", "unit 'layers.1.mlp'"),
                ]
                if (
                    not use_orig_params
                ):  # otherwise it is the user's own parameter, which holds a part
                    uses += [
                        (lambda: F.linear(x, inner.head.weight), "head.weight", root),
                        (lambda: inner.head.bias + torch.randn(NUM_TOKENS), "head.bias", root),
                        (lambda: torch.randn(NUM_TOKENS) + inner.head.bias, "head.bias", root),
                        (lambda: x * inner.layers[1].scale, "scale", layer),
                        (lambda: inner.head.bias.sum(), "head.bias", root),
                        (lambda: inner.head.weight[0], "head.weight", root),
                        (
                            lambda: x @ inner.layers[1].mlp.up.weight.T,
                            "up.weight",
                            "unit 'layers.1.mlp'",
                        ),
                        (lambda: torch.cat([x, inner.head.weight]), "head.weight", root),
                        (lambda: inner.head.weight.data, "head.weight", root),
                        (lambda: inner.head.weight.grad, "head.weight", root),
                        (lambda: inner.head.weight.requires_grad, "head.weight", root),
                        (
                            lambda: inner.head.weight.copy_(torch.zeros(NUM_TOKENS, DIM)),
                            "head.weight",
                            root,
                        ),
                        (lambda: nn.init.zeros_(inner.head.weight), "head.weight", root),
                        (lambda: list(inner.head.weight), "head.weight", root),
                        (lambda: len(inner.head.weight), "head.weight", root),
                        (lambda: float(inner.layers[1].scale), "scale", layer),
                        (lambda: torch.stack([inner.head.bias]), "head.bias", root),
                        (lambda: torch.linalg.norm(inner.head.weight), "head.weight", root),
                        (lambda: inner.scores(tokens()), "embed.weight", root),
                    ]
                for number, (use, parameter, unit) in enumerate(uses):
                    with about(number):
                        assert_refuses(use, parameter, unit)
                if name != "autocast":
                    assert_close(model(tokens()), plain(tokens()), "after the errors")
    model.train()
    assert_trains(model, plain)


@both_forms
def test_sharded_parameters_raise_outside_forward(use_orig_params: bool) -> None:
    run_ranks(2, _uses_sharded_parameters, use_orig_params)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 6.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _calls_with_parts_that_fit() -> None:
    """One rank holds one element of the scale, and each rank one row of the weight."""
    for build, parameter in (
        (Scale, "scale"),
        (partial(nn.Linear, DIM, 2, bias=False), "weight"),
    ):
        torch.manual_seed(0)
        plain = build()
        model = FSDP(copy.deepcopy(plain), use_orig_params=True)
        x = torch.randn(3, 5 if parameter == "scale" else DIM)
        part = getattr(model.module, parameter)
        for _ in range(2):
            assert_refuses(lambda: model.module(x), parameter, "the root unit")  # noqa: B023
            assert getattr(model.module, parameter) is part, "it may be read between steps"
            assert_close(model(x), plain(x), "after the error")
            with FSDP.summon_full_params(model):
                assert_close(model.module(x), plain(x), "while parameters are whole")


def test_calls_that_would_compute_with_parts_are_refused() -> None:
    run_ranks(2, _calls_with_parts_that_fit)


def _reads_other_units(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    x = torch.randn(DIM, DIM)
    for what in ("weight", "bias", "scale", "module", "after"):
        torch.manual_seed(0)
        plain = Reads("nothing")
        torch.manual_seed(0)
        options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
        model = FSDP(Reads(what), auto_wrap_policy=ModuleWrapPolicy({Mlp}), **options)
        for name, context in GRADIENTS.items():
            with about((what, name)), context():
                parameter = "down.bias" if what in ("bias", "scale") else "up.weight"
                assert_refuses(partial(model, x), parameter, "unit 'inner'")
                assert_idle(
                    model, "grad" if what == "after" else name
                )  # its unit may be whole for backward, but is not shown
        model.module.what = "nothing"
        assert_close(model(x), plain(x), "after the error")
        for module in (model, plain):
            module(x).pow(2).mean().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for (name, got), wanted in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                assert_close(got.grad, wanted.grad, name)


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
def test_parameters_of_another_unit_raise_inside_forward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    run_ranks(2, _reads_other_units, strategy, use_orig_params)


def _reads_parts_outside(use_orig_params: bool = True) -> None:
    """With use_orig_params=True parameters are the user's own objects between steps, and optimizers
    and logging read and write them."""
    model, plain = wrapped(use_orig_params=True), decoder()
    weight = model.module.head.weight
    assert isinstance(weight, nn.Parameter)
    total = weight.detach().sum()
    dist.all_reduce(total)
    assert_close(total, plain.head.weight.sum(), "the sum of the parts")
    with torch.no_grad():
        weight.mul_(2.0)
        plain.head.weight.mul_(2.0)
    with pytest.raises(TypeError):
        model("no tokens")  # an error inside forward has no lasting effect
    assert model.module.head.weight is weight
    assert_trains(model, plain)


def test_use_orig_params_allows_reads_and_writes_between_steps() -> None:
    run_ranks(2, _reads_parts_outside)


def _asks_the_placeholder() -> None:
    model = wrapped()
    weight, bias = model.module.head.weight, model.module.layers[0].mlp.up.bias
    assert (weight.shape, weight.dtype, weight.device) == (
        (NUM_TOKENS, DIM),
        torch.float32,
        torch.device("cpu"),
    )
    assert (weight.ndim, weight.dim(), weight.numel(), weight.size(0), bias.shape[0]) == (
        2,
        2,
        NUM_TOKENS * DIM,
        NUM_TOKENS,
        12,
    )
    assert weight.is_floating_point()
    assert hasattr(model.module.head, "weight")
    assert not hasattr(model.module.head, "wait")
    assert not hasattr(weight, "no_such_thing")
    assert getattr(weight, "ds_id", None) is None  # as trainers ask
    assert "head" in repr(model) and "(13, 8)" in repr(weight).replace("[", "(").replace("]", ")")
    assert not isinstance(weight, Tensor)
    assert weight is not None
    assert str(inspect.signature(model.module.forward)) == "(tokens: 'Tensor') -> 'Tensor'"
    assert list(inspect.signature(model.module.head.forward).parameters) == ["input"]
    assert list(inspect.signature(type(model.module).forward).parameters) == ["self", "tokens"]
    assert [name for name, _ in model.module.head.named_parameters()] == []
    with FSDP.summon_full_params(model):
        assert isinstance(model.module.head.weight, nn.Parameter)
        assert_close(
            model.module(tokens()),
            decoder()(tokens()),
            "the inner module while parameters are whole",
        )
    with pytest.raises(StateError):
        copy.copy(weight).sum()
    assert not hasattr(weight, "__array_interface__")  # not mistaken for an array


def _copies_inner_modules() -> None:
    model = wrapped()
    head = copy.deepcopy(model.module.head)
    for use in (lambda: head(torch.zeros(2, DIM)), lambda: head.weight * 2):
        with pytest.raises(StateError, match=r"'head\.weight' was used while its unit is sharded"):
            use()
    whole = wrapped(use_orig_params=True).module.head
    with pytest.raises(StateError, match="was used while its unit is sharded"):
        copy.deepcopy(whole)(torch.zeros(2, DIM))


def test_copy_of_an_inner_module_has_sharded_placeholders() -> None:
    run_ranks(2, _copies_inner_modules)


def test_placeholder_has_shape_dtype_and_device() -> None:
    run_ranks(2, _asks_the_placeholder)


def _keeps_signatures(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    for _ in range(2):
        for module, names in (
            (model.module, ["tokens"]),
            (model.module.head, ["input"]),
            (model.module.layers[0].mlp, None),
        ):
            inner = module.module if isinstance(module, FSDP) else module
            assert list(inspect.signature(inner.forward).parameters) == (names or ["x"])
        model(tokens()).sum().backward()


@both_forms
def test_forward_signatures_of_inner_modules_are_kept(use_orig_params: bool) -> None:
    run_ranks(2, _keeps_signatures, use_orig_params)


# -- modules of torch that read parameters of others


def _encodes(
    use_orig_params: bool, units: tuple[type[nn.Module], ...], build: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = FSDP(
        build(), auto_wrap_policy=ModuleWrapPolicy(set(units)), use_orig_params=use_orig_params
    )
    assert len(FSDP.fsdp_modules(model)) > 1
    x = torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    inputs = (
        [{}, {"src_key_padding_mask": mask}]
        if isinstance(plain, (nn.TransformerEncoder, nn.TransformerEncoderLayer))
        else [{}]
    )
    for training in (True, False):
        model.train(training)
        plain.train(training)
        for name, context in GRADIENTS.items():
            for kwargs in inputs:
                with about((training, name, list(kwargs))), context():
                    got, wanted = model(x, **kwargs), plain(x, **kwargs)
                    got, wanted = (v[0] if isinstance(v, tuple) else v for v in (got, wanted))
                    keep = (
                        ~mask if kwargs else torch.ones_like(mask)
                    )  # masked positions are undefined
                    assert_close(got[keep], wanted[keep], "output")
                    assert_idle(model, name)
    for module in (model, plain):
        output = module(x)
        (output[0] if isinstance(output, tuple) else output).pow(2).mean().backward()
    grads = [p.grad for p in plain.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, got), wanted in zip(model.named_parameters(), grads, strict=True):
            assert_close(got.grad, wanted, f"gradient of {name}")


def _layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)


def _encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(_layer(), 2)


def _rnn(kind: type[nn.RNNBase]) -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), kind(DIM, DIM, num_layers=2, batch_first=True))


TRANSFORMERS: list[Any] = [
    (_layer, (nn.Linear,)),
    (_layer, (nn.LayerNorm, nn.MultiheadAttention)),
    (_encoder, (nn.TransformerEncoderLayer,)),
    (_encoder, (nn.TransformerEncoderLayer, nn.MultiheadAttention, nn.Linear)),
    (_encoder, (nn.Linear, nn.LayerNorm)),
    (partial(_rnn, nn.LSTM), (nn.LSTM,)),
    (partial(_rnn, nn.GRU), (nn.GRU, nn.Linear)),
]


@each_value
@both_forms
@pytest.mark.parametrize("number", range(len(TRANSFORMERS)))
def test_torch_modules_that_read_parameters_of_others_equal_unsharded(
    number: int, use_orig_params: bool
) -> None:
    build, units = TRANSFORMERS[number]
    run_ranks(2, _encodes, use_orig_params, units, build)


def _attends(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(DIM, 2, batch_first=True)
    torch.manual_seed(0)
    model = FSDP(nn.MultiheadAttention(DIM, 2, batch_first=True), use_orig_params=use_orig_params)
    x = torch.randn(3, 5, DIM)
    for training in (True, False):
        model.train(training)
        plain.train(training)
        for context in GRADIENTS.values():
            with context():
                for got, wanted in zip(model(x, x, x), plain(x, x, x), strict=True):
                    assert_close(got, wanted, "attention")
    assert_refuses(lambda: model.module(x, x, x), "in_proj_weight", "the root unit")
    assert_refuses(lambda: model.module.out_proj(x), "out_proj.weight", "the root unit")
    assert_close(model(x, x, x)[0], plain(x, x, x)[0], "after the error")


@both_forms
def test_attention_alone_can_be_the_model(use_orig_params: bool) -> None:
    run_ranks(2, _attends, use_orig_params)


def _calls_an_rnn_inside(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    model = FSDP(
        _rnn(nn.LSTM), auto_wrap_policy=ModuleWrapPolicy({nn.LSTM}), use_orig_params=use_orig_params
    )
    torch.manual_seed(0)
    plain, x = _rnn(nn.LSTM), torch.randn(3, 5, DIM)
    for _ in range(2):
        assert_refuses(lambda: model[1].module(x), "weight_ih_l0", "unit '1'")
        assert_close(model(x)[0], plain(x)[0], "after the error")


@both_forms
def test_rnn_inside_a_unit_raises_if_called_alone(use_orig_params: bool) -> None:
    run_ranks(2, _calls_an_rnn_inside, use_orig_params)
