"""The state that an optimizer would create in its first step, tried out on copies."""

from __future__ import annotations

import collections
import contextlib
import copy
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._archive.walk import leaves
from ..errors import StateError
from .optim_contents import (
    CompositeOptimizer,
    ParamOwnership,
    StateKind,
    classify_all,
    in_tensors,
    inner_optimizers,
)

_States = dict[nn.Parameter, Mapping[Any, Any]]


def states_to_be(ownership: ParamOwnership, optimizer: Optimizer) -> _States:
    """Return the optimizer's states by parameter; for parameters without state, what the first step
    would create, tried once for all that are alike. Raises StateError if that step fails."""
    states: _States = {}
    alike: dict[object, list[nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                states[parameter] = optimizer.state[parameter]
            elif parameter.requires_grad:
                kind = number, tuple(parameter.shape), parameter.dtype, parameter.device
                alike.setdefault(kind, []).append(parameter)
    for parameters in alike.values():
        states.update(dict.fromkeys(parameters, _tried_alone(ownership, optimizer, parameters[0])))
    return states


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    """A context in which compiled functions, such as torchao's steps, run as they are."""
    stance: Any = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        stance = torch.compiler.set_stance("force_eager")
    with stance:
        yield


def numels_of_states(
    ownership: ParamOwnership, optimizer: Optimizer, parameter: nn.Parameter, numel: int
) -> dict[str, int]:
    """Return by a path how many elements each tensor has that the first step would create for a
    parameter of ``numel`` elements in place of another; nothing if the step fails."""
    like = parameter.detach()
    stand_in = nn.Parameter(torch.zeros(numel, dtype=like.dtype, device=like.device))
    stand_in.grad = torch.zeros_like(stand_in)
    try:
        states = _after_one_step(ownership, optimizer, {parameter: stand_in})[parameter]
    except Exception:  # a step may raise anything
        return {}
    its = leaves(in_tensors(states))
    return {path: leaf.numel() for path, leaf in its if isinstance(leaf, torch.Tensor)}


def first_states(ownership: ParamOwnership, optimizer: Optimizer) -> _States:
    """Return what the first step would create for each parameter, with no step counted and zero
    gradients. If the step fails, warn and return nothing."""
    trainable = [p for p in ownership.numbers if p.requires_grad and not ownership.is_vacant(p)]
    try:
        states = _after_one_step(ownership, optimizer, _stand_ins(trainable))
    except Exception as error:  # a step may raise anything: it may need a closure, or a model
        warnings.warn(
            f"{type(optimizer).__name__} has no state yet, and a first step on copies failed "
            f"({type(error).__name__}: {textwrap.shorten(str(error), 200)}): its state dict has no "
            "entries to read a checkpoint into. Take it after the first step.",
            stacklevel=4,
        )
        return {}
    kinds = classify_all(states, tells_0d=True)
    for parameter, entry in states.items():
        scalars = [
            key
            for key, value in entry.items()
            if kinds[parameter][key] is StateKind.SCALAR or not isinstance(value, torch.Tensor)
        ]
        if scalars == ["step"]:  # where others go with it, it has to stay
            entry["step"] = entry["step"] * 0
    return {parameter: entry for parameter, entry in states.items() if entry}


def _tried_alone(
    ownership: ParamOwnership, optimizer: Optimizer, parameter: nn.Parameter
) -> Mapping[Any, Any]:
    try:
        return _after_one_step(ownership, optimizer, _stand_ins([parameter]))[parameter]
    except Exception as error:
        if not parameter.numel():  # some steps divide by the number of elements
            return {}
        raise StateError.of(
            "The optimizer's step failed on a copy of a parameter.",
            expected="an optimizer whose step() needs nothing but gradients",
            got=f"{type(error).__name__}: {error}",
            where=f"optim.check, {ownership.where}",
            fix="call optim.check after the first step",
        ) from error


def _after_one_step(
    ownership: ParamOwnership,
    optimizer: Optimizer,
    stand_ins: Mapping[nn.Parameter, nn.Parameter],
) -> dict[nn.Parameter, dict[Any, Any]]:
    """Return a copied optimizer's states after one step on others in place of some parameters."""
    if isinstance(optimizer, CompositeOptimizer):
        states: dict[nn.Parameter, dict[Any, Any]] = {}
        for each in inner_optimizers(optimizer):
            its = {p for group in each.param_groups for p in group["params"]}
            own = {p: other for p, other in stand_ins.items() if p in its}
            states |= _after_one_step(ownership, each, own)
        return states
    optimizer = _innermost(optimizer)
    left_out = nn.Parameter(torch.empty(0))
    # What deepcopy takes for the copy of an object, by its id.
    copies: dict[int, Any] = {id(p): stand_ins.get(p, left_out) for p in ownership.held}
    copies[id(optimizer.state)] = collections.defaultdict(dict)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            copies[id(value)] = collections.OrderedDict()
    trial = object.__new__(type(optimizer))
    # A scheduler puts a step of its own on the object, which is bound to the original.
    vars(trial).update(
        copy.deepcopy({k: v for k, v in vars(optimizer).items() if k != "step"}, copies)
    )
    for group in trial.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not left_out]
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    devices = {parameter.device for parameter in stand_ins if parameter.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=kind), without_compiling():
        type(optimizer).step(trial)
    return {
        parameter: dict(trial.state.get(stand_in) or {})
        for parameter, stand_in in stand_ins.items()
    }


def _innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that keeps the state; others may be wrapped around it."""
    for value in vars(optimizer).values():
        is_other = isinstance(value, Optimizer) and value is not optimizer
        if is_other and value.state is optimizer.state:
            return _innermost(value)
    return optimizer


def _stand_ins(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
    """Return copies, with zero gradients."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in parameters:
        copied = found[parameter] = nn.Parameter(parameter.detach().clone())
        if parameter.grad_dtype not in (None, parameter.dtype):
            copied.grad_dtype = parameter.grad_dtype
        copied.grad = torch.zeros_like(copied, dtype=parameter.grad_dtype or parameter.dtype)
    return found
