"""Which parameter belongs to which unit, and under which names modules hold it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from .. import _torch_private


@dataclasses.dataclass(frozen=True)
class ParamSlots:
    """Where modules hold an original parameter, and its names, but not the parameter itself."""

    slots: tuple[tuple[nn.Module, str], ...]  # (module, attribute); several if it is tied
    # Relative to the module that was traversed; several per slot if a module is shared.
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    def present(self) -> Any:
        """Return the parameter that modules hold now, or None if the attribute is absent."""
        module, attribute = self.slots[0]
        return _torch_private.parameters_of(module).get(attribute)


@dataclasses.dataclass(frozen=True)
class OrigParam:
    """An original parameter, kept whole in memory, and where modules hold it."""

    parameter: nn.Parameter
    param_slots: ParamSlots

    @property
    def slots(self) -> tuple[tuple[nn.Module, str], ...]:
        return self.param_slots.slots

    @property
    def name(self) -> str:
        return self.param_slots.name


def assign_owners(
    root: nn.Module,
    unit_modules: Collection[nn.Module],
    skip: Collection[nn.Parameter],
    closed: Collection[nn.Module],
) -> dict[nn.Module, list[OrigParam]]:
    """Return the parameters of each unit: a parameter belongs to the lowest unit that can be called
    and contains all its uses, and so is unsharded in each of them.

    skip: parameters that are not managed. closed: modules that are sharded already."""
    chains: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    slots: dict[nn.Parameter, dict[tuple[nn.Module, str], None]] = {}
    names: dict[nn.Parameter, list[str]] = {}

    def visit(module: nn.Module, chain: tuple[nn.Module, ...], prefix: str) -> None:
        if module in closed:
            return
        chain = (
            (*chain, module)
            if module in unit_modules and (module is root or _has_forward(module))
            else chain
        )
        for attribute, parameter in _torch_private.parameters_of(module).items():
            if parameter is None or parameter in skip:
                continue
            slots.setdefault(parameter, {})[module, attribute] = None
            names.setdefault(parameter, []).append(prefix + attribute)
            chains.setdefault(parameter, []).append(chain)
        # A shared module is visited once per name.
        for name, child in _torch_private.children_of(module):
            visit(child, chain, f"{prefix}{name}.")

    visit(root, (), "")
    owned: dict[nn.Module, list[OrigParam]] = {module: [] for module in unit_modules}
    for parameter, parameter_chains in chains.items():
        owner = next(
            module
            for module in reversed(parameter_chains[0])
            if all(module in chain for chain in parameter_chains)
        )
        owned[owner].append(
            OrigParam(parameter, ParamSlots(tuple(slots[parameter]), tuple(names[parameter])))
        )
    return owned


def _has_forward(module: nn.Module) -> bool:
    """False for modules that are never called (nn.ModuleList), and so would never be unsharded."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def named_within(unit: nn.Module, members: Iterable[OrigParam]) -> list[OrigParam]:
    """Return the parameters of a unit with names relative to its module instead of to the root."""
    names: dict[tuple[nn.Module, str], list[str]] = {}
    for path, child in unit.named_modules(remove_duplicate=False):
        for attribute in _torch_private.parameters_of(child):
            names.setdefault((child, attribute), []).append(f"{path}.{attribute}".lstrip("."))
    return [
        OrigParam(
            member.parameter,
            ParamSlots(member.slots, tuple(name for slot in member.slots for name in names[slot])),
        )
        for member in members
    ]


Kinds = tuple[torch.dtype, bool, tuple[object, ...], torch.dtype | None]


def group_members(members: Iterable[OrigParam]) -> list[tuple[Kinds, list[OrigParam]]]:
    """Return a unit's parameters by (dtype, requires_grad, placement of a DTensor, grad_dtype),
    in order of first appearance, trainable groups first."""
    kinds: dict[Kinds, list[OrigParam]] = {}
    for member in members:
        p = member.parameter
        kind = p.dtype, p.requires_grad, _torch_private.placement(p), p.grad_dtype
        kinds.setdefault(kind, []).append(member)
    return sorted(kinds.items(), key=lambda item: not item[0][1])
