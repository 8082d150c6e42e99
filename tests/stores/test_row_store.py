"""The row store over DTensors, on several ranks: parameters lie where ``distribute_tensor`` puts
them, follow what users do to them, and keep every bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_compat._engine.storage import GroupMemory
from fsdp_compat._stores.placement import DataMesh, RowPlacement, SpmdMesh, placement_of
from fsdp_compat._stores.row_store import RowStore
from fsdp_compat.errors import StateError
from tests.support.cases import about
from tests.support.engine_build import CPU, members_of
from tests.support.ranks import on_ranks


class Shapes(nn.Module):
    """Parameters of many shapes; those whose names begin with ``dim1`` are cut along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.odd = nn.Parameter(torch.randn(5, 3))
        self.small = nn.Parameter(torch.randn(1, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.dim1_even = nn.Parameter(torch.randn(3, 8, 2))
        self.dim1_odd = nn.Parameter(torch.randn(3, 5, 2))
        self.dim1_empty = nn.Parameter(torch.randn(0, 5))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)


def _dim(name: str) -> int:
    return 1 if name.startswith("dim1") else 0


def _store_of(model: nn.Module, data_mesh: DataMesh) -> RowStore:
    """Make a store of all parameters, and put the sharded ones into the modules."""
    members = members_of(model)
    axis = data_mesh.engine_mesh().shard
    placements = [placement_of(m.parameter, data_mesh, _dim(m.name)) for m in members]
    store = RowStore(members, placements, rank=axis.rank, ranks=axis.ranks, device=CPU)
    for slot in store.shown(None):
        slot.module.register_parameter(slot.attribute, slot.parameter)
    return store


def _check_placements(store: RowStore, wholes: dict[str, torch.Tensor]) -> None:
    for (param, _), member in zip(store.sharded_params, store.orig_params, strict=True):
        whole = wholes[member.name]
        assert type(param) is DTensor
        assert isinstance(param, nn.Parameter)
        assert (param.shape, param.stride()) == (whole.shape, whole.contiguous().stride())
        expected = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        local = param.to_local().detach()
        assert torch.equal(local, expected.to_local()), (member.name, param.placements)
        assert torch.equal(param.full_tensor(), whole), (member.name, param.placements)
        assert local.is_contiguous()
        assert (param.data_ptr(), local.storage_offset()) == (0, 0)
        assert local.untyped_storage().nbytes() == local.nbytes


# -- where parameters lie


def _described(store: RowStore, wholes: dict[str, torch.Tensor]) -> list[str]:
    _check_placements(store, wholes)
    assert store.is_intact()
    return [str(param.placements) for param, _ in store.sharded_params]


def _values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@on_ranks(4)
def test_parameters_lie_as_torch_distributes_them() -> None:
    for shape in ((4,), (2, 2)):
        names, has_replicas = ("replicate", "shard")[-len(shape) :], len(shape) == 2
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        data_mesh = DataMesh(mesh, 1, 0) if has_replicas else DataMesh(mesh, 0, None)
        model = Shapes()
        wholes = _values_of(model)
        found = _described(_store_of(model, data_mesh), wholes)
        for index, own in ((0, "Shard(dim=0)"), (2, "Replicate()"), (6, "Shard(dim=1)")):
            assert found[index] == (f"(Replicate(), {own})" if has_replicas else f"({own},)")


class Parallel(nn.Module):
    """DTensors on ``mesh``, of one placement each."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wholes: dict[str, torch.Tensor] = {}
        for index, each in enumerate(placements):
            for name, shape in ((f"rows{index}", (8, 6)), (f"dim1_{index}", (6, 8))):
                self.wholes[name] = torch.randn(shape)
                value = distribute_tensor(self.wholes[name], mesh, each, src_data_rank=None)
                setattr(self, name, nn.Parameter(value))


def _check_gradients(store: RowStore) -> None:
    """Gradients that are placed in another way than the parameter are moved before they are cut."""
    form = store.reduce_form()
    assert not form.can_pack_grads
    buffer = torch.empty(store.ranks * form.numel)
    for index in range(len(store.orig_params)):
        parallel = store.parallel[index]
        assert parallel is not None
        whole = torch.arange(float(math.prod(parallel.shape))).view(parallel.shape)
        moved = distribute_tensor(
            whole, parallel.mesh, [Replicate()] * parallel.mesh.ndim, src_data_rank=None
        )
        parts = form.split(index, moved)
        for part, piece in zip(parts, form.param_views(buffer)[index], strict=True):
            piece.copy_(part)
        own = buffer.view(store.ranks, -1)[store.rank]
        assert torch.equal(form.grads(own)[index].full_tensor(), whole)


CUT, CUT_TWICE = "Shard(dim=0)", "_StridedShard(dim=0, sf=2), Shard(dim=0)"
CUT_OTHER_DIM = "_StridedShard(dim=1, sf=2), Shard(dim=1)"


CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[int, str]]] = [
    ((2,), (2,), {0: CUT_TWICE, 1: f"Shard(dim=1), {CUT}", 3: CUT_OTHER_DIM}),
    ((1, 2), (2,), {0: f"Replicate(), {CUT_TWICE}"}),
    ((2, 1), (2,), {0: f"Replicate(), {CUT_TWICE}"}),
    ((2,), (1, 2), {0: f"{CUT_TWICE}, {CUT}", 2: f"{CUT}, {CUT}, Shard(dim=1)"}),
]


@on_ranks(4)
def test_tensor_parallel_parameters_are_cut_once_more() -> None:
    for case in CASES:
        with about(case):
            _check_tensor_parallel(*case)


def _check_tensor_parallel(
    data: tuple[int, ...], parallel: tuple[int, ...], expected: dict[int, str]
) -> None:
    names = [f"data{i}" for i in range(len(data))], [f"tp{i}" for i in range(len(parallel))]
    mesh = init_device_mesh("cpu", data + parallel, mesh_dim_names=(*names[0], *names[1]))
    kinds: list[list[Any]] = [[Shard(0)], [Shard(1)], [Replicate()]]
    if len(parallel) == 2:
        kinds = [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(0)]]
    model = Parallel(mesh[tuple(names[1])], kinds)
    data_mesh = DataMesh(mesh[tuple(names[0])], len(data) - 1, 0 if len(data) == 2 else None)
    store = _store_of(model, data_mesh)
    _check_gradients(store)
    found = _described(store, model.wholes)
    assert [found[index] for index in expected] == [f"({each})" for each in expected.values()]


@on_ranks(4)
def test_parameters_on_the_mesh_of_everything_are_cut_along_data_parallelism() -> None:
    _check_mesh_of_everything(
        (2, 2), ("dp", "tp"), ("dp",), {0: CUT_TWICE, 4: f"{CUT}, Replicate()"}
    )
    _check_mesh_of_everything((2, 1, 2), ("dp", "cp", "tp"), ("dp", "cp"), {0: CUT_TWICE})


def _check_mesh_of_everything(
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    shard: tuple[str, ...],
    expected: dict[int, str],
) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dims = tuple(names.index(name) for name in shard)
    inner = mesh[shard[0]] if len(shard) == 1 else mesh[shard]._flatten("_".join(shard))
    kinds = [
        [Replicate() if dim in dims else own for dim in range(mesh.ndim)]
        for own in (Shard(0), Shard(1), Replicate())
    ]
    model = Parallel(mesh, kinds)
    store = _store_of(model, DataMesh(inner, 0, None, SpmdMesh(mesh, dims, dims)))
    parallel = store.parallel[0]
    assert parallel is not None
    # What is partial along data parallelism stays so, until the reduction.
    placements = [Partial() if dim in dims else p for dim, p in enumerate(parallel.placements)]
    own = torch.full_like(parallel.part(torch.zeros(8, 6)), float(dist.get_rank()))
    value = DTensor.from_local(own, mesh, placements, run_check=False)
    assert torch.equal(parallel.local(value), own)
    found = _described(store, model.wholes)
    assert [found[index] for index in expected] == [f"({each})" for each in expected.values()]


# -- what users do to them


@on_ranks(2)
def test_sharded_parameters_that_users_replace_are_taken_in_or_refused() -> None:
    data_mesh = DataMesh(init_device_mesh("cpu", (2,)), 0, None)
    wholes, model = _values_of(Shapes()), Shapes().to("meta")
    model.odd.mine = "kept"
    store = _store_of(model, data_mesh)
    assert store.shard.is_meta
    assert not store.adopt()
    model.to_empty(device="cpu")
    assert store.adopt()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(distribute_tensor(wholes[name], param.device_mesh, param.placements))
    assert store.is_intact()
    _check_placements(store, wholes)
    # Other parameter objects, and another dtype.
    before = [param for param, _ in store.sharded_params]
    doubled = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(doubled, assign=True)
    assert store.adopt()
    model.to(torch.bfloat16)
    assert not store.is_intact()
    assert store.adopt()
    assert not any(a is b for a, (b, _) in zip(before, store.sharded_params, strict=True))
    assert model.odd.mine == "kept"
    assert {param.requires_grad for param, _ in store.sharded_params} == {True, False}
    assert store.dtype == torch.bfloat16
    _check_placements(store, {name: (value * 2).bfloat16() for name, value in wholes.items()})
    # An optimizer step, foreach, leaves them where they are.
    form = store.reduce_form()
    grads = form.grads(torch.ones(form.numel, dtype=torch.bfloat16))
    for (param, _), grad in zip(store.sharded_params, grads, strict=True):
        assert (grad is None) == (not param.requires_grad)
        param.grad = grad
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    assert store.is_intact()
    store.check("a unit")
    # One of them alone, with another dtype or other placements.
    sharded = model.odd
    for wrong in (
        torch.zeros(5, 3, dtype=torch.bfloat16),
        sharded.detach().redistribute(placements=[Replicate()]),
    ):
        model.odd = nn.Parameter(wrong)
        shard = store.shard.clone()
        with pytest.raises(StateError, match="'odd'"):
            store.adopt()
        assert torch.equal(store.shard, shard)
    model.odd = sharded
    assert not store.adopt()
    sharded._local_tensor = sharded._local_tensor.float()
    with pytest.raises(StateError, match="others did not"):
        store.adopt()


# -- every bit of every dtype, and rows of fewer ranks: simulated in one process


def _simulated(model: nn.Module, ranks: int) -> list[RowStore]:
    return [
        RowStore(
            members_of(model),
            [RowPlacement(_dim(n) if p.dim() else None) for n, p in model.named_parameters()],
            rank=rank,
            ranks=ranks,
            device=CPU,
        )
        for rank in range(ranks)
    ]


def _filled(stores: list[RowStore], dtype: torch.dtype) -> GroupMemory:
    memory = GroupMemory(stores[0], len(stores), dtype, CPU)
    if not memory.aliased:
        memory.allocate()
        memory.all_gather_output.copy_(torch.cat([store.shard for store in stores]))
        memory.fill_unsharded_params()
    return memory


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_frozen_parameters_keep_every_bit(dtype: torch.dtype, ranks: int) -> None:
    width = dtype.itemsize
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    model = nn.Module()
    for name, shape in (("rows", (6, 8)), ("lone", (512,)), ("dim1", (4, 6)), ("odd", (5, 3))):
        numel = math.prod(shape) * width
        start = 2**16 - numel if name == "lone" else 2 * 0x7F80  # NaN patterns of bf16
        value = patterns[start : start + numel]
        value = value % 2 if dtype == torch.bool else value
        setattr(model, name, nn.Parameter(value.view(dtype).view(shape), requires_grad=False))
    stores = _simulated(model, ranks)
    memory = _filled(stores, dtype)
    for unsharded, (name, original) in zip(
        memory.unsharded_params, model.named_parameters(), strict=True
    ):
        assert torch.equal(unsharded.view(torch.uint8), original.view(torch.uint8)), name
    for whole, original in zip(
        stores[0].whole(torch.cat([store.shard for store in stores])),
        model.parameters(),
        strict=True,
    ):
        assert torch.equal(whole.view(torch.uint8), original.view(torch.uint8))


@pytest.mark.parametrize("ranks", [2, 3])
def test_frozen_parameters_take_no_bytes_in_the_reduction(ranks: int) -> None:
    model = Shapes()
    store = _simulated(model, ranks)[0]
    form = store.reduce_form()
    assert form.indices == list(range(8))
    assert form is store.reduce_form()
    places = form.param_views(torch.empty(ranks * form.numel))
    assert [bool(views) for views in places[:-1]] == [
        param.requires_grad and param.numel() > 0 for param in model.parameters()
    ]
    store.sharded_params[0].parameter.requires_grad_(False)
    fewer = store.reduce_form()
    assert fewer.indices == list(range(1, 8))
    assert fewer.numel < form.numel
    assert fewer.grads(torch.ones(fewer.numel))[0] is None
    store.sharded_params[0].parameter.requires_grad_(True)
    assert store.reduce_form() is form


class Special(nn.Parameter):
    pass


def test_attributes_and_classes_of_parameters_are_kept() -> None:
    model = nn.Module()
    model.weight = Special(torch.ones(4, 2))
    model.bias = nn.Parameter(torch.ones(2))
    model.weight.rate = 0.5
    store = _simulated(model, 2)[0]
    unsharded = GroupMemory(store, 2, torch.float32, CPU).unsharded_params
    sharded = [param for param, _ in store.sharded_params]
    assert [type(param) for param in unsharded] == [Special, nn.Parameter]
    assert (sharded[0].rate, unsharded[0].rate) == (0.5, 0.5)
    sharded[0].rate = 2.0
    assert unsharded[0].rate == 2.0
    assert not hasattr(unsharded[1], "rate")
