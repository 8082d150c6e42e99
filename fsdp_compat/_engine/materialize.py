"""Before a module is sharded: give meta tensors memory and values, move buffers to the device, and
broadcast values so that all ranks start alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.mesh import Mesh
from ..errors import UsageError

Slot = tuple[nn.Module, str]  # a module, and the name of its parameter or buffer


def require_initial_values(root: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise UsageError for a module with tensors on the meta device but no
    ``reset_parameters``."""
    for module in modules:
        if any(tensor.is_meta for _, tensor in own_tensors(module)):
            _require_reset(root, module)


def materialize(
    root: nn.Module,
    modules: Sequence[nn.Module],
    init: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> set[Slot]:
    """Give those ``modules`` that have tensors on the meta device memory on ``device`` and values.
    Return the slots that got memory.

    Calls ``init`` (param_init_fn) for each such module or, without it, ``to_empty`` and the
    module's ``reset_parameters``. root: the model, for errors.
    """
    on_meta = [
        module for module in modules if any(tensor.is_meta for _, tensor in own_tensors(module))
    ]
    before = _addresses(on_meta)
    for module in on_meta:
        with _torch_private.PoisonedMemory():  # recognised by `is_uninitialised`
            if init is not None:
                init(module)
                continue
            with torch.no_grad():
                module.to_empty(device=device, recurse=False)
                module.reset_parameters()  # type: ignore[operator]
    left = [
        f"{_name_of(root, m)}.{name}"
        for m in on_meta
        for name, tensor in own_tensors(m)
        if tensor.is_meta
    ]
    if left:
        raise UsageError.of(
            "Tensors are still on the meta device after initialisation.",
            expected="param_init_fn to materialise every parameter and buffer of the module it "
            "is given",
            got=f"{left[:5]}{' and more' if len(left) > 5 else ''}",
            where=f"a {type(root).__name__}",
            fix="call module.to_empty(device=..., recurse=False) and fill the values in "
            "param_init_fn",
        )
    # Includes tensors that were not on the meta device: ``to_empty`` replaces all of a module's.
    return {slot for slot, address in _addresses(on_meta).items() if before.get(slot) != address}


def _addresses(modules: Iterable[nn.Module]) -> dict[Slot, int | None]:
    """Return the addresses of the tensors of ``modules``; None for those on the meta device."""
    return {
        (module, name): None if tensor.is_meta else _torch_private.local_part(tensor).data_ptr()
        for module in modules
        for name, tensor in own_tensors(module)
    }


def is_uninitialised(tensor: torch.Tensor) -> bool:
    """True if a tensor holds only the pattern that fills uninitialised memory. Never for empty and
    boolean tensors."""
    tensor = _torch_private.local_part(tensor.detach()).reshape(-1)
    if not tensor.numel() or tensor.is_meta or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor[0].isnan()) and bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


def uninitialised(slots: set[Slot]) -> set[Slot]:
    """Return the slots that initialisation left without values. slots: those that ``materialize``
    gave memory."""
    return {
        (module, name)
        for module in {module for module, _ in slots}
        for name, tensor in own_tensors(module)
        if (module, name) in slots and is_uninitialised(tensor)
    }


def _require_reset(root: nn.Module, module: nn.Module) -> None:
    if callable(getattr(module, "reset_parameters", None)):
        return
    raise UsageError.of(
        "A module on the meta device cannot be initialised.",
        expected="a method reset_parameters() that fills the module's own parameters and buffers",
        got=f"{type(module).__name__} without one, with "
        f"{[name for name, t in own_tensors(module) if t.is_meta]} on the meta device",
        where=f"module {_name_of(root, module)!r}",
        fix="pass param_init_fn=, or give the class a reset_parameters method",
    )


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move buffers to ``device``. Parameters need not move: a store copies its part of each into
    its shard."""
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))


def broadcast_states(states: Iterable[torch.Tensor], mesh: Mesh, device: torch.device) -> None:
    """Overwrite tensors with those of the mesh's first rank.

    Collective: all ranks of the mesh. First over the replica axis, then over the shard axis.
    Tensors that are not on ``device`` are copied there one at a time.
    """
    tensors = {id(tensor): _torch_private.local_part(tensor.detach()) for tensor in states}
    with torch.no_grad():
        for axis in (mesh.replica, mesh.shard):
            if axis.ranks == 1:
                continue
            comm = communicator(axis, device)
            for tensor in tensors.values():
                # Elements of expanded tensors share memory: send each only once.
                for dim, stride in enumerate(tensor.stride()):
                    tensor = (
                        tensor.narrow(dim, 0, min(1, tensor.shape[dim])) if stride == 0 else tensor
                    )
                packed = tensor.to(device).contiguous()
                if 0 in packed.stride():
                    packed = torch.empty(packed.shape, dtype=packed.dtype, device=device).copy_(
                        packed
                    )
                comm.broadcast([packed], "the first rank's parameters and buffers")
                if packed.data_ptr() != tensor.data_ptr():
                    tensor.copy_(packed)


def own_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the name and value of a module's own parameters and buffers."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def ties(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the slots of every parameter that has more than one."""
    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            slots.setdefault(parameter, []).append((module, name))
    return [places for places in slots.values() if len(places) > 1]


def restore_ties(ties: Iterable[Sequence[tuple[nn.Module, str]]]) -> None:
    """Tie parameters to the first module's again: materialising modules one by one gave each module
    a parameter of its own.

    Skips ties with parameters that are still on the meta device.
    """
    for (first, first_name), *others in ties:
        parameter = _torch_private.parameters_of(first).get(first_name)
        tied = [
            parameter,
            *(_torch_private.parameters_of(module).get(name) for module, name in others),
        ]
        if any(each is None or each.is_meta for each in tied):
            continue
        for module, name in others:
            if _torch_private.parameters_of(module)[name] is not parameter:
                _torch_private.parameters_of(module)[name] = parameter


def _name_of(root: nn.Module, module: nn.Module) -> str:
    return (
        next((name for name, m in root.named_modules() if m is module), "") or type(root).__name__
    )
