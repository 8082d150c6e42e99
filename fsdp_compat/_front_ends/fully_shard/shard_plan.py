"""The plan of one call of ``fully_shard``: everything is checked and decided before anything
changes."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._engine.ownership import OrigParam, ParamSlots
from ..._layout.rows import Cut
from ..._stores.extension import has_extension
from ..._stores.flat_cuts import ShardBlocks, UnitBlocks, shard_blocks_of
from ..._stores.placement import DataMesh, RowPlacement, placement_of
from ...errors import (
    AssertedUsageError,
    NotImplementedUsageError,
    UsageError,
    function_or_none,
    truth,
)
from . import arguments, sharding_checks
from .arguments import Offload, Placed
from .policies import DataParallelMeshInfo, MixedPrecisionPolicy


class Owners(typing.NamedTuple):
    """What earlier calls own."""

    is_sharded: Callable[[nn.Module], bool]  # whether a call was made for a module
    owner_of: Callable[[nn.Module, str], object | None]  # the call that owns an attribute
    sharded_params: Callable[[Sequence[nn.Module]], set[int]]  # ids, in modules and their children


@dataclasses.dataclass(frozen=True)
class Managed:
    """What one call manages."""

    roots: tuple[nn.Module, ...]  # the modules that were passed, without those inside others
    modules: Sequence[nn.Module]  # the roots and the modules in them, outer ones first
    params: Sequence[OrigParam]  # names begin at the root, with several roots at its number
    buffers: Sequence[torch.Tensor]

    @property
    def holders(self) -> list[nn.Module]:
        """The modules that hold the parameters, each once."""
        return list(dict.fromkeys(module for param in self.params for module, _ in param.slots))


@dataclasses.dataclass(frozen=True)
class PlannedStore:
    """Parameters that will share a store."""

    mesh: DataMesh
    gather_dtype: torch.dtype | None  # None: the parameters' own
    is_extended: bool  # the parameters' tensors say what an all-gather sends
    params: list[OrigParam]
    placements: list[RowPlacement]


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """What a call of ``fully_shard`` will make."""

    managed: Managed
    mesh: DataMesh  # of parameters that shard_placement_fn puts nowhere else
    info: DataParallelMeshInfo  # of this mesh
    device: torch.device  # that computes
    stores: Sequence[PlannedStore]
    policy: MixedPrecisionPolicy
    offload: Offload
    reshard: bool | None  # after forward; None: unless it is the root
    partial_ranks: int  # see Behavior
    allow_unused_units: bool

    def without_parameters(self) -> ShardPlan:
        """Return what is still needed once the stores exist."""
        managed = dataclasses.replace(self.managed, params=(), buffers=())
        return dataclasses.replace(self, managed=managed, stores=())


def plan(
    module: Any,
    owners: Owners,
    *,
    mesh: Any,
    reshard_after_forward: Any,
    shard_placement_fn: Any,
    mp_policy: Any,
    offload_policy: Any,
    ignored_params: Any,
    dp_mesh_dims: Any,
    allow_unused_units: Any,
    shard_blocks: Any,
) -> ShardPlan:
    """Check the arguments of ``fully_shard`` and decide what it will make. Raises UsageError.
    Collective only if several dimensions of a mesh are flattened into one."""
    roots = _root_modules(sharding_checks.modules_of(module))
    sharding_checks.refuse_modules(roots, owners.is_sharded)
    policy = arguments.policy_of(mp_policy)
    offload = arguments.offload_of(offload_policy)
    ignored = arguments.ignored_of(ignored_params)
    placement_fn = function_or_none(
        "shard_placement_fn", shard_placement_fn, "one parameter", arguments.WHERE
    )
    allow_unused = truth("allow_unused_units", allow_unused_units, arguments.WHERE)
    device_mesh = arguments.default_mesh() if mesh is None else mesh
    dims = arguments.require_mesh(device_mesh, dp_mesh_dims)
    device = arguments.device_of(device_mesh)
    managed = _managed_by(
        roots,
        ignored,
        lambda module: (
            owners.is_sharded(module) or "replicate" in _torch_private.composable_apis(module)
        ),
    )
    sharding_checks.refuse_parameters(
        roots, managed.params, owners.owner_of, owners.sharded_params(roots)
    )
    sharding_checks.refuse_dtensors(managed.params, device)
    info = arguments.mesh_info_of(device_mesh, dims)
    default = Placed(0, info, arguments.data_mesh_of(info))
    reshard, partial_ranks = arguments.reshard_of(reshard_after_forward, default.mesh)
    if default.mesh.spmd is not None:
        sharding_checks.require_dtensors_on(default.mesh.spmd, managed.params)
    blocks = shard_blocks_of(shard_blocks, arguments.WHERE)
    stores = _stores(managed.params, placement_fn, default, policy)
    if blocks is not None:
        for store in stores:
            _require_whole_blocks(store, blocks)
    if partial_ranks and any(store.mesh is not default.mesh for store in stores):
        raise NotImplementedUsageError.of(
            "reshard_after_forward as a number works with one mesh only.",
            expected="True, False or None with a shard_placement_fn that returns other meshes",
            got=repr(reshard_after_forward),
            where="argument 'reshard_after_forward' of fully_shard",
            fix="pass True or False, or shard these parameters by a call of their own",
        )
    return ShardPlan(
        managed,
        default.mesh,
        info,
        device,
        stores,
        policy,
        offload,
        reshard,
        partial_ranks,
        allow_unused,
    )


def _root_modules(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Return ``modules``, each once, without those that are inside others."""
    inside = {child for module in modules for child in module.modules() if child is not module}
    return tuple(module for module in dict.fromkeys(modules) if module not in inside)


def _managed_by(
    roots: tuple[nn.Module, ...],
    ignored: Collection[nn.Parameter],
    is_closed: Callable[[nn.Module], bool],
) -> Managed:
    """Return what a call for ``roots`` manages: neither ``ignored`` parameters nor modules that are
    closed because another call manages them."""
    names: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module not in roots and is_closed(module):
            return
        names.setdefault(module, []).append(name)
        for attribute, child in _torch_private.children_of(module):
            visit(child, f"{name}.{attribute}" if name else attribute)

    for number, root in enumerate(roots):
        visit(root, "" if len(roots) == 1 else str(number))

    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    buffers: dict[torch.Tensor, None] = {}
    for module in names:
        for attribute, parameter in _torch_private.parameters_of(module).items():
            if parameter is not None and parameter not in ignored:
                slots.setdefault(parameter, []).append((module, attribute))
        buffers.update((buffer, None) for buffer in module.buffers(recurse=False))
    params = [
        OrigParam(
            parameter,
            ParamSlots(
                tuple(its),
                tuple(
                    f"{name}.{attribute}" if name else attribute
                    for module, attribute in its
                    for name in names[module]
                ),
            ),
        )
        for parameter, its in slots.items()
    ]
    modules = [m for m in names if not _is_ignored(m, ignored)] if ignored else list(names)
    return Managed(roots, modules, params, list(buffers))


def _is_ignored(module: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    """True if a module has parameters, all of them ignored, and no buffers."""
    parameters = list(module.parameters())
    return (
        bool(parameters)
        and all(parameter in ignored for parameter in parameters)
        and next(iter(module.buffers()), None) is None
    )


def _stores(
    params: Sequence[OrigParam],
    function: Callable[[nn.Parameter], Any] | None,
    default: Placed,
    policy: MixedPrecisionPolicy,
) -> list[PlannedStore]:
    """Group the parameters into stores, in order of first appearance."""
    infos: dict[tuple[object, ...], Placed] = {}  # by the process groups of a mesh
    stores: dict[object, PlannedStore] = {}
    for param in params:
        parameter = param.parameter
        placed = arguments.placed(parameter, param.name, function, default)
        placed = _of_one_mesh(placed, param.name, infos)
        gather = arguments.gather_dtype(parameter, param.name, policy)
        extended = has_extension(parameter)
        key = (
            id(placed.mesh),
            parameter.dtype,
            parameter.is_meta,
            gather,
            placed.dim,
            extended,
            _torch_private.placement(parameter),
            parameter.grad_dtype,
        )
        store = stores.setdefault(key, PlannedStore(placed.mesh, gather, extended, [], []))
        store.params.append(param)
        store.placements.append(_row_placement(param, placed))
    return list(stores.values())


def _require_whole_blocks(store: PlannedStore, blocks: ShardBlocks) -> None:
    """Raise UsageError unless the rows of every rank are whole blocks."""
    in_model = {param.parameter: param.name for param in store.params}
    asked = UnitBlocks.asked_for(blocks, store.params, in_model, arguments.WHERE).of
    ranks = store.mesh.size(store.mesh.shard_dim)
    for param, placement in zip(store.params, store.placements, strict=True):
        shape, its = tuple(_torch_private.local_part(param.parameter).shape), asked[param.name]
        cut = Cut(shape, placement.dim, ranks)
        parts = [numel for rank in range(ranks) if (numel := cut.part_numel(rank))]
        are_whole = cut.is_contiguous and not parts[0] % its.size and min(parts) >= its.least
        if cut.dim is None or len(parts) < 2 or are_whole:
            continue
        raise UsageError.of(
            "The rows of a rank are not whole blocks.",
            expected=f"parts of whole blocks of {its.size:,} elements, at least {its.least:,}",
            got=f"parts of {parts[0]:,} to {parts[-1]:,} elements, cut along dim {cut.dim}",
            where=f"argument 'shard_blocks' of fully_shard, parameter {param.name!r} of shape "
            f"{shape} over {ranks} ranks",
            fix="use blocks that divide these parts, or another number of ranks; "
            "FullyShardedDataParallel(use_orig_params=True, shard_blocks=...) adds padding instead",
        )


def _of_one_mesh(placed: Placed, name: str, infos: dict[tuple[object, ...], Placed]) -> Placed:
    """Return ``placed`` with the DataMesh that was first placed on its groups (``infos``)."""
    mesh = placed.mesh
    groups = tuple(
        None if dim is None else mesh.mesh.get_group(dim)
        for dim in (mesh.shard_dim, mesh.replicate_dim)
    )
    first = infos.setdefault(groups, placed)
    if first.info is not placed.info:
        raise UsageError.of(
            "shard_placement_fn returned two FSDPMeshInfos with the same process groups.",
            expected="one FSDPMeshInfo object for all parameters on a mesh",
            got=f"another object for {name!r} than for an earlier parameter",
            where="argument 'shard_placement_fn' of fully_shard",
            fix="make each FSDPMeshInfo once, outside the function",
        )
    return dataclasses.replace(placed, mesh=first.mesh)


def _row_placement(param: OrigParam, placed: Placed) -> RowPlacement:
    try:
        return placement_of(param.parameter, placed.mesh, placed.dim)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, UsageError) or not _torch_private.is_dtensor(param.parameter):
            raise
        parameter: Any = param.parameter
        raise AssertedUsageError.of(
            "The mesh of a DTensor and the mesh of fully_shard cannot be joined.",
            expected="two different parts of the same mesh",
            got=f"{param.name!r} on {parameter.device_mesh}, and {placed.mesh.mesh}",
            where="argument 'mesh' of fully_shard",
            fix="take both from one mesh: mesh = init_device_mesh(..., mesh_dim_names=('dp', "
            "'tp')), then mesh['tp'] for tensor parallelism and mesh['dp'] here",
        ) from error
