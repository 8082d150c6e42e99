"""Tensors from the meta device get values from the user or rank 0, or are reported by name before
the first forward."""

from __future__ import annotations

import contextlib
import copy
import re
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
from fsdp_compat._state.units import clean_name
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM
from tests.support.pairwise import each_value
from tests.support.parity import (
    Pair,
    assert_same_values,
    both_forms,
    seeded,
)
from tests.support.ranks import on_ranks


class Rotary(nn.Module):
    """As in RoPE: a non-persistent buffer, which is only initialised if ``fills``."""

    def __init__(self, fills: bool = True) -> None:
        super().__init__()
        self.fills = fills
        self.register_buffer("inv_freq", torch.linspace(1.0, 2.0, DIM), persistent=False)

    def fill(self) -> None:
        self.inv_freq.copy_(torch.linspace(1.0, 2.0, DIM))

    def reset_parameters(self) -> None:
        if self.fills:
            self.fill()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv_freq


class Masked(nn.Module):
    """Integer and boolean buffers next to a parameter."""

    def __init__(self, fills: bool = True) -> None:
        super().__init__()
        self.fills = fills
        self.weight = nn.Parameter(torch.ones(DIM))
        self.register_buffer("order", torch.arange(DIM).flip(0))
        self.register_buffer("mask", torch.arange(DIM) % 2 == 0, persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def fill(self) -> None:
        self.order.copy_(torch.arange(DIM).flip(0))
        self.mask.copy_(torch.arange(DIM) % 2 == 0)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.scale.fill_(0.5)
        if self.fills:
            self.fill()

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, x[..., self.order] * self.weight, x) * self.scale


class Block(nn.Module):
    def __init__(self, fills: bool = True) -> None:
        super().__init__()
        self.linear, self.rotary, self.masked = nn.Linear(DIM, DIM), Rotary(fills), Masked(fills)
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.masked(self.rotary(self.linear(x))))


class Net(nn.Module):
    def __init__(self, fills: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(fills) for _ in range(2))
        self.rotary, self.head = Rotary(fills), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.rotary(x))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def batch() -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))


def wrapped(model: nn.Module, units: bool = True, **options: Any) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}) if units else None, **options)


def to_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {clean_name(name): buffer for name, buffer in model.named_buffers()}


def assert_trains(model: FSDP, plain: nn.Module) -> None:
    """Train both from the state of ``model``; non-persistent buffers must already be correct."""
    plain.load_state_dict(model.state_dict())
    assert_same_values(named_buffers(model), named_buffers(plain), "buffer", 0.0)
    pair = Pair(plain, model, data_ranks=1)
    for _ in range(2):
        pair.step()
    pair.compare_outputs()


# -- initialised values are used


@on_ranks(2)
def test_model_from_meta_runs_once_all_values_are_set() -> None:
    def by_init(module: nn.Module) -> None:
        to_empty(module)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()

    for units in (True, False):
        for options in ({}, {"param_init_fn": by_init}, {"sync_module_states": True}):
            with about((units, options)):
                torch.manual_seed(0)  # the same on all ranks
                model = wrapped(on_meta(Net), units, **options)
                assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
                assert all(unit.uninitialised == [] for unit in model._runtime.units)
                assert_trains(model, Net())


@both_forms
@on_ranks(2)
def test_materialized_tensors_keep_their_values(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    inner, plain = on_meta(Net), Net()
    inner.head = copy.deepcopy(plain.head)  # materialised already, with its values
    inner.blocks[0] = copy.deepcopy(plain.blocks[0])
    model = wrapped(inner, use_orig_params=use_orig_params)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        if name.startswith(("head", "blocks.0")):
            assert torch.equal(state[name], value), f"{name} was there"
    assert_trains(model, plain)


# -- missing values are reported


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UsageError, match="never given values") as caught:
        call()
    return str(caught.value)


def fill(model: nn.Module) -> None:
    """Fill buffers in place, as after ``to_empty``."""
    for module in model.modules():
        if isinstance(module, (Rotary, Masked)):
            module.fill()


@on_ranks(2)
def test_uninitialized_buffers_are_reported_by_name_until_written() -> None:
    for units in (True, False):
        for forward in ("train", "no_grad", "eval", "block alone")[: 4 if units else 3]:
            with about((units, forward)):
                model = wrapped(on_meta(lambda: Net(False)), units, use_orig_params=True)
                model.train(forward == "train")
                call = model.blocks[1] if forward == "block alone" else model
                with torch.no_grad() if forward != "train" else contextlib.nullcontext():
                    text = refusal(partial(call, batch()))
                    # of all units, no matter which one was called
                    named = "inv_freq", "order", "'blocks.0", "'blocks.1"
                    assert all(name in text for name in named), text
                    assert not any(name in text for name in ("linear", "scale", "running")), text
                    refusal(partial(call, batch()))  # again: the problem remains
                    fill(model)
                    call(batch())
                if forward == "train":
                    assert_trains(model, Net())


@on_ranks(2)
def test_replaced_buffers_count_as_initialized() -> None:
    """A buffer may also be replaced or removed."""
    model = wrapped(on_meta(lambda: Net(False)))
    refusal(lambda: model(batch()))
    for module in model.modules():
        if isinstance(module, Rotary):
            module.inv_freq = torch.linspace(1.0, 2.0, DIM)
        if isinstance(module, Masked):
            module.order = torch.arange(DIM).flip(0)
            module.mask = torch.arange(DIM) % 2 == 0
    assert_trains(model, Net())


@both_forms
@on_ranks(2)
def test_uninitialized_parameters_are_reported_until_loaded_or_written(
    use_orig_params: bool,
) -> None:
    source = wrapped(Net(), use_orig_params=use_orig_params)
    with FSDP.state_dict_type(source, StateDictType.SHARDED_STATE_DICT):
        sharded = source.state_dict()
    for state in (None, source.state_dict(), sharded):
        model = wrapped(on_meta(Net), param_init_fn=to_empty, use_orig_params=use_orig_params)
        text = refusal(partial(model, batch()))
        weight = r"'linear\.weight' of unit 'blocks\.0'|'blocks\.0\.linear\.weight'"
        assert re.search(weight, text), text
        if state is None:
            with FSDP.summon_full_params(model), FSDP.summon_full_params(source), torch.no_grad():
                for p, q in zip(model.parameters(), source.parameters(), strict=True):
                    p.copy_(q)
                for b, c in zip(model.buffers(), source.buffers(), strict=True):
                    b.copy_(c)
        else:
            model.load_state_dict(state)
            text = refusal(partial(model, batch()))  # the non-persistent buffer
            assert "inv_freq" in text and "linear" not in text and "order" not in text, text
        fill(model)
        assert_same_values(model.state_dict(), source.state_dict(), "value", 0.0)
        assert_trains(model, Net())


@each_value
@both_forms
@pytest.mark.parametrize("from_rank_0", [False, True])
@on_ranks(3)
def test_values_missing_on_one_rank_raise_on_all(from_rank_0: bool, use_orig_params: bool) -> None:
    """Rank 1 lacks values, or rank 0 that sends its values to all."""
    rank = dist.get_rank()
    lacks = rank == (0 if from_rank_0 else 1)
    inner = Net() if from_rank_0 and not lacks else on_meta(lambda: Net(not lacks))
    model = wrapped(inner, sync_module_states=from_rank_0, use_orig_params=use_orig_params)
    text = refusal(partial(model, batch()))
    assert "inv_freq" in text or not (lacks or from_rank_0), text
    fill(model)
    model(batch()).sum().backward()


class Last(nn.Module):
    """Only the last rank holds the last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.zeros(96)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first.sum() + self.last.sum()


@both_forms
@on_ranks(3)
def test_parameter_missing_on_one_rank_is_named_on_all(use_orig_params: bool) -> None:
    def init(module: nn.Module) -> None:
        to_empty(module)
        nn.init.ones_(module.first)

    model = FSDP(on_meta(Last), param_init_fn=init, use_orig_params=use_orig_params)
    assert "'last'" in refusal(lambda: model(torch.ones(2)))
    with FSDP.summon_full_params(model), torch.no_grad():
        model.last.fill_(1.0)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 100.0))


# -- values that look suspicious but are valid


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("zeros", torch.zeros(3))
        self.register_buffer("infinite", torch.full((2, 2), -torch.inf), persistent=False)
        self.register_buffer("some_nan", torch.tensor([torch.nan, 1.0]))
        self.register_buffer("numbers", torch.tensor([2**31, -1]))
        self.register_buffer("small", torch.tensor([255, 0], dtype=torch.uint8))
        self.register_buffer("all_true", torch.ones(3, dtype=torch.bool))
        self.register_buffer("all_false", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("complex", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("nothing", None)

    def reset_parameters(self) -> None:
        fresh = Strange()
        for name, buffer in self.named_buffers():
            buffer.copy_(getattr(fresh, name))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_ranks(2)
def test_integers_booleans_and_infinities_count_as_values() -> None:
    for options in ({}, {"sync_module_states": True}):
        model = FSDP(on_meta(Strange), **options)
        model(batch()).sum().backward()
        for name, buffer in Strange().named_buffers():
            got = model.module.get_buffer(name)
            assert torch.equal(got.nan_to_num(7.0), buffer.nan_to_num(7.0)), name
    # Not from the meta device: the values are the user's, whatever they are.
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
    expected = Net()
    with torch.no_grad():
        for block in expected.blocks:
            block.norm.running_mean.fill_(rank + 1)
            block.rotary.inv_freq.mul_(rank + 1.0)
            block.masked.order.copy_(torch.arange(DIM).roll(rank))
            block.masked.mask.copy_(torch.arange(DIM) % 3 == rank)
    inner = copy.deepcopy(expected) if rank == 0 or not by_to_empty else on_meta(Net)
    options: dict[str, Any] = {"param_init_fn": to_empty} if by_to_empty and rank != 0 else {}
    if len(shape) == 2:
        options |= {
            "device_mesh": init_device_mesh("cpu", shape),
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        }
    model = wrapped(inner, sync_module_states=True, use_orig_params=use_orig_params, **options)
    first = [{**expected.state_dict(), **named_buffers(expected)}]
    dist.broadcast_object_list(first, 0)
    assert_same_values({**model.state_dict(), **named_buffers(model)}, first[0], "value", 0.0)
    model(batch()).sum().backward()


class Extreme(nn.Module):
    """Buffers that hold the pattern of uninitialised memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("unknown", torch.full((3,), torch.nan))
        self.register_buffer("largest", torch.full((2,), torch.iinfo(torch.int64).max))

    def reset_parameters(self) -> None:
        """Does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_ranks(2)
def test_nan_and_largest_integers_count_as_values_unless_from_meta() -> None:
    for elsewhere in (lambda: Extreme(), lambda: on_meta(Extreme)):
        first = dist.get_rank() == 0
        inner = Extreme() if first else elsewhere()
        options: dict[str, Any] = {"param_init_fn": to_empty} if inner.unknown.is_meta else {}
        model = FSDP(inner, sync_module_states=True, **options)
        assert model(batch()).isfinite().all()
        assert model.module.unknown.isnan().all()
        assert (model.module.largest == torch.iinfo(torch.int64).max).all()
    inner = on_meta(Extreme) if dist.get_rank() == 0 else Extreme()
    text = refusal(partial(FSDP(inner, sync_module_states=True), batch()))
    assert "unknown" in text and "largest" in text, text


# -- back to the meta device


SHARD: dict[str, Callable[[nn.Module], Any]] = {
    "flat": partial(FSDP, use_orig_params=False),
    "original": partial(FSDP, use_orig_params=True),
    "in place": fully_shard,
}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("kind", SHARD)
@on_ranks(2)
def test_a_sharded_model_is_not_moved_to_the_meta_device(kind: str, is_used: bool) -> None:
    """Nor is a model around it; both still train."""
    plain, model = (
        seeded(lambda: nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2)))) for _ in range(2)
    )
    model[0] = SHARD[kind](model[0])
    model = SHARD[kind](model)
    pair = Pair(plain, model)
    if is_used:
        pair.step()
    for moved in (model, nn.Sequential(model)):
        with pytest.raises(StateError, match="cannot be moved to the meta device") as raised:
            moved.to("meta")
        assert "'cpu' to 'meta'" in str(raised.value)
    model.to("cpu").float()
    pair.step()


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("kind", SHARD)
@on_ranks(2)
def test_a_module_inside_that_was_moved_to_the_meta_device_is_named(
    kind: str, is_used: bool
) -> None:
    model = SHARD[kind](nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2))))
    x = torch.ones(2, DIM)
    if is_used:
        model(x).sum().backward()
    inside = nn.Sequential(*model) if kind == "in place" else model.module
    inside.to("meta")
    with pytest.raises(StateError, match="its values are lost") as raised:
        model(x)
    assert "weight' on 'meta'" in str(raised.value) or "_flat_param' on" in str(raised.value)
