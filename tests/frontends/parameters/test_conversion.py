"""Converting a wrapped model to another dtype converts its shards before the first forward and
raises afterwards."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision, ShardingStrategy, StateError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.beside_torch import assert_as_torch, trained
from tests.support.models import DIM
from tests.support.parity import (
    Pair,
    assert_same_values,
    both_forms,
    seeded,
    vectors,
)
from tests.support.ranks import on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(DIM, 3)
        self.register_buffer("scale", torch.full((3,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) * self.scale


def network() -> Net:
    return seeded(Net)


def batch(dtype: torch.dtype) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def wrapped(inner: nn.Module, **options: Any) -> FSDP:
    return FSDP(inner, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def trains(plain: nn.Module, model: nn.Module, dtype: torch.dtype) -> None:
    """Train both, with the same batch on all ranks."""
    tolerance = 0.02 if dtype == torch.bfloat16 else None  # of sums in another order
    pair = Pair(plain, model, data_ranks=1, tolerance=tolerance, batch=lambda _: batch(dtype))
    for _ in range(2):
        pair.step()
    pair.assert_state_equal()


CONVERSIONS: list[tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = [
    (lambda m: m.double(), torch.float64),
    (lambda m: m.bfloat16(), torch.bfloat16),
    (lambda m: m.to(torch.float64), torch.float64),
    (lambda m: m.to("cpu", torch.float64), torch.float64),
    (lambda m: m.half().double(), torch.float64),  # rounded once
    (lambda m: m.double().float(), torch.float32),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_new_model_trains_in_the_dtype_it_is_converted_to(num_ranks: int) -> None:
    strategies = itertools.cycle(list(ShardingStrategy)[:3])
    for (convert, dtype), strategy in zip(CONVERSIONS, strategies, strict=False):
        plain = network()
        model = wrapped(network(), use_orig_params=True, sharding_strategy=strategy)
        before = list(model.parameters())
        assert convert(model) is model
        assert list(map(id, model.parameters())) == list(map(id, before)), (
            "an optimizer made before goes on working"
        )
        assert {p.dtype for p in model.parameters()} == {dtype}
        convert(plain)
        assert [b.dtype for b in model.buffers()] == [b.dtype for b in plain.buffers()]
        state, expected = model.state_dict(), plain.state_dict()
        assert_same_values(state, expected, "converted value", 0.0)
        assert [v.dtype for v in state.values()] == [v.dtype for v in expected.values()]
        trains(plain, model, dtype)


def _converts(models: list[Any], library: Any, model: Any) -> None:
    models.append(model.bfloat16())


def _low_vectors(generator: torch.Generator) -> Tensor:
    return vectors(generator).bfloat16()


@both_forms
@on_ranks(2)
def test_training_after_a_conversion_is_bit_equal_to_torch(use_orig_params: bool) -> None:
    """Dtypes that mixed precision sets take precedence over the dtype of the shards."""
    for precision in (
        {},
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.float32},
    ):
        models: list[Any] = []
        options = {"precision": precision, "use_orig_params": use_orig_params}
        prepare = partial(_converts, models)
        assert_as_torch(partial(trained, prepare=prepare, batch=_low_vectors, **options), precision)
        handle, group = models[0]._handle, models[1]._unit.groups[0]
        theirs = handle._orig_param_dtype, handle._fwd_bwd_param_dtype, handle._reduce_dtype
        ours = models[1]._handle._orig_param_dtype, group.gather_dtype, group.reduce_dtype
        assert ours == theirs
        # torch says it in forward, and not where parameters are cast
        for model in models[1:] if precision else models:
            with pytest.raises(ValueError):
                model.double()
                model(batch(torch.float64)).sum().backward()


@both_forms
@on_ranks(2)
def test_mixed_precision_and_buffers_follow_a_conversion(use_orig_params: bool) -> None:
    """Buffers are still cast, without loss; batch norms compute in their own new dtype."""
    precision = MixedPrecision(param_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = wrapped(network(), use_orig_params=use_orig_params, mixed_precision=precision).double()
    assert model.module.scale.dtype == torch.bfloat16
    assert model.blocks[0].module.norm.running_mean.dtype == torch.float64
    state = model.state_dict()
    assert torch.equal(state["scale"], torch.full((3,), 0.7).double())
    assert {value.dtype for value in state.values()} == {torch.float64, torch.int64}
    model(batch(torch.float32)).sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float64}


@both_forms
@on_ranks(2)
def test_model_that_has_run_rejects_a_conversion_and_still_trains(use_orig_params: bool) -> None:
    model = wrapped(network(), use_orig_params=use_orig_params)
    with (
        pytest.raises(StateError, match=r"inside summon_full_params, where"),
        FSDP.summon_full_params(model),
    ):
        model.half()
    model(batch(torch.float32)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for convert in (
        lambda: model.half(),
        lambda: model.to(torch.float64),
        lambda: model.blocks[0].bfloat16(),
    ):
        with pytest.raises(ValueError, match="before the first forward"):
            convert()
    model.float()
    model.to("cpu")
    assert_same_values(model.state_dict(), before, "value", 0.0)
    model(batch(torch.float32)).sum().backward()


@on_ranks(2)
def test_conversion_on_one_rank_raises_on_all_ranks() -> None:
    model = wrapped(network())
    with pytest.raises(StateError, match="conversion"):
        model.half() if dist.get_rank() == 0 else model.state_dict()


@both_forms
@on_ranks(2)
def test_a_converted_model_can_be_copied_and_wrapped_again(use_orig_params: bool) -> None:
    inner = FSDP(network(), use_orig_params=use_orig_params).double()
    copied, plain = copy.deepcopy(inner), network().double()
    around = FSDP(nn.Sequential(inner, nn.Linear(3, 3).double()), use_orig_params=use_orig_params)
    around(batch(torch.float64)).sum().backward()
    trains(plain, copied, torch.float64)
