"""Residency of units, the parameters that their modules show, and storages whose memory comes and
goes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compat._engine.dtypes import Precision
from fsdp_compat._engine.storage import GroupMemory, Storage
from fsdp_compat._engine.unit import Residency, Unit
from fsdp_compat.errors import StateError
from tests.support.engine_build import CPU, STORES, lone_mesh, make_store, make_unit, members_of

# Gathered in another dtype, so that one rank gathers too.
HALF = Precision(torch.bfloat16, torch.float32)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)


def unit_in(state: str, kind: str = "flat", precision: Precision | None = HALF) -> Unit:
    module = Pair()
    unit = make_unit(kind, module, lone_mesh(), members_of(module), precision=precision)
    unit.label = "unit 'blocks.7'"
    if state != "SHARDED":
        unit.unshard()
    if state == "UNSHARDED":
        unit.wait_for_unshard()
    assert unit.residency.name == state
    return unit


@pytest.mark.parametrize(
    ("state", "call", "after"),
    [
        ("SHARDED", "unshard", "UNSHARDING"),
        ("UNSHARDING", "unshard", "UNSHARDING"),
        ("UNSHARDED", "unshard", "UNSHARDED"),
        ("SHARDED", "wait_for_unshard", "SHARDED"),
        ("UNSHARDING", "wait_for_unshard", "UNSHARDED"),
        ("UNSHARDED", "wait_for_unshard", "UNSHARDED"),
        ("SHARDED", "reshard", "SHARDED"),
        ("UNSHARDING", "reshard", "SHARDED"),
        ("UNSHARDED", "reshard", "SHARDED"),
    ],
)
def test_unshard_wait_and_reshard_are_legal_in_every_state(
    state: str, call: str, after: str
) -> None:
    unit = unit_in(state)
    getattr(unit, call)()
    assert unit.residency.name == after


@pytest.mark.parametrize("kind", STORES)
def test_memory_follows_residency(kind: str) -> None:
    unit = unit_in("SHARDED", kind)
    numel = unit.groups[0].store.numel
    found = []
    for call in (unit.unshard, unit.wait_for_unshard, unit.reshard):
        call()
        found.append(unit.groups[0].resident_nbytes)
    assert found == [2 * numel, 2 * numel, 0]


@pytest.mark.parametrize("kind", STORES)
def test_one_rank_without_a_cast_holds_only_its_shard(kind: str) -> None:
    unit = unit_in("UNSHARDED", kind, None)
    group = unit.groups[0]
    assert group.resident_nbytes == 0
    shard = group.store.shard
    assert all(
        param.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        for param in group.unsharded_params
    )
    unit.reshard()
    assert all(param.untyped_storage().nbytes() for param in group.unsharded_params)


def test_running_unit_is_not_resharded() -> None:
    unit = unit_in("UNSHARDED")
    unit.running = 1
    unit.reshard()
    assert unit.residency is Residency.UNSHARDED
    unit.running = 0
    unit.reshard()
    assert unit.residency is Residency.SHARDED


def test_summoned_unit_neither_unshards_nor_shows() -> None:
    unit = unit_in("SHARDED")
    unit.view.begin_summon()
    unit.unshard()
    unit.view.show_unsharded()
    assert (unit.residency, unit.view.shows_unsharded) == (Residency.SHARDED, False)


# -- shown parameters


@pytest.mark.parametrize("kind", STORES)
def test_modules_show_unsharded_or_sharded_parameters(kind: str) -> None:
    unit = unit_in("UNSHARDED", kind)
    unit.view.show_unsharded()
    assert {name: tuple(p.shape) for name, p in unit.module.named_parameters()} == {
        "first.weight": (2, 3),
        "first.bias": (2,),
        "last.weight": (2, 2),
        "last.bias": (2,),
    }
    unit.view.show_sharded()
    sharded_params = [param for group in unit.groups for param, _ in group.store.sharded_params]
    assert [id(p) for p in unit.module.parameters()] == [id(param) for param in sharded_params]


def test_flat_unit_hides_original_parameters_while_sharded() -> None:
    unit = unit_in("SHARDED")
    assert [name for name, _ in unit.module.named_parameters()] == ["_flat_param"]
    with pytest.raises(AttributeError):
        _ = unit.module.first.weight.data


@pytest.mark.parametrize("kind", STORES)
def test_replaced_parameter_is_refused(kind: str) -> None:
    unit = unit_in("UNSHARDED", kind)
    unit.view.show_unsharded()
    unit.module.last.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(
        StateError, match=r"(?s)replaced by another object.*'blocks\.7', Linear\.weight"
    ):
        unit.view.show_sharded()


def test_order_of_names_survives_swaps() -> None:
    module = Pair()
    managed = [
        member for member in members_of(module) if member.name in ("first.weight", "last.bias")
    ]
    unit = make_unit("flat", module, lone_mesh(), managed)
    for _ in range(2):
        unit.view.show_unsharded()
        assert [name for name, _ in module.named_parameters()] == [
            "first.weight",
            "first.bias",
            "last.weight",
            "last.bias",
        ]
        unit.view.show_sharded()
        assert [name for name, _ in module.named_parameters()] == [
            "_flat_param",
            "first.bias",
            "last.weight",
        ]


def test_rnn_weight_list_follows_the_shown_parameters() -> None:
    module = nn.LSTM(3, 2)
    names = list(module._flat_weights_names)
    unit = make_unit("original", module, lone_mesh(), members_of(module), precision=HALF)
    unit.unshard()
    unit.wait_for_unshard()
    for show in (
        unit.view.show_unsharded,
        unit.view.show_sharded,
        unit.view.show_unsharded,
    ):
        show()
        assert [id(weight) for weight in module._flat_weights] == [
            id(module._parameters[name]) for name in names
        ]


# -- storages


def test_storage_frees_and_allocates_the_same_size() -> None:
    tensor = torch.arange(12.0)
    storage = Storage(tensor)
    assert storage.resident_nbytes == 48
    storage.free()
    assert storage.resident_nbytes == 0
    storage.allocate()
    assert storage.resident_nbytes == 48
    storage.allocate()
    assert storage.resident_nbytes == 48


def test_views_are_valid_after_reallocation() -> None:
    tensor = torch.arange(12.0)
    view, storage = tensor[4:8].view(2, 2), Storage(tensor)
    storage.free()
    storage.allocate()
    tensor.copy_(torch.arange(12.0) * 2)
    assert view.tolist() == [[8.0, 10.0], [12.0, 14.0]]


def test_saved_tensor_is_valid_after_reallocation() -> None:
    weight = torch.tensor([2.0, 3.0])
    storage = Storage(weight)
    x = torch.ones(2, requires_grad=True)
    loss = (x * weight).sum()
    storage.free()
    storage.allocate()
    weight.data.copy_(torch.tensor([2.0, 3.0]))
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_group_memory_starts_empty_and_counts_its_bytes(kind: str, ranks: int) -> None:
    module = Pair()
    store = make_store(kind, members_of(module), rank=0, ranks=ranks, home=(module, "_flat_param"))
    memory = GroupMemory(store, ranks, torch.bfloat16, CPU)
    assert memory.resident_nbytes == 0
    memory.allocate()
    assert memory.resident_nbytes == 2 * ranks * store.numel
    memory.all_gather_output.data.zero_()
    memory.fill_unsharded_params()
    copied = kind == "row" and ranks > 1
    own = memory.unsharded_params[0].untyped_storage().nbytes()  # of all; the buffer is freed
    assert memory.resident_nbytes == (own if copied else 2 * ranks * store.numel)
    assert own >= 2 * 14  # elements
    memory.free()
    assert memory.resident_nbytes == 0


@pytest.mark.parametrize("kind", STORES)
def test_unshard_moves_no_version_counter(kind: str) -> None:
    unit = unit_in("SHARDED", kind)
    params = unit.groups[0].unsharded_params
    before = [param._version for param in params]
    for _ in range(3):
        unit.unshard()
        unit.wait_for_unshard()
        unit.reshard()
    assert [param._version for param in params] == before
