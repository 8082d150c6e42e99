"""A model as a checkpoint sees it: its parameter groups, and this rank's part of each tensor."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import _torch_private
from ..._comm.mesh import Axis, axis_of
from ..._comm.transport import Transport
from ..._engine.group import Group
from ..._engine.state_store import StateStore, store_of
from ..._engine.store import ShardedParam
from ..._engine.unit import Unit
from ..._layout.box import Box, Piece, Share
from ..._layout.spec import FlatLayout, ParamSpec, Section
from ..._state.model_state import unmanaged_state
from ..._state.sharded_values import piece_of
from ..._state.units import NamedUnit, clean_name, named_sections, names_before, names_of, units_of
from ...errors import UsageError
from .._formats.manifest import FlatGroup


@dataclasses.dataclass(frozen=True)
class NamedGroup:
    """A parameter group, the name of its tensor in the files, and the replica that writes it."""

    group: Group
    section: Section  # of the group's shards: one of them, if the store has several
    name: str
    prefix: str  # of its parameters' names
    mesh: int  # groups with the same number are sharded over the same ranks
    writer: int  # rank among the replicas
    # This process's part of the parameters, which tensor parallelism cuts into parts, and so does
    # fully_shard along another dim than the first.
    part: int
    num_parts: int
    is_first_tp_copy: bool  # False if an earlier rank of tensor parallelism holds the same

    @property
    def is_written_here(self) -> bool:
        return self.group.replica.rank == self.writer and self.is_first_tp_copy

    @property
    def rank(self) -> int:
        """This rank's number in the layout of the section."""
        return self.section.rank(store_of(self.group).rank)

    @property
    def params(self) -> range:
        """The indices of the section's parameters."""
        return self.section.params

    @property
    def sharded_params(self) -> Sequence[ShardedParam]:
        """Those of the section's parameters."""
        store, params = store_of(self.group), self.params
        found = store.sharded_params
        return found if store.is_flattened else found[params.start : params.stop]

    @property
    def numel(self) -> int:
        """The number of elements of the section, the same on every rank of its layout."""
        return self.section.layout.shard_numel

    def names(self, index: int) -> tuple[str, ...]:
        """Return all names of a parameter in the model, before wrapping."""
        return tuple(names_of(store_of(self.group).orig_params[index], self.prefix))

    def share(self, index: int) -> Share:
        """Return what this rank holds of a parameter."""
        number = index - self.section.first_param
        return Share(piece_of(store_of(self.group), index), self.section.layout, number, self.rank)

    def described(self, axis: int) -> FlatGroup:
        names = tuple(map(self.names, self.params))
        pieces = tuple(self.share(index).piece for index in self.params)
        dtype, layout = self.group.store.dtype, self.section.layout
        return FlatGroup(self.name, dtype, axis, layout, names, pieces)


def named_groups(units: Sequence[NamedUnit]) -> list[NamedGroup]:
    """Return the groups of ``units``, alike on all ranks. Raises UsageError for partial
    DTensors."""
    meshes: dict[tuple[object, ...], int] = {}
    found: list[NamedGroup] = []
    counts = collections.Counter[str]()  # units of several modules have no prefix, as the root
    axes = tensor_parallel_axes([named.unit for named in units])
    for named in units:
        for _, group, section in named_sections(named.unit):
            name = f"{named.prefix}flat_{counts[named.prefix]}"
            counts[named.prefix] += 1
            members = group.shard.members, group.replica.members
            split: list[Axis | Transport] = [*_split_axes(named, store_of(group), section)]
            split += [group.shard] if section.offsets is not None else []
            num_parts, part = math.prod(axis.ranks for axis in split), 0
            for axis in split:
                part = part * axis.ranks + axis.rank
            around = {rank for its in (*members, *(axis.members for axis in split)) for rank in its}
            copies = [axis for axis in axes if len(around & {*axis.members}) == 1]
            found.append(
                NamedGroup(
                    group,
                    section,
                    name if num_parts == 1 else f"{name}.part_{part}",
                    named.prefix,
                    meshes.setdefault((*members, section.offsets is not None), len(meshes)),
                    len(found) % group.replica.ranks,
                    part,
                    num_parts,
                    is_first_tp_copy=not any(axis.rank for axis in copies),
                )
            )
    return found


def tensor_parallel_axes(units: Sequence[Unit]) -> list[Axis]:
    """Return the mesh axes of tensor parallelism with several ranks, alike on all ranks."""
    stores = (store_of(group) for unit in units for group in unit.groups)
    meshes = {id(its.mesh): its for store in stores for its in store.parallel if its is not None}
    dims = ((its.mesh, dim) for its in meshes.values() for dim in its.tensor_parallel_dims)
    axes = (axis_of(mesh.get_group(dim)) for mesh, dim in dims)
    return list({axis.members: axis for axis in axes if axis.ranks > 1}.values())


def _split_axes(named: NamedUnit, store: StateStore, section: Section) -> list[Axis]:
    """Return the axes along which tensor parallelism cuts the parameters of a section."""
    found: dict[int, list[Axis]] = {}  # by parameter
    for index in range(section.first_param, section.first_param + len(section.layout.params)):
        if (parallel := store.parallel[index]) is None:
            continue
        for dim in parallel.tensor_parallel_dims:
            placement = parallel.placements[dim]
            if not (placement.is_replicate() or placement.is_shard()):
                name = f"{named.prefix}{clean_name(store.orig_params[index].name)}"
                raise UsageError.of(
                    "Checkpoints cannot hold a DTensor parameter that is placed in this way.",
                    expected="Shard(dim) or Replicate() on every dimension of its mesh",
                    got=f"{placement} for {name}",
                    where=named.unit.label,
                    fix="distribute the parameter with Shard or Replicate, or save state dicts",
                )
            axis = axis_of(parallel.mesh.get_group(dim))
            if axis.ranks > 1 and not placement.is_replicate():
                found.setdefault(index, []).append(axis)
    return found.get(section.first_param, [])


# -- what this rank holds


@dataclasses.dataclass(frozen=True)
class HeldPart(Share):
    """This rank's share of one tensor, with the values."""

    names: tuple[str, ...]  # of the tensor in the model
    dtype: torch.dtype
    values: torch.Tensor  # 1-D: a view of the elements in place
    is_written_here: bool  # this rank is the one that writes them
    place: tuple[NamedGroup, int] | None = None  # the index in its group; None: unmanaged

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.piece.whole_shape

    def boxes(self, values: torch.Tensor | None = None) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield this rank's boxes of the whole tensor, with views of its (or other) ``values``."""
        values, start = self.values if values is None else values, 0
        for box in self.boxes_on(self.rank):
            yield box, values[start : start + box.numel].view(box.sizes)
            start += box.numel


def managed_parts(groups: Sequence[NamedGroup]) -> Iterator[HeldPart]:
    """Yield this rank's part of every parameter of ``groups``; it may be empty."""
    for named in groups:
        store = store_of(named.group)
        for index in named.params:
            share = named.share(index)
            # Every rank may hold the one element of a 0-d parameter.
            is_first = share.rank == 0 or share.part != share.layout.part(share.index, 0)
            yield HeldPart(
                *(share.piece, share.layout, share.index, share.rank),
                named.names(index),
                store.dtype,
                store.local_part(index),
                named.is_written_here and is_first,
                (named, index),
            )


def _unmanaged_parts(state: Mapping[str, Any], is_written_here: bool) -> Iterator[HeldPart]:
    """Yield whole buffers and unmanaged parameters with all names. Collective for DTensors."""
    found: dict[tuple[object, ...], tuple[list[str], torch.Tensor]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if _torch_private.is_dtensor(value):
                value = value.full_tensor()  # type: ignore[attr-defined]
            memory = value.data_ptr() or name, tuple(value.shape), value.stride(), value.dtype
            found.setdefault(memory, ([], value.detach()))[0].append(name)
    for names, value in found.values():
        yield of_whole(tuple(names), value, is_written_here)


def of_whole(
    names: tuple[str, ...], value: torch.Tensor, is_written_here: bool = False
) -> HeldPart:
    """Return a tensor that every rank holds whole."""
    shape, own = tuple(value.shape), value.reshape(-1)
    layout = FlatLayout((ParamSpec(names[0], shape, 0),), 1, max(own.numel(), 1))
    piece = Piece.of_whole(shape)
    return HeldPart(piece, layout, 0, 0, names, value.dtype, own, is_written_here)


@dataclasses.dataclass(frozen=True)
class HeldState:
    """What a model holds, and this rank of it."""

    groups: list[NamedGroup]
    unmanaged: dict[str, Any]  # buffers, unmanaged parameters and extra state, by clean name
    parts: list[HeldPart]  # of all tensors, in the order before sharding


def held_state(model: nn.Module, is_written_here: bool = False) -> HeldState:
    """Return the state of a model. is_written_here: this rank is the one that writes what no unit
    manages. Collective for DTensors beside units."""
    groups, unmanaged = named_groups(units_of(model)), unmanaged_state(model)
    order = {name: position for position, name in enumerate(names_before(model))}
    parts = [*managed_parts(groups), *_unmanaged_parts(unmanaged, is_written_here)]
    parts.sort(key=lambda held: order.get(held.names[0], len(order)))
    return HeldState(groups, unmanaged, parts)
