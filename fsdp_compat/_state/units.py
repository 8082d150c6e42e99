"""The registry of a model's units, and names without the parts that wrappers add.

A front end registers one ``ModelUnit`` per unit, on the module whose name is the unit's: a wrapper,
or the unit's module. State dicts, optimizer state and checkpoints do not depend on the front
end."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._comm.mesh import Axis, Mesh, axis_of
from .._engine.group import Group
from .._engine.ownership import ParamSlots
from .._engine.runtime import Runtime, runtime_of
from .._engine.state_store import FLAT_PARAM, flat_param_name, store_of
from .._engine.unit import Unit
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

# (name, whether it is a parameter that requires grad) -> whether a state dict is to hold it
Wanted = Callable[[str, bool], bool]

# The children that hold the wrapped module, of FSDP, activation checkpointing and torch.compile.
FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
CHECKPOINT_WRAPPED_MODULE = "_checkpoint_wrapped_module"
COMPILED_MODULE = "_orig_mod"
_WRAPPERS = (FSDP_WRAPPED_MODULE, CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE)


def clean_name(name: str, wrappers: Collection[str] = _WRAPPERS) -> str:
    """Return a name without what FSDP, activation checkpointing and torch.compile add to it."""
    if "_wrapped_module" not in name and COMPILED_MODULE not in name:  # most names
        return name
    return ".".join(part for part in name.split(".") if part not in wrappers)


def everything(name: str, trainable: bool) -> bool:
    """The choice of a state dict without a filter."""
    return True


def wanted_by(given: Any, where: str) -> Wanted:
    """Return what a ``filter`` chooses: by name, "trainable", or None: all. Raises UsageError."""
    if given is None:
        return everything
    if given == "trainable":
        return lambda name, trainable: trainable
    if not callable(given) or not takes(given, 1):
        known = "a function of a name that returns True or False, the string 'trainable', or None"
        raise wrong_type("filter", known, given, where)
    return lambda name, trainable: bool(given(name))


def named_sections(unit: Unit) -> list[tuple[str, Group, Section]]:
    """Return the sections of a unit: (name of the flat parameter in dicts, group, section)."""
    sections = [(group, section) for group in unit.groups for section in store_of(group).sections]
    return [(flat_param_name(number), *found) for number, found in enumerate(sections)]


def shows_originals(unit: Unit) -> bool:
    """True if the unit's own parameters are views of flat shards: use_orig_params=True."""
    return not any(store_of(group).is_flattened for group in unit.groups)


def is_flat_name(name: str) -> bool:
    """True for the name of a flat parameter, of any unit of any model."""
    return re.fullmatch(rf"(.*\.)?{FLAT_PARAM}(_\d+)?", name) is not None


def names_of(param: ParamSlots, prefix: str) -> list[str]:
    """Return a parameter's names in a model, with its unit's prefix; tied ones have several."""
    return list(dict.fromkeys(prefix + clean_name(name) for name in param.names))


# The module attribute that holds a registered ModelUnit or LazyUnit.
ATTRIBUTE = "_fsdp_model_unit"


@dataclasses.dataclass(eq=False)
class ModelUnit:
    """One unit of a model, and what state dicts and checkpoints need to know about it."""

    unit: Unit
    mesh: Mesh
    device: torch.device  # where the unit computes
    group: dist.ProcessGroup  # the ranks that share one copy of the parameters
    device_mesh: DeviceMesh | None = None
    # {clean name of a module in the unit: names of its parameters before sharding}
    attribute_order: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    form: StateDictSettings = dataclasses.field(
        default_factory=lambda: default_form(StateDictType.FULL_STATE_DICT)
    )
    wanted: Wanted = everything  # the filter of the state_dict() call that is running
    # While load_state_dict() runs: the prefix of the unit's keys, those of its sharded parameters,
    # and what shows modules whole ones.
    loading: tuple[str, set[str], contextlib.ExitStack] = ("", set(), contextlib.ExitStack())
    # Of a unit of several modules: gives the unit's parameters the names that they have in a model.
    # None: their names begin at the unit's module.
    rename: Callable[[nn.Module], None] | None = None

    @property
    def runtime(self) -> Runtime:
        """The runtime of the unit's root."""
        return runtime_of(self.unit)

    @property
    def takes_parts(self) -> bool:
        """True if a parameter's value in a state dict may be this rank's part of it."""
        return self.form.state_dict_type is StateDictType.LOCAL_STATE_DICT

    @property
    def is_kept_here(self) -> bool:
        """False if only the first rank is to have the state dict, and this is another one."""
        return self.mesh.is_first or not getattr(self.form.state_dict_config, "rank0_only", False)


_CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def default_form(kind: StateDictType) -> StateDictSettings:
    """Return the settings of a state dict type with default configurations."""
    return StateDictSettings(kind, *(config() for config in _CONFIGS[kind]))


def attribute_order_of(module: nn.Module) -> dict[str, list[str]]:
    """Return {clean name of a module in ``module``: the names of its own parameters}."""
    return {
        clean_name(name): [attribute for attribute, p in child._parameters.items() if p is not None]
        for name, child in module.named_modules(remove_duplicate=False)
    }


class LazyUnit(typing.Protocol):
    """A unit that is made at its first use."""

    def model_unit(self) -> ModelUnit:
        """Return the unit. Collective if it has to be made."""


def register(module: nn.Module, unit: ModelUnit | LazyUnit) -> None:
    """Register a unit on a module."""
    module.__dict__[ATTRIBUTE] = unit


def is_lazy(module: nn.Module) -> bool:
    """True if the unit of a module is a LazyUnit: its parameters were sharded in place."""
    return ATTRIBUTE in module.__dict__ and not has_made_unit(module)


def is_registered(module: nn.Module) -> bool:
    """True if a module has a unit."""
    return ATTRIBUTE in module.__dict__


def has_made_unit(module: nn.Module) -> bool:
    """True if a module has a unit that is not lazy, as wrappers do."""
    return isinstance(module.__dict__.get(ATTRIBUTE), ModelUnit)


def model_unit_of(module: nn.Module) -> ModelUnit | None:
    """Return the unit registered on a module, or None. Collective on first use of some."""
    found = module.__dict__.get(ATTRIBUTE)
    if found is None or isinstance(found, ModelUnit):
        return found
    return typing.cast(LazyUnit, found).model_unit()


def model_units_in(model: nn.Module) -> list[ModelUnit]:
    """Return the units in a model, outer ones first."""
    return [unit for child in model.modules() if (unit := model_unit_of(child)) is not None]


@contextlib.contextmanager
def in_form(
    units: Sequence[ModelUnit], form: StateDictSettings | None = None, wanted: Wanted | None = None
) -> Generator[None, None, None]:
    """Give all units one form, or one filter, inside of the context."""
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
    """Return the units with the prefixes of their names, each ``once`` or under each name."""
    found = []
    for name, child in model.named_modules(remove_duplicate=once):
        if (registered := model_unit_of(child)) is not None:
            prefix = clean_name(name)
            if registered.rename is not None:
                registered.rename(model)
                prefix = ""
            found.append(NamedUnit(registered, below("", prefix)))
    return found


def prefixes_in(model: nn.Module) -> dict[ModelUnit, list[str]]:
    """Return the units with all prefixes of their names: a module may have several."""
    found: dict[ModelUnit, dict[str, None]] = {}
    for named in units_of(model, once=False):
        found.setdefault(named.own, {})[named.prefix] = None
    return {own: [*prefixes] for own, prefixes in found.items()}


def managed_names(model: nn.Module, but: Collection[Unit | None] = ()) -> set[str]:
    """Return the clean names of parameters of units that are neither summoned nor in ``but``."""
    found: set[str] = set()
    for named in units_of(model, once=False):
        is_left_out = named.unit.summoned or named.unit in but
        sections = named_sections(named.unit) if not is_left_out else ()
        for flat_name, group, section in sections:
            found.add(named.prefix + flat_name)
            for index in section.params:
                found.update(names_of(store_of(group).orig_params[index], named.prefix))
    return found


def owners_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by path of each module, the innermost module with a unit around it, or the model."""
    found: dict[str, nn.Module] = {}
    for path, child in model.named_modules(remove_duplicate=False):
        is_owner = not path or ATTRIBUTE in child.__dict__
        found[path] = child if is_owner else found[path.rpartition(".")[0]]
    return found


def tensor_parallel_axes(units: Sequence[Unit]) -> list[Axis]:
    """Return the mesh axes of tensor parallelism with several ranks, alike on all ranks."""
    stores = (store_of(group) for unit in units for group in unit.groups)
    meshes = {id(its.mesh): its for store in stores for its in store.parallel if its is not None}
    dims = ((its.mesh, dim) for its in meshes.values() for dim in its.tensor_parallel_dims)
    axes = (axis_of(mesh.get_group(dim)) for mesh, dim in dims)
    return list({axis.members: axis for axis in axes if axis.ranks > 1}.values())


class Slot(typing.NamedTuple):
    """A parameter, a buffer or the extra state of a module, which state dicts have an entry for."""

    key: str  # as modules are named now
    holder: nn.Module  # the module that it belongs to
    value: torch.Tensor | None  # None: extra state
    unit: Unit | None  # that holds the value in its sharded form

    @property
    def name(self) -> str:
        return clean_name(self.key)


def slots_in(model: nn.Module) -> Iterator[Slot]:
    """Yield the slots in the order of the modules; one with several names under each of them."""
    named = list(model.named_modules(remove_duplicate=False))
    units = {
        id(param): registered.unit
        for _, child in named
        if (registered := model_unit_of(child)) is not None
        for group in registered.unit.groups
        for param, _ in group.store.sharded_params
    }
    for path, child in named:
        tensors: dict[str, Any] = {**child._parameters, **child._buffers}
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            tensors["_extra_state"] = None
        for name, value in tensors.items():
            is_kept = name == "_extra_state" or value is not None
            if is_kept and name not in child._non_persistent_buffers_set:
                yield Slot(f"{path}.{name}".lstrip("."), child, value, units.get(id(value)))


def unmanaged_in(model: nn.Module) -> Iterator[Slot]:
    """Yield the slots of what no unit shards: buffers, other parameters, and extra state."""
    return (slot for slot in slots_in(model) if slot.unit is None)


def names_in_order(model: nn.Module, base: str) -> list[str]:
    """Return the keys of a module's state dict, behind ``base``, in the order before sharding; flat
    parameters come first in their unit, with use_orig_params=True last."""
    found: list[str] = []
    _add_names(found, model, base, {})
    return found


def _add_names(
    found: list[str], module: nn.Module, start: str, order: dict[str, Sequence[str]]
) -> None:
    """order: {the prefix of a module: the names of its parameters before sharding}."""
    registered, flat = model_unit_of(module), list[str]()
    if registered is not None:
        inner = registered.attribute_order.items()
        order = {**order, **{below(start, path): names for path, names in inner}}
        if not is_lazy(module):
            flat = [start + name for name, _, _ in named_sections(registered.unit)]
    is_last = registered is not None and shows_originals(registered.unit)
    found += flat if not is_last else ()
    if registered is None or registered.unit.module is module:
        own = (*order.get(start, ()), *module._parameters, *module._buffers, "_extra_state")
        found += [start + name for name in dict.fromkeys(own)]
    for name, child in module._modules.items():
        if child is not None:
            _add_names(found, child, start if name in _WRAPPERS else f"{start}{name}.", order)
    found += flat if is_last else ()


def below(prefix: str, name: str) -> str:
    return f"{prefix}{name}." if name else prefix


def names_before(model: nn.Module) -> list[str]:
    """Return the names of a model's parameters in their order before sharding."""
    names = []
    for path, child in model.named_modules():
        registered = model_unit_of(child)
        if registered is not None and (registered.unit.is_root or child is model):
            names += names_in_order(child, below("", clean_name(path)))
    return names


@dataclasses.dataclass(frozen=True)
class NamedUnit:
    """A unit, and the prefix of its parameters' names in the model."""

    own: ModelUnit
    prefix: str

    @property
    def unit(self) -> Unit:
        return self.own.unit


def refuse_extensions(groups: Iterable[Group], where: str) -> None:
    """Raise UsageError for parameters with their own all-gather, which cannot be saved."""
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
