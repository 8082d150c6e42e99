"""The registry of a model's units, used by state dicts, optimizer state and checkpoints, and names
without the parts that wrappers add.

A front end registers one ``ModelUnit`` per unit, on the module whose name in the model is the
unit's name: a wrapper, or the unit's module itself. No code here or above depends on which front
end made a unit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._comm.mesh import Mesh
from .._engine.group import Group
from .._engine.ownership import ParamSlots
from .._engine.runtime import Runtime, runtime_of
from .._engine.state_store import FLAT_PARAM, flat_param_name, store_of
from .._engine.unit import Unit
from .._layout.rows import CopiedLayout
from .._layout.spec import Section
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
from ..errors import UsageError, takes, wrong_type

Wanted = Callable[
    [str, bool], bool
]  # (name, whether it is a parameter that requires grad) -> whether a state dict is to hold it


FSDP_WRAPPED_MODULE = (
    "_fsdp_wrapped_module"  # the child that holds the wrapped module, named as in torch
)

_CHECKPOINT_WRAPPED_MODULE = (
    "_checkpoint_wrapped_module"  # torch's wrapper of activation checkpointing has its module there
)

_WRAPPERS = frozenset({FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE})


def clean_name(name: str) -> str:
    """Return a parameter's, buffer's or module's name as it was before FSDP and activation
    checkpointing wrapped anything."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def without_checkpoint_wrapper(name: str) -> str:
    """Return a name as the wrapper of activation checkpointing reports it: without its own part."""
    return ".".join(part for part in name.split(".") if part != _CHECKPOINT_WRAPPED_MODULE)


def everything(name: str, trainable: bool) -> bool:
    """The choice of a state dict without a filter."""
    return True


def wanted_by(given: Any, where: str) -> Wanted:
    """Return what a ``filter`` chooses: a function of a name, the string "trainable", or None for
    everything.

    Raises UsageError for anything else.
    """
    if given is None:
        return everything
    if given == "trainable":
        return lambda name, trainable: trainable
    if not callable(given) or not takes(given, 1):
        raise wrong_type(
            "filter",
            "a function of a name that returns True or False, the string 'trainable', or None",
            given,
            where,
        )
    return lambda name, trainable: bool(given(name))


def flat_names(unit: Unit) -> list[str]:
    """Return the names of a unit's flat parameters in local state dicts: one per section of the
    shards of its groups."""
    return [name for name, _, _ in named_sections(unit)]


def named_sections(unit: Unit) -> list[tuple[str, Group, Section]]:
    """Return the sections of the shards of a unit's groups, with their names in local state
    dicts."""
    sections = [(group, section) for group in unit.groups for section in store_of(group).sections]
    return [(flat_param_name(number), *found) for number, found in enumerate(sections)]


def shows_originals(unit: Unit) -> bool:
    """True if the unit's own parameters are 1-D views of flat shards: use_orig_params=True."""
    stores = [store_of(group) for group in unit.groups]
    return not any(
        store.is_flattened
        or len(store.sections) > 1
        or isinstance(store.sections[0].layout, CopiedLayout)
        for store in stores
    )


def is_flat_name(name: str) -> bool:
    """True for the name of a flat parameter, of any unit of any model."""
    return re.fullmatch(rf"(.*\.)?{FLAT_PARAM}(_\d+)?", name) is not None


def names_of(param: ParamSlots, prefix: str) -> list[str]:
    """Return the names in a model of a parameter of the unit with this prefix; a tied one has
    several."""
    return list(dict.fromkeys(prefix + clean_name(name) for name in param.names))


def param_names(unit: Unit) -> Iterator[str]:
    """Yield all names of all parameters of a unit, without the unit's prefix."""
    for group in unit.groups:
        for param in store_of(group).orig_params:
            yield from map(clean_name, param.names)


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


@contextlib.contextmanager
def in_form(
    units: Sequence[ModelUnit], form: StateDictSettings | None = None, wanted: Wanted | None = None
) -> Generator[None, None, None]:
    """Give all units one form, or one filter, inside of the context; at the end they have theirs
    again."""
    before = [(unit.form, unit.wanted) for unit in units]
    try:
        for unit in units:
            unit.form, unit.wanted = form or unit.form, wanted or unit.wanted
        yield
    finally:
        for unit, its in zip(units, before, strict=True):
            unit.form, unit.wanted = its


def runtimes_of(units: Iterable[ModelUnit]) -> list[Runtime]:
    """Return the distinct runtimes of units. All units below one root share a runtime."""
    return list(dict.fromkeys(unit.runtime for unit in units))


def require_idle(model: nn.Module, what: str) -> None:
    """Raise StateError for a call in the middle of a step. what: the call."""
    for runtime in runtimes_of(model_units_in(model)):
        runtime.require_idle(what)
        runtime.require_parts(what)


def units_of(model: nn.Module, once: bool = True) -> list[NamedUnit]:
    """Return the units in a model with the prefix of their parameter names, outer ones first.

    once: False lists a unit whose module has several names under each of them.
    """
    found = []
    for name, child in model.named_modules(remove_duplicate=once):
        if (registered := model_unit_of(child)) is not None:
            prefix = clean_name(name)
            if registered.rename is not None:
                registered.rename(model)
                prefix = ""
            found.append(NamedUnit(registered.unit, f"{prefix}." if prefix else ""))
    return found


def managed_names(model: nn.Module) -> set[str]:
    """Return the clean names of all parameters of units, and of flat parameters; without units that
    show whole parameters now."""
    return {
        named.prefix + name
        for named in units_of(model, once=False)
        if not named.unit.summoned
        for name in (*flat_names(named.unit), *param_names(named.unit))
    }


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


@dataclasses.dataclass(frozen=True)
class NamedUnit:
    """A unit, and the prefix of its parameters' names in the model."""

    unit: Unit
    prefix: str


def refuse_extensions(groups: Iterable[Group], where: str) -> None:
    """Raise UsageError for parameters that all-gather in their own way: their whole values can be
    computed with, not saved."""
    for group in groups:
        if group.store.has_extension:
            raise UsageError.of(
                "Whole values of tensor subclasses with fsdp_pre_all_gather are not available.",
                expected="plain parameters",
                got=f"parameter {store_of(group).orig_params[0].name!r}",
                where=f"{where}, {group.name}",
                fix="use DTensors: model.state_dict() as it is by default, and "
                "StateDictType.SHARDED_STATE_DICT for optimizers",
            )


def registered_unit(wrapper: nn.Module) -> ModelUnit:
    own = model_unit_of(wrapper)
    assert own is not None
    return own
