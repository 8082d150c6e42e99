"""Tensors from the meta device get values from the user or rank 0, or are reported by name before
the first forward."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateDictType, StateError, UsageError, fully_shard
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM, chain
from tests.support.pairwise import each_value
from tests.support.parity import Pair, assert_same_values, both_forms, vectors
from tests.support.ranks import on_ranks

INV_FREQ, ORDER = torch.linspace(1.0, 2.0, DIM), torch.arange(DIM).flip(0)
MASK = torch.arange(DIM) % 2 == 0


class Outside(nn.Module):
    """Buffers beside parameters: those that ``fill`` knows are only initialised if ``fills``."""

    def __init__(self, fills: bool = True) -> None:
        super().__init__()
        self.linear, self.norm, self.fills = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), fills
        self.weight = nn.Parameter(torch.ones(DIM))
        self.register_buffer("inv_freq", INV_FREQ.clone(), persistent=False)  # as in RoPE
        self.register_buffer("order", ORDER.clone())
        self.register_buffer("mask", MASK.clone(), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def fill(self) -> None:
        self.inv_freq.copy_(INV_FREQ)
        self.order.copy_(ORDER)
        self.mask.copy_(MASK)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.scale.fill_(0.5)
        if self.fills:
            self.fill()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.inv_freq
        return self.norm(torch.where(self.mask, x[..., self.order] * self.weight, x) * self.scale)


class Unit(Outside):
    """A class for the policy."""


def net(fills: bool = True) -> nn.Sequential:
    linear = partial(nn.Linear, DIM, 3)
    return chain(*[partial(kind, fills) for kind in (Unit, Unit, Outside)], linear)


def batch() -> Tensor:
    return vectors(torch.Generator().manual_seed(1))


def wrapped(model: nn.Module, units: bool = True, **options: Any) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Unit}) if units else None, **options)


def to_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def reset(module: nn.Module) -> None:
    to_empty(module)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def fill(model: nn.Module) -> None:
    """Fill buffers in place, as after ``to_empty``."""
    for module in model.modules():
        if isinstance(module, Outside):
            module.fill()


def assert_trains(model: FSDP) -> None:
    """Train from the state of ``model``; non-persistent buffers must already be correct."""
    plain = net()
    plain.load_state_dict(model.state_dict())
    assert all(itertools.starmap(torch.equal, zip(model.buffers(), plain.buffers(), strict=True)))
    pair = Pair(plain, model, data_ranks=1)
    for _ in range(2):
        pair.step()
    pair.compare_outputs()


# -- initialised values are used


@pytest.mark.parametrize("options", [{}, {"param_init_fn": reset}, {"sync_module_states": True}])
@on_ranks(2)
def test_model_from_meta_runs_once_all_values_are_set(options: Any) -> None:
    for units in (True, False):
        torch.manual_seed(0)  # the same on all ranks
        model = wrapped(net().to("meta"), units, **options)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        assert_trains(model)


@both_forms
@on_ranks(2)
def test_materialized_tensors_keep_their_values(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    plain, inner = net(), net().to("meta")
    for index in (0, 3):
        inner[index] = copy.deepcopy(plain[index])
    model = wrapped(inner, use_orig_params=use_orig_params)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert not name.startswith(("0.", "3.")) or torch.equal(state[name], value), name
    assert_trains(model)


# -- missing values are reported


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UsageError, match="never given values") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("units", [True, False])
@on_ranks(2)
def test_uninitialized_buffers_are_reported_by_name_until_written(units: bool) -> None:
    for forward in ("train", "no_grad", "eval", "unit alone")[: 4 if units else 3]:
        with about(forward):
            model = wrapped(net(False).to("meta"), units, use_orig_params=True)
            model.train(forward == "train")
            call = model.module[1] if forward == "unit alone" else model
            with torch.no_grad() if forward != "train" else contextlib.nullcontext():
                text = refusal(partial(call, batch()))
                # of all units, no matter which one was called
                assert all(name in text for name in ("inv_freq", "order", "'0", "'1")), text
                assert not any(name in text for name in ("linear", "scale", "running")), text
                refusal(partial(call, batch()))  # again: the problem remains
                fill(model)
                call(batch())
            if forward == "train":
                assert_trains(model)


@both_forms
@pytest.mark.parametrize("given", ["summon_full_params", "FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_ranks(2)
def test_uninitialized_parameters_are_reported_until_loaded_or_written(
    given: str, use_orig_params: bool
) -> None:
    source = wrapped(net(), use_orig_params=use_orig_params)
    model = wrapped(net().to("meta"), param_init_fn=to_empty, use_orig_params=use_orig_params)
    text = refusal(partial(model, batch()))
    assert "'2.linear.weight' of the root unit" in text, text
    if given == "summon_full_params":
        with FSDP.summon_full_params(model), FSDP.summon_full_params(source), torch.no_grad():
            for of in (nn.Module.parameters, nn.Module.buffers):
                for found, value in zip(of(model), of(source), strict=True):
                    found.copy_(value)
    else:
        for each in (model, source):
            FSDP.set_state_dict_type(each, StateDictType[given])
        model.load_state_dict(source.state_dict())
        text = refusal(partial(model, batch()))  # the non-persistent buffer
        assert "inv_freq" in text and "linear" not in text and "order" not in text, text
        for each in (model, source):
            FSDP.set_state_dict_type(each, StateDictType.FULL_STATE_DICT)
    fill(model)
    assert_same_values(model.state_dict(), source.state_dict(), "value", 0.0)
    assert_trains(model)


@each_value
@both_forms
@pytest.mark.parametrize("from_rank_0", [False, True])
@on_ranks(3)
def test_values_missing_on_one_rank_raise_on_all(from_rank_0: bool, use_orig_params: bool) -> None:
    """Rank 1 lacks values, or rank 0 that sends its values to all."""
    lacks = dist.get_rank() == (0 if from_rank_0 else 1)
    inner = net() if from_rank_0 and not lacks else net(not lacks).to("meta")
    model = wrapped(inner, sync_module_states=from_rank_0, use_orig_params=use_orig_params)
    text = refusal(partial(model, batch()))
    assert "inv_freq" in text or not (lacks or from_rank_0), text
    fill(model)
    model(batch()).sum().backward()


# -- values that look suspicious but are valid


# The pattern of uninitialised memory.
PATTERN = {"unknown": torch.full((3,), torch.nan)}
PATTERN["largest"] = torch.full((2,), torch.iinfo(torch.int64).max)


class Buffers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        for name, value in PATTERN.items():
            self.register_buffer(name, value.clone())


@on_ranks(2)
def test_nan_and_largest_integers_count_as_values_unless_from_meta() -> None:
    is_first = dist.get_rank() == 0
    for on_meta in (False, True):
        inner, options = Buffers(), dict[str, Any]()
        if on_meta and not is_first:
            inner, options = inner.to("meta"), {"param_init_fn": to_empty}
        model = FSDP(inner, sync_module_states=True, **options)
        assert model(batch()).isfinite().all()
        for name, value in PATTERN.items():
            assert torch.equal(inner.get_buffer(name).nan_to_num(), value.nan_to_num())
    inner = Buffers().to("meta" if is_first else "cpu")
    text = refusal(partial(FSDP(inner, sync_module_states=True), batch()))
    assert "unknown" in text and "largest" in text, text
    plain = nn.Linear(DIM, DIM)
    nn.init.constant_(plain.weight, torch.nan)
    assert FSDP(plain)(batch()).isnan().all()


# -- from the first rank


@each_value
@both_forms
@pytest.mark.parametrize(("num_ranks", "shape"), [(3, (3,)), (4, (2, 2))])
@pytest.mark.parametrize("by_to_empty", [True, False])
@on_ranks("num_ranks")
def test_all_ranks_get_the_values_of_the_first_one(
    num_ranks: int, shape: tuple[int, ...], by_to_empty: bool, use_orig_params: bool
) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    expected = net()
    for unit in expected[:2]:
        unit.norm.running_mean.fill_(rank + 1)
        unit.inv_freq.mul_(rank + 1.0)
        unit.order.copy_(torch.arange(DIM).roll(rank))
        unit.mask.copy_(torch.arange(DIM) % 3 == rank)
    inner, options = copy.deepcopy(expected), dict[str, Any]()
    if by_to_empty and rank != 0:
        inner, options = inner.to("meta"), {"param_init_fn": to_empty}
    if len(shape) == 2:
        options["device_mesh"] = init_device_mesh("cpu", shape)
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    model = wrapped(inner, sync_module_states=True, use_orig_params=use_orig_params, **options)
    first = [(expected.state_dict(), list(expected.buffers()))]
    dist.broadcast_object_list(first, 0)
    assert_same_values(model.state_dict(), first[0][0], "value", 0.0)
    assert all(itertools.starmap(torch.equal, zip(model.buffers(), first[0][1], strict=True)))
    model(batch()).sum().backward()


# -- back to the meta device


SHARD: dict[str, Callable[[nn.Module], Any]] = {
    "flat": partial(FSDP, use_orig_params=False),
    "original": partial(FSDP, use_orig_params=True),
    "in place": fully_shard,
}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("kind", SHARD)
@on_ranks(2)
def test_what_is_moved_to_the_meta_device_is_named(kind: str, is_used: bool) -> None:
    """The model, or one around it, is not moved. A module inside loses its values."""
    model = SHARD[kind](chain(*[partial(nn.Linear, DIM, DIM)] * 2))
    if is_used:
        model(batch()).sum().backward()
    for moved in (model, nn.Sequential(model)):
        with pytest.raises(StateError, match=r"moved to the meta device(.|\n)*'cpu' to 'meta'"):
            moved.to("meta")
    model.to("cpu").float()
    model(batch()).sum().backward()
    inside = nn.Sequential(*model) if kind == "in place" else model.module
    inside.to("meta")
    with pytest.raises(StateError, match=r"values are lost(.|\n)*(weight' on 'meta'|_flat_param')"):
        model(batch())
