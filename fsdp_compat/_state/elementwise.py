"""Recognises optimizers that are wrong on shards, because they need whole parameters."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _torch_private
from .optim_contents import CompositeOptimizer
from .trials import depends_on_others, depends_on_shape, small_shape

# Every element's update depends on its own gradients alone. Subclasses may differ.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
)
_LR = 0.01  # instead of a schedule's first one, which may be 0
_OWN = frozenset({"params", "param_names", "lr", "initial_lr"})  # what groups may differ in
_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def warn_of_parts(
    optimizer: Optimizer, shapes: Mapping[int, tuple[int, ...]], stacklevel: int
) -> None:
    """Warn, once, if the optimizer would compute something else for whole parameters, which is
    tried on small ones, or if a choice by shape may have left a group empty. shapes: by the number
    of a group, a whole parameter of which it has a part."""
    if isinstance(optimizer, CompositeOptimizer) or optimizer in _told:
        return
    _told.add(optimizer)
    groups = optimizer.param_groups
    is_flat = [len(shape) > groups[at]["params"][0].dim() == 1 for at, shape in shapes.items()]
    if any(is_flat) and not all(group["params"] for group in groups):
        warnings.warn(
            f"A parameter group of {type(optimizer).__name__} is empty. If it was chosen by shape: "
            "parameters of a wrapped model have one dim, so that weight decay may apply to none. "
            "Choose them before wrapping, with use_orig_params=True.",
            stacklevel=stacklevel,
        )
    if type(optimizer) in _ELEMENTWISE:
        return
    tried: set[str] = set()
    for number, shape in shapes.items():
        group, small = optimizer.param_groups[number], small_shape(shape)
        settings = {key: value for key, value in group.items() if key not in _OWN}
        kind = repr((small, settings))
        if isinstance(group.get("lr"), (int, float, torch.Tensor)):
            settings["lr"] = _LR
        if kind not in tried and (text := _unfit(optimizer, settings, small, group["params"][0])):
            warnings.warn(f"{text} (parameter group {number})", stacklevel=stacklevel)
            return
        tried.add(kind)


def _unfit(
    optimizer: Optimizer, settings: dict[str, Any], shape: tuple[int, ...], example: torch.Tensor
) -> str:
    """Return what is wrong with an optimizer of these settings on shards, or ""."""
    name = type(optimizer).__name__

    def make(params: list[nn.Parameter]) -> Optimizer:
        return type(optimizer)([{**settings, "params": params}])  # type: ignore[call-arg]

    if not depends_on_shape(make, shape, example.device):
        return ""
    text = f"fsdp_compat.optim.GatheredOptimizer(model, lambda params: {name}(params, ...))"
    fix = f"Use {text}, which steps whole parameters."
    if not _torch_private.is_plain(example):
        return f"{name} needs whole parameters: with DTensors it gathers them, or raises. {fix}"
    if depends_on_others(make, shape, example.device):
        fix = "It needs all parameters at once; use another optimizer."
    return (
        f"{name} is wrong on shards: its update of a part of a parameter is not that part of the "
        f"update of the whole. {fix}"
    )
