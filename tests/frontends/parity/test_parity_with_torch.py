"""Losses, gradients and parameters are bit-equal to those of torch's FullyShardedDataParallel on
the same data."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_compat
from tests.support.matrix import Case, draw_cases, losses_and_parameters
from tests.support.models import (
    DIM,
    Block,
    Inner,
    Lora,
    Outer,
    Stack,
    Transformer,
    chain,
    encoder_layer,
)
from tests.support.pairwise import each_value
from tests.support.parity import square, tokens, vectors, wide_vectors
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most

# per step, by name: loss, parameters, and the optimizer's state, which depends on gradients
Seen = list[dict[str, Tensor]]

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def _train(
    library: Any,
    build: Callable[[], nn.Module],
    units: set[type[nn.Module]],
    batch: Callable[[torch.Generator], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    strategy: str,
    use_orig_params: bool,
    precision: dict[str, torch.dtype] | None,
    pattern: str,
) -> Seen:
    torch.manual_seed(0)
    model = library.FullyShardedDataParallel(
        build(),
        auto_wrap_policy=library.wrap.ModuleWrapPolicy(units),
        sharding_strategy=library.ShardingStrategy[strategy],
        mixed_precision=library.MixedPrecision(**precision) if precision else None,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    # In torch, CPU copies of values that are on the CPU are freed memory, or other values.
    configs = (
        library.FullStateDictConfig(offload_to_cpu=False),
        library.FullOptimStateDictConfig(offload_to_cpu=False),
    )
    library.FullyShardedDataParallel.set_state_dict_type(
        model, library.StateDictType.FULL_STATE_DICT, *configs
    )
    optim = optimizer(model.parameters())
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    seen: Seen = []
    for letter in pattern:
        if letter == "n":
            with model.no_sync():
                square(model, batch(generator)).backward()
            continue
        loss = square(model, batch(generator))
        loss.backward()
        optim.step()
        optim.zero_grad()
        now = {"loss": loss.detach()}
        now |= {f"parameter {name}": value.clone() for name, value in model.state_dict().items()}
        for name, state in library.FullyShardedDataParallel.optim_state_dict(model, optim)[
            "state"
        ].items():
            now |= {
                f"{kind} of {name}": value.clone()
                for kind, value in state.items()
                if value is not None
            }
        seen.append(now)
    return seen


def _differences(*args: Any) -> list[str]:
    """Return descriptions of everything that is not bit-equal; none are expected."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch deprecates NO_SHARD, and its FSDP warns of its own state dicts
        theirs = _train(torch_fsdp, *args)
        ours = _train(fsdp_compat, *args)
    found = []
    for step, (wanted, got) in enumerate(zip(theirs, ours, strict=True)):
        assert sorted(got) == sorted(wanted)
        assert sum(" of " in name for name in got) >= 2
        for name, value in wanted.items():
            if not torch.equal(got[name], value):
                difference = (got[name].double() - value.double()).abs().max().item()
                found.append(
                    f"step {step}: {name} differs by {difference:.1e} at "
                    f"{value.abs().max().item():.1e}"
                )
    return found


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


MODELS = {
    "blocks": (Stack, {Block}, vectors),
    "units inside units": (partial(Stack, 2, Outer), {Outer, Inner}, vectors),
    "transformer layers": (
        partial(chain, encoder_layer, encoder_layer),
        {nn.TransformerEncoderLayer},
        None,
    ),
    "tied": (Transformer, {nn.TransformerEncoderLayer}, tokens),
}


def _sequences(generator: torch.Generator) -> Tensor:
    return torch.randn(3, 5, DIM, generator=generator)


@each_value
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_equal_to_torch(name: str, strategy: str, use_orig_params: bool) -> None:
    build, units, batch = MODELS[name]
    differences = run_ranks(
        2,
        _differences,
        build,
        units,
        batch or _sequences,
        _sgd,
        strategy,
        use_orig_params,
        None,
        "ss",
    )
    assert differences == [[], []]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_adamw_is_bit_equal_to_torch(use_orig_params: bool) -> None:
    differences = run_ranks(
        2, _differences, *MODELS["blocks"], _adam, "FULL_SHARD", use_orig_params, None, "ss"
    )
    assert differences == [[], []]


@each_value
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_without_sync_is_bit_equal_to_torch(
    strategy: str, use_orig_params: bool
) -> None:
    differences = run_ranks(
        2, _differences, *MODELS["blocks"], _sgd, strategy, use_orig_params, None, "nsns"
    )
    assert differences == [[], []]


def test_frozen_weights_beside_trainable_ones_are_bit_equal_to_torch() -> None:
    build = partial(chain, Lora, Lora)
    differences = run_ranks(
        2, _differences, build, {Lora}, wide_vectors, _sgd, "FULL_SHARD", True, None, "ss"
    )
    assert differences == [[], []]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_bf16_computation_with_float32_reduction_is_bit_equal_to_torch(
    use_orig_params: bool,
) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    differences = run_ranks(
        2, _differences, *MODELS["blocks"], _sgd, "FULL_SHARD", use_orig_params, precision, "ss"
    )
    assert differences == [[], []]


# -- a sample of combinations


def _differ(cases: list[Case]) -> list[str]:
    """Return descriptions of the cases that are not bit-equal; none are expected."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            theirs, ours = (
                losses_and_parameters(case, library) for library in (torch_fsdp, fsdp_compat)
            )
            assert len(ours) > 40
            different = [
                index
                for index, (a, b) in enumerate(zip(theirs, ours, strict=True))
                if not torch.equal(a, b)
            ]
            if different:
                found.append(
                    f"{case}: {len(different)} of {len(ours)} values, the first is number "
                    f"{different[0]}"
                )
    return found


def _comparable(case: Case) -> Case:
    """Torch fails with a reentrant checkpoint over a part of a unit, and with frozen parameters in
    a FlatParameter with others.

    With NO_SHARD it reduces accumulated gradients again in each backward: the same average, rounded
    more often.
    """
    if case.strategy == "NO_SHARD" and case.backwards.count("s") > 1:
        case = dataclasses.replace(case, backwards="nns")
    if case.reentrant and case.wrapping == "root":
        case = dataclasses.replace(case, checkpoint=case.checkpoint.split()[0])
    return (
        dataclasses.replace(case, frozen="")
        if case.wrapping == "root" and not case.use_orig_params
        else case
    )


def _draw(rng: random.Random) -> list[Case]:
    """Draw cases that torch supports: on the CPU, without offload, and with FlatParameters that are
    trainable or frozen as a whole."""
    cases = draw_cases(
        rng,
        at_most(9, of_all=14),
        strategy=STRATEGIES,
        precision=["fp32"],
        offload=[False],
        frozen=["", "unit"],
        clip=[""],
        comm_hook=[False],
        evaluates=[False],
    )
    return [_comparable(case) for case in cases]


@pytest.mark.slow
@seed(0)
@settings(
    max_examples=1,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=True).map(_draw))
def test_any_settings_train_bit_equal_to_torch(cases: list[Case]) -> None:
    assert run_ranks(2, _differ, cases) == [[], []]
