"""Residency of units, the parameters that their modules show, and storages whose memory comes and
goes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compat._engine.dtypes import Precision
from fsdp_compat._engine.storage import GroupMemory, Storage
from fsdp_compat._engine.unit import Residency, Unit
from tests.support.engine_build import CPU, STORES, lone_mesh, make_store, make_unit, members_of
from tests.support.memory import gathered_nbytes, group_nbytes

# Gathered in another dtype, so that one rank gathers too.
HALF = Precision(torch.bfloat16, torch.float32)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)


def unit_in(state: str, kind: str = "flat") -> Unit:
    module = Pair()
    unit = make_unit(kind, module, lone_mesh(), members_of(module), precision=HALF)
    if state != "SHARDED":
        unit.unshard()
    if state == "UNSHARDED":
        unit.wait_for_unshard()
    assert unit.residency.name == state
    return unit


STATES = "SHARDED", "UNSHARDING", "UNSHARDED"


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("unshard", ("UNSHARDING", "UNSHARDING", "UNSHARDED")),
        ("wait_for_unshard", ("SHARDED", "UNSHARDED", "UNSHARDED")),
        ("reshard", ("SHARDED", "SHARDED", "SHARDED")),
    ],
)
def test_unshard_wait_and_reshard_are_legal_in_every_state(
    call: str, after: tuple[str, ...]
) -> None:
    for state, expected in zip(STATES, after, strict=True):
        unit = unit_in(state)
        getattr(unit, call)()
        assert unit.residency.name == expected


@pytest.mark.parametrize("kind", STORES)
def test_memory_follows_residency_and_no_version_counter_moves(kind: str) -> None:
    unit = unit_in("SHARDED", kind)
    group = unit.groups[0]
    before, numel = [param._version for param in group.unsharded_params], group.store.numel
    for _ in range(3):
        for call, held in (("unshard", 2), ("wait_for_unshard", 2), ("reshard", 0)):
            getattr(unit, call)()
            assert group_nbytes(group) == held * numel
    assert [param._version for param in group.unsharded_params] == before


def test_running_unit_is_not_resharded() -> None:
    unit = unit_in("UNSHARDED")
    unit.running = 1
    unit.reshard()
    assert unit.residency is Residency.UNSHARDED
    unit.running = 0
    unit.reshard()
    assert unit.residency is Residency.SHARDED


# -- shown parameters


NAMES = ["first.weight", "first.bias", "last.weight", "last.bias"]


def shown(unit: Unit) -> list[str]:
    return [name for name, _ in unit.module.named_parameters()]


@pytest.mark.parametrize("kind", STORES)
def test_modules_show_unsharded_or_sharded_parameters(kind: str) -> None:
    unit = unit_in("UNSHARDED", kind)
    unit.view.show_unsharded()
    assert shown(unit) == NAMES
    assert [tuple(p.shape) for p in unit.module.parameters()] == [(2, 3), (2,), (2, 2), (2,)]
    unit.view.show_sharded()
    sharded_params = [param for group in unit.groups for param, _ in group.store.sharded_params]
    assert [id(p) for p in unit.module.parameters()] == [id(param) for param in sharded_params]


def test_order_of_names_survives_swaps() -> None:
    module = Pair()
    managed = [member for member in members_of(module) if member.name in (NAMES[0], NAMES[3])]
    unit = make_unit("flat", module, lone_mesh(), managed)
    for _ in range(2):
        unit.view.show_unsharded()
        assert shown(unit) == NAMES
        unit.view.show_sharded()
        assert shown(unit) == ["_flat_param", *NAMES[1:3]]


# -- storages


def test_storage_frees_and_allocates_the_same_size_with_valid_views() -> None:
    tensor = torch.arange(12.0)
    view, storage = tensor[4:8].view(2, 2), Storage(tensor)
    for call, nbytes in ((storage.free, 0), (storage.allocate, 48), (storage.allocate, 48)):
        call()
        assert storage.resident_nbytes == nbytes
    tensor.copy_(torch.arange(12.0) * 2)
    assert view.tolist() == [[8.0, 10.0], [12.0, 14.0]]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_group_memory_starts_empty_and_counts_its_bytes(kind: str, ranks: int) -> None:
    module = Pair()
    store = make_store(
        kind, members_of(module), rank=0, ranks=ranks, flat_slot=(module, "_flat_param")
    )
    memory = GroupMemory(store, ranks, torch.bfloat16, CPU)
    assert gathered_nbytes(memory) == 0
    memory.allocate()
    assert gathered_nbytes(memory) == 2 * ranks * store.numel
    memory.all_gather_output.data.zero_()
    memory.fill_unsharded_params()
    copied = kind == "row" and ranks > 1
    own = memory.unsharded_params[0].untyped_storage().nbytes()  # of all; the buffer is freed
    assert gathered_nbytes(memory) == (own if copied else 2 * ranks * store.numel)
    assert own >= 2 * 14  # elements
    memory.free()
    assert gathered_nbytes(memory) == 0
