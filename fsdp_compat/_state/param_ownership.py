"""Which of the user's parameters each parameter of an optimizer contains: one, or the many of a
FlatParameter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .. import _torch_private
from .._engine.group import Group
from .._engine.state_store import store_of
from .._engine.unit import Unit
from ..errors import UsageError
from .names import clean_name


@dataclasses.dataclass(frozen=True)
class NamedUnit:
    """A unit, and the prefix of its parameters' names in the model."""

    unit: Unit
    prefix: str


@dataclasses.dataclass(frozen=True)
class ParamContents:
    """The user's parameters in one parameter of the optimizer, by (index in the store, name)."""

    group: Group | None  # None: a parameter that no unit manages
    names: tuple[tuple[int, str], ...]
    # All names of each of them, beginning with the one in ``names``; tied parameters have several.
    all_names: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class ParamOwnership:
    """The parameters of an optimizer, in its groups, with the contents of each."""

    where: str  # the optimizer, for errors
    groups: Sequence[Mapping[str, Any]]  # the optimizer's parameter groups
    # Of all parameters of the model, in its order; the optimizer may have only some of them.
    held: Mapping[nn.Parameter, ParamContents]
    # The model's current names of its parameters, including the parts that wrappers add.
    names: Mapping[nn.Parameter, str]

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters, in the order in which its state dict numbers them."""
        return [parameter for group in self.groups for parameter in group["params"]]

    @functools.cached_property
    def by_name(self) -> dict[str, tuple[nn.Parameter, int]]:
        """Which parameter contains each name of the model, and the name's index in the layout."""
        return {
            name: (parameter, index)
            for parameter, contents in self.held.items()
            for index, name in contents.names
        }

    @functools.cached_property
    def members(self) -> frozenset[nn.Parameter]:
        """The optimizer's parameters."""
        return frozenset(self.parameters)

    @functools.cached_property
    def by_current_name(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters by the model's current names, which a named optimizer uses as
        keys of its state."""
        return {
            self.names[parameter]: parameter
            for parameter in self.parameters
            if parameter in self.names
        }

    def is_vacant(self, parameter: nn.Parameter) -> bool:
        """True for a parameter that has elements, but none on this rank. Its optimizer state on
        this rank is meaningless.

        False for a DTensor, which has state on every rank.
        """
        group = self.held[parameter].group
        if group is None or parameter.numel() or _torch_private.is_dtensor(parameter):
            return False
        store = store_of(group)
        return any(math.prod(store.local_shape(index)) for index, _ in self.held[parameter].names)

    def name_before(self, name: object) -> str:
        """Return the name of a parameter before anything was wrapped, without the ``module.`` that
        DistributedDataParallel adds."""
        clean = clean_name(str(name))
        inner = clean.removeprefix("module.")
        return inner if clean not in self.by_name and inner in self.by_name else clean

    def in_group(self, group: Group) -> list[nn.Parameter]:
        """Return the sharded parameters of one group, whether the optimizer holds them or not."""
        return [param for param, _ in store_of(group).sharded_params if param in self.held]

    @functools.cached_property
    def unmanaged(self) -> list[tuple[nn.Parameter, str]]:
        """The optimizer's parameters that no unit manages, with their names, in the model's
        order."""
        return [
            (p, contents.names[0][1])
            for p, contents in self.held.items()
            if contents.group is None and p in self.members
        ]


def require_units(units: Sequence[NamedUnit], model: nn.Module, where: str) -> None:
    """Raise UsageError for a model without units."""
    if not units:
        raise UsageError.of(
            "The model is not wrapped.",
            expected="a model that FullyShardedDataParallel or fully_shard was applied to",
            got=f"a {type(model).__name__} without any",
            where=where,
            fix="wrap the model first, or use optimizer.state_dict() and "
            "optimizer.load_state_dict(...), which do not need a wrapped model",
        )


def contents_of(units: Sequence[NamedUnit], model: nn.Module) -> dict[nn.Parameter, ParamContents]:
    """Return the contents of each parameter that an optimizer may hold: first the units' sharded
    parameters, then those that no unit manages."""
    held: dict[nn.Parameter, ParamContents] = {}
    for named in units:
        for group in named.unit.groups:
            params = store_of(group).orig_params
            for parameter, indices in group.store.sharded_params:
                all_names = [
                    tuple(
                        dict.fromkeys(named.prefix + clean_name(name) for name in params[i].names)
                    )
                    for i in indices
                ]
                names = [(i, of_param[0]) for i, of_param in zip(indices, all_names, strict=True)]
                held[parameter] = ParamContents(group, tuple(names), tuple(all_names))
    others: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in held:
            others.setdefault(parameter, []).append(clean_name(name))
    for parameter, of_param in others.items():
        held[parameter] = ParamContents(None, ((0, of_param[0]),), (tuple(of_param),))
    return held


def ownership_of(
    groups: Sequence[Mapping[str, Any]], where: str, units: Sequence[NamedUnit], model: nn.Module
) -> ParamOwnership:
    """Return the contents of every parameter in an optimizer's groups.

    Raises UsageError for a parameter that is not the model's, and for a model without units.
    """
    require_units(units, model, where)
    held = contents_of(units, model)
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
    for position, group_of_optimizer in enumerate(groups):
        for parameter in group_of_optimizer["params"]:
            if parameter not in held:
                raise UsageError.of(
                    "The optimizer holds a parameter that is not the model's.",
                    expected="an optimizer created from the parameters of the wrapped model",
                    got=f"a parameter of shape {tuple(parameter.shape)}",
                    where=f"parameter group {position}, {where}",
                    fix="create the optimizer after wrapping, from model.parameters(), or wrap "
                    "with use_orig_params=True",
                )
    return ParamOwnership(where, groups, held, names)


def numbered_names(ownership: ParamOwnership, order: Sequence[str]) -> list[list[str]]:
    """Return, group by group, the names of parameters in the order in which the optimizer of an
    unwrapped model numbers them.

    order: the model's names before wrapping, in order. It numbers the parameters of a
    FlatParameter. With use_orig_params=True, the order of the optimizer's own parameters does.
    """
    position = {name: number for number, name in enumerate(order)}
    found = []
    for group in ownership.groups:
        names = [
            name for parameter in group["params"] for _, name in ownership.held[parameter].names
        ]
        if any(is_flattened(ownership, parameter) for parameter in group["params"]):
            names.sort(key=lambda name: position.get(name, len(position)))
        found.append(names)
    return found


def is_flattened(ownership: ParamOwnership, parameter: nn.Parameter) -> bool:
    """True if ``parameter`` is a FlatParameter."""
    group = ownership.held[parameter].group
    return group is not None and is_flat(group)


def is_flat(group: Group) -> bool:
    """True if the optimizer holds the group as one FlatParameter."""
    return store_of(group).is_flattened


def is_whole(group: Group) -> bool:
    """True if the optimizer holds the user's parameters in their own shapes: nothing is sharded."""
    return store_of(group).ranks == 1 and not is_flat(group)
