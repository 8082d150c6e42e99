"""torch.compile inside units, around units and around the model trains as the unsharded model, with
few recompilations and no graph breaks of ours."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import Block, Recomputed, Stack
from tests.support.parity import (
    Pair,
    assert_close,
    backward,
    make_pair,
    one_backward,
    seeded,
)
from tests.support.ranks import on_ranks
from tests.support.sampling import TEST_ALL

pytestmark = pytest.mark.slow


class Backend:
    """Counts the graphs that are compiled, and compiles them with another backend."""

    def __init__(self, name: str) -> None:
        self.name, self.num_graphs = name, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Start with an empty compiler cache, and leave an empty one."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def _unchanged(model: Any, **options: Any) -> Any:
    return model


def _blocks(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        block.compile(**options)
    return model


def _blocks_in_wrappers(model: Any, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)
    return model


def _model_and_blocks(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return _blocks(model, **options)


def _recomputes_units(reentrant: bool, model: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return backward(x.pow(2).mean())


BLOCKS, UNITS, KEPT = 4, 12, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], int]] = {
    # how it is compiled before it is wrapped, and after; of FSDP; the most graphs: one for both
    # blocks, with and without gradients, and a recompilation each; more where units break them
    "blocks in wrappers": (_blocks_in_wrappers, _unchanged, {"use_orig_params": True}, BLOCKS),
    "blocks in place": (_blocks, _unchanged, KEPT, BLOCKS),
    "blocks that recompute": (_blocks, _unchanged, {"use_orig_params": True}, BLOCKS),
    "blocks that are recomputed": (_blocks, _unchanged, {}, BLOCKS),
    "the model in a wrapper": (_unchanged, torch.compile, {}, UNITS),
    "the model and units": (_unchanged, _model_and_blocks, {"use_orig_params": True}, UNITS),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_compiled_modules_train_as_unsharded(name: str) -> None:
    before, after, how, most_graphs = CASES[name]
    recompute = name == "blocks that recompute"
    build = partial(Stack, 2, partial(Recomputed, False) if recompute else Block)
    # inductor takes half a minute
    backend = Backend("inductor" if TEST_ALL and before is _blocks_in_wrappers else "aot_eager")
    options = {"backend": backend, "fullgraph": most_graphs == BLOCKS and not recompute}
    recomputed = [partial(_recomputes_units, reentrant) for reentrant in (True, False)]
    steps = itertools.cycle(recomputed if "are recomputed" in name else [one_backward])
    with empty_cache():
        inner: Any = before(seeded(build), **options)
        policy = ModuleWrapPolicy({type(inner.blocks[0])})
        model = FSDP(inner, auto_wrap_policy=policy, **how)
        assert len(FSDP.fsdp_modules(model)) == 3
        pair = Pair(seeded(build), after(model, **options))
        for _ in range(3):
            pair.step(next(steps))
        pair.compare_outputs()
        first = backend.num_graphs
        for _ in range(5):
            pair.step(next(steps))
        pair.compare_outputs()
        pair.assert_state_equal()
        assert 1 <= first <= most_graphs, first
        assert backend.num_graphs - first <= 2, "compiled again and again"


@on_ranks(2)
def test_compiled_blocks_compute_in_the_dtype_of_the_unit() -> None:
    precision, found = MixedPrecision(param_dtype=torch.bfloat16), []
    for prepare in (_unchanged, _blocks):
        with empty_cache():
            pair = make_pair(
                lambda prepare=prepare: prepare(Stack(2), backend="aot_eager", fullgraph=True),
                mixed_precision=precision,
                use_orig_params=True,
            )
            for x in pair.batches() * 2:
                output = pair.model(x)
                output.float().pow(2).mean().backward()
            found.append([output, *(p.grad for p in pair.model.parameters() if p.numel())])
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, "output or gradient")
