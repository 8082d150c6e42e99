"""One unit of FullyShardedDataParallel: a wrapper, the module in it, and the flat stores of its
parameters."""

from __future__ import annotations

import dataclasses
import typing
import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..._engine import hooks, rendezvous
from ..._engine.group import Group
from ..._engine.runtime import Runtime
from ..._engine.unit import Unit, UnitOptions
from ..._features.description import UnitFacts
from ..._state import optimizer_checks
from ..._state.units import ATTRIBUTE, FSDP_WRAPPED_MODULE, ModelUnit, clean_name, register
from ..._stores.flat_store import FlatParameter, FlatStore
from ...errors import StateError
from .settings import Settings

_wrapped: WeakIdKeyDictionary = WeakIdKeyDictionary()  # all modules that are in a wrapper


@dataclasses.dataclass(eq=False, kw_only=True)
class FlatUnit(ModelUnit):
    """A unit and its resolved settings."""

    settings: Settings

    @property
    def stores(self) -> list[FlatStore]:
        return [typing.cast(FlatStore, group.store) for group in self.unit.groups]

    def unit_facts(self) -> UnitFacts:
        """Return what ``describe`` shows of the unit."""
        settings = self.settings
        return UnitFacts(
            settings.strategy.name,
            self.mesh.shard.ranks,
            self.mesh.replica.ranks,
            self.unit.options.reshard_after_forward,
            [(store, settings.precision(store.dtype)) for store in self.stores],
        )


def is_wrapper(module: object) -> bool:
    """True for a wrapper; False for the module in it."""
    return isinstance(module, nn.Module) and isinstance(module.__dict__.get(ATTRIBUTE), FlatUnit)


def is_wrapped(module: nn.Module) -> bool:
    """True for the module in a wrapper."""
    return module in _wrapped


def flat_unit_of(wrapper: nn.Module) -> FlatUnit:
    """Return the unit of a wrapper."""
    found = wrapper.__dict__[ATTRIBUTE]
    assert isinstance(found, FlatUnit)
    return found


def flat_units_in(module: nn.Module) -> list[FlatUnit]:
    """Return the units of all wrappers in ``module``, which may be one itself, outer ones first."""
    return [flat_unit_of(child) for child in module.modules() if is_wrapper(child)]


def make_flat_unit(
    wrapper: nn.Module,
    stores: Sequence[FlatStore],
    settings: Settings,
    attribute_order: Mapping[str, Sequence[str]],
    originals: Iterable[nn.Parameter] = (),
) -> FlatUnit:
    """Make the unit of a wrapper around its stores, and register it. It has no runtime and no cast
    buffers yet. originals: the parameters that were flattened into the stores. Collective over the
    mesh of the settings, once per process group."""
    module: nn.Module = getattr(wrapper, FSDP_WRAPPED_MODULE)
    options = settings.unit_options(sum(p.numel for store in stores for p in store.layout.params))
    optimizer_checks.register_flattened(originals, stores)
    for store in stores:
        for param, _ in store.sharded_params:
            if not isinstance(param, FlatParameter):  # clients recognize FlatParameters by class
                param.__dict__["_fsdp_flattened"] = True
    groups = [group_around(store, settings, options) for store in stores]
    rendezvous.register(groups)
    unit = Unit(module, groups, options)
    unit.owner = weakref.ref(wrapper)
    hooks.guard_state_dicts(unit)
    found = FlatUnit(
        unit=unit,
        mesh=settings.mesh,
        device=settings.device,
        group=settings.group,
        device_mesh=settings.device_mesh,
        attribute_order=attribute_order,
        settings=settings,
    )
    register(wrapper, found)
    _wrapped[module] = True
    return found


def group_around(store: FlatStore, settings: Settings, options: UnitOptions) -> Group:
    """Make the parameter group of one of a unit's stores."""
    return Group(
        store,
        settings.mesh,
        settings.precision(store.dtype),
        settings.device,
        settings.offload,
        options.reshard_after_forward,
    )


def make_runtime(wrapper: nn.Module) -> None:
    """Make one runtime for the unit of a wrapper and all units below it."""
    found = flat_unit_of(wrapper)
    named = [(name, child) for name, child in wrapper.named_modules() if is_wrapper(child)]
    units = [flat_unit_of(child).unit for _, child in named]
    Runtime(found.unit, units, [clean_name(name) for name, _ in named], found.settings.runtime)


def require_root(
    is_root: bool, label: str, call: str, error: type[StateError] = StateError
) -> None:
    """Raise ``error`` unless a unit is the root of its model."""
    if not is_root:
        raise error.of(
            f"{call} works on the root only.",
            expected="a call on the outermost sharded module",
            got=f"a call on {label}",
            where=call,
            fix="call it on the module whose forward runs the whole model",
        )
