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
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullStateDictConfig, StateDictType, StateError, UsageError, fully_shard
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.checkpoint._full import iter_full_state_dict
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import NewBytes, group_nbytes
from tests.support.models import Lora
from tests.support.odd_model import assert_identical, assert_same, local_tensors, stack
from tests.support.parity import local, seeded
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

SHARDED, LOCAL = StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
FULL = StateDictType.FULL_STATE_DICT
WIDTH, RANK = 32, 2  # of adapters


class Model(nn.Module):
    """Frozen layers with small adapters, a tie, a buffer, and parameters of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.Sequential(Lora(WIDTH), Lora(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight
        self.ignored = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.wide = nn.Parameter(torch.randn(5).double())


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def shard(
    model: nn.Module, use_orig_params: bool = False, wrapped: bool = True, **options: Any
) -> FSDP:
    wrap = ModuleWrapPolicy({Lora}) if wrapped else None
    return FSDP(
        model,
        use_orig_params=use_orig_params,
        auto_wrap_policy=wrap,
        ignored_modules=[model.ignored],
        **options,
    )


Filter = Callable[[str], bool] | str


def is_lora(name: str) -> bool:
    return name.endswith((".a.weight", ".b.weight"))


def is_some(name: str) -> bool:
    """Some of every group, one name of a tie, a buffer, and an unmanaged parameter."""
    managed = "head.weight", "nothing", "gain", "blocks.1.a.weight", "wide"
    return name in (*managed, "norm.running_var", "ignored.bias")


def chosen(plain: nn.Module, choice: Filter) -> dict[str, Any]:
    """What the unsharded model has of it."""
    named = plain.named_parameters(remove_duplicate=False)
    trainable = {name for name, p in named if p.requires_grad}
    chooses = trainable.__contains__ if isinstance(choice, str) else choice
    return {name: value for name, value in plain.state_dict().items() if chooses(name)}


def assert_streams(
    model: nn.Module, expected: dict[str, Any], choice: Any = None
) -> dict[str, Any]:
    """Return what is streamed, which may come in another order."""
    found = dict(iter_full_state_dict(model, filter=choice))
    assert_same(found, expected)
    return found


def sent(model: FSDP) -> tuple[int, int]:
    """(gathers, bytes) that this rank has sent; the counters begin anew."""
    num_gathers = nbytes = 0
    for traffic in {
        id(group.shard): group.shard.traffic for group in model._runtime.groups
    }.values():
        num_gathers += traffic.counts.total()
        nbytes += traffic.nbytes.total()
        traffic.clear()
    return num_gathers, nbytes


CHOICES: tuple[Filter, ...] = (is_lora, is_some, "trainable", lambda name: False)


@pytest.mark.parametrize("world_size", sample([1, 3], 1))
@on_ranks("world_size")
def test_a_filter_chooses_the_same_entries_as_for_the_unsharded_model(world_size: int) -> None:
    plain, on_rank0 = make_model(), FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    for use_orig_params, wrapped in itertools.product((False, True), (False, True)):
        model = shard(make_model(), use_orig_params, wrapped)
        for choice in CHOICES:
            expected = chosen(plain, choice)
            assert_identical(model.state_dict(filter=choice), expected)
            assert_streams(model, expected, choice)
            with FSDP.state_dict_type(model, FULL, on_rank0):
                found = model.state_dict(filter=choice)
            assert_identical(found, expected if dist.get_rank() == 0 else {})
        biases = model.state_dict(prefix="a.", filter=lambda name: name.endswith("bias"))
        assert [*biases] == [f"a.{name}" for name in plain.state_dict() if name.endswith("bias")]
        assert_identical(model.state_dict(), plain.state_dict())
        with FSDP.summon_full_params(model):
            assert_identical(model.state_dict(filter=is_lora), chosen(plain, is_lora))
            with pytest.raises(StateError, match="summon_full_params"):
                next(iter_full_state_dict(model))
        for wrong in (3, "all", lambda: True):
            with pytest.raises(UsageError, match="filter"):
                model.state_dict(filter=wrong)


@on_ranks(3)
def test_a_filtered_sharded_dict_holds_compact_copies_that_dcp_takes(tmp_path: Path) -> None:
    plain = make_model(1)
    meshes = (None, init_device_mesh("cpu", (3,)))
    for number, (use_orig_params, mesh) in enumerate(itertools.product((False, True), meshes)):
        model = shard(make_model(1), use_orig_params, device_mesh=mesh)
        for choice in CHOICES[:3]:
            expected = chosen(plain, choice)
            sent(model)
            with FSDP.state_dict_type(model, SHARDED):
                found = model.state_dict(filter=choice)
            assert list(found) == list(expected)
            assert mesh is not None or sent(model) == (0, 0)
            for name, value in found.items():
                tensors = [local(tensor) for tensor in local_tensors(value)]
                storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
                held = sum(storage.nbytes() for storage in storages.values())
                assert held == sum(t.nbytes for t in tensors), f"{name} keeps more than it shows"
            folder = f"{tmp_path}/{number}/{CHOICES.index(choice)}"
            dcp.save(found, checkpoint_id=folder)
            other = shard(make_model(2), not use_orig_params)
            with FSDP.state_dict_type(other, SHARDED):
                read = other.state_dict(filter=choice)
            dcp.load(read, checkpoint_id=folder)
            other.load_state_dict(read, strict=False)
            assert_identical(other.state_dict(filter=choice), expected)
        with FSDP.state_dict_type(model, LOCAL):
            keys = list(model.state_dict(filter=is_lora))
        flat = [key for key in keys if key.endswith("_flat_param")]
        assert flat == ["blocks.0._flat_param", "blocks.1._flat_param"], "with what is chosen"
        parts = [key for key in keys if key not in flat]
        assert parts == [*chosen(plain, is_lora)] * use_orig_params


@on_ranks(3)
def test_a_filtered_adapter_moves_only_its_own_bytes() -> None:
    ranks = dist.get_world_size()
    adapter_nbytes = 2 * 2 * WIDTH * RANK * 4  # two blocks, two matrices
    for use_orig_params, wrapped in itertools.product((False, True), (True, False)):
        model = shard(make_model(), use_orig_params, wrapped)
        for take in (
            FSDP.state_dict,
            lambda model, filter: dict(iter_full_state_dict(model, filter=filter)),
        ):
            sent(model)
            assert len(take(model, filter=is_lora)) == 4
            gathers, nbytes = sent(model)
            assert gathers == (2 if wrapped else 1), "groups without a match are not gathered"
            least = adapter_nbytes * (ranks - 1) // ranks
            assert least <= nbytes <= (least if wrapped else 2 * least) + 64 * gathers * (ranks - 1)
        sent(model)
        one = model.state_dict(filter=lambda name: name == "blocks.1.a.weight")
        assert_identical(one, {"blocks.1.a.weight": make_model().blocks[1].a.weight})
        least = RANK * WIDTH * 4 * (ranks - 1)
        assert sent(model) <= (1, least), "of a group only what matches travels"
    model = shard(make_model())
    sent(model)
    model.state_dict(filter=lambda name: name.startswith("norm.running"))
    assert sent(model) == (0, 0)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_the_state_is_streamed_unit_by_unit_with_ties_together(world_size: int) -> None:
    plain = make_model()
    rows = fully_shard(make_model())
    for choice in CHOICES:
        assert_streams(rows, chosen(plain, choice), choice)
    for use_orig_params in (False, True):
        model = shard(make_model(), use_orig_params)
        pairs = list(iter_full_state_dict(model))
        expected = plain.state_dict()
        order = [name for name in expected if name != "head.weight"]
        order.insert(order.index("embed.weight") + 1, "head.weight")
        order.sort(key=lambda name: name.startswith("blocks"))
        assert [name for name, _ in pairs] == order, "the root's first, a tie's together"
        found = dict(pairs)
        assert found["embed.weight"] is found["head.weight"]
        assert_same(found, expected)
        cast = dict(iter_full_state_dict(model, device=None, dtype=torch.bfloat16))
        assert cast["embed.weight"] is cast["head.weight"]
        rounded = {k: v.bfloat16() if v.is_floating_point() else v for k, v in expected.items()}
        assert_same(cast, rounded)
        live = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        for name, value in pairs:
            assert value.untyped_storage().nbytes() == value.nbytes, name
            assert value.untyped_storage()._cdata not in live, name
    whole, container = (  # which is no unit itself, around one of two names
        seeded(lambda unit=unit: nn.ModuleDict({"norm": nn.BatchNorm1d(4), "first": unit(Lora())}))
        for unit in (lambda m: m, FSDP)
    )
    for each in (whole, container):
        each["again"] = each["first"]
    found = assert_streams(container, whole.state_dict())
    assert found["first.w.weight"] is found["again.w.weight"]
    with pytest.raises(UsageError, match="module"):
        iter_full_state_dict(3)  # type: ignore[arg-type]
    for wrong in ({"dtype": torch.int64}, {"device": "nowhere"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            iter_full_state_dict(container, **wrong)


@on_ranks(2)
def test_streaming_holds_one_unit_and_stopping_frees_it() -> None:
    torch.manual_seed(0)
    model = FSDP(stack(bias=True), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    unit_nbytes = 2 * model._runtime.groups[0].store.shard.nbytes
    for make in (
        iter_full_state_dict,
        lambda model: iter_full_state_dict(model, filter=lambda name: name.endswith("weight")),
    ):
        with NewBytes() as new:
            largest = max(value.nbytes for _, value in make(model))
            assert new.now == 0
        assert unit_nbytes < new.peak <= unit_nbytes + 2 * largest, (new.peak, unit_nbytes, largest)
    with NewBytes() as new:
        for name, _ in iter_full_state_dict(model):
            if name == "2.weight":
                break
        gc.collect()
        del _
        assert new.now == 0, "nothing is left of an iteration that stopped"
    assert all(group_nbytes(group) == 0 for group in model._runtime.groups)
