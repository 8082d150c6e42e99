"""What the parameters of an optimizer hold: each of them a part of one parameter of the user's, or of many."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .._engine.unit import Group, Unit
from ..errors import UsageError, explain
from .model import store_of
from .names import clean_name

__all__ = ["Held", "Holdings", "NamedUnit", "holdings_of", "is_flat", "is_whole"]


@dataclasses.dataclass(frozen=True)
class NamedUnit:
    """A unit, and what its parameters' names begin with in the model."""

    unit: Unit
    prefix: str


@dataclasses.dataclass(frozen=True)
class Held:
    """What one parameter of the optimizer holds: parameters of the user's, by (index in the layout, name)."""

    group: Group | None  # None: a parameter that no unit manages
    names: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class Holdings:
    """The parameters of an optimizer, in its groups, and what each holds."""

    where: str  # for errors: whose they are
    groups: Sequence[Mapping[str, Any]]  # the optimizer's parameter groups
    held: Mapping[nn.Parameter, Held]  # of all parameters of the model; the optimizer may have some of them only

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """By the number that the optimizer's state dict gives them."""
        return [parameter for group in self.groups for parameter in group["params"]]

    @functools.cached_property
    def by_name(self) -> dict[str, tuple[nn.Parameter, int]]:
        """Which parameter holds each name of the model, and the name's index in the layout."""
        return {name: (parameter, index) for parameter, its in self.held.items() for index, name in its.names}

    def name_before(self, name: object) -> str:
        """The name of a parameter before anything was wrapped: DistributedDataParallel's begin with ``module.``."""
        clean = clean_name(str(name))
        inner = clean.removeprefix("module.")
        return inner if clean not in self.by_name and inner in self.by_name else clean

    def in_group(self, group: Group) -> list[nn.Parameter]:
        """The targets of one flat group, whether the optimizer has them or not."""
        return [target for target, _ in store_of(group).targets if target in self.held]


def holdings_of(groups: Sequence[Mapping[str, Any]], where: str, units: Sequence[NamedUnit], model: nn.Module) -> Holdings:
    """Return what every parameter in the groups of an optimizer holds.

    Raises UsageError for a parameter that is not the model's, and for a model without units.
    """
    if not units:
        raise UsageError(
            explain(
                "The model is not wrapped.",
                expected="a model with a FullyShardedDataParallel in it",
                got=f"a {type(model).__name__} without any",
                where=where,
                fix="wrap the model before, or use optimizer.state_dict() and optimizer.load_state_dict(...), which do without",
            )
        )
    held: dict[nn.Parameter, Held] = {}
    for named in units:
        for group in named.unit.groups:
            members = store_of(group).members
            for target, indices in group.store.targets:
                held[target] = Held(group, tuple((i, named.prefix + clean_name(members[i].name)) for i in indices))
    for name, parameter in model.named_parameters():
        held.setdefault(parameter, Held(None, ((0, clean_name(name)),)))
    for position, group_of_optimizer in enumerate(groups):
        for parameter in group_of_optimizer["params"]:
            if parameter not in held:
                raise UsageError(
                    explain(
                        "The optimizer holds a parameter that is not the model's.",
                        expected="an optimizer made from the parameters of the wrapped model",
                        got=f"a parameter of shape {tuple(parameter.shape)}",
                        where=f"parameter group {position}, {where}",
                        fix="make the optimizer after wrapping, from model.parameters(), or wrap with use_orig_params=True",
                    )
                )
    return Holdings(where, groups, held)


def is_flat(group: Group, target: nn.Parameter) -> bool:
    """True for a FlatParameter, which holds the whole shard of its group."""
    return store_of(group).flat_parameter is target


def is_whole(group: Group, target: nn.Parameter) -> bool:
    """True for one of the user's own parameters in its own shape: nothing is sharded, and its state is what it always was."""
    return store_of(group).layout.ranks == 1 and not is_flat(group, target)
