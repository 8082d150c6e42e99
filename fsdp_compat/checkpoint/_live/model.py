"""A model as a checkpoint saves it: its parameter groups, and which rank writes what."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from ..._comm.mesh import Axis
from ..._comm.transport import Transport
from ..._engine.group import Group
from ..._engine.state_store import store_of
from ..._engine.store import ShardedParam
from ..._layout.spec import Section
from ..._state.held import share_of, split_axes
from ..._state.units import NamedUnit, named_sections, names_of, tensor_parallel_axes
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

    def described(self, axis: int) -> FlatGroup:
        names = tuple(map(self.names, self.params))
        pieces = tuple(share_of(self.group, index).piece for index in self.params)
        dtype, layout = self.group.store.dtype, self.section.layout
        if store_of(self.group).is_flattened:  # states of blocks are those of all parameters
            specs = (dataclasses.replace(spec, block=0) for spec in layout.params)
            layout = dataclasses.replace(layout, params=tuple(specs))
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
            split: list[Axis | Transport] = [*split_axes(named, group, section)]
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
