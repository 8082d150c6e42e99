"""The entries of a model's state dict that are not parameters of units: buffers, parameters that no
unit manages, and extra state."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..api import StateDictType
from .units import (
    clean_name,
    default_form,
    in_form,
    managed_in,
    managed_names,
    model_unit_of,
    model_units_in,
)


class Unmanaged(typing.NamedTuple):
    """One such entry."""

    name: str  # in the model, before wrapping
    holder: nn.Module  # the module that it belongs to
    owner: nn.Module  # see ``owners_in``
    value: torch.Tensor | None  # None: extra state


def owners_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by the path of each module in ``model``, the innermost module around it, itself
    included, that a unit is registered on; the model where there is none."""
    found: dict[str, nn.Module] = {}
    for path, child in model.named_modules(remove_duplicate=False):
        is_owner = not path or model_unit_of(child) is not None
        found[path] = child if is_owner else found[path.rpartition(".")[0]]
    return found


def unmanaged_in(model: nn.Module) -> Iterator[Unmanaged]:
    """Yield the entries in the order of the modules; one that has several names comes under each of
    them."""
    managed, owners = managed_in(model), owners_in(model)
    for path, child in model.named_modules(remove_duplicate=False):
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if (
                tensor is not None
                and id(tensor) not in managed
                and name not in child._non_persistent_buffers_set
            ):
                yield Unmanaged(_joined(path, name), child, owners[path], tensor)
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield Unmanaged(_joined(path, "_extra_state"), child, owners[path], None)


def _joined(path: str, name: str) -> str:
    return clean_name(f"{path}.{name}".lstrip("."))


def unmanaged_state(model: nn.Module) -> dict[str, Any]:
    """Return what a state dict of the model holds beside the parameters of units, by clean name.
    Nothing is sent.

    The modules' own methods and hooks make the entries, so that a class which saves something in
    its own way is heard.
    """
    managed = managed_names(model)
    form = default_form(StateDictType.LOCAL_STATE_DICT)
    # Not every parameter of a unit has a local form.
    with in_form(model_units_in(model), form, lambda name, trainable: name not in managed):
        state = model.state_dict()
    return {
        clean: value for name, value in state.items() if (clean := clean_name(name)) not in managed
    }


def load_unmanaged(model: nn.Module, entries: Mapping[str, Any]) -> None:
    """Load what ``unmanaged_state`` returned, or a part of it. Nothing is sent."""
    with in_form(model_units_in(model), default_form(StateDictType.LOCAL_STATE_DICT)):
        model.load_state_dict(entries, strict=False)


def others_in(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return what a module's state dict holds beside the units' parameters, by clean name.

    None for extra state, and for an entry of a module whose class loads in its own way.
    """
    return {
        entry.name: None if loads_in_own_way(entry.holder) else entry.value
        for entry in unmanaged_in(model)
    }


def loads_in_own_way(module: nn.Module) -> bool:
    return not type(module)._load_from_state_dict.__module__.startswith("torch.")
