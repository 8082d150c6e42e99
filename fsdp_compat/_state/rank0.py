"""Values that only rank 0 of a mesh has, sent to all ranks along its two axes.

Names and small values are sent first, then tensors, one group of parameters at a time, so that no
rank holds more."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._comm.communicator import communicator
from .._comm.host_memory import memory_of
from .._comm.mesh import Mesh, mesh_from_group
from .._engine.state_store import StateStore
from ..errors import CheckpointError
from .loaded_values import dtype_of, materialised, shape_of
from .optim_agreement import gathered_along
from .units import ModelUnit


@dataclasses.dataclass(frozen=True)
class Outline:
    """The shape and dtype of a tensor that only rank 0 has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def outline_of(tensor: Any) -> Outline:
    """Return the outline of a tensor, or of a lazy value."""
    return Outline(shape_of(tensor), dtype_of(tensor))


def common_mesh(units: Sequence[ModelUnit]) -> Mesh | None:
    """Return the mesh over which rank 0 has what it may send to the ranks of all units: theirs, or
    that of all ranks of the job, if units have several or cut parameters along other axes too.
    None: other ranks have parameters that rank 0 has not."""
    meshes = {(each.mesh.shard.members, each.mesh.replica.members) for each in units}
    further = {axis.members for u in units for g in u.unit.groups for axis in g.tensor_parallel}
    if (len(meshes) > 1 or further) and all(_reaches_all(each.mesh, further) for each in units):
        return mesh_from_group(None)
    return units[0].mesh if len(meshes) == 1 else None


def _reaches_all(mesh: Mesh, further: Iterable[tuple[int, ...]]) -> bool:
    """True if a mesh and the axes beside it, given by their ranks, span all ranks of the job."""
    own = {*mesh.shard.members, *mesh.replica.members}
    beside = (len(members) for members in further if len(own & {*members}) == 1)
    return mesh.ranks * math.prod(beside) == dist.get_world_size()


class Rank0Broadcast:
    """Sends values of rank 0 to all ranks of a mesh. Rank 0 is first on both axes."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """Collective over the mesh, once per process group. device: which the backend takes."""
        self.is_here, self.device = mesh.is_first, device
        self.num_ranks = mesh.ranks
        self._shard = communicator(mesh.shard, device)
        self._replica = communicator(mesh.replica, device)

    def gather(self, value: object) -> list[Any]:
        """Return every rank's small ``value``, rank 0's first. Collective."""
        return gathered_along((self._shard, self._replica), value)

    def tell(self, value: object) -> Any:
        """Return rank 0's ``value``, which is small. Collective."""
        if self._shard.rank == 0:
            value = self._replica.broadcast_object(value)
        return self._shard.broadcast_object(value)

    def send(self, values: Sequence[torch.Tensor | Outline], what: str) -> list[torch.Tensor]:
        """Return rank 0's tensors, on the device. values: elsewhere outlines. Collective."""
        tensors = [
            value.detach().to(self.device).contiguous()
            if isinstance(value, torch.Tensor)
            else torch.empty(value.shape, dtype=value.dtype, device=self.device)
            for value in values
        ]
        self._broadcast(tensors, what)
        return tensors

    def send_object(self, value: object, what: str) -> Any:
        """Return rank 0's ``value``, of any size; tensors in it are on the CPU. Collective."""
        packed = packed_bytes(value) if self.is_here else None
        numel = self.tell(None if packed is None else packed.numel())
        message = (
            torch.empty(numel, dtype=torch.uint8, device=self.device)
            if packed is None
            else packed.to(self.device)
        )
        self._broadcast([message], what)
        return unpacked(message.cpu(), torch.device("cpu"))

    def _broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """First to the first rank of every copy, then within each copy."""
        if self._shard.rank == 0:
            self._replica.broadcast(tensors, what)
        self._shard.broadcast(tensors, what)


def packed_bytes(value: object) -> torch.Tensor:
    """Return the pickled value, 1-D uint8 on the CPU."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(packed: torch.Tensor, device: torch.device | None) -> Any:
    """Undo ``packed_bytes``. Only for bytes that ranks of the same program have sent."""
    file = io.BytesIO(memory_of(packed.contiguous()))
    return torch.load(file, map_location=device, weights_only=False)


@dataclasses.dataclass(frozen=True)
class Rank0Value:
    """A parameter's value that only rank 0 has. It is sent when the parameter's unit is loaded."""

    is_lazy: bool  # the same on all ranks; a lazy value may fail to load
    value: Any = None  # on rank 0: a tensor, or a lazy value
    sender: Rank0Broadcast | None = None


def received(store: StateStore, label: str, found: dict[int, Any]) -> dict[int, Any]:
    """Return a store's values by index, with tensors for those that only rank 0 has. Collective if
    there are any. Raises CheckpointError, on all ranks, if a lazy value there does not load."""
    awaited = {index: each for index, each in found.items() if isinstance(each, Rank0Value)}
    sender = next((each.sender for each in awaited.values()), None)
    if sender is None:
        return found
    error = None
    values: list[torch.Tensor | Outline] = [
        Outline(store.shape(index), store.dtype) for index in awaited
    ]
    try:
        for number, (index, each) in enumerate(awaited.items() if sender.is_here else ()):
            value = materialised(each.value, store.orig_params[index].name)
            values[number] = value.detach().to(store.dtype).reshape(store.shape(index))
    except CheckpointError as caught:
        error = caught
    if any(each.is_lazy for each in awaited.values()):
        told = sender.tell("" if error is None else str(error))
        if told:
            raise error or CheckpointError(told)
    sent = sender.send(values, f"the parameters of {label} that are loaded")
    return {**found, **dict(zip(awaited, sent, strict=True))}
