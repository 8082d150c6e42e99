"""Optimizers that were created before their model was wrapped.

With use_orig_params=True they keep working: the parameters are the same objects, and existing state
of unsharded parameters is cut to this rank's parts before it is used. With use_orig_params=False
they hold parameters that are no longer trained, so the first step raises an error."""

from __future__ import annotations

import typing
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .._engine.runtime import live_runtimes
from .._engine.state_store import StateStore
from ..errors import StateError, UsageError
from .optim_contents import is_count
from .summon import shown_stores


class _Lost(typing.NamedTuple):
    """Why a parameter is not trained, as facts of an error."""

    got: str
    fix: str


# The parameters of all units. For a sharded parameter: (weak reference to its store, index of the
# first of the model's parameters in it). For a parameter that another one has replaced: a _Lost.
_managed: WeakIdKeyDictionary = WeakIdKeyDictionary()
# {a parameter whose value, but not the object, became part of a unit: a _Lost}
_assigned: WeakIdKeyDictionary = WeakIdKeyDictionary()
# An attribute of sharded parameters. Unlike an entry in `_managed`, it is pickled with them.
_MARK = "_fsdp_compat_part"
_PICKLED_APART = _Lost(
    "a copy of a sharded parameter, which was pickled separately from its model",
    "create the optimizer from model.parameters() after unpickling, and load the optimizer's "
    "state_dict()",
)
# The optimizers that were checked after the last unit was made.
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

_undo: list[Callable[[], None]] = []


def patch() -> None:
    """Check every optimizer of this process before it steps."""
    if not _undo:
        _undo.append(register_optimizer_step_pre_hook(_before_step).remove)


def undo() -> None:
    """Stop checking: an optimizer that was created before wrapping then steps without an error."""
    while _undo:
        _undo.pop()()


def note(originals: Iterable[nn.Parameter], stores: Iterable[StateStore]) -> None:
    """Register ``originals``, which were flattened into ``stores``."""
    fix = "create the optimizer after wrapping, or pass use_orig_params=True"
    _lose(originals, "part of a FlatParameter", fix)
    for store in stores:
        for sharded_param, indices in store.sharded_params:
            sharded_param.__dict__[_MARK] = True
            _managed[sharded_param] = weakref.ref(store), indices[0]


def note_replaced(originals: Iterable[nn.Parameter]) -> None:
    """Register ``originals``, which were sharded into DTensors."""
    _lose(originals, "a DTensor", "create the optimizer after fully_shard")


def _lose(originals: Iterable[nn.Parameter], now: str, fix: str) -> None:
    _checked.clear()
    for parameter in originals:
        got = f"a parameter of shape {tuple(parameter.shape)}, which is {now} now"
        _managed[parameter] = _Lost(got, fix)


def note_assigned(parameter: nn.Parameter, name: str) -> None:
    """Record that the value of ``parameter``, but not the object, was assigned to the attribute
    ``name`` of a unit."""
    _checked.clear()
    _assigned[parameter] = _Lost(
        f"a parameter that was assigned to the attribute {name!r} of a sharded module, which "
        "copied its value",
        "create the optimizer from wrapped_model.parameters(); to train that parameter elsewhere, "
        "assign a copy of it",
    )


def is_managed(parameter: nn.Parameter) -> bool:
    """True for a sharded parameter, and for one that was replaced."""
    return parameter in _managed


def is_held(parameter: nn.Parameter) -> bool:
    """True for a sharded parameter, which an optimizer holds."""
    return type(_managed.get(parameter)) is tuple


def store_of_param(parameter: nn.Parameter) -> StateStore | None:
    """Return the store of a sharded parameter of FullyShardedDataParallel; None for any other."""
    place = _managed.get(parameter)
    return place[0]() if type(place) is tuple else None


def convert(optimizer: torch.optim.Optimizer) -> None:
    """Cut optimizer state of unsharded parameters to this rank's parts. Raises UsageError if the
    optimizer holds a parameter that is no longer trained."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            place = _assigned.get(parameter) or _managed.get(parameter)
            if place is None and _MARK in parameter.__dict__:
                place = _PICKLED_APART
            if isinstance(place, _Lost):
                raise UsageError.of(
                    "The optimizer holds a parameter that the model does not train.",
                    expected="an optimizer created from the parameters of the sharded model",
                    got=place.got,
                    where=f"parameter group {number} of {type(optimizer).__name__}",
                    fix=place.fix,
                )
            store = store_of_param(parameter)
            if store is not None and not store.is_flattened and optimizer.state.get(parameter):
                _cut(optimizer.state[parameter], store, place[1], parameter)
    _checked.add(optimizer)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step while the optimizer's parameters are unsharded: it would miss gradients, and
    its writes could be lost or corrupt backward."""
    if optimizer not in _checked:
        convert(optimizer)
    unsharded: dict[object, str] = {
        group.store: "inside forward or backward"
        for runtime in live_runtimes()
        if runtime.runs and not runtime.backward.steps
        for group in runtime.groups
    }
    unsharded.update(dict.fromkeys(shown_stores(), "inside summon_full_params"))
    for number, group in enumerate(optimizer.param_groups if unsharded else ()):
        for parameter in group["params"]:
            if when := unsharded.get(store_of_param(parameter)):
                raise StateError.of(
                    f"optimizer.step() was called {when}.",
                    expected="a step between backward and the next forward",
                    got=f"a step {when}, where parameters are not sharded",
                    where=f"parameter group {number} of {type(optimizer).__name__}",
                    fix="call optimizer.step() later",
                )


def _cut(state: dict[Any, Any], store: StateStore, index: int, parameter: nn.Parameter) -> None:
    shape, part = store.local_shape(index), store.part(index, store.rank)
    for key, value in state.items() if tuple(parameter.shape) != shape else ():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and tuple(value.shape) == shape and not is_count(key, shape):
            state[key] = value.reshape(-1)[part.slice].to(parameter.device, copy=True)
