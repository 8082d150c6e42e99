"""The parameter groups of a model, as a checkpoint sees them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from .._engine.store import ShardedParam
from .._layout.spec import Section
from .._state.model_units import units_of
from .._state.names import clean_name, named_sections
from .._state.param_ownership import NamedUnit, ownership_of
from ..errors import UsageError, explain
from ._manifest import FlatGroup

__all__ = [
    "NamedGroup",
    "held_by",
    "named_groups",
    "names_in",
]


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

    @property
    def is_written_here(self) -> bool:
        return self.group.replica.rank == self.writer

    @property
    def params(self) -> range:
        """The indices of the section's parameters."""
        first = self.section.first_param
        return range(first, first + len(self.section.layout.params))

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

    def described(self, axis: int) -> FlatGroup:
        names = tuple(self.names(index) for index in self.params)
        return FlatGroup(self.name, self.group.store.dtype, axis, self.section.layout, names)


def named_groups(units: Sequence[NamedUnit]) -> list[NamedGroup]:
    """Return the parameter groups of ``units``, in the same order on all ranks. Raises UsageError
    for tensor-parallel parameters."""
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    found: list[NamedGroup] = []
    counts = collections.Counter[str]()  # units of several modules have no prefix, as the root
    for named in units:
        for _, group, section in named_sections(named.unit):
            store = store_of(group)
            if any(parallel is not None for parallel in store.parallel):
                raise UsageError(
                    explain(
                        "The native checkpoint format does not support tensor-parallel parameters.",
                        expected="no DTensor parameters",
                        got="a DTensor parameter "
                        f"{named.prefix}{clean_name(store.orig_params[0].name)}",
                        where=named.unit.label,
                        fix="save state dicts, with torch.save or torch.distributed.checkpoint",
                    )
                )
            number = counts[named.prefix]
            counts[named.prefix] += 1
            mesh = meshes.setdefault((group.shard.members, group.replica.members), len(meshes))
            found.append(
                NamedGroup(
                    group,
                    section,
                    _sharded_params_of(store, section),
                    f"{named.prefix}flat_{number}",
                    named.prefix,
                    mesh,
                    len(found) % group.replica.ranks,
                )
            )
    return found


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
