"""The whole model's state, one unit at a time: for files of any kind, and for models that fit no
single process twice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn

from .._engine import rendezvous
from .._state.model_units import (
    model_unit_of,
    model_units_in,
    names_in_order,
    runtimes_of,
)
from .._state.names import Wanted, clean_name, wanted_by
from .._state.unit_entries import gathered_unit
from .._state.unmanaged import owners_in, unmanaged_in
from ..errors import require_module

__all__ = ["iter_full_state_dict"]


def iter_full_state_dict(
    model: nn.Module, *, filter: Callable[[str], bool] | Literal["trainable"] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor on the CPU) of a model's parameters and persistent buffers, under
    the names before wrapping.

    model: a FullyShardedDataParallel, or a module around some. Unit by unit, the outer ones first,
    and within a unit in the model's order. A tied parameter comes under all its names, one after
    the other, with one tensor. Tensors are copies, and the caller's. filter: which to yield, a
    function of a name, or "trainable" for the parameters that require grad; only those are
    gathered.

    Collective: all ranks iterate in step, to the end or until they all stop at the same name. A
    rank holds one gathered unit and the tensor that was yielded last. Extra state, which is no
    tensor, is left out.
    """
    require_module(model, "iter_full_state_dict")
    return _full_state(model, wanted_by(filter, "iter_full_state_dict"))


def _full_state(model: nn.Module, wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (clean name, whole tensor on the CPU, a copy) of what is wanted of a model, unit by
    unit, see ``iter_full_state_dict``.

    Collective, as far as it is consumed.
    """
    units = model_units_in(model)
    for runtime in runtimes_of(units):
        runtime.require_idle("iter_full_state_dict")
        runtime.require_parts("iter_full_state_dict")
    rendezvous.require_all_ranks(
        "iter_full_state_dict", (group for each in units for group in each.unit.groups)
    )
    position = {name: number for number, name in enumerate(names_in_order(model, ""))}
    for owned in _by_owner(model):
        found: list[tuple[list[str], Callable[[], torch.Tensor]]] = [
            (names, functools.partial(_copy_on_cpu, tensor))
            for names, tensor in owned.others_wanted(wanted)
        ]
        own = model_unit_of(owned.owner)
        if own is not None:
            own.runtime.require_idle("iter_full_state_dict")
            own.runtime.rest([own.unit])
            found += gathered_unit(
                own.unit, [f"{path}." if path else "" for path in owned.paths], wanted
            )
        found.sort(key=lambda entry: position.get(entry[0][0], len(position)), reverse=True)
        while found:  # what was yielded is let go
            names, make = found.pop()
            value = make()
            del make
            for name in names:
                yield name, value
            del value


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@dataclasses.dataclass
class _Owned:
    """What a state dict holds of the modules of one instance, or of the module around all of them,
    and of no inner instance's."""

    owner: nn.Module
    paths: list[str]  # clean names of the owner
    others: dict[str, torch.Tensor]  # by clean name: what is no unit's parameter

    def others_wanted(self, wanted: Wanted) -> list[tuple[list[str], torch.Tensor]]:
        """Return (its names that are wanted, tensor) of each that has any."""
        found: dict[int, tuple[list[str], torch.Tensor]] = {}
        for name, tensor in self.others.items():
            if wanted(name, isinstance(tensor, nn.Parameter) and tensor.requires_grad):
                found.setdefault(id(tensor), ([], tensor))[0].append(name)
        return list(found.values())


def _by_owner(model: nn.Module) -> list[_Owned]:
    """Share the modules of ``model`` out to the instances that they belong to, the outer ones
    first."""
    found: dict[nn.Module, _Owned] = {}
    for path, owner in owners_in(model).items():
        its = found.setdefault(owner, _Owned(owner, [], {}))
        if not path or owner is model.get_submodule(path):
            its.paths.append(clean_name(path))
    for entry in unmanaged_in(model):
        if entry.value is not None:
            found[entry.owner].others[entry.name] = entry.value
    for its in found.values():
        own = model_unit_of(its.owner)
        for name, exact in own.exact_buffers() if own is not None else ():
            keys = [f"{path}.{name}".lstrip(".") for path in its.paths]
            its.others.update((key, exact) for key in keys if key in its.others)
    return list(found.values())
