"""The parameter groups of a model, as a checkpoint sees them."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn

from .._comm.mesh import Axis, axis_of
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from .._engine.store import ShardedParam
from .._engine.unit import Unit
from .._layout.pieces import Piece
from .._layout.spec import Section
from .._state.optim_contents import ownership_of
from .._state.sharded_values import place_of
from .._state.units import NamedUnit, clean_name, named_sections, units_of
from ..errors import UsageError
from ._manifest import FlatGroup


@dataclasses.dataclass(frozen=True)
class NamedGroup:
    """A parameter group, the name of its tensor in the files, and the replica that writes it."""

    group: Group
    section: Section  # of the group's shards: one of them, if the store has several
    sharded_params: Sequence[ShardedParam]  # those of the section's parameters
    name: str
    prefix: str  # of its parameters' names
    mesh: int  # groups with the same number are sharded over the same ranks
    writer: int  # rank among the replicas
    part: int = 0  # of the parts that tensor parallelism cuts the parameters into: this process's
    num_parts: int = 1
    is_first_copy: bool = True  # False where another rank of tensor parallelism holds the same

    @property
    def is_written_here(self) -> bool:
        return self.group.replica.rank == self.writer and self.is_first_copy

    @property
    def params(self) -> range:
        """The indices of the section's parameters."""
        return self.section.params

    @property
    def numel(self) -> int:
        """The number of elements of the section, the same on every rank."""
        return self.section.layout.shard_numel

    def names(self, index: int) -> tuple[str, ...]:
        """Return all names of a parameter in the model, before wrapping."""
        return tuple(
            dict.fromkeys(
                self.prefix + clean_name(name)
                for name in store_of(self.group).orig_params[index].names
            )
        )

    def piece(self, index: int) -> Piece:
        """Return what the group shards of a parameter: all of it, or this process's part."""
        store = store_of(self.group)
        place = place_of(store.local_shape(index), store.parallel[index])
        return Piece(place.whole_shape, place.origin, store.local_shape(index))

    def described(self, axis: int) -> FlatGroup:
        names = tuple(self.names(index) for index in self.params)
        parts: tuple[Piece | None, ...] = ()
        if self.num_parts > 1:
            pieces = map(self.piece, self.params)
            parts = tuple(None if piece.is_whole else piece for piece in pieces)
        return FlatGroup(self.name, self.group.store.dtype, axis, self.section.layout, names, parts)


def named_groups(units: Sequence[NamedUnit]) -> list[NamedGroup]:
    """Return the parameter groups of ``units``, in the same order on all ranks. Raises UsageError
    for DTensor parameters that are placed in another way than by Shard or Replicate."""
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    found: list[NamedGroup] = []
    counts = collections.Counter[str]()  # units of several modules have no prefix, as the root
    axes = tensor_parallel_axes([named.unit for named in units])
    for named in units:
        for _, group, section in named_sections(named.unit):
            store = store_of(group)
            number = counts[named.prefix]
            counts[named.prefix] += 1
            name = f"{named.prefix}flat_{number}"
            mesh = meshes.setdefault((group.shard.members, group.replica.members), len(meshes))
            split = _split_axes(named, store, section)
            num_parts = math.prod(axis.ranks for axis in split)
            part = 0
            for axis in split:
                part = part * axis.ranks + axis.rank
            around = {rank for axis in split for rank in axis.members}
            around |= {*group.shard.members, *group.replica.members}
            found.append(
                NamedGroup(
                    group,
                    section,
                    _sharded_params_of(store, section),
                    name if num_parts == 1 else f"{name}.part_{part}",
                    named.prefix,
                    mesh,
                    len(found) % group.replica.ranks,
                    part,
                    num_parts,
                    not any(axis.rank for axis in axes if len(around & {*axis.members}) == 1),
                )
            )
    return found


def tensor_parallel_axes(units: Sequence[Unit]) -> list[Axis]:
    """Return the axes of the meshes that DTensor parameters lie on beside data parallelism, each
    once and in the same order on all ranks; without those of one rank."""
    found: dict[tuple[int, ...], Axis] = {}
    seen: set[int] = set()  # ids of meshes, of which many parameters have the same
    for unit in units:
        for group in unit.groups:
            for parallel in store_of(group).parallel:
                if parallel is not None and id(parallel.mesh) not in seen:
                    seen.add(id(parallel.mesh))
                    for dim in parallel.own_dims:
                        axis = axis_of(parallel.mesh.get_group(dim))
                        if axis.ranks > 1:
                            found.setdefault(axis.members, axis)
    return list(found.values())


def _split_axes(named: NamedUnit, store: StateStore, section: Section) -> list[Axis]:
    """Return the axes along which tensor parallelism cuts the parameters of a section. It cuts all
    of them or repeats all, along each axis."""
    for index in range(section.first_param, section.first_param + len(section.layout.params)):
        parallel = store.parallel[index]
        if parallel is None:
            continue
        for dim in parallel.own_dims:
            placement = parallel.placements[dim]
            if not (placement.is_replicate() or placement.is_shard()):
                raise UsageError.of(
                    "Checkpoints cannot hold a DTensor parameter that is placed in this way.",
                    expected="Shard(dim) or Replicate() on every dimension of its mesh",
                    got=f"{placement} for {named.prefix}"
                    f"{clean_name(store.orig_params[index].name)}",
                    where=named.unit.label,
                    fix="distribute the parameter with Shard or Replicate, or save state dicts",
                )
    first = store.parallel[section.first_param] if section.layout.params else None
    if first is None:
        return []
    return [
        axis
        for dim in first.own_dims
        if not first.placements[dim].is_replicate()
        and (axis := axis_of(first.mesh.get_group(dim))).ranks > 1
    ]


def _sharded_params_of(store: StateStore, section: Section) -> Sequence[ShardedParam]:
    if store.is_flattened:
        return store.sharded_params
    first = section.first_param
    return store.sharded_params[first : first + len(section.layout.params)]


def names_in(groups: Sequence[NamedGroup]) -> set[str]:
    """Return all names of all parameters of ``groups``."""
    return {name for named in groups for index in named.params for name in named.names(index)}


def held_by(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[torch.Tensor, tuple[str, ...]]:
    """Return the names of the model's parameters that each parameter of the optimizer holds. Raises
    UsageError for a parameter that is not the model's."""
    owned = ownership_of(optimizer.param_groups, type(optimizer).__name__, units_of(model), model)
    return {
        parameter: tuple(name for _, name in contents.names)
        for parameter, contents in owned.held.items()
    }
