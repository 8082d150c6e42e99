"""Construction in two steps: ``plan`` checks and decides without changing anything; ``apply``
builds the units, innermost first, and then the runtime that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._engine import hooks
from .._engine.ownership import OrigParam, ParamSlots, assign_owners, group_members
from .._engine.state_store import flat_param_name
from .._state.model_units import attribute_order_of, model_unit_of
from .._state.names import FSDP_WRAPPED_MODULE
from .._stores.flat_store import FlatStore
from ..wrap import replace_modules
from .client_attributes import mark
from .flat_unit import FlatUnit, flat_unit_of, is_wrapper, make_flat_unit, make_runtime
from .preparation import Preparation, buffers_to_cast, uninitialised_of
from .refusals import (
    refuse_ignored_units,
    refuse_managed,
    refuse_module,
    refuse_optimizers_in_backward,
    refuse_parts_of_a_model,
)
from .resolve import resolve
from .settings import Arguments, Settings
from .wrap_plan import plan_wrapping

__all__ = ["Plan", "apply", "listed", "own_dtype", "plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The units that wrapping a module will make."""

    root: nn.Module
    # By the module of each unit; inner units first, the root last.
    settings: Mapping[nn.Module, Settings]
    params: Mapping[nn.Module, list[OrigParam]]  # the parameters each unit owns, not yet sharded
    wrappers: Sequence[nn.Module]  # existing wrappers in the module; they stay units of their own
    cast_around: Sequence[nn.Module]  # modules that compute in their own dtype inside any unit

    @property
    def closed(self) -> set[nn.Module]:
        """The modules that construction leaves alone, with all below them."""
        return {*self.wrappers, *self.settings[self.root].ignored_modules}


def plan(module: nn.Module, policy: Any, arguments: Arguments) -> Plan:
    """Decide which units to make in ``module``, and which parameters each of them owns.

    Collective only if a hybrid strategy makes its process groups. Raises UsageError if anything
    cannot be wrapped.
    """
    refuse_module(module)
    refuse_ignored_units(arguments.ignored_modules)
    refuse_ignored_units(arguments.ignored_states)
    settings = resolve(module, arguments)
    wrappers = [child for child in module.modules() if is_wrapper(child)]
    closed = {*wrappers, *settings.ignored_modules}
    refuse_managed(module, closed, settings.ignored_parameters)
    refuse_optimizers_in_backward(module, settings)
    refuse_parts_of_a_model(
        module, [(child, flat_unit_of(child).runtime.root) for child in wrappers]
    )
    uncast = settings.uncast_classes
    apart = [c for c in module.modules() if c is not module and isinstance(c, uncast)]
    units: dict[nn.Module, Settings] = {}
    if policy is not None or apart:
        chosen = plan_wrapping(
            module,
            policy or _no_module,
            {
                *settings.ignored_modules,
                *(below for child in wrappers for below in child.modules()),
            },
            settings.ignored_parameters,
            {field: getattr(arguments, field) for field in arguments.__dataclass_fields__},
            is_wrapped=is_wrapper,
        )
        units = {c: _settings_of(c, kwargs, arguments, settings) for c, kwargs in chosen.items()}
    units[module] = settings
    casts = settings.mixed_precision.param_dtype is not None
    taken = {below for child in closed for below in child.modules()}
    return Plan(
        module,
        units,
        assign_owners(module, units, settings.ignored_parameters, closed),
        wrappers,
        [child for child in apart if casts and child not in taken],
    )


def apply(plan: Plan, wrapper: nn.Module, new_wrapper: Callable[[], nn.Module]) -> list[FlatUnit]:
    """Build the planned units, and return them. Collective.

    wrapper: becomes the wrapper of the root.
    new_wrapper: returns an empty wrapper for an inner unit.
    """
    preparation = Preparation(plan.root, plan.settings, plan.settings[plan.root], plan.closed)
    params = dict(plan.params)
    made: list[FlatUnit] = []

    def wrapped(module: nn.Module) -> nn.Module:
        inner = new_wrapper()
        own = renamed(preparation.of_unit(module, params.pop(module)), module)
        made.append(_build(inner, module, plan.settings[module], own, preparation))
        return inner

    inner_units: dict[nn.Module, dict[str, Any]] = {
        module: {} for module in plan.settings if module is not plan.root
    }
    replace_modules(plan.root, inner_units, wrapped)
    own = preparation.of_unit(plan.root, params.pop(plan.root))
    made.append(_build(wrapper, plan.root, plan.settings[plan.root], own, preparation))
    make_runtime(wrapper)
    for module in plan.cast_around:
        hooks.cast_around(module, own_dtype(module))
    _slow_transformers(plan.root)
    return made


def _build(
    wrapper: nn.Module,
    module: nn.Module,
    settings: Settings,
    params: list[OrigParam],
    preparation: Preparation,
) -> FlatUnit:
    """Put ``module`` into its wrapper and shard the parameters that the unit owns."""
    order = attribute_order_of(module)
    setattr(wrapper, FSDP_WRAPPED_MODULE, module)
    mark(module, settings.ignored_modules)
    taken = {below for child in module.modules() if is_wrapper(child) for below in child.modules()}
    with torch.inference_mode(False), torch.no_grad():
        stores = [
            _store(module, settings, index, members)
            for index, (_, members) in enumerate(group_members(params))
        ]
        buffers = buffers_to_cast(module, settings, taken)
        originals = [param.parameter for param in params]
        made = make_flat_unit(wrapper, stores, settings, buffers, order, originals)
    made.unit.uninitialised = uninitialised_of(module, stores, preparation.left, taken)
    return made


def _store(
    module: nn.Module, settings: Settings, index: int, members: list[OrigParam]
) -> FlatStore:
    return FlatStore(
        members,
        rank=settings.mesh.shard.rank,
        ranks=settings.mesh.shard.ranks,
        home=(module, flat_param_name(index)),
        use_orig_params=settings.use_orig_params,
        device=settings.home,
        pin=settings.offload and settings.device.type != "cpu",
    )


def _settings_of(
    module: nn.Module, kwargs: Mapping[str, Any], arguments: Arguments, settings: Settings
) -> Settings:
    """Return the settings of a unit that a policy chose: new ones if the policy changed an
    argument, else those of the root."""
    changes = {
        name: value
        for name, value in kwargs.items()
        if getattr(arguments, name, arguments) is not value
    }
    return resolve(module, arguments.changed(**changes)) if changes else settings


def renamed(members: list[OrigParam], module: nn.Module) -> list[OrigParam]:
    """Return the parameters with names relative to the unit's module instead of to the root."""
    names: dict[tuple[int, str], list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for attribute in child._parameters:
            names.setdefault((id(child), attribute), []).append(f"{path}.{attribute}".lstrip("."))
    return [
        OrigParam(
            m.parameter,
            ParamSlots(
                m.slots,
                tuple(name for child, attribute in m.slots for name in names[id(child), attribute]),
            ),
        )
        for m in members
    ]


def listed(given: Any) -> Any:
    """Return an iterable as a list, because it is used more than once. Anything else is returned
    unchanged and rejected later, in an error that names the argument."""
    if isinstance(given, Iterable) and not isinstance(given, (nn.Module, torch.Tensor)):
        return list(given)
    return given


def own_dtype(module: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of a module's own parameters and buffers."""
    tensors = (*module.parameters(), *module.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


def _no_module(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A policy that chooses no modules."""
    return False


def _slow_transformers(module: nn.Module) -> None:
    """Turn off the fast path of torch's transformer layers that contain units: in evaluation it
    reads the parameters of submodules without calling them."""
    for child in module.modules():
        if not isinstance(child, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        if any(model_unit_of(below) is not None for below in child.modules()):
            if isinstance(child, nn.TransformerEncoder):
                child.use_nested_tensor = False
            else:
                hooks.without_fast_path(child)
