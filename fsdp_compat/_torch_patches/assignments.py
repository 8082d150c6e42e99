"""``module.weight = nn.Parameter(...)`` on a wrapped model copies the value at once, or raises.

With use_orig_params=True every rank copies its own part of the value into its shard. The existing
parameter stays, with its gradient and optimizer state, and takes ``requires_grad`` of the new one;
an optimizer that holds the new one raises at its next step. Values of another shape or dtype, tied
parameters, DTensors, and assignments while the model runs or is unsharded for backward raise. With
use_orig_params=False every assignment raises, except that inside summon_full_params both settings
accept a value that fits.

With use_orig_params=False ``layer.requires_grad_(...)`` inside a unit raises: between steps the
layer has no parameters, so torch's method would change nothing."""

from __future__ import annotations

import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .._engine.runtime import runtime_of
from .._engine.state_store import StateStore, store_of
from .._engine.unit import Residency, Unit
from .._state import optimizer_checks
from ..errors import StateError
from .patches import Patch, Undo, around_method


class _Place(typing.NamedTuple):
    """The unit, store and index of a parameter."""

    unit: weakref.ref[Unit]
    store: weakref.ref[StateStore]
    number: int


_places: WeakIdKeyDictionary = WeakIdKeyDictionary()  # {module: {attribute: _Place}}


def watch(unit: Unit) -> None:
    """Watch the parameters of a unit from now on."""
    for group in unit.groups:
        store = store_of(group)
        for index, member in enumerate(store.orig_params):
            for module, attribute in member.slots:
                _places.setdefault(module, {})[attribute] = _Place(
                    weakref.ref(unit), weakref.ref(store), index
                )


def _on_requires_grad(
    original: Callable[[bool], nn.Module], module: nn.Module, requires_grad: bool = True
) -> nn.Module:
    """Refuse a change that would not reach a part of a FlatParameter outside ``module``."""
    reached: set[nn.Parameter] | None = None
    for child in module.modules():
        for name, place in _places.get(child, {}).items():
            unit, store = place.unit(), place.store()
            if unit is None or store is None or not store.is_flattened:
                continue
            flat = store.sharded_params[0].parameter
            if flat.requires_grad is bool(requires_grad):
                continue
            if _torch_private.parameters_of(child).get(name) is not None:
                continue  # shown whole, as in summon_full_params
            reached = set(module.parameters()) if reached is None else reached
            if flat not in reached:
                raise StateError.of(
                    "requires_grad of a part of a FlatParameter cannot be changed.",
                    expected="requires_grad_ of all parameters of a unit, or use_orig_params=True",
                    got=f"requires_grad_({requires_grad}) of a {type(module).__name__} inside "
                    "a unit",
                    where=f"{unit.label}, {type(child).__name__}.{name}",
                    fix="pass use_orig_params=True, or call it before wrapping: parameters "
                    "that require grad and those that do not get a FlatParameter each",
                )
    return original(requires_grad)


def _on_assignment(module: nn.Module, name: str, value: nn.Parameter) -> nn.Parameter | None:
    """Return the parameter that stays; None for one that is not a unit's."""
    place = _places.get(module, {}).get(name)
    unit, store = (None, None) if place is None else (place.unit(), place.store())
    if place is None or unit is None or store is None:
        return None
    current = _torch_private.parameters_of(module).get(name)
    if value is current:
        return None
    sharded_param = None if store.is_flattened else store.sharded_params[place.number].parameter
    if unit.summoned and current is not None:
        wrong = _does_not_fit(store, place.number, value, (tuple(current.shape), current.dtype))
        sharded_param = current
    else:
        wrong = _why_not(unit, store, place.number, value, sharded_param)
    if wrong:
        unit.view.put_placeholders_back()
        raise _refused(unit, module, name, wrong)
    assert sharded_param is not None
    if value is sharded_param:  # it was taken out, and comes back
        return None
    with torch.inference_mode(False), torch.no_grad():
        if unit.summoned:
            sharded_param.copy_(value)
        else:
            store.copy_in(place.number, value)
    if not store.is_flattened:
        sharded_param.requires_grad_(value.requires_grad)
    optimizer_checks.register_assigned(value, name)
    result: nn.Parameter | None = sharded_param
    return result


def _why_not(
    unit: Unit,
    store: StateStore,
    index: int,
    value: nn.Parameter,
    sharded_param: nn.Parameter | None,
) -> str:
    """Return why a value cannot be copied; empty if it can."""
    if sharded_param is None:
        return "an assignment to a part of a FlatParameter (use_orig_params=False)"
    if value is sharded_param:
        return ""
    if runtime_of(unit).runs:
        return "an assignment inside forward or backward"
    if unit.residency is Residency.UNSHARDED:
        return "an assignment between forward and backward, while the unit is unsharded"
    if optimizer_checks.is_held(value):
        return "a parameter that already belongs to a FullyShardedDataParallel"
    whole, part = store.local_shape(index), tuple(store.local_part(index).shape)
    shape = part if tuple(value.shape) == part else whole
    return _does_not_fit(store, index, value, (shape, store.dtype))


def _does_not_fit(
    store: StateStore, index: int, value: nn.Parameter, wanted: tuple[tuple[int, ...], torch.dtype]
) -> str:
    shape, dtype = wanted
    if len(store.orig_params[index].slots) > 1:
        return "an assignment to one of the names of a tied parameter"
    if store.parallel[index] is not None or not _torch_private.is_plain(value):
        return "an assignment that concerns a DTensor"
    if isinstance(value, nn.parameter.UninitializedParameter) or value.is_meta:
        return "a parameter without values"
    if (tuple(value.shape), value.dtype) != (shape, dtype):
        return (
            f"one of shape {tuple(value.shape)} and {value.dtype}, where shape {shape} and "
            f"{dtype} belong"
        )
    if (
        store.is_flattened
        and value.requires_grad is not store.sharded_params[0].parameter.requires_grad
    ):
        return (
            f"one with requires_grad={value.requires_grad} for a part of a FlatParameter that "
            "has the opposite"
        )
    return ""


def _refused(unit: Unit, module: nn.Module, name: str, got: str) -> StateError:
    return StateError.of(
        "A sharded parameter cannot be replaced like this.",
        expected="use_orig_params=True, and between steps a Parameter of the whole shape and the "
        "same dtype, for one that is not tied",
        got=got,
        where=f"{unit.label}, {type(module).__name__}.{name}",
        fix="write the values in place: `with "
        "FullyShardedDataParallel.summon_full_params(model), torch.no_grad(): "
        "parameter.copy_(value)`; change the structure of a model before wrapping",
    )


def _patch() -> Iterator[Undo]:
    register: Any = nn.modules.module.register_module_parameter_registration_hook
    yield register(_on_assignment).remove  # it runs for every parameter that is assigned
    yield around_method(nn.Module, "requires_grad_", _on_requires_grad)


patches = Patch(_patch)
