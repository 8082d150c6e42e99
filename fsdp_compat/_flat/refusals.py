"""Modules and arguments that cannot be wrapped, refused before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .. import _torch_private
from .._engine.unit import Unit
from .._state import optimizers
from .._state.names import clean_name
from .._stores.registration import FlatParameter
from ..errors import UsageError, explain
from .flat_unit import is_wrapped, is_wrapper
from .settings import Settings

__all__ = [
    "refuse_ignored_units",
    "refuse_managed",
    "refuse_module",
    "refuse_optimizers_in_backward",
    "refuse_parts_of_a_model",
]


def refuse_module(module: nn.Module) -> None:
    """Raise UsageError for a module that cannot be wrapped."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            explain(
                "Only modules can be wrapped.",
                expected="a torch.nn.Module",
                got=f"a {type(module).__name__}",
                where="FullyShardedDataParallel(module, ...)",
                fix="pass the module itself",
            )
        )
    if is_wrapper(module) or is_wrapped(module):
        raise UsageError(
            explain(
                "The module is wrapped already.",
                expected="a module that is not, and is not in, a FullyShardedDataParallel",
                got="an instance of it"
                if is_wrapper(module)
                else f"a {type(module).__name__} that one holds",
                where="FullyShardedDataParallel(module, ...)",
                fix="use the wrapper that is there; wrap inner modules before outer ones, each "
                "once",
            )
        )
    if next(iter(module.parameters()), None) is None and not any(
        is_wrapper(m) for m in module.modules()
    ):
        raise UsageError(
            explain(
                "The module has no parameters, so there is nothing to shard.",
                expected="a module with at least one parameter",
                got=f"{type(module).__name__} with none",
                where="FullyShardedDataParallel(module, ...)",
                fix="leave it unwrapped: the instance around it runs it as it is",
            )
        )
    for name, parameter in module.named_parameters():
        lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        if lazy or parameter.is_inference():
            raise UsageError(
                explain(
                    f"Parameter {clean_name(name)!r} cannot be sharded: "
                    + ("it has no shape yet." if lazy else "it was made in inference mode."),
                    expected="parameters with shapes, which autograd can use",
                    got=f"a {type(parameter).__name__} of a "
                    f"{type(module.get_submodule(name.rpartition('.')[0])).__name__}",
                    where=f"FullyShardedDataParallel({type(module).__name__})",
                    fix="run one forward before wrapping"
                    if lazy
                    else "make the module outside of torch.inference_mode()",
                )
            )
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise UsageError(
            explain(
                "This module cannot be a unit: its forward is never called.",
                expected="a module that is called",
                got="the output projection of an nn.MultiheadAttention, whose weight the attention "
                "reads by itself",
                where="FullyShardedDataParallel(module, ...)",
                fix="wrap the attention, or a module around it",
            )
        )


def refuse_ignored_units(given: Any) -> None:
    """Raise UsageError if a wrapper is among what is to be ignored. given: as
    ``listed`` returns it."""
    if isinstance(given, list) and any(is_wrapper(item) for item in given):
        raise UsageError(
            explain(
                "A wrapped module cannot be ignored.",
                expected="ignored_modules= or ignored_states= without any FullyShardedDataParallel",
                got="one of its instances",
                where="FullyShardedDataParallel(...)",
                fix="leave it out: it stays a unit of its own; modules inside of it are ignored "
                "where it is made",
            )
        )


def refuse_parts_of_a_model(module: nn.Module, nested: Sequence[tuple[nn.Module, Unit]]) -> None:
    """Raise UsageError if instances in ``module`` belong to a model whose root is outside of it.
    nested: they, with their roots."""
    inside = set(module.modules())
    for child, root in nested:
        owner = root.owner()
        if owner is not None and owner not in inside:
            raise UsageError(
                explain(
                    "The module holds units of another wrapped model.",
                    expected="a module around a whole wrapped model, or around none of it",
                    got=f"a {type(module).__name__} around a unit whose root is a "
                    f"{type(root.module).__name__} outside of it",
                    where=f"FullyShardedDataParallel({type(module).__name__}), {child._get_name()}",
                    fix="wrap around the root, or delete the outer wrapper first",
                )
            )


def refuse_managed(
    module: nn.Module, closed: set[nn.Module], ignored: frozenset[nn.Parameter]
) -> None:
    """A parameter belongs to one unit. One that an instance made before has taken cannot be seen
    whole any more."""
    inside = {id(below) for child in closed for below in child.modules()}
    for name, child in module.named_modules():
        if id(child) in inside:
            continue
        for attribute, parameter in child._parameters.items():
            if (
                parameter is not None
                and parameter not in ignored
                and optimizers.is_managed(parameter)
            ):
                raise UsageError(
                    explain(
                        "A parameter belongs to another FullyShardedDataParallel already.",
                        expected="every parameter in one instance; a tied one in an instance "
                        "around all its uses",
                        got=f"{clean_name(f'{name}.{attribute}'.lstrip('.'))!r} in a second one",
                        where=f"FullyShardedDataParallel({type(module).__name__})",
                        fix="pass auto_wrap_policy= to the outer module, which puts tied "
                        "parameters into the unit around all their "
                        "uses; or do not wrap the inner modules that share it",
                    )
                )


def refuse_optimizers_in_backward(module: nn.Module, settings: Settings) -> None:
    """Raise UsageError for parameters with optimizers that step in backward, if these would not see
    them any more."""
    for name, parameter in module.named_parameters():
        if (
            _torch_private.optimizers_in_backward(parameter)
            and parameter not in settings.ignored_parameters
            and not isinstance(parameter, FlatParameter)
            and not (settings.use_orig_params and _torch_private.is_plain(parameter))
        ):
            raise UsageError(
                explain(
                    "An optimizer that steps in backward would hold a parameter that is not "
                    "trained any more.",
                    expected="_apply_optimizer_in_backward() after wrapping, or "
                    "use_orig_params=True",
                    got=f"a call of it before, for {clean_name(name)!r}",
                    where=f"FullyShardedDataParallel({type(module).__name__})",
                    fix="wrap the model first, then call _apply_optimizer_in_backward(..., "
                    "wrapped_model.parameters(), ...)",
                )
            )
