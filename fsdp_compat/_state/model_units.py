"""Wrapped modules among others: which there are, and what everything in them was called before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .._engine.runtime import Runtime, runtime_of
from .._engine.unit import Unit
from .._flat.settings import Settings
from ..api import StateDictSettings
from .model import flat_names
from .names import Wanted, clean_name
from .optim import NamedUnit

__all__ = [
    "Instance",
    "instances_in",
    "managed_in",
    "named_units",
    "names_before",
    "names_in_order",
    "runtimes_of",
]


class Instance(nn.Module):
    """A wrapper, as everything knows it that deals with state: a unit, around a module that it
    holds."""

    _unit: Unit
    _settings: Settings
    _fsdp_wrapped_module: nn.Module
    _state_settings: StateDictSettings
    _attribute_order: dict[
        str, list[str]
    ]  # by module: its parameters as they were, for the order of state dicts
    _wanted: Wanted  # what a state dict that is being taken is to hold

    @property
    def _runtime(self) -> Runtime:
        return runtime_of(self._unit)

    def _exact_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The names of buffers that are kept in another dtype than the user's model has them, with
        what they are in that."""
        exact = self._unit.buffers.in_full() if self._unit.buffers is not None else {}
        for path, child in (
            self._fsdp_wrapped_module.named_modules(remove_duplicate=False) if exact else ()
        ):
            for name in child._buffers:
                if (id(child), name) in exact:
                    yield clean_name(f"{path}.{name}".lstrip(".")), exact[id(child), name]


def instances_in(module: nn.Module) -> list[Instance]:
    """The wrappers in ``module``, itself included, the outer ones first."""
    return [child for child in module.modules() if isinstance(child, Instance)]


def runtimes_of(instances: Iterable[Instance]) -> list[Runtime]:
    """The runtimes of wrappers, each once: those below one root have one together."""
    return list(dict.fromkeys(instance._runtime for instance in instances))


def named_units(model: nn.Module) -> list[NamedUnit]:
    """The units in a model, which need not be one itself, with what their parameters' names begin
    with."""
    found = []
    for name, child in model.named_modules():
        if isinstance(child, Instance):
            prefix = clean_name(name)
            found.append(NamedUnit(child._unit, f"{prefix}." if prefix else ""))
    return found


def managed_in(model: nn.Module) -> set[int]:
    """The ids of what is registered for units' parameters."""
    return {
        id(target)
        for named in named_units(model)
        for group in named.unit.groups
        for target, _ in group.store.sharded_params
    }


def names_in_order(model: nn.Module, base: str) -> list[str]:
    """The keys of a module's state dict, as they came before anything was wrapped; those of local
    ones beside them.

    model: an instance, or a module around some. base: what the keys begin with.
    """
    modules = [
        (clean_name(path), child) for path, child in model.named_modules(remove_duplicate=False)
    ]
    order: dict[str, list[str]] = {}
    for path, child in modules:
        if isinstance(child, Instance):  # inner instances know what their modules had
            order.update(
                (".".join(filter(None, (path, inner))), names)
                for inner, names in child._attribute_order.items()
            )
    names = []
    for path, child in modules:
        start = f"{base}{path}." if path else base
        if isinstance(child, Instance):
            names += [start + name for name in flat_names(child._unit)]
        else:
            attributes = dict.fromkeys(
                (*order.get(path, ()), *child._parameters, *child._buffers, "_extra_state")
            )
            names += [start + attribute for attribute in attributes]
    return names


def names_before(model: nn.Module) -> list[str]:
    """The names of a model's parameters, in the order they had before anything was wrapped."""
    outermost = [
        (name, child) for name, child in model.named_modules() if isinstance(child, Instance)
    ]
    if outermost and outermost[0][1] is model:
        return names_in_order(model, "")
    names = []
    for path, child in model.named_modules():
        if isinstance(child, Instance) and child._unit.is_root:
            names += names_in_order(child, f"{clean_name(path)}.")
    return names
