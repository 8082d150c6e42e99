"""What an optimizer will keep for its parameters, found out without touching them."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import StateError, explain
from .holdings import Holdings

__all__ = ["states_to_be"]


def states_to_be(holdings: Holdings, optimizer: Optimizer) -> dict[nn.Parameter, Mapping[Any, Any]]:
    """Return the optimizer's states by parameter, and for those without what it would make in its first step.

    Raises StateError if that step fails.
    """
    states: dict[nn.Parameter, Mapping[Any, Any]] = {}
    tried: dict[object, Mapping[Any, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                states[parameter] = optimizer.state[parameter]
            elif parameter.requires_grad:
                kind = number, tuple(parameter.shape), parameter.dtype, parameter.device
                if kind not in tried:
                    tried[kind] = _shapes_of(_first_state(holdings, optimizer, number, parameter))
                states[parameter] = tried[kind]
    return states


def _first_state(holdings: Holdings, optimizer: Optimizer, number: int, parameter: nn.Parameter) -> Mapping[Any, Any]:
    """The state that a copy of the optimizer has for a stand-in of ``parameter``, in group ``number``, after one step of zeros."""
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(stand_in)
    nobody: dict[int, Any] = {id(p): stand_in for p in holdings.held} | {id(optimizer.state): collections.defaultdict(dict)}
    devices = [parameter.device] if parameter.device.type != "cpu" else []
    trial = object.__new__(type(optimizer))
    try:
        trial.__dict__ = copy.deepcopy({k: v for k, v in optimizer.__dict__.items() if k not in _LEFT_OUT}, nobody)
        for name in optimizer.__dict__.keys() & _HOOKS:
            trial.__dict__[name] = collections.OrderedDict()
        for position, group in enumerate(trial.param_groups):
            group["params"] = [stand_in] if position == number else []
        with torch.random.fork_rng(devices, device_type=parameter.device.type if devices else "cuda"):
            type(optimizer).step(trial)
    except Exception as error:  # whatever a user's step raises on its own terms: it wants a closure, or a model
        if not parameter.numel():  # some steps divide by the number of elements
            return {}
        raise StateError(
            explain(
                "The optimizer cannot be tried on a stand-in.",
                expected="an optimizer whose step() needs nothing but gradients",
                got=f"{type(error).__name__}: {error}",
                where=f"check_optimizer, {holdings.where}",
                fix="call check_optimizer after the first step: it looks at the states that are there then",
            )
        ) from error
    state: Mapping[Any, Any] = trial.state.get(stand_in, {})
    return state


def _shapes_of(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Tensors without memory in the place of plain ones."""
    return {key: value.to("meta") if type(value) is torch.Tensor else value for key, value in state.items()}


_HOOKS = frozenset(
    {
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    }
)
_LEFT_OUT = _HOOKS | {"step"}  # a scheduler puts a step of its own on the object, which is bound to the original
