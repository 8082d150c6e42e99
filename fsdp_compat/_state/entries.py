"""What an optimizer keeps for a parameter, by what can be done with it at another layout."""

from __future__ import annotations

import copy
import enum
import io
import numbers
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import _torch_private

__all__ = ["Entry", "classify", "classify_all", "copied", "snapshot"]


class Entry(enum.Enum):
    """How an entry of an optimizer's state belongs to the parameter (the optimizer's: this rank's
    part) that it is kept for."""

    PER_ELEMENT = enum.auto()  # one element per element: cut and put together as the parameter is
    SCALAR = enum.auto()  # a count or a setting: the same on all ranks, and at any layout
    OPAQUE = (
        enum.auto()
    )  # of another shape, or no tensor: belongs to this rank's part, and to no other


def classify(value: object, target: nn.Parameter) -> Entry:
    """Return how a value that an optimizer keeps for ``target`` belongs to it.

    A 0-d tensor is a scalar, also where the target is 0-d. A tensor that stands for others, such as
    a quantized one, is opaque. Nothing is sent: whether a scalar is equal on all ranks is not
    looked at.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return Entry.SCALAR
        plain = type(
            value
        ).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or not _torch_private.is_plain(
            value
        )
        return (
            Entry.PER_ELEMENT
            if plain and value.layout is torch.strided and value.shape == target.shape
            else Entry.OPAQUE
        )
    return (
        Entry.SCALAR if value is None or isinstance(value, (numbers.Number, str)) else Entry.OPAQUE
    )


def classify_all(
    states: Mapping[nn.Parameter, Mapping[Any, Any]],
) -> dict[nn.Parameter, dict[Any, Entry]]:
    """Return how every entry of the states of several targets belongs to its target.

    Of a target with one element or none, a state of another shape may have the same shape by chance
    (a scale per block of elements): what is opaque for other targets is opaque there.
    """
    found = {
        target: {key: classify(value, target) for key, value in state.items()}
        for target, state in states.items()
    }
    opaque = {key for its in found.values() for key, entry in its.items() if entry is Entry.OPAQUE}
    for target, its in found.items():
        for key in opaque & its.keys() if target.numel() <= 1 else ():
            if its[key] is Entry.PER_ELEMENT:
                its[key] = Entry.OPAQUE
    return found


def copied(value: Any, to_cpu: bool = False) -> Any:
    """Return a tensor's copy, so that nothing in a dict shares or keeps more memory than it shows;
    anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if to_cpu else value.detach().clone()
    return value


def snapshot(value: Any, to_cpu: bool = False) -> Any:
    """Return a copy of an opaque state that does not change when the optimizer goes on. What cannot
    be copied comes as it is."""
    if isinstance(value, torch.Tensor):
        return copied(value, to_cpu)
    if type(value) is dict:
        return {key: snapshot(item, to_cpu) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(item, to_cpu) for item in value)
    for make_copy in (lambda: _by_pickle(value, to_cpu), lambda: copy.deepcopy(value)):
        try:
            return make_copy()
        except Exception:  # an object may refuse in any way, and a save must not fail for that
            continue
    return value


class _Pickler(pickle.Pickler):
    """Tensors go apart: deepcopy and torch's own way of pickling copy whole storages, of which they
    may show little."""

    def __init__(self, file: io.BytesIO, to_cpu: bool) -> None:
        super().__init__(file)
        self._to_cpu = to_cpu
        self._seen: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or obj.requires_grad:
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = len(self.tensors)
            self.tensors.append(copied(obj, self._to_cpu))
        return self._seen[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[pid]


def _by_pickle(value: Any, to_cpu: bool) -> Any:
    file = io.BytesIO()
    pickler = _Pickler(file, to_cpu)
    pickler.dump(value)
    file.seek(0)
    return _Unpickler(file, pickler.tensors).load()
