"""Prepare a unit's modules for sharding: initial values, devices, broadcasts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import nn

from .._comm.host_memory import give_back_freed
from .._comm.mesh import Mesh
from . import materialize
from .ownership import OrigParam
from .state_store import StateStore
from .unit import Uninitialised


class Preparation:
    """Prepares modules unit by unit: initializes meta tensors, moves buffers to the device and
    broadcasts the first rank's values.

    Because of this order, a process that builds a model on the meta device never holds more than
    one unit of it unsharded.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Collection[nn.Module],
        closed: Collection[nn.Module],
        *,
        device: torch.device,
        init: Callable[[nn.Module], None] | None,
        broadcast_over: Mesh | None,
        keep: Collection[nn.Parameter],
    ) -> None:
        """
        units: the modules that become units, including ``root``.
        closed: modules that need no preparation, with all below them.
        init: initializes one module on the meta device; None: its ``reset_parameters`` does.
        broadcast_over: whose first rank's values all ranks take; None: they keep their own.
        keep: parameters that are not broadcast.

        Raises UsageError, before anything changes, if a module on the meta device cannot be
        initialized.
        """
        self._root, self._device, self._init = root, device, init
        self._broadcast_over, self._keep = broadcast_over, keep
        self._done = {below for child in closed for below in child.modules()}
        self._was_meta = False
        # Slots of parameters and buffers from the meta device that still have no values.
        self._left: set[materialize.Slot] = set()
        self._simulated = device.type == "meta"  # tensors never get values
        self._modules = {unit: list(_own_modules(unit, units)) for unit in units}
        self._ties = materialize.ties(root)
        if init is None and not self._simulated:
            materialize.require_initial_values(
                root, [child for child in root.modules() if child not in self._done]
            )

    def of_unit(self, unit: nn.Module, members: Iterable[OrigParam]) -> list[OrigParam]:
        """Prepare the modules of a unit, and return its parameters as they are afterwards.
        Collective if values are broadcast."""
        if self._was_meta:
            give_back_freed()  # memory of the previous unit
        modules = [module for module in self._modules.pop(unit) if module not in self._done]
        self._done.update(modules)
        filled: set[materialize.Slot] = set()
        if not self._simulated:
            filled = materialize.materialize(self._root, modules, self._init, self._device)
        self._was_meta = self._was_meta or bool(filled)
        materialize.restore_ties(self._ties)
        materialize.move_buffers(modules, self._device)
        left = materialize.uninitialised(filled)
        if self._broadcast_over is not None:
            sent = {
                (module, name): tensor
                for module in modules
                for name, tensor in materialize.own_tensors(module)
                if tensor not in self._keep
            }
            # The ranks take NaN from rank 0 as a value, unless rank 0 marks it as left without one.
            marks = torch.tensor(
                [slot in left for slot in sent], dtype=torch.uint8, device=self._device
            )
            materialize.broadcast_states(
                [*sent.values(), marks], self._broadcast_over, self._device
            )
            if not self._simulated:
                left.difference_update(sent)
                left.update(slot for slot, mark in zip(sent, marks.tolist(), strict=True) if mark)
        self._left |= left
        return [OrigParam(member.place.present(), member.place) for member in members]

    def uninitialised(
        self, module: nn.Module, stores: Iterable[StateStore], taken: Collection[nn.Module]
    ) -> list[Uninitialised]:
        """Return what was left without values in a unit: parameters in its stores, and buffers of
        its modules that are not ``taken`` by other units."""
        if not self._left:
            return []
        found = [
            Uninitialised(member.name, functools.partial(store.local_part, index))
            for store in stores
            for index, member in enumerate(store.orig_params)
            if any(slot in self._left for slot in member.slots)
        ]
        return found + [
            Uninitialised(
                f"{path}.{name}".lstrip("."), functools.partial(child._buffers.__getitem__, name)
            )
            for path, child in module.named_modules()
            for name in child._buffers
            if (child, name) in self._left and child not in taken
        ]


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
