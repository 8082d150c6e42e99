"""Before a module is sharded: meta tensors get memory and values, buffers their device, all ranks
the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.mesh import Mesh
from ..errors import UsageError, explain

__all__ = [
    "broadcast_states",
    "is_uninitialised",
    "materialize",
    "move_buffers",
    "own_tensors",
    "require_initial_values",
    "restore_ties",
    "ties",
    "uninitialised",
]

Slot = tuple[nn.Module, str]  # a module, and the attribute of a parameter or buffer that it holds


def require_initial_values(root: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise UsageError for a module of ``modules`` on the meta device that has no way of its own to
    get its values."""
    for module in modules:
        if any(tensor.is_meta for _, tensor in own_tensors(module)):
            _require_reset(root, module)


def materialize(
    root: nn.Module,
    modules: Sequence[nn.Module],
    init: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> set[Slot]:
    """Give every module of ``modules`` with tensors on the meta device memory on ``device`` and
    values. Return what got memory.

    ``init`` (param_init_fn) is called for each such module; without it, ``to_empty`` and the
    module's ``reset_parameters``. root: what they belong to, for errors.
    """
    wanting = [
        module for module in modules if any(tensor.is_meta for _, tensor in own_tensors(module))
    ]
    before = _addresses(wanting)
    for module in wanting:
        with (
            _torch_private.PoisonedMemory()
        ):  # what init leaves as it is can be told, see `unwritten`
            if init is not None:
                init(module)
                continue
            with torch.no_grad():
                module.to_empty(device=device, recurse=False)
                module.reset_parameters()  # type: ignore[operator]
    left = [
        f"{_name_of(root, m)}.{name}"
        for m in wanting
        for name, tensor in own_tensors(m)
        if tensor.is_meta
    ]
    if left:
        raise UsageError(
            explain(
                "Tensors are still on the meta device after initialisation.",
                expected="param_init_fn to materialise every parameter and buffer of the module it "
                "is given",
                got=f"{left[:5]}{' and more' if len(left) > 5 else ''}",
                where=type(root).__name__,
                fix="call module.to_empty(device=..., recurse=False) and fill the values in "
                "param_init_fn",
            )
        )
    # Also what was not on the meta device: ``to_empty`` empties all tensors of a module.
    return {slot for slot, address in _addresses(wanting).items() if before.get(slot) != address}


def _addresses(modules: Iterable[nn.Module]) -> dict[Slot, int | None]:
    """Return where the tensors of ``modules`` lie; None for those on the meta device."""
    return {
        (module, name): None if tensor.is_meta else _torch_private.local_part(tensor).data_ptr()
        for module in modules
        for name, tensor in own_tensors(module)
    }


def is_uninitialised(tensor: torch.Tensor) -> bool:
    """True if a tensor holds nothing but what uninitialised memory was filled with. Empty and
    boolean ones never do."""
    tensor = _torch_private.local_part(tensor.detach()).reshape(-1)
    if not tensor.numel() or tensor.is_meta or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor[0].isnan()) and bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


def uninitialised(slots: set[Slot]) -> set[Slot]:
    """Return which of ``slots`` (what ``materialize`` gave memory) initialisation has left without
    values."""
    return {
        (module, name)
        for module in {module for module, _ in slots}
        for name, tensor in own_tensors(module)
        if (module, name) in slots and is_uninitialised(tensor)
    }


def _require_reset(root: nn.Module, module: nn.Module) -> None:
    if callable(getattr(module, "reset_parameters", None)):
        return
    raise UsageError(
        explain(
            "A module on the meta device cannot be given its initial values.",
            expected="a method reset_parameters() that fills the module's own parameters and "
            "buffers",
            got=f"{type(module).__name__} without one, with "
            f"{[name for name, t in own_tensors(module) if t.is_meta]} on the meta device",
            where=f"module {_name_of(root, module)!r}",
            fix="pass param_init_fn=, or give the class a reset_parameters method",
        )
    )


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move buffers to ``device``. Parameters need not move: a store copies its own part of each to
    where its shard is."""
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))


def broadcast_states(states: Iterable[torch.Tensor], mesh: Mesh, device: torch.device) -> None:
    """Overwrite tensors with those of the mesh's first rank.

    Collective: all ranks of the mesh. Along the replica axis first, which gives the first replica's
    values to every shard rank's first one, then along the shard axis. Tensors elsewhere than on
    ``device`` travel by way of it, one at a time.
    """
    tensors = {id(tensor): _torch_private.local_part(tensor.detach()) for tensor in states}
    with torch.no_grad():
        for axis in (mesh.replica, mesh.shard):
            if axis.ranks == 1:
                continue
            wire = communicator(axis, device)
            for tensor in tensors.values():
                for dim, stride in enumerate(
                    tensor.stride()
                ):  # an expanded tensor has one element behind many
                    tensor = (
                        tensor.narrow(dim, 0, min(1, tensor.shape[dim])) if stride == 0 else tensor
                    )
                packed = tensor.to(device).contiguous()
                if 0 in packed.stride():
                    packed = torch.empty(packed.shape, dtype=packed.dtype, device=device).copy_(
                        packed
                    )
                wire.broadcast([packed], "the first rank's parameters and buffers")
                if packed.data_ptr() != tensor.data_ptr():
                    tensor.copy_(packed)


def own_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a module holds itself, with their attributes."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def ties(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return, for every parameter that several modules hold, where."""
    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in _torch_private.parameters_of(module).items():
            if parameter is not None:
                slots.setdefault(parameter, []).append((module, name))
    return [places for places in slots.values() if len(places) > 1]


def restore_ties(ties: Iterable[Sequence[tuple[nn.Module, str]]]) -> None:
    """Materialising modules one by one gives each its own parameter; tie them to the first one's
    again.

    A tie that a module on the meta device still has a part in is left for later.
    """
    for (first, first_name), *others in ties:
        parameter = _torch_private.parameters_of(first).get(first_name)
        its = [
            parameter,
            *(_torch_private.parameters_of(module).get(name) for module, name in others),
        ]
        if any(one is None or one.is_meta for one in its):
            continue
        for module, name in others:
            if _torch_private.parameters_of(module)[name] is not parameter:
                _torch_private.parameters_of(module)[name] = parameter


def _name_of(root: nn.Module, module: nn.Module) -> str:
    return (
        next((name for name, m in root.named_modules() if m is module), "") or type(root).__name__
    )
