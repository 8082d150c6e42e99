"""Checks that reject modules and arguments before wrapping changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..._engine.unit import Unit
from ..._state import optimizer_checks
from ..._state.units import clean_name, is_lazy
from ...errors import UsageError, require_module
from .flat_unit import is_wrapped, is_wrapper


def refuse_module(module: nn.Module) -> None:
    """Raise UsageError for a module that cannot be wrapped."""
    require_module(module, "FullyShardedDataParallel")
    if is_wrapped(module) and not is_wrapper(module):
        raise UsageError.of(
            "The module is already wrapped.",
            expected="a module that is not wrapped",
            got=f"a {type(module).__name__} inside a FullyShardedDataParallel",
            where="FullyShardedDataParallel(module, ...)",
            fix="use the existing wrapper; wrap each module once, inner modules first",
        )
    if any(is_lazy(child) for child in module.modules()):
        inside, fix = "with modules ", "apply fully_shard to this module as well"
        if is_lazy(module):
            inside, fix = "", "use the module as it is: fully_shard has sharded it"
        raise UsageError.of(
            "fully_shard manages the module, or a part of it.",
            expected="FullyShardedDataParallel or fully_shard for the whole model",
            got=f"a {type(module).__name__} {inside}that fully_shard was applied to",
            where="FullyShardedDataParallel(module, ...)",
            fix=fix,
        )
    has_units = any(is_wrapper(child) for child in module.modules())
    if not has_units and next(iter(module.parameters()), None) is None:
        raise UsageError.of(
            "The module has no parameters to shard.",
            expected="a module with at least one parameter",
            got=f"a {type(module).__name__} without parameters",
            where="FullyShardedDataParallel(module, ...)",
            fix="leave it unwrapped; it still runs inside a wrapped module",
        )
    where = f"FullyShardedDataParallel({type(module).__name__})"
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        refuse_unusable(clean_name(name), parameter, owner, where, "wrapping")
    refuse_output_projection(module, where)


def refuse_output_projection(module: nn.Module, where: str) -> None:
    """Raise UsageError for a module whose forward is never called."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise UsageError.of(
            "The output projection of nn.MultiheadAttention cannot be a unit.",
            expected="a module whose forward is called",
            got="a module whose weight the attention reads directly",
            where=where,
            fix="shard the nn.MultiheadAttention, or a module around it",
        )


def refuse_unusable(
    name: str, parameter: nn.Parameter, module: nn.Module, where: str, before: str
) -> None:
    """Raise UsageError for a parameter that cannot be sharded. before: what would shard it."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError.of(
            f"Parameter {name!r} cannot be sharded: TorchScript keeps it where it is.",
            expected="modules that are not scripted or traced",
            got=f"a {module.original_name} in a {type(module).__name__}",
            where=where,
            fix="use torch.compile instead, or shard the modules beside it, each by itself",
        )
    lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
    if lazy or parameter.is_inference():
        raise UsageError.of(
            f"Parameter {name!r} cannot be sharded: "
            + ("it has no shape yet." if lazy else "it was created in inference mode."),
            expected="parameters that have a shape and work with autograd",
            got=f"a {type(parameter).__name__} of a {type(module).__name__}",
            where=where,
            fix=f"run one forward before {before}"
            if lazy
            else "create the module outside torch.inference_mode()",
        )


def refuse_ignored_units(given: Any) -> None:
    """Raise UsageError if a wrapper is to be ignored. given: a list, or an invalid argument."""
    if isinstance(given, list) and any(is_wrapper(item) for item in given):
        raise UsageError.of(
            "A wrapped module cannot be ignored.",
            expected="ignored_modules= or ignored_states= without a FullyShardedDataParallel",
            got="a list with a FullyShardedDataParallel",
            where="FullyShardedDataParallel(...)",
            fix="leave it out: it stays a unit of its own; to ignore modules inside it, pass "
            "them where it is wrapped",
        )


def refuse_parts_of_a_model(module: nn.Module, nested: Sequence[tuple[nn.Module, Unit]]) -> None:
    """Raise UsageError if ``nested`` wrappers in ``module`` have their root outside of it."""
    inside = set(module.modules())
    for child, root in nested:
        owner = root.owner()
        if owner is not None and owner not in inside:
            raise UsageError.of(
                "The module contains units of another wrapped model.",
                expected="a module that contains all of a wrapped model, or none of it",
                got=f"a {type(module).__name__} with a unit whose root, a "
                f"{type(root.module).__name__}, is outside",
                where=f"FullyShardedDataParallel({type(module).__name__}), {child._get_name()}",
                fix="wrap a module that contains the root, or delete the outer wrapper first",
            )


def refuse_managed(
    module: nn.Module, closed: set[nn.Module], ignored: frozenset[nn.Parameter]
) -> None:
    """Raise UsageError if a parameter already belongs to another unit."""
    inside = {id(below) for child in closed for below in child.modules()}
    for name, child in module.named_modules():
        if id(child) in inside:
            continue
        for attribute, parameter in child._parameters.items():
            if (
                parameter is not None
                and parameter not in ignored
                and optimizer_checks.is_managed(parameter)
            ):
                raise UsageError.of(
                    "A parameter already belongs to another FullyShardedDataParallel.",
                    expected="each parameter in one unit, which contains all its uses",
                    got=f"{clean_name(f'{name}.{attribute}'.lstrip('.'))!r} in a second unit",
                    where=f"FullyShardedDataParallel({type(module).__name__})",
                    fix="wrap the outer module with auto_wrap_policy=, which puts a tied "
                    "parameter into the unit around all its uses; or do not wrap the inner "
                    "modules that share it",
                )


def refuse_optimizers_in_backward(module: nn.Module, replaced: Sequence[str]) -> None:
    """Raise UsageError if ``replaced`` parameters have post-accumulate hooks, or optimizers that
    step in backward."""
    if replaced:
        raise UsageError.of(
            "A hook or an optimizer runs in backward for a parameter that wrapping replaces.",
            expected="_apply_optimizer_in_backward() and register_post_accumulate_grad_hook() "
            "after wrapping, or use_orig_params=True",
            got=f"a call before wrapping, for {clean_name(replaced[0])!r}",
            where=f"FullyShardedDataParallel({type(module).__name__})",
            fix="wrap the model first, then make the call for wrapped_model.parameters()",
        )
