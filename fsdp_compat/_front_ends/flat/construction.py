"""Construction in two steps: ``plan`` checks and decides without changing anything; ``apply``
builds the units, innermost first, and then the runtime that they share."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ... import _torch_private
from ..._engine import agreement, hooks
from ..._engine.buffers import CastBuffers
from ..._engine.module_view import mark
from ..._engine.ownership import OrigParam, assign_owners, group_members, named_within
from ..._engine.preparation import Preparation
from ..._engine.state_store import flat_param_name
from ..._state.units import FSDP_WRAPPED_MODULE, attribute_order_of, clean_name
from ..._stores.flat_cuts import UnitBlocks
from ..._stores.flat_store import FlatParameter, FlatStore
from ...api import MixedPrecision, as_ours
from ...errors import UsageError
from ...wrap import (
    ModuleWrapPolicy,
    as_set_of_classes,
    checked_choice,
    checked_function,
    children_first,
    modules_chosen_by,
    places_of,
)
from .blocks import policy_of, warn_of_large_unit
from .flat_unit import flat_unit_of, is_wrapper, make_flat_unit, make_runtime
from .module_checks import (
    refuse_ignored_units,
    refuse_managed,
    refuse_module,
    refuse_optimizers_in_backward,
    refuse_parts_of_a_model,
)
from .settings import Settings, resolve


@dataclasses.dataclass(frozen=True)
class WrappingPlan:
    """The units that wrapping a module will make."""

    root: nn.Module
    # By the module of each unit; inner units first, the root last.
    settings: Mapping[nn.Module, Settings]
    cast_around: Sequence[nn.Module]  # modules that compute in their own dtype inside any unit
    # The parameters each unit owns, not yet sharded. ``apply`` takes them out, unit by unit.
    params: dict[nn.Module, list[OrigParam]]
    preparation: Preparation
    places: Mapping[nn.Module, Sequence[tuple[nn.Module, str]]]  # (parent, name) of each unit
    blocks: Mapping[nn.Module, UnitBlocks]  # of units that are cut between blocks


def plan(module: nn.Module, policy: Any, kwargs: Mapping[str, Any]) -> WrappingPlan:
    """Decide which units to make in ``module``, and which parameters each of them owns. kwargs: the
    constructor's keyword arguments except the policy, which may override them for single units.
    Collective only if a hybrid strategy makes its process groups. Raises UsageError if anything
    cannot be wrapped."""
    refuse_module(module)
    policy = policy_of(policy, module)
    kwargs = {
        **kwargs,
        "mixed_precision": as_ours(kwargs["mixed_precision"], MixedPrecision, "mixed_precision"),
        "ignored_modules": _listed(kwargs["ignored_modules"]),
        "ignored_states": _listed(kwargs["ignored_states"]),
    }
    refuse_ignored_units(kwargs["ignored_modules"])
    refuse_ignored_units(kwargs["ignored_states"])
    settings = resolve(module, kwargs)
    wrappers = [child for child in module.modules() if is_wrapper(child)]
    closed = {*wrappers, *settings.ignored_modules}
    refuse_managed(module, closed, settings.ignored_parameters)
    refuse_parts_of_a_model(
        module, [(child, flat_unit_of(child).runtime.root) for child in wrappers]
    )
    uncast = settings.uncast_classes
    apart = [c for c in module.modules() if c is not module and isinstance(c, uncast)]
    chosen: Mapping[nn.Module, Mapping[str, Any]] = {}
    if policy is not None or apart:
        chosen = plan_wrapping(
            module,
            policy or (lambda **_: False),  # chooses no module
            {
                *settings.ignored_modules,
                *(below for child in wrappers for below in child.modules()),
            },
            settings.ignored_parameters,
            kwargs,
            is_wrapped=is_wrapper,
        )
    units = {unit: _settings_of(unit, own, kwargs, settings) for unit, own in chosen.items()}
    units[module] = settings
    casts = settings.mixed_precision.param_dtype is not None
    taken = {below for child in closed for below in child.modules()}
    owned = assign_owners(module, units, settings.ignored_parameters, closed)
    _warn_of_containers(unit for unit, params in owned.items() if params)
    warn_of_large_unit({unit: [each.parameter for each in its] for unit, its in owned.items()})
    # A policy that chooses the root may choose nothing inside it.
    is_chosen = isinstance(module, tuple(getattr(policy, "_module_classes", ())))
    if policy is not None and not (chosen or wrappers or is_chosen):
        _warn_of_policy(module, settings)
    params = {unit: named_within(unit, members) for unit, members in owned.items()}
    made = WrappingPlan(
        root=module,
        settings=units,
        cast_around=[child for child in apart if casts and child not in taken],
        params=params,
        preparation=Preparation(
            module,
            units,
            closed,
            device=settings.device,
            init=settings.param_init_fn,
            broadcast_over=settings.mesh if settings.sync_module_states else None,
            not_broadcast=settings.ignored_parameters,
        ),
        places=places_of(units, module),
        blocks=_blocks_of(module, units, params),
    )
    replaced = [
        name
        for name, parameter in module.named_parameters()
        if (
            _torch_private.optimizers_in_backward(parameter)
            or _torch_private.have_post_accumulate_hooks([parameter])
        )
        and parameter not in settings.ignored_parameters
        and not isinstance(parameter, FlatParameter)
        and not (settings.use_orig_params and _torch_private.is_plain(parameter))
    ]
    refuse_optimizers_in_backward(module, replaced)
    return made


def _blocks_of(
    root: nn.Module,
    units: Mapping[nn.Module, Settings],
    params: Mapping[nn.Module, Sequence[OrigParam]],
) -> dict[nn.Module, UnitBlocks]:
    """Return the blocks that users ask for. Raises UsageError if they need too much padding."""
    in_model = {parameter: clean_name(name) for name, parameter in root.named_parameters()}
    found = dict[nn.Module, UnitBlocks]()
    for unit, its in units.items():
        if its.shard_blocks is not None:
            where = f"FullyShardedDataParallel of a {type(unit).__name__}"
            asked = UnitBlocks.asked_for(its.shard_blocks, params[unit], in_model, where)
            ranks, found[unit] = its.mesh.shard.ranks, asked
            for _, members in group_members(params[unit]):
                is_mapped = ranks > 1 and its.home.type == "cpu" and not its.pins
                asked.check(members, ranks, is_mapped, not its.use_orig_params)
    return found


def _warn_of_containers(units: Iterable[nn.Module]) -> None:
    for unit in units:
        if isinstance(unit, (nn.ModuleList, nn.ModuleDict)) and (
            type(unit).forward is nn.Module.forward
        ):
            warnings.warn(
                f"A wrapped {type(unit).__name__} has no forward, so nothing unshards the "
                "parameters of its modules. Wrap these modules, or one around them.",
                stacklevel=5,
            )


def _warn_of_policy(module: nn.Module, settings: Settings) -> None:
    below = (p for child in module.children() for p in child.parameters())
    if any(parameter not in settings.ignored_parameters for parameter in below):
        warnings.warn(
            f"auto_wrap_policy chooses no module in the {type(module).__name__}, so all its "
            "parameters are unsharded at the same time. Name classes of modules in the model, such "
            "as its layers, or leave the policy out.",
            stacklevel=5,
        )


def apply(plan: WrappingPlan, wrapper: nn.Module, new_wrapper: Callable[[], nn.Module]) -> None:
    """Build the planned units; ``wrapper`` becomes the root's. Collective. Raises UsageError on all
    ranks, before anything changes, if values are to be broadcast and the plans differ."""
    if plan.settings[plan.root].sync_module_states:  # else the first forward compares the units
        _require_alike(plan)
    for module in plan.settings:
        outer = wrapper if module is plan.root else new_wrapper()
        setattr(outer, FSDP_WRAPPED_MODULE, module)
        _build(plan, module, outer)
        for parent, name in plan.places[module]:
            setattr(parent, name, outer)
    make_runtime(wrapper)
    for module in plan.cast_around:
        hooks.cast_around(module)
    for module in plan.root.modules():
        if isinstance(module, hooks.WITH_FAST_PATH) and any(map(is_wrapper, module.modules())):
            hooks.without_fast_path(module)


def _require_alike(plan: WrappingPlan) -> None:
    """Raise UsageError, on all ranks, if their plans for the same mesh differ. Collective."""
    names = {module: name for name, module in plan.root.named_modules()}
    parts = []
    for module, settings in plan.settings.items():
        facts = _facts(settings, plan.params[module], plan.blocks.get(module))
        facts.insert(0, agreement.unit(names[module]))
        parts.append((settings.mesh, settings.device, facts))
    where = f"FullyShardedDataParallel of a {type(plan.root).__name__}"
    agreement.require_all_alike(parts, where)


def _facts(settings: Settings, params: Iterable[OrigParam], blocks: UnitBlocks | None) -> list[str]:
    """Return what must be alike on all ranks of a unit with these parameters."""
    values = [(param.name, param.parameter) for param in params]
    return [
        *settings.facts(),
        *(f"{name} in blocks of {its.size}" for name, its in (blocks.of if blocks else {}).items()),
        *(agreement.parameter(n, its.shape, its.dtype, its.requires_grad) for n, its in values),
    ]


def _build(plan: WrappingPlan, module: nn.Module, wrapper: nn.Module) -> None:
    """Shard the parameters that a unit owns, and register the unit on its wrapper."""
    settings = plan.settings[module]
    taken = {below for child in module.modules() if is_wrapper(child) for below in child.modules()}
    cast = _modules_to_cast(module, settings, taken)
    order = attribute_order_of(module)
    mark(module, settings.ignored_modules)
    params = plan.preparation.of_unit(module, plan.params.pop(module))
    blocks = plan.blocks.get(module)
    facts = _facts(settings, params, blocks)  # now: stores cut the parameters
    with torch.inference_mode(False), torch.no_grad():
        stores = [
            FlatStore(
                members,
                rank=settings.mesh.shard.rank,
                ranks=settings.mesh.shard.ranks,
                flat_slot=(module, flat_param_name(index)),
                use_orig_params=settings.use_orig_params,
                device=settings.home,
                pin=settings.pins,
                blocks=blocks,
            )
            for index, (_, members) in enumerate(group_members(params))
        ]
        originals = [param.parameter for param in params]
        unit = make_flat_unit(wrapper, stores, settings, order, originals).unit
    agreement.store_facts(unit, settings.mesh, facts)
    if settings.mixed_precision.buffer_dtype is not None:
        unit.buffers = CastBuffers(cast, settings.mixed_precision.buffer_dtype)
    unit.uninitialised = plan.preparation.uninitialised(module, stores, taken)


def _modules_to_cast(
    module: nn.Module, settings: Settings, taken: set[nn.Module]
) -> list[nn.Module]:
    """Return the modules of a unit whose buffers are cast. taken: modules of other units."""
    uncast = {
        below
        for child in module.modules()
        if isinstance(child, settings.uncast_classes)
        for below in child.modules()
    }
    skip = taken | settings.ignored_modules | uncast
    return [child for child in module.modules() if child not in skip]


def _settings_of(
    module: nn.Module, own: Mapping[str, Any], kwargs: Mapping[str, Any], settings: Settings
) -> Settings:
    """Return a unit's settings: new ones if its arguments from the policy, ``own``, differ from
    ``kwargs``, else those of the root."""
    if unknown := sorted(own.keys() - kwargs.keys()):
        raise UsageError.of(
            "A wrap policy returned an argument that FullyShardedDataParallel does not have.",
            expected=f"keyword arguments among {sorted(kwargs)}",
            got=str(unknown),
            where="the dict returned by a CustomPolicy's function",
            fix="correct the names",
        )
    if all(kwargs[name] is value for name, value in own.items()):
        return settings
    return resolve(module, {**kwargs, **own})


def _listed(given: Any) -> Any:
    """Return an iterable as a list, as it is used more than once; anything else unchanged."""
    if isinstance(given, Iterable) and not isinstance(given, (nn.Module, torch.Tensor)):
        return list(given)
    return given


# -- which submodules become units


def plan_wrapping(
    root: nn.Module,
    policy: Any,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    root_kwargs: Mapping[str, Any],
    is_wrapped: Callable[[nn.Module], bool] = lambda module: False,
) -> dict[nn.Module, dict[str, Any]]:
    """Decide which submodules become units.

    The choice equals torch's. A module that is registered several times is one unit. If
    ``root_kwargs["mixed_precision"]`` is not None, instances of its `_module_classes_to_ignore`
    are also chosen, with ``mixed_precision=None``. A policy function then cannot stop the
    descent, as in torch.

    Never chosen, whatever the policy returns:
        - the root, which the caller wraps
        - ignored modules
        - a module without parameters, or whose parameters are all ignored or in wrapped modules
        - the output projection of an `nn.MultiheadAttention`: its forward is never called, so
          nothing would gather it

    Args:
        root: the module to wrap.
        policy: a policy function or object, ours or torch's.
        ignored_modules: including their descendants.
        ignored_parameters: not counted in ``nonwrapped_numel``; nor are those of wrapped modules.
        root_kwargs: copied into each unit's arguments; a policy object can override them.
        is_wrapped: whether a module is a unit already.

    Returns:
        The submodules that become units, children before parents, each with its keyword arguments.

    Raises:
        UsageError: ``policy`` is not a policy, has unusable arguments, or returns an unusable
            value."""
    run_policy = getattr(policy, "_run_policy", None)
    if isinstance(policy, type) or not (callable(run_policy) or callable(policy)):
        raise _not_a_policy(policy, root)
    wrapped = (module for module in root.modules() if module is not root and is_wrapped(module))
    skipped_parameters = {
        *ignored_parameters,
        *(parameter for module in wrapped for parameter in module.parameters()),
    }
    never_called = _never_called(root)

    def may_be_unit(module: nn.Module) -> bool:
        return (
            module is not root
            and module not in ignored_modules
            and module not in never_called
            and any(parameter not in skipped_parameters for parameter in module.parameters())
        )

    mixed_precision = root_kwargs.get("mixed_precision")
    unmixed = () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)
    candidates = [module for module in children_first(root) if may_be_unit(module)]
    chosen: dict[nn.Module, Mapping[str, Any]]
    if not callable(run_policy):
        function = checked_function(policy)
        if mixed_precision is not None:
            function = _or_instances(function, unmixed)
        units, _ = modules_chosen_by(
            function, root, ignored_modules, skipped_parameters, may_be_unit
        )
        chosen = dict.fromkeys(units, root_kwargs)
    else:
        where = f"{type(policy).__name__}._run_policy, called for a {type(root).__name__}"
        choice = run_policy(root, set(ignored_modules), dict(root_kwargs))
        chosen = checked_choice(choice, root, where)
        for module in root.modules():
            if isinstance(module, unmixed):
                chosen.setdefault(module, root_kwargs)
    return {
        module: {**chosen[module], "mixed_precision": None}
        if isinstance(module, unmixed)
        else dict(chosen[module])
        for module in candidates
        if module in chosen
    }


def _or_instances(
    function: Callable[..., bool], classes: tuple[type[nn.Module], ...]
) -> Callable[..., bool]:
    """Return a policy function that also chooses all instances of ``classes``."""
    instances = ModuleWrapPolicy(classes)
    return lambda **arguments: function(**arguments) or instances(**arguments)


def _never_called(root: nn.Module) -> set[nn.Module]:
    """Return the output projections of attention modules, which are read but never called."""
    return {
        child
        for module in root.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
        if isinstance(child, NonDynamicallyQuantizableLinear)
    }


def _not_a_policy(policy: object, root: nn.Module) -> UsageError:
    fix = f"pass a policy, such as ModuleWrapPolicy({as_set_of_classes(policy)})"
    if isinstance(policy, type) and not issubclass(policy, nn.Module):
        fix = f"pass {policy.__name__}(...)"
    return UsageError.of(
        "auto_wrap_policy is not a policy.",
        expected='"auto", class names, a ModuleWrapPolicy, a CustomPolicy, or a function '
        "(module, recurse, nonwrapped_numel) -> bool",
        got=f"{policy!r} of type {type(policy).__name__}",
        where=f"wrapping a {type(root).__name__}",
        fix=fix,
    )
