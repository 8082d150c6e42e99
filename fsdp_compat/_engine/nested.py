"""Tensors in nested values: in containers, dataclasses and plain objects."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Types of values in which no tensors are searched.
OPAQUE = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))


def contents_of(value: Any, in_place: bool = True) -> Iterable[tuple[Any, Any]] | None:
    """Return (key, content) of a container or plain object, None for anything else."""
    package = type(value).__module__.partition(".")[0]
    if package == __name__.partition(".")[0]:
        return None
    if isinstance(value, (tuple, list, set, frozenset, collections.deque)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    is_known = package == "torch" and not isinstance(value, torch.distributions.Distribution)
    is_plain = hasattr(value, "__dict__") and not callable(value)
    if in_place and is_plain and not is_known and not isinstance(value, types.ModuleType):
        result: Iterable[tuple[Any, Any]] | None = vars(value).items()
        return result
    return None


def map_tensors(
    value: Any,
    change: Callable[[Tensor], Tensor],
    in_place: bool = False,
    seen: dict[int, Any] | None = None,
) -> Any:
    """Return ``value`` with its tensors changed, in copies of the containers around them or,
    unchanged, itself. in_place: in plain objects, too, and in the containers themselves, except
    tuples and sets."""
    if isinstance(value, Tensor):
        return change(value)
    contents, seen = contents_of(value, in_place), {} if seen is None else seen
    if contents is None or id(value) in seen:
        return seen.get(id(value), value)
    new = seen[id(value)] = value  # until it has changed: in a cycle
    changes = {
        key: mapped
        for key, item in list(contents)
        if type(item) not in OPAQUE
        and (mapped := map_tensors(item, change, in_place, seen)) is not item
    }
    if changes and isinstance(value, tuple):
        items = [changes.get(index, item) for index, item in enumerate(value)]
        new = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif changes and not isinstance(value, (set, frozenset, types.MappingProxyType)):
        new = value if in_place else copy.copy(value)
        for key, mapped in changes.items():
            if hasattr(new, "__setitem__"):
                new[key] = mapped
            else:
                object.__setattr__(new, key, mapped)
    seen[id(value)] = new
    return new


def tensors_in(value: object, in_plain_objects: bool = True) -> list[Tensor]:
    """Return the tensors of nested containers and, if asked for, of plain objects, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note, in_place=in_plain_objects)
    return found


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``."""
    return map_tensors(
        value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t
    )


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``. Copies to the CPU may be read, and their
    sources on the CPU overwritten, at once: copies from pinned memory wait for the device."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        is_pageable = tensor.device.type == "cpu" and not tensor.is_pinned()
        return tensor.to(device, non_blocking=is_pageable)

    return map_tensors(value, moved)
