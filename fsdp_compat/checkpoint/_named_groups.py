"""The parameter groups of a model as a checkpoint sees them, and what the model's state dict holds
besides."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._engine.group import Group
from .._state.model import store_of
from .._state.model_units import model_units_in
from .._state.names import clean_name, everything
from .._state.optim import NamedUnit
from ..api import LocalOptimStateDictConfig, LocalStateDictConfig, StateDictSettings, StateDictType
from ..errors import UsageError, explain
from ._manifest import FlatGroup

__all__ = [
    "NamedGroup",
    "held_by",
    "named_groups",
    "names_in",
    "unmanaged",
    "without_groups",
]


@dataclasses.dataclass(frozen=True)
class NamedGroup:
    """A parameter group, the name of its tensor in the files, and the replica that writes it."""

    group: Group
    name: str
    prefix: str  # of its parameters' names
    mesh: int  # groups with the same number are sharded over the same ranks
    writer: int  # rank among the replicas

    @property
    def is_written_here(self) -> bool:
        return self.group.replica.rank == self.writer

    def names(self, index: int) -> tuple[str, ...]:
        """Return all names of a parameter in the model, before wrapping."""
        return tuple(
            dict.fromkeys(
                self.prefix + clean_name(name)
                for name in store_of(self.group).orig_params[index].names
            )
        )

    def described(self, axis: int) -> FlatGroup:
        store = store_of(self.group)
        names = tuple(self.names(index) for index in range(len(store.orig_params)))
        return FlatGroup(self.name, store.dtype, axis, store.layout, names)


def named_groups(units: Sequence[NamedUnit]) -> list[NamedGroup]:
    """Return the parameter groups of ``units``, in the same order on all ranks. Raises UsageError
    for tensor-parallel parameters."""
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    found: list[NamedGroup] = []
    for named in units:
        for number, group in enumerate(named.unit.groups):
            store = store_of(group)
            if any(parallel is not None for parallel in store.parallel):
                raise UsageError(
                    explain(
                        "The native checkpoint format does not support tensor-parallel parameters.",
                        expected="no DTensor parameters",
                        got="a DTensor parameter "
                        f"{named.prefix}{clean_name(store.orig_params[0].name)}",
                        where=named.unit.label,
                        fix="save full state dicts: FullyShardedDataParallel.state_dict() and "
                        "optim_state_dict()",
                    )
                )
            mesh = meshes.setdefault((group.shard.members, group.replica.members), len(meshes))
            found.append(
                NamedGroup(
                    group,
                    f"{named.prefix}flat_{number}",
                    named.prefix,
                    mesh,
                    len(found) % group.replica.ranks,
                )
            )
    return found


@contextlib.contextmanager
def without_groups(model: nn.Module, managed: Collection[str]) -> Iterator[None]:
    """Make state dicts of ``model`` communicate nothing and leave out the names in ``managed``."""
    units = model_units_in(model)
    before = [each.form for each in units]
    local = StateDictSettings(
        StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), LocalOptimStateDictConfig()
    )
    try:
        for each in units:
            each.form = local
            each.wanted = lambda name, trainable: name not in managed
        yield
    finally:
        for each, form in zip(units, before, strict=True):
            each.form = form
            each.wanted = everything


def names_in(groups: Sequence[NamedGroup]) -> set[str]:
    """Return all names of all parameters of ``groups``."""
    return {
        name
        for named in groups
        for index in range(len(store_of(named.group).orig_params))
        for name in named.names(index)
    }


def unmanaged(model: nn.Module, groups: Sequence[NamedGroup]) -> dict[str, Any]:
    """Return the model's state without the parameters of ``groups``: buffers, ignored parameters
    and extra state, by name."""
    managed = names_in(groups)
    with without_groups(model, managed):
        state = model.state_dict()
    return {
        clean_name(name): value for name, value in state.items() if clean_name(name) not in managed
    }


def held_by(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: Sequence[NamedGroup]
) -> dict[torch.Tensor, tuple[str, ...]]:
    """Return the names of the model's parameters that each parameter of the optimizer holds. Raises
    UsageError for a parameter that is not the model's."""
    held: dict[torch.Tensor, tuple[str, ...]] = {
        target: tuple(named.names(index)[0] for index in indices)
        for named in groups
        for target, indices in store_of(named.group).sharded_params
    }
    for name, parameter in model.named_parameters():
        held.setdefault(parameter, (clean_name(name),))
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in held:
                raise UsageError(
                    explain(
                        "The optimizer holds a parameter that is not the model's.",
                        expected="an optimizer made from the parameters of the wrapped model",
                        got=f"a parameter of shape {tuple(parameter.shape)}",
                        where=f"parameter group {number} of {type(optimizer).__name__}",
                        fix="make the optimizer after wrapping, from model.parameters(), or wrap "
                        "with use_orig_params=True",
                    )
                )
    return held
