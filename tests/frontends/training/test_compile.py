"""torch.compile inside units, around units and around the model gives the results of eager, with
few recompilations and no graph breaks of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM, Block, Recomputed, Stack
from tests.support.parity import assert_close, both_forms, seeded
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

pytestmark = pytest.mark.slow

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NUM_STEPS = 8


class Checkpointed(Recomputed):
    """Recomputes its activations."""

    def __init__(self) -> None:
        super().__init__(reentrant=False)


def network(make: type[nn.Module] = Block) -> Any:
    return seeded(partial(Stack, 2, make))


def batch(seed: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Start with an empty compiler cache, and leave an empty one."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


class Backend:
    """Counts the graphs that are compiled, and compiles them with another backend."""

    def __init__(self, name: str) -> None:
        self.name, self.num_graphs = name, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


def trains(model: nn.Module, fsdp: FSDP, plain: nn.Module, num_steps: int) -> None:
    """model: the module that is called; fsdp: the same, or the instance in it."""
    optims = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (fsdp, plain)]
    for seed in range(num_steps):
        outputs = [m(batch(seed)) for m in (model, plain)]
        assert_close(outputs[0], outputs[1], f"output of step {seed}")
        for output, optim in zip(outputs, optims, strict=True):
            output.pow(2).mean().backward()
            optim.step()
            optim.zero_grad()
    state = fsdp.state_dict()
    for (name, value), got in zip(plain.state_dict().items(), state.values(), strict=True):
        assert_close(got, value, name)
    with torch.no_grad():
        assert_close(model(batch(99)), plain(batch(99)), "evaluation")


# -- inside


CASES = [  # how, backend, strategy, number of steps
    ("torch.compile", "aot_eager", FULL_SHARD, NUM_STEPS),
    ("torch.compile", "eager", SHARD_GRAD_OP, 3),
    ("module.compile", "eager", FULL_SHARD, 3),
]


@both_forms
@on_ranks(2, timeout=180)
def test_blocks_compiled_and_then_wrapped_give_what_eager_gives(use_orig_params: bool) -> None:
    for how, backend, strategy, num_steps in CASES[:1] if use_orig_params else sample(CASES[1:], 0):
        with about((how, strategy)), counted():
            plain, inner, compiler = network(), network(), Backend(backend)
            for number, block in enumerate(inner.blocks):
                if how == "torch.compile":
                    inner.blocks[number] = torch.compile(block, backend=compiler, fullgraph=True)
                else:
                    block.compile(backend=compiler, fullgraph=True)
            policy = ModuleWrapPolicy({type(inner.blocks[0])})
            model = FSDP(
                inner,
                auto_wrap_policy=policy,
                sharding_strategy=strategy,
                use_orig_params=use_orig_params,
            )
            assert len(FSDP.fsdp_modules(model)) == 3
            trains(model, model, plain, num_steps)
            # One graph for both blocks, with and without gradients; a recompilation each is
            # allowed.
            assert 1 <= compiler.num_graphs <= 2 + 2, compiler.num_graphs
            assert not counters["graph_break"], dict(counters["graph_break"])


@pytest.mark.parametrize("use_orig_params", [True])
@on_ranks(2, timeout=180)
def test_modules_inside_of_units_may_be_compiled_after_wrapping(use_orig_params: bool) -> None:
    """Wrap first, then compile the modules inside the units."""
    with counted():
        plain, compiler = network(), Backend("aot_eager")
        model = FSDP(
            network(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params
        )
        for block in model.blocks:
            block.module.compile(backend=compiler, fullgraph=True)
        trains(model, model, plain, 4)
        assert 1 <= compiler.num_graphs <= 4, compiler.num_graphs
        assert not counters["graph_break"], dict(counters["graph_break"])


@pytest.mark.parametrize("use_orig_params", [True])
@on_ranks(2, timeout=180)
def test_compiled_blocks_may_recompute_their_activations(use_orig_params: bool) -> None:
    with counted():
        plain, inner, compiler = network(Checkpointed), network(Checkpointed), Backend("aot_eager")
        for block in inner.blocks:
            block.compile(backend=compiler)
        model = FSDP(
            inner,
            auto_wrap_policy=ModuleWrapPolicy({Checkpointed}),
            use_orig_params=use_orig_params,
        )
        trains(model, model, plain, 6)
        assert 1 <= compiler.num_graphs <= 4, compiler.num_graphs


@pytest.mark.parametrize("use_orig_params", [False])
@on_ranks(2, timeout=180)
def test_compiled_blocks_may_be_recomputed(use_orig_params: bool) -> None:
    """A checkpoint around the unit, a compiled block in it."""
    with counted():
        plain, inner, compiler = network(), network(), Backend("aot_eager")
        for block in inner.blocks:
            block.compile(backend=compiler, fullgraph=True)
        model = FSDP(
            inner, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params
        )
        optims = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
        for seed in range(4):
            for module, optim in zip((model, plain), optims, strict=True):
                x = batch(seed).requires_grad_()
                for block in module.blocks:
                    x = checkpoint(block, x, use_reentrant=seed % 2 == 0)
                x.pow(2).mean().backward()
                optim.step()
                optim.zero_grad()
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert_close(state[name], value, name)
        assert compiler.num_graphs <= 4, compiler.num_graphs


@pytest.mark.parametrize("use_orig_params", [True])
@on_ranks(2, timeout=180)
def test_compiled_blocks_compute_in_the_dtype_of_the_unit(use_orig_params: bool) -> None:
    outputs = []
    for compiled in (False, True):
        with counted():
            inner = network()
            if compiled:
                for block in inner.blocks:
                    block.compile(backend="aot_eager", fullgraph=True)
            precision = MixedPrecision(param_dtype=torch.bfloat16)
            policy = ModuleWrapPolicy({Block})
            model = FSDP(
                inner,
                auto_wrap_policy=policy,
                mixed_precision=precision,
                use_orig_params=use_orig_params,
            )
            for seed in range(3):
                model(batch(seed)).float().pow(2).mean().backward()
            outputs.append([model(batch(9)), *(p.grad for p in model.parameters() if p.numel())])
    for got, expected in zip(*outputs, strict=True):
        assert_close(got, expected, "output or gradient")


# -- around


def _like(model: FSDP) -> nn.Module:
    plain = network()
    plain.load_state_dict(model.state_dict())
    return plain


@both_forms
@on_ranks(2, timeout=180)
def test_a_wrapped_model_that_is_compiled_gives_what_eager_gives(use_orig_params: bool) -> None:
    for how, backend, strategy, num_steps in sample(CASES[1:], 1) if use_orig_params else CASES[:1]:
        with about((how, strategy)), counted():
            plain, compiler, policy = network(), Backend(backend), ModuleWrapPolicy({Block})
            model = FSDP(
                network(),
                auto_wrap_policy=policy,
                sharding_strategy=strategy,
                use_orig_params=use_orig_params,
            )
            called: Any = model
            if how == "torch.compile":
                called = torch.compile(model, backend=compiler)
            else:
                model.compile(backend=compiler)
            trains(called, model, plain, 3)
            first = compiler.num_graphs
            trains(called, model, _like(model), num_steps)
            assert compiler.num_graphs - first <= 2, "compiled again and again"


@pytest.mark.parametrize("use_orig_params", [False])
@on_ranks(2, timeout=180)
def test_a_function_that_calls_the_model_may_be_compiled(use_orig_params: bool) -> None:
    """Compile the code around the model: the loss, and the call."""
    with counted():
        plain, compiler = network(), Backend("aot_eager")
        model = FSDP(
            network(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params
        )

        def loss_of(module: nn.Module, x: Tensor) -> Tensor:
            return (module(x * 2).tanh() + 1).pow(2).mean()

        compiled = torch.compile(loss_of, backend=compiler)
        optims = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
        for seed in range(6):
            losses = [compiled(model, batch(seed)), loss_of(plain, batch(seed))]
            assert_close(losses[0], losses[1], "loss")
            for loss, optim in zip(losses, optims, strict=True):
                loss.backward()
                optim.step()
                optim.zero_grad()
        assert compiler.num_graphs <= 8, compiler.num_graphs


# -- with a C++ compiler


@on_ranks(2, timeout=240)
def test_the_default_backend_gives_what_eager_gives() -> None:
    with counted():
        plain, inner = network().blocks[0], network().blocks[0]
        inner.compile(fullgraph=True)
        trains(*[FSDP(inner, use_orig_params=True)] * 2, plain, 3)
