"""Copies of a wrapped module: deepcopy, and this rank's part for pickle.

A copy is made of the modules without their managed parameters, and of the stores; its unit and
runtime are built anew around them."""

from __future__ import annotations

import contextlib
import ctypes
import io
import typing
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

from .. import _torch_private
from .._state.names import clean_name
from ..errors import StateError, explain

if typing.TYPE_CHECKING:
    from ..fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["deepcopy_of", "reduced", "restore"]

_OWN = frozenset({"_unit", "_settings"})  # of an instance: what is built anew
# an instance around this one is being pickled, and has withdrawn the parameters of all below it
_pickling = False


def deepcopy_of(
    instance: FullyShardedDataParallel, memo: dict[int, Any]
) -> FullyShardedDataParallel:
    """Return a second instance, with shards of its own, over the same process groups."""
    _require_rest(instance, "copy.deepcopy")
    copy = type(instance).__new__(type(instance))
    memo[id(instance)] = copy
    with _withdrawn(instance):
        copy.__dict__.update(
            {
                name: deepcopy(value, memo)
                for name, value in instance.__dict__.items()
                if name not in _OWN
            }
        )
        stores = [deepcopy(store, memo) for store in _stores(instance)]
        buffers = deepcopy(instance._unit.buffers, memo)
    _build(copy, stores, instance._settings, buffers)
    for group, original in zip(copy._unit.groups, instance._unit.groups, strict=True):
        if original.hook is not None:
            group.set_hook(original.hook)
    return copy


def reduced(instance: FullyShardedDataParallel) -> tuple[Any, ...]:
    """Return what pickle makes an instance of again. Everything below the outermost one is packed
    together, so that parts that share a storage go on sharing it."""
    global _pickling
    if _pickling:
        return _blank, (type(instance),), _parts(instance)
    _require_rest(instance, "pickle")
    packed = io.BytesIO()
    _pickling = True
    try:
        with contextlib.ExitStack() as stack:
            for below in type(instance).fsdp_modules(instance):
                _require_rest(below, "pickle")
                stack.enter_context(_withdrawn(below))
            torch.save(instance, packed)
    finally:
        _pickling = False
    return _unpacked, (
        torch.frombuffer(bytearray(packed.getbuffer()), dtype=torch.uint8),
    )  # torch.save would double some bytes


def _parts(instance: FullyShardedDataParallel) -> tuple[Any, ...]:
    attributes = {name: value for name, value in instance.__dict__.items() if name not in _OWN}
    return attributes, _stores(instance), instance._settings.portable(), instance._unit.buffers


def _unpacked(packed: torch.Tensor) -> FullyShardedDataParallel:
    return torch.load(
        io.BytesIO(ctypes.string_at(packed.data_ptr(), packed.numel())), weights_only=False
    )


def _blank(cls: type[FullyShardedDataParallel]) -> FullyShardedDataParallel:
    return cls.__new__(cls)


def restore(instance: FullyShardedDataParallel, parts: tuple[Any, ...]) -> None:
    """Give an instance that pickle has made its parts. Collective: all ranks load theirs."""
    attributes, stores, settings, buffers = parts
    instance.__dict__.update(attributes)
    _build(instance, stores, settings.resolved(), buffers)


def _build(
    instance: FullyShardedDataParallel, stores: list[Any], settings: Any, buffers: Any
) -> None:
    from .construction import remember

    _restore_order(instance, stores)
    with torch.inference_mode(False), torch.no_grad():
        instance._set_up(stores, settings, buffers)
    remember(instance._fsdp_wrapped_module, (), stores)


def _restore_order(instance: FullyShardedDataParallel, stores: list[Any]) -> None:
    """Let parameters come back in the order they had: keep a place for each of them in its
    module."""
    slots = {
        (id(module), name)
        for store in stores
        for member in store.orig_params
        for module, name in member.slots
    }
    for path, child in instance._fsdp_wrapped_module.named_modules(remove_duplicate=False):
        order = [
            name
            for name in instance._attribute_order.get(clean_name(path), ())
            if (id(child), name) in slots
        ]
        if order:
            parameters = _torch_private.parameters_of(child)
            kept = dict(parameters)
            parameters.clear()
            for name in instance._attribute_order[clean_name(path)]:
                if name in kept or name in order:
                    parameters[name] = kept.pop(name, None)
            parameters.update(kept)


def _stores(instance: FullyShardedDataParallel) -> list[Any]:
    return [group.store for group in instance._unit.groups]


@contextlib.contextmanager
def _withdrawn(instance: FullyShardedDataParallel) -> Iterator[None]:
    """Take the managed parameters out of the modules for the while."""
    instance._unit.view.withdraw()
    try:
        yield
    finally:
        instance._unit.view.restore()


def _require_rest(instance: FullyShardedDataParallel, what: str) -> None:
    if instance._unit.summoned:
        raise StateError(
            explain(
                f"{what} inside of summon_full_params would copy parameters that are about to be "
                "parts again.",
                expected=f"{what} of a wrapped module between steps",
                got="a call inside of summon_full_params",
                where=instance._unit.label,
                fix="leave the context first; for a copy with whole parameters take a state_dict()",
            )
        )
    instance._runtime.require_idle(what)
    instance._runtime.rest()
