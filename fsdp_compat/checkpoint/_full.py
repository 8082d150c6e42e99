"""Whole tensors of a model, gathered one unit at a time: for any file format, and for models too
large to hold twice."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from .._engine import rendezvous
from .._state.held import exact_buffers_of
from .._state.model_state import gathered_unit
from .._state.units import (
    ModelUnit,
    Wanted,
    model_unit_of,
    model_units_in,
    names_in_order,
    owners_in,
    require_idle,
    units_of,
    unmanaged_in,
    wanted_by,
)
from ..errors import require_module, wrong_type

_WHERE = "iter_full_state_dict"


def iter_full_state_dict(
    model: nn.Module,
    *,
    filter: Callable[[str], bool] | Literal["trainable"] | None = None,
    device: torch.device | str | None = "cpu",
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole tensor of each parameter and persistent buffer of a model.

    The names are those before wrapping. Outer units come first; within a unit, the model's order. A
    tied parameter is yielded under each of its names in turn, with the same tensor. Tensors are
    copies that the caller owns. A rank holds one unsharded unit and the last yielded tensor. Extra
    state is left out: it is not a tensor.

    Collective: all ranks of the model iterate in step, to the end or until they all stop at the
    same name.

    Args:
        model: a sharded module, of either front end, or one that contains some.
        filter: what to yield and gather: a function of a name, or "trainable" for parameters that
            require grad.
        device: of the tensors; None: where each unit computes.
        dtype: of the floating-point tensors; None: as stored.

    Returns:
        An iterator over (name, tensor)."""
    require_module(model, _WHERE)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise wrong_type("dtype", "a floating-point dtype, or None", dtype, _WHERE)
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise wrong_type("device", "a torch.device, its name, or None", device, _WHERE) from error
    return _full_state(model, wanted_by(filter, _WHERE), device, dtype)


def _full_state(
    model: nn.Module, wanted: Wanted, device: torch.device | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """See ``iter_full_state_dict``; names are clean. Collective, as far as it is consumed."""
    units = units_of(model, once=False)
    require_idle(model, _WHERE)
    groups = [
        group for own in dict.fromkeys(each.own for each in units) for group in own.unit.groups
    ]
    rendezvous.require_all_ranks(_WHERE, groups)
    position = {name: number for number, name in enumerate(names_in_order(model, ""))}
    others = _others(model, wanted)
    for own in dict.fromkeys((model_unit_of(model), *(each.own for each in units))):
        found: list[tuple[list[str], Callable[[], torch.Tensor]]] = [
            (names, functools.partial(tensor.to, device or tensor.device, copy=True))
            for names, tensor in others[own].values()
        ]
        if own is not None:
            own.runtime.require_idle(_WHERE)
            own.runtime.reshard_all([own.unit])
            prefixes = dict.fromkeys(each.prefix for each in units if each.own is own)
            found += gathered_unit(own.unit, [*prefixes], wanted, device)
        found.sort(key=lambda entry: position.get(entry[0][0], len(position)), reverse=True)
        while found:  # drop each tensor once it has been yielded
            names, make = found.pop()
            value = make()
            del make
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            for name in names:
                yield name, value
            del value


def _others(
    model: nn.Module, wanted: Wanted
) -> Mapping[ModelUnit | None, dict[int, tuple[list[str], torch.Tensor]]]:
    """Return (wanted names, tensor) of what no unit shards, by the unit around its module."""
    found, owners = collections.defaultdict[Any, Any](dict), owners_in(model)
    with contextlib.ExitStack() as stack:
        for own in model_units_in(model):
            stack.enter_context(exact_buffers_of(own.unit))
        for slot in unmanaged_in(model):
            value, trains = slot.value, isinstance(slot.value, nn.Parameter)
            if value is not None and wanted(slot.name, trains and value.requires_grad):
                its = found[model_unit_of(owners[slot.key.rpartition(".")[0]])]
                its.setdefault(id(value), ([], value.detach()))[0].append(slot.name)
    return found
