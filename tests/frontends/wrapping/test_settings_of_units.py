"""Units of one model may have different settings, or torch's own settings objects; training still
equals unsharded training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import (
    BackwardPrefetch,
    CPUOffload,
    FlatParameter,
    MixedPrecision,
    ShardingStrategy,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import CustomPolicy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.models import DIM, Block, Inner, Outer, Stack, chain
from tests.support.parity import Pair, both_forms, seeded
from tests.support.ranks import on_ranks

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID, HYBRID_ZERO2 = ShardingStrategy

NESTED = partial(Stack, 2, Outer)  # two Outers of two Inners each, in a root


def _train(model: Any, build: Callable[[], nn.Module] = NESTED) -> Pair:
    """Train a sharded model beside the unsharded one."""
    pair = Pair(seeded(build), model)
    for _ in range(2):
        pair.step()
    return pair


# -- strategies


def _options() -> dict[ShardingStrategy, dict[str, Any]]:
    """Return the FSDP options of every strategy. Collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    # Without None, a unit inherits the two axes of a hybrid root.
    return {
        s: {"sharding_strategy": s, "device_mesh": mesh if s in (HYBRID, HYBRID_ZERO2) else None}
        for s in ShardingStrategy
    }


def _answers(answers: dict[type[nn.Module], Any], module: nn.Module) -> bool | dict[str, Any]:
    """For CustomPolicy."""
    return answers.get(type(module), False)


IN_HYBRID = list(itertools.product((HYBRID, HYBRID_ZERO2), (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)))


@pytest.mark.parametrize(
    ("num_ranks", "nested"),
    [
        (2, list(itertools.product(ShardingStrategy, repeat=2))),
        (4, IN_HYBRID + [(inner, outer) for outer, inner in IN_HYBRID]),
    ],
    ids=["all", "hybrid"],
)
@on_ranks("num_ranks")
def test_every_strategy_nested_in_every_other_trains_as_unsharded(
    num_ranks: int, nested: list[tuple[ShardingStrategy, ShardingStrategy]]
) -> None:
    """Two combinations are in a model: one by policy and one by hand."""
    options = _options()
    others = zip(itertools.cycle(ShardingStrategy), itertools.cycle((False, True)), strict=False)
    models = zip(nested[::2], (nested[1::2] + nested[:1])[: len(nested[::2])], strict=True)
    for (root, use_orig_params), by_block in zip(others, models, strict=False):
        model: Any = seeded(NESTED)
        wrap = partial(FSDP, use_orig_params=use_orig_params)
        outer, inner = by_block[1]
        block = model.blocks[1]
        for name in ("first", "second"):
            setattr(block, name, wrap(getattr(block, name), **options[inner]))
        model.blocks[1] = wrap(block, **options[outer])
        outer, inner = by_block[0]
        policy = CustomPolicy(partial(_answers, {Outer: options[outer], Inner: options[inner]}))
        model = wrap(model, auto_wrap_policy=policy, **options[root])
        got = [unit.sharding_strategy for unit in FSDP.fsdp_modules(model)]
        assert got == [root, *[s for outer, inner in by_block for s in (outer, inner, inner)]]
        _train(model)


# -- original parameters in some units


@pytest.mark.parametrize(("root", "expected"), [(False, (1 + 4, 2 * 2)), (True, (2, 4 + 4 * 6))])
@on_ranks(2)
def test_units_may_differ_in_use_orig_params(root: bool, expected: tuple[int, int]) -> None:
    """The numbers of FlatParameters and of others in the optimizer."""
    answers: dict[type[nn.Module], Any] = {
        Outer: {"use_orig_params": not root},
        Inner: {"use_orig_params": root},
    }
    policy = CustomPolicy(partial(_answers, answers))
    model = FSDP(seeded(NESTED), auto_wrap_policy=policy, use_orig_params=root)
    parameters = list(_train(model).model.parameters())
    flat = sum(isinstance(p, FlatParameter) for p in parameters)
    assert (flat, len(parameters) - flat) == expected


# -- dtypes


DIFFERENT = partial(chain, Block, Inner, Block, Inner, partial(nn.Linear, DIM, 3))


def _low_in_some(library: Any, module: nn.Module) -> bool | dict[str, Any]:
    """For CustomPolicy: strategies and dtypes that differ from unit to unit."""
    low = partial(library.MixedPrecision, cast_forward_inputs=True)
    if isinstance(module, Inner):
        return {"mixed_precision": low(param_dtype=torch.float32)}
    if isinstance(module, Block):
        precision = low(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        strategy = library.ShardingStrategy.SHARD_GRAD_OP
        return {"sharding_strategy": strategy, "mixed_precision": precision}
    return False


@both_forms
@on_ranks(2)
def test_units_with_different_settings_are_bit_equal_to_torch(use_orig_params: bool) -> None:
    def policy(library: Any) -> Any:
        return library.wrap.CustomPolicy(partial(_low_in_some, library))

    options = {"build": DIFFERENT, "policy": policy, "use_orig_params": use_orig_params}
    assert_as_torch(partial(trained, with_state=True, **options))


# -- the ranks


@on_ranks(2)
def test_units_may_have_process_groups_and_meshes_of_their_own() -> None:
    """By hand and by policy; inner units have a group of their own, or a mesh."""
    group, mesh = dist.new_group(), init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = seeded(NESTED)
    for index, block in enumerate(model.blocks):
        block.first = FSDP(block.first, device_mesh=mesh)
        model.blocks[index] = FSDP(block, process_group=group)
    _train(FSDP(model))
    policy = CustomPolicy(
        partial(_answers, {Outer: {"process_group": group}, Inner: {"device_mesh": mesh}})
    )
    _train(FSDP(seeded(NESTED), auto_wrap_policy=policy))


# -- torch's own objects


@pytest.mark.parametrize("strategy", [s.name for s in ShardingStrategy])
@on_ranks(2)
def test_torch_settings_are_accepted(strategy: str) -> None:
    """In the constructor and in the answers of a policy of torch's."""
    ours, theirs, options = ShardingStrategy[strategy], torch_fsdp.ShardingStrategy, _options()
    low = torch_fsdp.MixedPrecision(torch.float32, cast_forward_inputs=True)
    inner = options[HYBRID] | {"sharding_strategy": theirs.HYBRID_SHARD, "mixed_precision": low}
    model = FSDP(
        seeded(NESTED),
        auto_wrap_policy=torch_wrap.CustomPolicy(partial(_answers, {Outer: True, Inner: inner})),
        backward_prefetch=torch_fsdp.BackwardPrefetch.BACKWARD_POST,
        cpu_offload=torch_fsdp.CPUOffload(offload_params=True),
        mixed_precision=torch_fsdp.MixedPrecision(reduce_dtype=torch.float32),
        **(options[ours] | {"sharding_strategy": theirs[strategy]}),
    )
    root = ours, MixedPrecision(reduce_dtype=torch.float32)
    below = HYBRID, MixedPrecision(torch.float32, cast_forward_inputs=True)
    units = FSDP.fsdp_modules(model)
    found = [(unit.sharding_strategy, unit.mixed_precision) for unit in units]
    assert found == [root, *[root, below, below] * 2]
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert model.cpu_offload == CPUOffload(offload_params=True)
    _train(model)
