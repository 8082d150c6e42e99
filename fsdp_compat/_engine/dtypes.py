"""Casts of nested values, and the dtypes in which a unit computes and communicates."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class ComputeDtype(enum.IntEnum):
    """Which of its two dtypes a unit computes in; also an index into lists."""

    TRAIN = 0  # Precision.gather
    EVAL = 1  # Precision.evaluate: modules in evaluation mode, with full precision in eval


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes that one group computes and communicates in."""

    gather: torch.dtype  # of the all-gather, and so of the computation
    reduce: torch.dtype  # of the reduce-scatter
    evaluate: torch.dtype | None = None  # instead of ``gather`` in evaluation mode; None: the same
    grad: torch.dtype | None = None  # of ``.grad``; None: the shard's


def is_packed(dtype: torch.dtype) -> bool:
    """True for the dtypes of packed formats, integers and 8-bit floats, which are never cast."""
    return not dtype.is_floating_point or dtype.itemsize == 1


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view of a tensor of one-byte elements, so that copies keep every bit pattern,
    and any other tensor unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists, sets, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with its tensors changed, in the same containers or, unchanged, itself."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        items = {key: map_tensors(item, change) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        try:
            return type(value)(items)
        except TypeError:  # a mapping whose constructor wants something else (defaultdict)
            changed = value.copy()
            changed.update(items)
            return changed
    if isinstance(value, (tuple, list)):
        values = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(values, value, strict=True)):
            return value
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: new
            for field in dataclasses.fields(value)
            if field.init
            and (new := map_tensors(old := getattr(value, field.name), change)) is not old
        }
        return dataclasses.replace(value, **changes) if changes else value
    return value


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
