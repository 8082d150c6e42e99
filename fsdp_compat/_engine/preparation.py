"""Prepares a unit's modules for sharding: memory and values for meta tensors, buffers on the
device, and a broadcast of values so that all ranks start alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.host_memory import give_back_freed
from .._comm.mesh import Mesh
from ..errors import UsageError
from .ownership import OrigParam
from .state_store import StateStore
from .unit import Uninitialised

Slot = tuple[nn.Module, str]  # a module, and the name of its parameter or buffer


class Preparation:
    """Prepares modules unit by unit: initializes meta tensors, moves buffers to the device and
    broadcasts the first rank's values. So no process holds more than one unit unsharded."""

    def __init__(
        self,
        root: nn.Module,
        units: Collection[nn.Module],
        closed: Collection[nn.Module],
        *,
        device: torch.device,
        init: Callable[[nn.Module], None] | None,
        broadcast_over: Mesh | None,
        not_broadcast: Collection[nn.Parameter],
    ) -> None:
        """units: the modules that become units, including ``root``. closed: modules that need no
        preparation, with all below them. init: initializes one module on the meta device; None: its
        ``reset_parameters``. broadcast_over: the mesh whose first rank's values all ranks take, if
        any, except for ``not_broadcast``.

        Raises UsageError if a module on the meta device cannot be initialized."""
        self._root, self._device, self._init = root, device, init
        self._broadcast_over, self._not_broadcast = broadcast_over, not_broadcast
        self._done = {below for child in closed for below in child.modules()}
        self._was_meta = False
        # Slots of parameters and buffers from the meta device that still have no values.
        self._left: set[Slot] = set()
        self._simulated = device.type == "meta"  # tensors never get values
        self._modules = {unit: list(_own_modules(unit, units, set())) for unit in units}
        self._ties = _ties(root)
        for child in root.modules() if init is None and not self._simulated else ():
            if child not in self._done:
                _require_reset(root, child)

    def of_unit(self, unit: nn.Module, members: Iterable[OrigParam]) -> list[OrigParam]:
        """Prepare a unit's modules, and return its parameters. Collective: the mesh, if it
        broadcasts."""
        if self._was_meta:
            give_back_freed()  # memory of the previous unit
        modules = [module for module in self._modules.pop(unit) if module not in self._done]
        self._done.update(modules)
        filled = set() if self._simulated else self._materialize(modules)
        self._was_meta = self._was_meta or bool(filled)
        self._restore_ties()
        for module in modules:  # buffers only: stores copy parameters into their shards
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != self._device:
                    setattr(module, name, buffer.to(self._device))
        tensors = _slots_of(modules)
        left = {slot for slot in filled if is_uninitialised(tensors[slot])}
        if self._broadcast_over is not None:
            sent = {slot: t for slot, t in tensors.items() if t not in self._not_broadcast}
            # NaN from rank 0 counts as a value, unless rank 0 marks the tensor as uninitialised.
            is_left = [slot in left for slot in sent]
            marks = torch.tensor(is_left, dtype=torch.uint8, device=self._device)
            broadcast_states([*sent.values(), marks], self._broadcast_over, self._device)
            if not self._simulated:
                left.difference_update(sent)
                left.update(slot for slot, mark in zip(sent, marks.tolist(), strict=True) if mark)
        self._left |= left
        return [OrigParam(member.param_slots.present(), member.param_slots) for member in members]

    def _materialize(self, modules: Sequence[nn.Module]) -> set[Slot]:
        """Give tensors on the meta device memory and values. Return the slots that got memory."""
        on_meta = [m for m in modules if any(tensor.is_meta for _, tensor in _own_tensors(m))]
        before = _addresses(on_meta)
        for module in on_meta:
            with _torch_private.PoisonedMemory():  # type: ignore[no-untyped-call]  # recognised by `is_uninitialised`
                if self._init is not None:
                    self._init(module)
                    continue
                with torch.no_grad():
                    module.to_empty(device=self._device, recurse=False)
                    module.reset_parameters()  # type: ignore[operator]
        after = _addresses(on_meta)
        left = [
            f"{_name_of(self._root, module)}.{name}"
            for (module, name), address in after.items()
            if address is None
        ]
        if left:
            raise UsageError.of(
                "Tensors are still on the meta device after initialisation.",
                expected="param_init_fn to materialise all tensors of the module it is given",
                got=f"{left[:5]}{' and more' if len(left) > 5 else ''}",
                where=f"a {type(self._root).__name__}",
                fix="call module.to_empty(device=..., recurse=False) and fill the values in "
                "param_init_fn",
            )
        return {slot for slot, address in after.items() if before.get(slot) != address}

    def _restore_ties(self) -> None:
        """Tie parameters again, unless some are still on the meta device: materialising modules one
        by one gave each module a parameter of its own."""
        for slots in self._ties:
            tied = [_torch_private.parameters_of(module).get(name) for module, name in slots]
            if not any(parameter is None or parameter.is_meta for parameter in tied):
                for module, name in slots:
                    _torch_private.parameters_of(module)[name] = tied[0]

    def uninitialised(
        self, module: nn.Module, stores: Iterable[StateStore], taken: Collection[nn.Module]
    ) -> list[Uninitialised]:
        """Return the uninitialised tensors of a unit. taken: modules of other units."""
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


def _own_modules(
    module: nn.Module, units: Collection[nn.Module], seen: set[nn.Module]
) -> Iterator[nn.Module]:
    """Yield the modules of a unit, except those that belong to units below it."""
    seen.add(module)
    yield module
    for child in module.children():
        if child not in seen and child not in units:
            yield from _own_modules(child, units, seen)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _slots_of(modules: Iterable[nn.Module]) -> dict[Slot, Tensor]:
    return {(module, name): value for module in modules for name, value in _own_tensors(module)}


def _addresses(modules: Iterable[nn.Module]) -> dict[Slot, int | None]:
    """Return the addresses of the tensors of ``modules``; None for those on the meta device."""
    return {
        slot: None if tensor.is_meta else _torch_private.local_part(tensor).data_ptr()
        for slot, tensor in _slots_of(modules).items()
    }


def _ties(root: nn.Module) -> list[list[Slot]]:
    slots: dict[nn.Parameter, list[Slot]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            slots.setdefault(parameter, []).append((module, name))
    return [places for places in slots.values() if len(places) > 1]


def _require_reset(root: nn.Module, module: nn.Module) -> None:
    on_meta = [name for name, tensor in _own_tensors(module) if tensor.is_meta]
    if on_meta and not callable(getattr(module, "reset_parameters", None)):
        raise UsageError.of(
            "A module on the meta device cannot be initialised.",
            expected="a method reset_parameters() that fills the module's parameters and buffers",
            got=f"{type(module).__name__} without one, with {on_meta} on the meta device",
            where=f"module {_name_of(root, module)!r}",
            fix="pass param_init_fn=, or give the class a reset_parameters method",
        )


def _name_of(root: nn.Module, module: nn.Module) -> str:
    names = (name for name, child in root.named_modules() if child is module)
    return next(names, "") or type(root).__name__


def is_uninitialised(tensor: Tensor) -> bool:
    """True if a tensor, not empty or boolean, holds only the fill pattern of new memory."""
    tensor = _torch_private.local_part(tensor.detach()).reshape(-1)
    if not tensor.numel() or tensor.is_meta or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor[0].isnan()) and bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


def broadcast_states(states: Iterable[Tensor], mesh: Mesh, device: torch.device) -> None:
    """Overwrite tensors with those of the mesh's first rank, copied to ``device`` one at a time.
    Collective: all ranks of the mesh."""
    tensors = {id(tensor): _torch_private.local_part(tensor.detach()) for tensor in states}
    with torch.no_grad():
        for axis in (mesh.replica, mesh.shard):
            if axis.ranks == 1:
                continue
            comm = communicator(axis, device)
            for tensor in tensors.values():
                # Elements of expanded tensors share memory: send each only once.
                for dim, stride in enumerate(tensor.stride()):
                    if stride == 0:
                        tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
                packed = tensor.to(device).contiguous()
                if 0 in packed.stride():
                    packed = packed.new_empty(packed.shape).copy_(packed)
                comm.broadcast([packed], "the first rank's parameters and buffers")
                if packed.data_ptr() != tensor.data_ptr():
                    tensor.copy_(packed)
