"""What fsdp_compat checks in every optimizer of the process.

*Before a step*: whether it was created before its model was wrapped. With use_orig_params=True it
keeps working: the parameters are the same objects, and existing state is cut to this rank's parts
first. With use_orig_params=False it holds parameters that are no longer trained, so the first step
raises.

*In its own state dict*, without ``FSDP.optim_state_dict``: whose parts it has. Another rank, or a
model that is cut differently, could take them for its own, as they often have the same shape. So
the dict gets a key beside "state" and "param_groups", which other readers ignore, and
``load_state_dict`` compares it. DTensors need none: torch.distributed.checkpoint reshards them, and
an unpickled mesh keeps the coordinates of the rank that saved it."""

from __future__ import annotations

import typing
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch_private
from .._archive.archive import is_count
from .._engine.runtime import live_runtimes
from .._engine.state_store import StateStore
from ..errors import CheckpointError, StateError, UsageError, ValueCheckpointError
from .elementwise import warn_of_parts
from .loaded_values import is_sharded, misfit
from .summon import shown_stores


class _Lost(typing.NamedTuple):
    """Why a parameter is not trained, as facts of an error."""

    got: str
    fix: str


# {sharded parameter: (weak reference to its store, its indices), replaced one: a _Lost}
_managed: WeakIdKeyDictionary = WeakIdKeyDictionary()
# {parameter whose value alone became part of a unit: a _Lost}
_assigned: WeakIdKeyDictionary = WeakIdKeyDictionary()
# An attribute of sharded parameters. Unlike an entry in `_managed`, it is pickled with them.
_MARK = "_fsdp_compat_part"
_KEY = "fsdp_compat"  # in an optimizer's own state dict
_PICKLED_APART = _Lost(
    "a copy of a sharded parameter, which was pickled separately from its model",
    "create the optimizer from model.parameters() after unpickling, and load the optimizer's "
    "state_dict()",
)
# The optimizers that were checked after the last unit was made.
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def register_flattened(originals: Iterable[nn.Parameter], stores: Iterable[StateStore]) -> None:
    """Register ``originals``, which were flattened into ``stores``."""
    fix = "create the optimizer after wrapping, or pass use_orig_params=True"
    _lose(originals, "part of a FlatParameter", fix)
    for store in stores:
        for sharded_param, indices in store.sharded_params:
            sharded_param.__dict__[_MARK] = True
            _managed[sharded_param] = weakref.ref(store), indices


def register_replaced(originals: Iterable[nn.Parameter]) -> None:
    """Register ``originals``, which were sharded into DTensors."""
    _lose(originals, "a DTensor", "create the optimizer after fully_shard")


def register_unsharded(parameters: Iterable[nn.Parameter]) -> None:
    """Register unsharded parameters, which modules may show after a forward of fully_shard."""
    fix = "create it before forward, or after model.reshard() of every module"
    _lose(parameters, "an unsharded copy of a DTensor", fix)


def _lose(originals: Iterable[nn.Parameter], now: str, fix: str) -> None:
    _checked.clear()
    for parameter in originals:
        got = f"a parameter of shape {tuple(parameter.shape)}, which is {now} now"
        _managed[parameter] = _Lost(got, fix)


def register_assigned(parameter: nn.Parameter, name: str) -> None:
    """Record that the value of ``parameter`` alone became attribute ``name`` of a unit."""
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


def cut_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut whole states to this rank's parts. Raises UsageError for untrained parameters,
    CheckpointError for whole states of DTensors."""
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
                _cut(optimizer, store, parameter)
            elif _torch_private.local_part(parameter).shape != (whole := parameter.shape):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if type(value) is torch.Tensor and value.shape == whole:
                        raise _not_own(optimizer, f"a whole tensor as {key!r}")
    _checked.add(optimizer)


def cut_shapes(optimizer: torch.optim.Optimizer) -> dict[int, tuple[tuple[int, ...], bool]]:
    """Return, by the number of a group, the shape of a whole parameter of which the optimizer has a
    part, or which is flattened: one with the most dims; and whether all such parts are rows of
    plain tensors. Parameters that lie whole, in their shape, on one rank do not count."""
    found: dict[int, tuple[tuple[int, ...], bool]] = {}
    for number, group in enumerate(optimizer.param_groups):
        if cut := [each for parameter in group["params"] for each in _cut_shapes_in(parameter)]:
            longest, _ = max(cut, key=lambda each: len(each[0]))
            found[number] = longest, all(are_rows for _, are_rows in cut)
    return found


def _cut_shapes_in(parameter: nn.Parameter) -> Iterator[tuple[tuple[int, ...], bool]]:
    store, whole = store_of_param(parameter), tuple(parameter.shape)
    if _torch_private.local_part(parameter).shape != whole:  # of a DTensor
        yield whole, False
    if store is None or not (store.ranks > 1 or store.is_flattened):
        return
    for index in _managed[parameter][1]:
        layout, number = store.cut(index)
        are_rows = layout.params[number].is_in_rows and not store.is_flattened
        if not are_rows or layout.cuts(number):
            yield store.shape(index), are_rows


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step with unsharded parameters: gradients or writes could be lost."""
    if optimizer not in _checked:
        cut_state(optimizer)
        warn_of_parts(optimizer, cut_shapes(optimizer), stacklevel=4)
    unsharded: dict[object, str] = {
        group.store: "inside forward or backward"
        for runtime in live_runtimes()
        if runtime.runs and not runtime.backward.steps
        for group in runtime.groups
    }
    unsharded.update(dict.fromkeys(shown_stores, "inside summon_full_params"))
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


def _cut(optimizer: torch.optim.Optimizer, store: StateStore, parameter: nn.Parameter) -> None:
    index, state = _managed[parameter][1][0], optimizer.state[parameter]
    shape, part = store.local_shape(index), store.part(index, store.rank)
    for key, value in state.items() if tuple(parameter.shape) != shape else ():
        if is_sharded(value):
            raise _not_own(optimizer, f"a sharded value as {key!r}, of FSDP.optim_state_dict")
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and tuple(value.shape) == shape and not is_count(key, shape):
            state[key] = value.reshape(-1)[part.slice].to(parameter.device, copy=True)


# -- their own state dicts


def with_owner(original: Callable[[], dict[str, Any]], optimizer: torch.optim.Optimizer) -> Any:
    """Around ``optimizer.state_dict()``: say whose parts it has."""
    state_dict = original()
    owner = _owner_of(optimizer)
    return state_dict if owner is None else {**state_dict, _KEY: owner}


def load_own(
    original: Callable[[Any], None], optimizer: torch.optim.Optimizer, state_dict: Any
) -> None:
    """Around ``optimizer.load_state_dict()``: raise CheckpointError for another rank's parts."""
    if isinstance(state_dict, Mapping):
        _require_own(optimizer, state_dict)
    try:
        original(state_dict)
    except ValueError as error:
        if _owner_of(optimizer) is None:
            raise
        raise _not_own(optimizer, str(error)) from error
    _checked.discard(optimizer)  # whole states are cut by the next step


def _not_own(
    optimizer: torch.optim.Optimizer, got: str, expected: str = "this rank's parts"
) -> CheckpointError:
    return ValueCheckpointError.of(
        "An optimizer's own state dict belongs to one rank.",
        expected=expected,
        got=got,
        where=f"{type(optimizer).__name__}.load_state_dict"
        + (f", global rank {dist.get_rank()}" if dist.is_initialized() else ""),
        fix="save FSDP.optim_state_dict(model, optimizer) and load it by optim_state_dict_to_load, "
        "or use fsdp_compat.checkpoint: any number of ranks can load them. What "
        "optimizer.state_dict() returned loads on the rank that saved it, in an equal layout",
    )


def _owner_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Describe whose parts the optimizer's state is; None if its parameters are whole."""
    cuts = list[Any]()
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        store = store_of_param(parameter)
        if store is not None and store.ranks > 1:
            cuts.append((store.rank, store.ranks, tuple(parameter.shape)))
            indices = _managed[parameter][1]
            cuts += [(store.local_shape(index), store.part(index, store.rank)) for index in indices]
    if not cuts:
        return None
    return {"rank": cuts[0][0], "ranks": cuts[0][1], "layout": zlib.crc32(repr(cuts).encode())}


def _require_own(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the parts of another rank or layout."""
    saved = state_dict.get(_KEY)
    owner = None if saved is None else _owner_of(optimizer)
    expected, got = "this rank's parts", ""
    if saved is not None and saved != owner:
        expected, got = _described(owner), _described(saved)
        if got == expected:
            got += " of parameters that were wrapped or cut otherwise"
    states = state_dict.get("state")
    for state in states.values() if isinstance(states, Mapping) and not got else ():
        for value in state.values() if isinstance(state, Mapping) else ():
            got = got or misfit(value) or ""
    if got:
        raise _not_own(optimizer, got, expected)


def _described(owner: Mapping[str, Any] | None) -> str:
    if owner is None:
        return "the state of whole parameters"
    return f"the parts of rank {owner.get('rank')} of {owner.get('ranks')}"
