"""Optimizers that step in backward: ``_apply_optimizer_in_backward`` of torch.distributed.optim,
and post-accumulate hooks of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdp_compat import CPUOffload, MixedPrecision, ShardingStrategy, UsageError
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.models import DIM, Block, RecomputesBlocks, Reuse, Stack
from tests.support.pairwise import each_value
from tests.support.parity import assert_close, assert_same_values, both_forms, no_sync, seeded
from tests.support.ranks import on_ranks

ADAM = {"lr": 0.01, "betas": (0.8, 0.9)}


def apply(parameters: Iterable[nn.Parameter]) -> None:
    _apply_optimizer_in_backward(torch.optim.Adam, parameters, ADAM)


def hook(parameters: Iterable[nn.Parameter]) -> None:
    """As torch's tutorial does."""
    parameters = list(parameters)
    optimizers = {p: torch.optim.Adam([p], **ADAM) for p in parameters}

    def step(p: Tensor) -> None:
        assert p.grad is not None and p.grad.shape == p.shape
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in parameters:
        p.register_post_accumulate_grad_hook(step)


each_way = pytest.mark.parametrize("steps_in_backward", [apply, hook])


def batch(seed: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, in_backward: bool, num_steps: int = 3) -> None:
    optim = None if in_backward else torch.optim.Adam(model.parameters(), **ADAM)
    for seed in range(num_steps):
        if seed == 1:
            with no_sync(model):
                model(batch(7)).pow(2).mean().backward()
        model(batch(seed)).pow(2).mean().backward()
        if optim is None:
            assert all(p.grad is None for p in model.parameters())
        else:
            optim.step()
            optim.zero_grad()


@each_value
@both_forms
@each_way
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_optimizers_step_in_backward_after_the_reduction(
    ranks: int, steps_in_backward: Callable[[Any], None], use_orig_params: bool
) -> None:
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
        (lambda: Stack(2), {"cpu_offload": CPUOffload(True)}),
        (lambda: Reuse(True), {}),
        (
            lambda: RecomputesBlocks(Block, True),
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        ),
        (lambda: RecomputesBlocks(Block, False), {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    ]
    for build, options in cases:
        plain = seeded(build)
        model = FSDP(
            copy.deepcopy(plain),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            **options,
        )
        steps_in_backward(model.parameters())
        train(model, in_backward=True)
        train(plain, in_backward=False)
        assert_same_values(
            model.state_dict(), plain.state_dict(), f"{type(plain).__name__}, {options}"
        )


def _steps_in_backward(library: Any, model: nn.Module) -> None:
    """All parameters but those of the head, whose gradients add up."""
    some = [p for name, p in model.named_parameters() if "head" not in name]
    _apply_optimizer_in_backward(torch.optim.Adam, some, ADAM)


@on_ranks(2)
def test_training_is_bit_equal_to_torch_where_some_parameters_step_in_backward() -> None:
    options = {"prepare": _steps_in_backward, "use_orig_params": True, "pattern": "aas"}
    assert_as_torch(partial(trained, **options))


@both_forms
@each_way
@on_ranks(2)
def test_optimizers_from_before_wrapping_go_on_or_are_refused(
    steps_in_backward: Callable[[Any], None], use_orig_params: bool
) -> None:
    inner = seeded(partial(Stack, 2))
    plain = copy.deepcopy(inner)
    steps_in_backward(inner.parameters())
    if not use_orig_params:
        with pytest.raises(UsageError, match="after wrapping"):
            FSDP(inner, use_orig_params=False)
        return
    model = FSDP(inner, use_orig_params=True)
    train(model, in_backward=True)
    train(plain, in_backward=False)
    assert_same_values(model.state_dict(), plain.state_dict(), "after training")


@on_ranks(4)
def test_hooks_run_in_every_backward_that_reduces_on_all_ranks_until_removed() -> None:
    """They may communicate, so ranks without a part of a parameter run them too."""
    plain = seeded(partial(Stack, 2))
    model = FSDP(
        copy.deepcopy(plain),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float64),
    )
    parameters, names = list(model.parameters()), [name for name, _ in plain.named_parameters()]
    runs = list[int]()
    norms = dict[str, Tensor]()

    def clip(number: int, p: Tensor) -> None:
        runs.append(number)
        norms[names[number]] = torch.nn.utils.clip_grad_norm_(p, 0.01)

    handles = [
        p.register_post_accumulate_grad_hook(partial(clip, number))
        for number, p in enumerate(parameters)
    ]
    with no_sync(model):
        model(batch(0)).sum().backward()
    assert not runs
    model(batch(0)).sum().backward()
    assert sorted(runs) == list(range(len(parameters)))
    (2 * plain(batch(0)).sum()).backward()
    for name, p in plain.named_parameters():
        assert_close(norms[name], p.grad.norm(), name)
    assert all(p.grad is None for p in parameters if not p.numel())
    for handle in handles:
        handle.remove()
    model(batch(0)).sum().backward()
    assert len(runs) == len(parameters)
