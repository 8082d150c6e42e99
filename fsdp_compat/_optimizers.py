"""Optimizers that were made before their model was wrapped.

With original parameters they go on working: the parameters are the same objects, and state that was there for whole parameters is
cut to this rank's parts before it is used. Without, what they hold is not trained any more, which the first step says.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ._stores.flat_store import FlatStore
from .errors import UsageError, explain

__all__ = ["convert", "is_managed", "note"]

# Parameters that some unit manages. Of originals that are views of a shard: (weak reference to their store, index in it). Of
# FlatParameters None; of originals whose values live in a FlatParameter now their name.
_managed: WeakIdKeyDictionary = WeakIdKeyDictionary()
_wrappings = itertools.count(1)
_last_wrapping = 0
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # and after which wrapping


def note(originals: Iterable[nn.Parameter], stores: Iterable[FlatStore]) -> None:
    """``originals`` are flattened into ``stores`` now."""
    global _last_wrapping
    if not _last_wrapping:
        register_optimizer_step_pre_hook(_before_step)
    _last_wrapping = next(_wrappings)
    for parameter in originals:
        _managed[parameter] = f"a parameter of shape {tuple(parameter.shape)}"
    for store in stores:
        for target, indices in store.targets:
            _managed[target] = (weakref.ref(store), indices[0]) if store.flat_parameter is None else None


def is_managed(parameter: nn.Parameter) -> bool:
    """True for a parameter that belongs to a unit, or whose values do."""
    return parameter in _managed


def convert(optimizer: torch.optim.Optimizer) -> None:
    """Cut state of whole parameters to this rank's parts. Raises UsageError if the optimizer holds what is not trained any more."""
    _seen[optimizer] = _last_wrapping
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            place = _managed.get(parameter)
            if isinstance(place, str):
                raise _orphaned(optimizer, number, place)
            if place is not None and optimizer.state.get(parameter):
                store = place[0]()
                if store is not None:
                    _cut(optimizer.state[parameter], store, place[1], parameter)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _seen.get(optimizer) != _last_wrapping:
        convert(optimizer)


def _cut(state: dict[Any, Any], store: FlatStore, index: int, parameter: nn.Parameter) -> None:
    shape, part = store.layout.params[index].shape, store.layout.part(index, store.rank)
    if parameter.shape == shape:
        return
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == shape != tuple(parameter.shape):
            state[key] = value.reshape(-1)[part.slice].to(parameter.device, copy=True)


def _orphaned(optimizer: torch.optim.Optimizer, number: int, what: str) -> UsageError:
    return UsageError(
        explain(
            "The optimizer was made before the model was wrapped, so it holds parameters that are not trained any more.",
            expected="an optimizer made from wrapped_model.parameters(), or a model wrapped with use_orig_params=True",
            got=f"{what} from before, whose values live in a FlatParameter now",
            where=f"parameter group {number} of {type(optimizer).__name__}",
            fix="make the optimizer after wrapping, or pass use_orig_params=True to FullyShardedDataParallel",
        )
    )
