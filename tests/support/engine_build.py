"""The engine without a front end: shard a module over any store.

``shard`` does only what every front end does: assign owners, group members, make stores, units and
a runtime, attach hooks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_compat._comm.mesh import Axis, Mesh
from fsdp_compat._engine.dtypes import Precision, tensors_in
from fsdp_compat._engine.group import Group
from fsdp_compat._engine.ownership import OrigParam, assign_owners, group_members
from fsdp_compat._engine.runtime import Runtime
from fsdp_compat._engine.schedule import Prefetch, RuntimeOptions
from fsdp_compat._engine.state_store import flat_param_name
from fsdp_compat._engine.store import ParamStore, ReduceForm
from fsdp_compat._engine.unit import Call, Unit, UnitOptions
from fsdp_compat._stores.flat_store import FlatStore
from fsdp_compat._stores.placement import RowPlacement
from fsdp_compat._stores.row_store import RowStore
from fsdp_compat._stores.row_views import cut_up

CPU = torch.device("cpu")
# one FlatParameter; the original parameters over a flat shard; rows
STORES = ("flat", "original", "row")


def make_store(
    kind: str,
    members: Sequence[OrigParam],
    *,
    rank: int,
    ranks: int,
    flat_slot: tuple[nn.Module, str],
) -> ParamStore:
    """Return a store of one of the STORES."""
    if kind == "row":  # of plain parameters instead of DTensors
        placements = [RowPlacement(0 if m.parameter.dim() else None) for m in members]
        return RowStore(members, placements, rank=rank, ranks=ranks, device=CPU)
    return FlatStore(
        members,
        rank=rank,
        ranks=ranks,
        flat_slot=flat_slot,
        use_orig_params=kind == "original",
        device=CPU,
    )


class RowGatherForm(ReduceForm):
    """How the parameters of a RowStore lie in the output of an all-gather."""

    def __init__(self, store: RowStore) -> None:
        self._store, self._views = store, store.layout
        self.numel, self.dtype = store.numel, store.dtype

    def param_views(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        indices = range(len(self._views.cuts))
        return [*(self._views.param_views(buffer, i) for i in indices), self._views.padding(buffer)]

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        parallel = self._store.parallel[index]
        value = value if parallel is None else parallel.local(value)
        return cut_up(value, self._views.cuts[index])


def gather_form(store: ParamStore) -> Any:
    """Return how parameters lie in the output of an all-gather, as a ReduceForm tells it of
    gradients: its places, and how to split a parameter into them."""
    return RowGatherForm(store) if isinstance(store, RowStore) else store


def members_of(module: nn.Module) -> list[OrigParam]:
    """Return all parameters of a module, as members of one unit."""
    return assign_owners(module, [module], (), ())[module]


def lone_mesh() -> Mesh:
    """Return a mesh of one rank, without a process group."""
    alone = Axis(None, 0, (0,))
    return Mesh(alone, alone)


def make_unit(
    kind: str,
    module: nn.Module,
    mesh: Mesh,
    members: Sequence[OrigParam],
    *,
    reshard_after_forward: bool = True,
    precision: Precision | None = None,
) -> Unit:
    """Collective over the mesh. Return a unit without a runtime."""
    groups = []
    with torch.no_grad():
        for index, (_, its) in enumerate(group_members(members)):
            flat_slot = (module, flat_param_name(index))
            store = make_store(
                kind, its, rank=mesh.shard.rank, ranks=mesh.shard.ranks, flat_slot=flat_slot
            )
            groups.append(Group(store, mesh, precision or Precision(store.dtype, store.dtype), CPU))
        return Unit(
            module, groups, UnitOptions(reshard_after_forward, False, False, torch.float32, CPU)
        )


def attach_unit(unit: Unit) -> None:
    """Unshard and reshard around the forward calls of the unit's module."""
    calls: list[Call] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        assert unit.runtime is not None
        calls.append(Call(unit, next(unit.runtime._ticks)))
        return unit.runtime.pre_forward(calls[-1], unit, args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert unit.runtime is not None
        if calls:
            call = calls.pop()
            call.leaving = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
            unit.runtime.post_forward(call, unit)

    unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    # Also after an exception, with None.
    unit.module.register_forward_hook(after, always_call=True)


def shard(
    module: nn.Module,
    unit_classes: Collection[type[nn.Module]],
    kind: str,
    mesh: Mesh,
    *,
    reshard_after_forward: bool = True,
) -> Runtime:
    """Shard ``module`` in place over stores of ``kind``: it and every module of ``unit_classes``
    become units. Collective."""
    named = {
        m: name
        for name, m in module.named_modules()
        if m is module or isinstance(m, tuple(unit_classes))
    }
    owned = assign_owners(module, list(named), (), ())
    units = {
        m: make_unit(kind, m, mesh, owned[m], reshard_after_forward=reshard_after_forward)
        for m in reversed(named)  # as a front end does: inner ones first
    }
    for unit in units.values():
        attach_unit(unit)
    ordered = [units[m] for m in named]
    options = RuntimeOptions(False, Prefetch.PRE, False)
    return Runtime(ordered[0], ordered, list(named.values()), options)
