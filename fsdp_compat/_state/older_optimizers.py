"""Optimizers that were created before their model was wrapped.

With use_orig_params=True they keep working: the parameters are the same objects, and existing state
of unsharded parameters is cut to this rank's parts before it is used. With use_orig_params=False
they hold parameters that are no longer trained, so the first step raises an error."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from .._engine.runtime import live_runtimes
from .._engine.state_store import StateStore
from ..errors import StateError, UsageError
from .optim_contents import is_count
from .summon import shown_stores


@dataclasses.dataclass(frozen=True)
class _Replaced:
    """Why a parameter is no longer trained."""

    by: str
    what: str
    expected: str
    fix: str


# The parameters of all units. For a sharded parameter: (weak reference to its store, index of the
# first of the model's parameters in it). For a parameter that another one has replaced: a
# _Replaced.
_managed: WeakIdKeyDictionary = WeakIdKeyDictionary()

# {a parameter whose value was copied into a unit: the attribute it was assigned to}
_assigned: WeakIdKeyDictionary = WeakIdKeyDictionary()

# An attribute of sharded parameters. Unlike an entry in `_managed`, it is pickled with them.
_MARK = "_fsdp_compat_part"

_wrappings = itertools.count(1)

_last_wrapping = 0

# {optimizer: the value of `_last_wrapping` when it was last checked}
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


_handle: RemovableHandle | None = None


def patch() -> None:
    """Check every optimizer of this process before it steps."""
    global _handle
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_before_step)


def undo() -> None:
    """Stop checking: an optimizer that was created before wrapping then steps without an error."""
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None


def note(originals: Iterable[nn.Parameter], stores: Iterable[StateStore]) -> None:
    """Register ``originals``, which were flattened into ``stores``."""
    global _last_wrapping
    _last_wrapping = next(_wrappings)
    for parameter in originals:
        _managed[parameter] = _Replaced(
            "wrapping",
            f"a parameter of shape {tuple(parameter.shape)}, which is part of a FlatParameter now",
            "an optimizer created from wrapped_model.parameters(), or a model wrapped with "
            "use_orig_params=True",
            "create the optimizer after wrapping, or pass use_orig_params=True",
        )
    for store in stores:
        for sharded_param, indices in store.sharded_params:
            sharded_param.__dict__[_MARK] = True
            _managed[sharded_param] = weakref.ref(store), indices[0]


def note_replaced(originals: Iterable[nn.Parameter]) -> None:
    """Register ``originals``, which were sharded into DTensors."""
    global _last_wrapping
    _last_wrapping = next(_wrappings)
    for parameter in originals:
        _managed[parameter] = _Replaced(
            "fully_shard",
            f"a parameter of shape {tuple(parameter.shape)}, which is a DTensor now",
            "an optimizer created from the parameters of the sharded model",
            "create the optimizer after fully_shard",
        )


def is_managed(parameter: nn.Parameter) -> bool:
    """True for a sharded parameter, and for one that was replaced."""
    return parameter in _managed


def is_held(parameter: nn.Parameter) -> bool:
    """True for a sharded parameter, which an optimizer holds."""
    return isinstance(_managed.get(parameter), tuple)


def store_of_param(parameter: nn.Parameter) -> StateStore | None:
    """Return the store of a sharded parameter of FullyShardedDataParallel; None for any other."""
    place = _managed.get(parameter)
    return place[0]() if isinstance(place, tuple) else None


def note_assigned(parameter: nn.Parameter, name: str) -> None:
    """Record that the value of ``parameter``, but not the object, was assigned to the attribute
    ``name`` of a unit."""
    global _last_wrapping
    _assigned[parameter] = name
    _last_wrapping = next(_wrappings)  # so that optimizers are checked again


def convert(optimizer: torch.optim.Optimizer) -> None:
    """Cut optimizer state of unsharded parameters to this rank's parts. Raises UsageError if the
    optimizer holds a parameter that is no longer trained."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            place = _managed.get(parameter)
            if parameter in _assigned:
                raise _not_trained(optimizer, number, _assigned[parameter])
            if isinstance(place, _Replaced):
                raise _orphaned(optimizer, number, place)
            if place is None and _MARK in parameter.__dict__:
                raise _pickled_apart(optimizer, number)
            if place is not None and optimizer.state.get(parameter):
                store = place[0]()
                if store is not None and not store.is_flattened:
                    _cut(optimizer.state[parameter], store, place[1], parameter)
    _seen[optimizer] = _last_wrapping


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _seen.get(optimizer) != _last_wrapping:
        convert(optimizer)
    if shown_stores():
        _refuse(optimizer, shown_stores(), "inside summon_full_params")
    for runtime in live_runtimes():
        if runtime.runs and not runtime.backward.steps:
            _refuse(
                optimizer,
                {group.store for group in runtime.groups},
                "inside forward or backward",
            )


def _refuse(optimizer: torch.optim.Optimizer, stores: Collection[object], when: str) -> None:
    """Raise StateError if the optimizer holds parameters of ``stores``. While parameters are
    unsharded, a step would miss gradients, and its writes could be lost or corrupt backward."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            place = _managed.get(parameter)
            if isinstance(place, tuple) and place[0]() in stores:
                raise StateError.of(
                    f"optimizer.step() was called {when}.",
                    expected="a step between backward and the next forward",
                    got=f"a step {when}, where parameters are not sharded",
                    where=f"parameter group {number} of {type(optimizer).__name__}",
                    fix="call optimizer.step() later",
                )


def _cut(state: dict[Any, Any], store: StateStore, index: int, parameter: nn.Parameter) -> None:
    shape, part = store.local_shape(index), store.part(index, store.rank)
    if parameter.shape == shape:
        return
    for key, value in state.items():
        per_element = (
            isinstance(value, torch.Tensor)
            and tuple(value.shape) == shape
            and not is_count(key, shape)
        )
        if per_element and tuple(value.shape) != tuple(parameter.shape):
            state[key] = value.reshape(-1)[part.slice].to(parameter.device, copy=True)


def _pickled_apart(optimizer: torch.optim.Optimizer, number: int) -> UsageError:
    return UsageError.of(
        "The optimizer holds copies of sharded parameters that no model trains.",
        expected="an optimizer created from the parameters of the unpickled model",
        got="parameters that were pickled separately from their model",
        where=f"parameter group {number} of {type(optimizer).__name__}",
        fix="create the optimizer from model.parameters() after unpickling, and load the "
        "optimizer's state_dict()",
    )


def _not_trained(optimizer: torch.optim.Optimizer, number: int, name: str) -> UsageError:
    return UsageError.of(
        "The optimizer holds a parameter that the model does not train.",
        expected="an optimizer created from wrapped_model.parameters()",
        got=f"a parameter that was assigned to the attribute {name!r} of a sharded module, "
        "which copied its value",
        where=f"parameter group {number} of {type(optimizer).__name__}",
        fix="create the optimizer from wrapped_model.parameters(); to train that parameter "
        "elsewhere, assign a copy of it",
    )


def _orphaned(optimizer: torch.optim.Optimizer, number: int, replaced: _Replaced) -> UsageError:
    return UsageError.of(
        f"The optimizer holds parameters that {replaced.by} has replaced.",
        expected=replaced.expected,
        got=replaced.what,
        where=f"parameter group {number} of {type(optimizer).__name__}",
        fix=replaced.fix,
    )
