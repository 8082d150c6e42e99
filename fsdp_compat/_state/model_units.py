"""The registry of a model's units, used by state dicts, optimizer state and checkpoints.

A front end registers one ``ModelUnit`` per unit, on the module whose name in the model is the
unit's name: a wrapper, or the unit's module itself. No code here or above depends on which front
end made a unit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._comm.mesh import Mesh
from .._engine.runtime import Runtime, runtime_of
from .._engine.unit import Unit
from ..api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .names import Wanted, clean_name, everything, flat_names, shows_originals
from .param_ownership import NamedUnit

# The module attribute that holds a registered ModelUnit, or the function that returns it.
ATTRIBUTE = "_fsdp_model_unit"


@dataclasses.dataclass(eq=False)
class ModelUnit:
    """One unit of a model, with everything that state dicts and checkpoints need to know about
    it."""

    unit: Unit
    mesh: Mesh
    device: torch.device  # where the unit computes
    group: dist.ProcessGroup  # the ranks that share one copy of the parameters
    device_mesh: DeviceMesh | None = None
    # {clean name of a module in the unit: names of its parameters before sharding}; gives the order
    # of state dicts.
    attribute_order: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    form: StateDictSettings = dataclasses.field(
        default_factory=lambda: default_form(StateDictType.FULL_STATE_DICT)
    )
    wanted: Wanted = everything  # the filter of the state_dict() call that is running
    # While load_state_dict() runs: the prefix of the unit's keys, and the keys of its sharded
    # parameters.
    loading: tuple[str, set[str]] = ("", set())
    # Of a unit of several modules, whose names have nothing in common: gives the unit's parameters
    # the names that they have in a model. None: their names begin at the unit's module.
    rename: Callable[[nn.Module], None] | None = None

    @property
    def runtime(self) -> Runtime:
        """The runtime of the unit's root."""
        return runtime_of(self.unit)

    @property
    def takes_parts(self) -> bool:
        """True if a parameter's value in a state dict may be this rank's part of it."""
        return self.form.state_dict_type is StateDictType.LOCAL_STATE_DICT

    def exact_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, value) of the buffers that are cast for computing, with the values in their
        original dtype."""
        exact = self.unit.buffers.in_full() if self.unit.buffers is not None else {}
        for path, child in self.unit.module.named_modules(remove_duplicate=False) if exact else ():
            for name in child._buffers:
                if (id(child), name) in exact:
                    yield clean_name(f"{path}.{name}".lstrip(".")), exact[id(child), name]


def default_form(kind: StateDictType) -> StateDictSettings:
    """Return the settings of a state dict type with default configurations."""
    if kind is StateDictType.LOCAL_STATE_DICT:
        return StateDictSettings(kind, LocalStateDictConfig(), LocalOptimStateDictConfig())
    if kind is StateDictType.FULL_STATE_DICT:
        return StateDictSettings(kind, FullStateDictConfig(), FullOptimStateDictConfig())
    return StateDictSettings(kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


def attribute_order_of(module: nn.Module) -> dict[str, list[str]]:
    """Return {clean name of a module in ``module``: the names of its own parameters}."""
    return {
        clean_name(name): [attribute for attribute, p in child._parameters.items() if p is not None]
        for name, child in module.named_modules(remove_duplicate=False)
    }


def register(module: nn.Module, unit: ModelUnit | Callable[[], ModelUnit]) -> None:
    """Register ``unit`` on ``module``, whose name in the model becomes the unit's name.

    unit: or a function that returns it, which is called each time that the unit is asked for. It
    may be collective.
    """
    module.__dict__[ATTRIBUTE] = unit


def is_lazy(module: nn.Module) -> bool:
    """True if a function was registered on a module: its parameters were sharded in place."""
    return callable(module.__dict__.get(ATTRIBUTE))


def model_unit_of(module: nn.Module) -> ModelUnit | None:
    """Return the unit registered on a module, or None. Collective if the front end makes its units
    when they are used, and this one was not used yet."""
    found = module.__dict__.get(ATTRIBUTE)
    if found is None or isinstance(found, ModelUnit):
        return found
    return typing.cast(Callable[[], ModelUnit], found)()


def model_units_in(model: nn.Module) -> list[ModelUnit]:
    """Return the units in a model, outer ones first."""
    return [unit for child in model.modules() if (unit := model_unit_of(child)) is not None]


def wrapped_units_in(model: nn.Module) -> list[ModelUnit]:
    """Return the units in a model that were not made in place, outer ones first."""
    found = (model_unit_of(child) for child in model.modules() if not is_lazy(child))
    return [unit for unit in found if unit is not None]


@contextlib.contextmanager
def keeping_forms(units: Sequence[ModelUnit]) -> Generator[None, None, None]:
    """Give the units back the form they have now at the end."""
    before = [unit.form for unit in units]
    try:
        yield
    finally:
        for unit, form in zip(units, before, strict=True):
            unit.form = form


@contextlib.contextmanager
def in_form(units: Sequence[ModelUnit], form: StateDictSettings) -> Generator[None, None, None]:
    """Give all units one form inside of the context, whatever forms they have."""
    with keeping_forms(units):
        for unit in units:
            unit.form = form
        yield


def runtimes_of(units: Iterable[ModelUnit]) -> list[Runtime]:
    """Return the distinct runtimes of units. All units below one root share a runtime."""
    return list(dict.fromkeys(unit.runtime for unit in units))


def units_of(model: nn.Module) -> list[NamedUnit]:
    """Return the units in a model with the prefix of their parameter names, outer ones first."""
    found = []
    for name, child in model.named_modules():
        if (registered := model_unit_of(child)) is not None:
            prefix = clean_name(name)
            if registered.rename is not None:
                registered.rename(model)
                prefix = ""
            found.append(NamedUnit(registered.unit, f"{prefix}." if prefix else ""))
    return found


def managed_in(model: nn.Module) -> set[int]:
    """Return the ids of all sharded parameters in a model."""
    return {
        id(param)
        for registered in model_units_in(model)
        for group in registered.unit.groups
        for param, _ in group.store.sharded_params
    }


def names_in_order(model: nn.Module, base: str) -> list[str]:
    """Return the keys of a module's state dict in their order before sharding, including the keys
    of flat parameters in local state dicts: as in torch, before everything else in their unit, or
    with use_orig_params=True after it.

    base: the prefix of the keys.
    """
    modules = [
        (clean_name(path), child) for path, child in model.named_modules(remove_duplicate=False)
    ]
    order: dict[str, Sequence[str]] = {}
    for path, child in modules:
        if (registered := model_unit_of(child)) is not None:
            order.update(
                (".".join(filter(None, (path, inner))), names)
                for inner, names in registered.attribute_order.items()
            )
    names = []
    last: list[tuple[str, list[str]]] = []  # (prefix, names) that come after what is below it
    for path, child in modules:
        start = f"{base}{path}." if path else base
        while last and not start.startswith(last[-1][0]):
            names += last.pop()[1]
        registered = model_unit_of(child)
        if registered is not None and not is_lazy(child):
            flat = [start + name for name in flat_names(registered.unit)]
            if shows_originals(registered.unit):
                last.append((start, flat))
            else:
                names += flat
        if registered is None or registered.unit.module is child:
            attributes = dict.fromkeys(
                (*order.get(path, ()), *child._parameters, *child._buffers, "_extra_state")
            )
            names += [start + attribute for attribute in attributes]
    return names + [name for _, flat in reversed(last) for name in flat]


def names_before(model: nn.Module) -> list[str]:
    """Return the names of a model's parameters in their order before sharding."""
    if model_unit_of(model) is not None:
        return names_in_order(model, "")
    names = []
    for path, child in model.named_modules():
        registered = model_unit_of(child)
        if registered is not None and registered.unit.is_root:
            names += names_in_order(child, f"{clean_name(path)}.")
    return names
