"""The kinds of state that an optimizer keeps for a parameter, and how to copy them."""

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


class StateKind(enum.Enum):
    """How a value of an optimizer's state relates to the (sharded) parameter that it is kept
    for."""

    PER_ELEMENT = enum.auto()  # of the parameter's shape: sharded and gathered like it
    SCALAR = enum.auto()  # a count or a setting: the same on all ranks and for any layout
    RANK_LOCAL = enum.auto()  # of another shape, or not a tensor: fits only this rank's part


def classify(value: object, param: nn.Parameter) -> StateKind:
    """Return the kind of a value that an optimizer keeps for ``param``.

    A 0-d tensor is a scalar, even if the parameter is 0-d. A tensor subclass that wraps others,
    such as a quantized one, is rank-local. Whether a scalar is equal on all ranks is not checked.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return StateKind.SCALAR
        is_wrapper = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        plain = not is_wrapper or not _torch_private.is_plain(value)
        return (
            StateKind.PER_ELEMENT
            if plain and value.layout is torch.strided and value.shape == param.shape
            else StateKind.RANK_LOCAL
        )
    return (
        StateKind.SCALAR
        if value is None or isinstance(value, (numbers.Number, str))
        else StateKind.RANK_LOCAL
    )


def classify_all(
    states: Mapping[nn.Parameter, Mapping[Any, Any]],
) -> dict[nn.Parameter, dict[Any, StateKind]]:
    """Return the kinds of all states of several parameters.

    For a parameter with at most one element, a rank-local state (a scale per block of elements) may
    have the parameter's shape by chance: a state that is rank-local for other parameters is
    rank-local for this one too.
    """
    kinds = {
        param: {key: classify(value, param) for key, value in state.items()}
        for param, state in states.items()
    }
    rank_local = {
        key
        for of_param in kinds.values()
        for key, kind in of_param.items()
        if kind is StateKind.RANK_LOCAL
    }
    for param, of_param in kinds.items():
        for key in rank_local & of_param.keys() if param.numel() <= 1 else ():
            if of_param[key] is StateKind.PER_ELEMENT:
                of_param[key] = StateKind.RANK_LOCAL
    return kinds


def copied(value: Any, to_cpu: bool = False) -> Any:
    """Return a copy of a tensor that keeps no other memory alive; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if to_cpu else value.detach().clone()
    return value


def snapshot(value: Any, to_cpu: bool = False) -> Any:
    """Return a copy of a rank-local state that later steps do not change. A value that cannot be
    copied is returned as it is."""
    if isinstance(value, torch.Tensor):
        return copied(value, to_cpu)
    if type(value) is dict:
        return {key: snapshot(item, to_cpu) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(item, to_cpu) for item in value)
    for make_copy in (lambda: _by_pickle(value, to_cpu), lambda: copy.deepcopy(value)):
        try:
            return make_copy()
        except Exception:  # an object may raise anything, and a save must not fail for that
            continue
    return value


class _Pickler(pickle.Pickler):
    """Copies tensors one by one, because deepcopy and torch's pickling copy whole storages."""

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
