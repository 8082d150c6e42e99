"""Loading a full state dict that rank 0 alone has."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import (
    CheckpointError,
    FsdpCompatError,
    FullStateDictConfig,
    StateDictType,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support import full_model
from tests.support.full_model import Block, shard
from tests.support.memory import NewBytes
from tests.support.odd_model import assert_holds
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

FULL = StateDictType.FULL_STATE_DICT


def make_model(seed: int) -> full_model.Model:
    """Return a model whose buffers and extra state differ, too."""
    model = full_model.make_model(seed)
    model.blocks[1].note = f"seed {seed}"
    model.blocks[0].norm.running_mean.fill_(seed)
    return model


def rank0(model: nn.Module) -> Any:
    return FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))


def alone(state: Any) -> Any:
    """The state dict on rank 0, what says that there is none on the others."""
    return state if dist.get_rank() == 0 else ({}, None)[dist.get_rank() % 2]


@pytest.mark.parametrize(
    ("world_size", "hybrid"), sample([(1, False), (2, False), (3, False), (4, True)], 2, 3)
)
@on_ranks("world_size")
def test_loading_from_rank_0_equals_loading_on_every_rank(world_size: int, hybrid: bool) -> None:
    options: dict[str, Any] = {}
    if hybrid:
        options = {
            "device_mesh": init_device_mesh("cpu", (2, 2)),
            "strategy": "HYBRID_SHARD",
        }
    forms = [*itertools.product((False, True), (True, False))]
    for use_orig_params, strict in sample(forms, 0, 3):
        model = shard(make_model(1), use_orig_params=use_orig_params, **options)
        with rank0(model):
            assert (
                str(model.load_state_dict(alone(make_model(2).state_dict()), strict=strict))
                == "<All keys matched successfully>"
            )
        assert_holds(model, make_model(2))
        with rank0(model):  # what it gives, it takes
            saved = make_model(3).state_dict()
            shard(make_model(3)).load_state_dict(saved)
            model.load_state_dict(alone(saved), assign=True)
        assert_holds(model, make_model(3))
        with rank0(model):
            model.blocks[1].load_state_dict(alone(make_model(4).blocks[1].state_dict()))
        expected = make_model(3)
        expected.blocks[1] = make_model(4).blocks[1]
        assert_holds(model, expected)
        some = {
            name: v.half()
            for name, v in make_model(5).state_dict().items()
            if name.endswith(("linear.weight", "wide.weight"))
        }
        with rank0(model):
            keys = model.load_state_dict(alone(some), strict=False)
        expected.load_state_dict(some, strict=False)
        assert_holds(model, expected)
        assert "embed.weight" in keys.missing_keys
    model = shard(make_model(1), "NO_SHARD")
    with rank0(model):
        model.load_state_dict(
            alone({f"module.{name}": value for name, value in make_model(2).state_dict().items()})
        )
        assert len(model.state_dict()) == (
            0 if dist.get_rank() else len(make_model(2).state_dict())
        )
    assert_holds(model, make_model(2))


@on_ranks(3)
def test_dicts_on_all_ranks_send_nothing_and_on_some_rank_0s_is_loaded() -> None:
    model = shard(make_model(1))
    state = make_model(2).state_dict()
    traffic = [group.shard.traffic for group in model._runtime.groups]
    sent: list[str] = []
    broadcast = type(model._unit.groups[0].shard).broadcast
    for comm in {id(group.shard): group.shard for group in model._runtime.groups}.values():
        comm.broadcast = lambda tensors, what, comm=comm: (
            sent.append(what) or broadcast(comm, tensors, what)
        )  # type: ignore[method-assign, func-returns-value]
    before = [dict(each.counts) for each in traffic]
    with rank0(model):
        model.load_state_dict(state)
    assert sent == []
    assert before == [dict(each.counts) for each in traffic]
    assert_holds(model, make_model(2))
    with rank0(model):
        model.load_state_dict(make_model(3).state_dict() if dist.get_rank() != 1 else {})
    assert sent
    assert_holds(model, make_model(3))


@on_ranks(2)
def test_a_module_around_units_loads_from_rank_0_and_keeps_no_hook() -> None:
    def built(seed: int, unit: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(seed)
        inside = nn.ModuleDict({"below": unit(Block()), "own": nn.Linear(3, 2)})
        return nn.ModuleDict(
            {
                "first": unit(Block()),
                "norm": nn.BatchNorm1d(2),
                "inside": inside,
                "last": unit(Block()),
            }
        )

    model = built(1, FSDP)
    with rank0(model):
        assert len(model._load_state_dict_pre_hooks) == 1
        given = built(2, lambda m: m).state_dict()
        model.load_state_dict(given if dist.get_rank() == 0 else {})
        with pytest.raises(CheckpointError, match=r"size mismatch for last\.linear\.bias"):
            model.load_state_dict(
                {**given, "last.linear.bias": torch.ones(9)} if dist.get_rank() == 0 else {}
            )
        with pytest.raises(CheckpointError, match=r"inside\.own\.bias"):
            model.load_state_dict(
                {k: v for k, v in given.items() if k != "inside.own.bias"}
                if dist.get_rank() == 0
                else {}
            )
    assert not model._load_state_dict_pre_hooks
    assert_holds(model, built(2, lambda m: m))
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    with FSDP.state_dict_type(model, FULL):
        assert not model._load_state_dict_pre_hooks
    assert len(model._load_state_dict_pre_hooks) == 1
    part = model["inside"]
    with rank0(part):
        given = built(3, lambda m: m)["inside"].state_dict()
        part.load_state_dict(given if dist.get_rank() == 0 else {})
    FSDP.set_state_dict_type(model, FULL)
    assert not model._load_state_dict_pre_hooks
    assert_holds(part, built(3, lambda m: m)["inside"])


@on_ranks(2)
def test_an_error_on_rank_0_is_raised_on_every_rank_before_any_change() -> None:
    model = shard(make_model(1))
    good = make_model(2).state_dict()
    with FSDP.state_dict_type(shard(make_model(1)), StateDictType.SHARDED_STATE_DICT):
        sharded = shard(make_model(1)).module.blocks[0]
        with FSDP.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            boxes = sharded.state_dict()["linear.weight"]
    bad = {
        "Missing key.*blocks.1.gain": {k: v for k, v in good.items() if k != "blocks.1.gain"},
        "Unexpected key.*other": {**good, "other": torch.ones(1)},
        "size mismatch for embed.weight": {**good, "embed.weight": torch.ones(2, 2)},
        "size mismatch for blocks.0.grid": {**good, "blocks.0.grid": torch.ones(2, 2)},
        "cannot be loaded from one rank": {**good, "blocks.0.linear.weight": boxes},
    }
    with rank0(model):
        for words, state in bad.items():
            with pytest.raises(CheckpointError, match=words):
                model.load_state_dict(alone(state))
        with pytest.raises(CheckpointError, match="none on rank 0"):
            model.load_state_dict({} if dist.get_rank() == 0 else good)
        with pytest.raises(FsdpCompatError, match=r"rank0_only|another rank"):
            model.load_state_dict([good] if dist.get_rank() == 1 else good)
        with pytest.raises(CheckpointError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(TypeError, match="NoneType"):
            model.load_state_dict(None)  # type: ignore[arg-type]
    assert_holds(model, make_model(1))
    for nothing in ({}, None):  # rank0_only is not set
        if dist.get_rank() == 0:
            continue
        with pytest.raises(FsdpCompatError, match="rank0_only=True"):
            model.load_state_dict(nothing)  # type: ignore[arg-type]
    assert_holds(model, make_model(1))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        self.table = nn.Embedding(64, 64)


@on_ranks(2)
def test_other_ranks_never_hold_more_than_one_unit() -> None:
    torch.manual_seed(0)
    plain = Stack()
    state = copy.deepcopy(plain.state_dict())
    inner = Stack()
    model = FSDP(
        inner, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), ignored_modules=[inner.table]
    )
    unit_nbytes = plain.table.weight.nbytes
    with rank0(model), NewBytes() as new:
        model.load_state_dict(alone(state))
    # A thread of gloo may hold what was sent for a moment longer.
    assert new.peak <= (2 * unit_nbytes if dist.get_rank() else 4096), (
        "one unit beside the shard, and none where the values are"
    )
    assert_holds(model, plain)
