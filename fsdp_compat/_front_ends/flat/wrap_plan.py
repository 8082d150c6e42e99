"""Which submodules become units, as decided by a wrap policy. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...errors import UsageError
from ...wrap import (
    as_set_of_classes,
    checked_choice,
    checked_function,
    children_first,
    modules_chosen_by,
)


def plan_wrapping(
    root: nn.Module,
    policy: Any,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    root_kwargs: Mapping[str, Any],
    is_wrapped: Callable[[nn.Module], bool] = lambda module: False,
) -> dict[nn.Module, dict[str, Any]]:
    """Return the submodules of ``root`` that become units, children before parents, each with its
    keyword arguments.

    The choice equals torch's. A module that is registered several times is one unit. If
    ``root_kwargs["mixed_precision"]`` is not None, instances of its `_module_classes_to_ignore`
    are chosen as well, with ``mixed_precision=None``. A policy function then cannot stop the
    descent, as in torch.

    Never chosen, whatever the policy returns:
        - the root, which the caller wraps
        - ignored modules
        - a module without parameters, or whose parameters are all ignored or in wrapped modules
        - the output projection of an `nn.MultiheadAttention`: its forward is never called, so
          nothing would gather it

    Args:
        policy: a policy function or object, ours or torch's.
        ignored_modules: including their descendants.
        ignored_parameters: not counted in ``nonwrapped_numel``; nor are those of wrapped modules.
        root_kwargs: copied into each unit's arguments; a policy object can override them.
        is_wrapped: whether a module is a unit already.

    Raises:
        UsageError: ``policy`` is not a policy, has unusable arguments, or returns an unusable
            value.
    """
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
    """Return a policy function that also chooses the instances of ``classes``, wherever they
    are."""

    def either(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        chosen = function(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        return chosen or recurse or isinstance(module, classes)

    return either


def _never_called(root: nn.Module) -> set[nn.Module]:
    """Return the output projections of the attentions in ``root``: attention reads their weights
    and never calls them."""
    return {
        child
        for module in root.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
        if isinstance(child, NonDynamicallyQuantizableLinear)
    }


def _not_a_policy(policy: object, root: nn.Module) -> UsageError:
    fix = "pass a policy, such as ModuleWrapPolicy({Block})"
    if isinstance(policy, type):
        fix = (
            f"pass ModuleWrapPolicy({as_set_of_classes(policy)})"
            if issubclass(policy, nn.Module)
            else f"pass {policy.__name__}(...)"
        )
    elif isinstance(policy, (set, frozenset, list, tuple)):
        fix = f"pass ModuleWrapPolicy({as_set_of_classes(policy)})"
    return UsageError.of(
        "auto_wrap_policy is not a policy.",
        expected="a ModuleWrapPolicy, a CustomPolicy, or a function (module, recurse, "
        "nonwrapped_numel) -> bool",
        got=f"{policy!r} of type {type(policy).__name__}",
        where=f"wrapping a {type(root).__name__}",
        fix=fix,
    )
