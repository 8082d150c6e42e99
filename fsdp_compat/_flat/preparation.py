"""Prepare a unit's modules for sharding: initial values, devices, broadcasts."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from .._comm.host_memory import give_back_freed
from .._engine import materialize
from .._engine.buffers import CastBuffers
from .._engine.ownership import OrigParam
from .._engine.unit import Uninitialised
from .._stores.flat_store import FlatStore
from .settings import Settings

__all__ = ["Preparation", "buffers_to_cast", "uninitialised_of"]


class Preparation:
    """Prepares modules unit by unit: initializes meta tensors, moves buffers to the device and
    broadcasts rank 0's values.

    Because of this order, a process that builds a model on the meta device never holds more than
    one unit of it unsharded.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Collection[nn.Module],
        settings: Settings,
        closed: set[nn.Module],
    ) -> None:
        """
        units: the modules that become units, including ``root``.
        closed: modules that need no preparation, with all below them.

        Raises UsageError, before anything changes, if a module on the meta device cannot be
        initialized.
        """
        self._root, self._settings = root, settings
        self._done = {below for child in closed for below in child.modules()}
        self._ties = materialize.ties(root)
        self._was_meta = False
        # Slots of parameters and buffers from the meta device that still have no values.
        self.left: set[tuple[nn.Module, str]] = set()
        self._modules = {unit: list(_own_modules(unit, units)) for unit in units}
        self._simulated = settings.device.type == "meta"  # tensors never get values
        if settings.param_init_fn is None and not self._simulated:
            materialize.require_initial_values(
                root, [child for child in root.modules() if child not in self._done]
            )

    def of_unit(self, unit: nn.Module, members: list[OrigParam]) -> list[OrigParam]:
        """Prepare the modules of a unit, and return its parameters as they are afterwards.
        Collective with sync_module_states."""
        settings = self._settings
        if self._was_meta:
            give_back_freed()  # memory of the previous unit
        modules = [module for module in self._modules.pop(unit) if module not in self._done]
        self._done.update(modules)
        filled: set[materialize.Slot] = set()
        if not self._simulated:
            filled = materialize.materialize(
                self._root, modules, settings.param_init_fn, settings.device
            )
        self._was_meta = self._was_meta or bool(filled)
        materialize.restore_ties(self._ties)
        materialize.move_buffers(modules, settings.device)
        if settings.sync_module_states:
            sent = {
                (module, name): tensor
                for module in modules
                for name, tensor in materialize.own_tensors(module)
                if tensor not in settings.ignored_parameters
            }
            # Materialized tensors are filled with NaN until they are initialized. The ranks take
            # NaN from rank 0 as a value, unless rank 0 marks it as fill.
            marks = torch.tensor(
                [slot in filled for slot in sent], dtype=torch.uint8, device=settings.device
            )
            materialize.broadcast_states([*sent.values(), marks], settings.mesh, settings.device)
            if not self._simulated:
                filled.difference_update(sent)
                filled.update(slot for slot, mark in zip(sent, marks.tolist(), strict=True) if mark)
        self.left |= materialize.uninitialised(filled)
        return [OrigParam(_present(member), member.place) for member in members]


def _own_modules(unit: nn.Module, units: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of a unit, without those that belong to a unit below it."""
    seen = {unit}
    waiting = [unit]
    while waiting:
        module = waiting.pop()
        yield module
        children = [
            child for child in module.children() if child not in seen and child not in units
        ]
        seen.update(children)
        waiting += reversed(children)


def _present(member: OrigParam) -> nn.Parameter:
    """Return the parameter that is now in a member's slot: a new object if the member was on the
    meta device."""
    module, attribute = member.slots[0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter


def uninitialised_of(
    module: nn.Module,
    stores: Iterable[FlatStore],
    left: set[tuple[nn.Module, str]],
    taken: set[nn.Module],
) -> list[Uninitialised]:
    """Return the entries of ``left`` that belong to a unit: parameters in its stores, and buffers
    of its modules that are not ``taken`` by other units."""
    found = []
    for store in stores if left else ():
        for index, member in enumerate(store.orig_params):
            if any(slot in left for slot in member.slots):
                found.append(Uninitialised(member.name, functools.partial(store.local_part, index)))
    for path, child in module.named_modules() if left else ():
        for name in child._buffers:
            if (child, name) in left and child not in taken:
                found.append(
                    Uninitialised(
                        f"{path}.{name}".lstrip("."),
                        functools.partial(child._buffers.__getitem__, name),
                    )
                )
    return found


def buffers_to_cast(
    module: nn.Module, settings: Settings, taken: set[nn.Module]
) -> CastBuffers | None:
    """Return the buffers to cast in a unit, from its modules that are not ``taken`` by other units;
    None without a buffer dtype."""
    dtype = settings.mixed_precision.buffer_dtype
    if dtype is None:
        return None
    uncast = {
        below
        for child in module.modules()
        if isinstance(child, settings.uncast_classes)
        for below in child.modules()
    }
    skip = taken | settings.ignored_modules | uncast
    return CastBuffers((child for child in module.modules() if child not in skip), dtype)
