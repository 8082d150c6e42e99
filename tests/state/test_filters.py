"""A part of a model's state: what a filter chooses, and the whole of it one unit at a time."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_compat import FullStateDictConfig, StateDictType, StateError, UsageError, fully_shard
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.checkpoint import iter_full_state_dict
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import NewBytes
from tests.support.models import Lora
from tests.support.odd_model import (
    Block,
    assert_identical,
    assert_same,
    local_tensors,
    make_model,
    shard,
    stack,
)
from tests.support.optimizer_state import FEW_CONFIGS, FULL, SHARDED, sent
from tests.support.parity import local, seeded
from tests.support.ranks import on_ranks

Filter = Callable[[str], bool] | str
CONFIGS = [*FEW_CONFIGS[:3], ("MESH", False, "blocks"), ("ROWS", True, "blocks")]


def is_adapter(name: str) -> bool:
    return name.endswith("up.weight")


def is_some(name: str) -> bool:
    """Some of every group, one name of a tie, a buffer, and an unmanaged parameter."""
    managed = "head.weight", "nothing", "gain", "blocks.1.up.weight", "wide.weight"
    return name in (*managed, "blocks.0.norm.running_var", "ignored.bias")


def chosen(plain: nn.Module, choice: Filter) -> dict[str, Any]:
    """What the unsharded model has of it."""
    named = plain.named_parameters(remove_duplicate=False)
    trainable = {name for name, p in named if p.requires_grad}
    chooses = trainable.__contains__ if isinstance(choice, str) else choice
    return {name: value for name, value in plain.state_dict().items() if chooses(name)}


CHOICES: tuple[Filter, ...] = (is_adapter, is_some, "trainable", lambda name: False)


@on_ranks(3)
def test_a_filter_chooses_the_same_entries_as_for_the_unsharded_model() -> None:
    plain, on_rank0 = make_model(), FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    for config in CONFIGS:
        model = shard(make_model(), config)
        for choice in CHOICES:
            expected = chosen(plain, choice)
            assert_same(dict(iter_full_state_dict(model, filter=choice)), expected)
            if config[0] == "ROWS":
                continue
            assert_identical(model.state_dict(filter=choice), expected)
            with FSDP.state_dict_type(model, FULL, on_rank0):
                found = model.state_dict(filter=choice)
            assert_identical(found, expected if dist.get_rank() == 0 else {})
    model = shard(make_model(), CONFIGS[0])
    biases = model.state_dict(prefix="a.", filter=lambda name: name.endswith("bias"))
    assert [*biases] == [f"a.{name}" for name in plain.state_dict() if name.endswith("bias")]
    with FSDP.summon_full_params(model):
        assert_identical(model.state_dict(filter=is_adapter), chosen(plain, is_adapter))
        with pytest.raises(StateError, match="summon_full_params"):
            next(iter_full_state_dict(model))
    for wrong in ("all", lambda: True):
        with pytest.raises(UsageError, match="filter"):
            model.state_dict(filter=wrong)


@on_ranks(3)
def test_a_filtered_sharded_dict_holds_compact_copies_that_dcp_takes(tmp_path: Path) -> None:
    plain = make_model(1, block=Block)
    for number, choice in itertools.product(range(4), CHOICES[:3]):
        config, folder = CONFIGS[number], f"{tmp_path}/{number}/{CHOICES.index(choice)}"
        model = shard(make_model(1, block=Block), config)
        expected = chosen(plain, choice)
        sent(model)
        with FSDP.state_dict_type(model, SHARDED):
            found = model.state_dict(filter=choice)
        assert list(found) == list(expected)
        assert config[0] == "MESH" or sent(model) == (0, 0)
        for name, value in found.items():
            tensors = [local(tensor) for tensor in local_tensors(value)]
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
            held = sum(storage.nbytes() for storage in storages.values())
            assert held == sum(t.nbytes for t in tensors), f"{name} keeps more than it shows"
        dcp.save(found, checkpoint_id=folder)
        other = shard(make_model(2, block=Block), CONFIGS[(number + 1) % 3])
        with FSDP.state_dict_type(other, SHARDED):
            read = other.state_dict(filter=choice)
        dcp.load(read, checkpoint_id=folder)
        other.load_state_dict(read, strict=False)
        assert_identical(other.state_dict(filter=choice), expected)
    for config in CONFIGS[0], ("FULL_SHARD", True, "blocks"):
        model = shard(make_model(1, block=Block), config)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            keys = list(model.state_dict(filter=is_adapter))
        flat = [key for key in keys if key.endswith("_flat_param")]
        assert flat == ["blocks.0._flat_param", "blocks.1._flat_param"], "with what is chosen"
        assert [key for key in keys if key not in flat] == [*chosen(plain, is_adapter)] * config[1]


@on_ranks(3)
def test_a_filtered_adapter_moves_only_its_own_bytes() -> None:
    width, ranks = 32, dist.get_world_size()
    adapter_nbytes = 2 * 2 * width * 2 * 4  # two blocks, two matrices
    for use_orig_params, wrapped in itertools.product((False, True), (True, False)):
        wrap = ModuleWrapPolicy({Lora}) if wrapped else None
        net = seeded(lambda: nn.Sequential(Lora(width), Lora(width), nn.BatchNorm1d(width)))
        one_weight = {"1.a.weight": net[1].a.weight.detach().clone()}
        model = FSDP(net, use_orig_params=use_orig_params, auto_wrap_policy=wrap)
        for take in (
            FSDP.state_dict,
            lambda model, filter: dict(iter_full_state_dict(model, filter=filter)),
        ):
            sent(model)
            assert len(take(model, filter=lambda name: ".a." in name or ".b." in name)) == 4
            gathers, nbytes = sent(model)
            assert gathers == (2 if wrapped else 1), "groups without a match are not gathered"
            least = adapter_nbytes * (ranks - 1) // ranks
            assert least <= nbytes <= (least if wrapped else 2 * least) + 64 * gathers * (ranks - 1)
        sent(model)
        assert_identical(model.state_dict(filter=one_weight.__contains__), one_weight)
        least = 2 * width * 4 * (ranks - 1)
        assert sent(model) <= (1, least), "of a group only what matches travels"
        model.state_dict(filter=lambda name: "running" in name)
        assert sent(model) == (0, 0)


@on_ranks(2)
def test_the_state_is_streamed_unit_by_unit_with_ties_together() -> None:
    expected = make_model(block=Block).state_dict()
    order = [name for name in expected if name != "head.weight"]
    order.insert(order.index("embed.weight") + 1, "head.weight")
    order.sort(key=lambda name: name.startswith("blocks"))
    rounded = {k: v.bfloat16() if v.is_floating_point() else v for k, v in expected.items()}
    for config in (FEW_CONFIGS[0], ("FULL_SHARD", True, "blocks")):
        model = shard(make_model(block=Block), config)
        pairs = list(iter_full_state_dict(model))
        assert [name for name, _ in pairs] == order, "the root's first, a tie's together"
        cast = dict(iter_full_state_dict(model, device=None, dtype=torch.bfloat16))
        for found in (dict(pairs), cast):
            assert found["embed.weight"] is found["head.weight"]
        assert_same(cast, rounded)
        live = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        for name, value in pairs:
            assert value.untyped_storage().nbytes() == value.nbytes, name
            assert value.untyped_storage()._cdata not in live, name
    for unit in (FSDP, lambda m: fully_shard([*m.children()]) and m):
        whole, container = (  # which is no unit itself, around one of two names
            seeded(lambda u=u: nn.ModuleDict({"norm": nn.BatchNorm1d(4), "first": u(Lora())}))
            for u in (lambda m: m, unit)
        )
        for each in (whole, container):
            each["again"] = each["first"]
        found = dict(iter_full_state_dict(container))
        assert_same(found, whole.state_dict())
    for wrong in ({"dtype": torch.int64}, {"device": "nowhere"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            iter_full_state_dict(container, **wrong)


@on_ranks(2)
def test_streaming_holds_one_unit_and_stopping_frees_it() -> None:
    model = FSDP(stack(bias=True), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    unit_nbytes = 4 * (64 * 64 + 64)
    for choice in (None, lambda name: name.endswith("weight")):
        with NewBytes() as new:
            largest = max(v.nbytes for _, v in iter_full_state_dict(model, filter=choice))
            assert new.now == 0
        assert unit_nbytes < new.peak <= unit_nbytes + 2 * largest, (new.peak, unit_nbytes, largest)
    with NewBytes() as new:
        for name, _ in iter_full_state_dict(model):
            if name == "2.weight":
                break
        gc.collect()
        del _
        assert new.now == 0, "nothing is left of an iteration that stopped"
