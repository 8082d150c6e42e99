"""Broadcasts from rank 0 of a mesh, along its two axes."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import torch

from .._comm.communicator import communicator
from .._comm.mesh import Mesh
from .rank_local import packed_bytes, unpacked

_ALIGN_NBYTES = 16  # every tensor in a message starts at a multiple of it


@dataclasses.dataclass(frozen=True)
class Outline:
    """The shape and dtype of a tensor that only rank 0 has."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Rank0Broadcast:
    """Sends values of rank 0 to all ranks of a mesh. Rank 0 is first on both axes."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """Collective over the mesh, once per process group. device: which the backend takes."""
        self.is_here, self.device = mesh.is_first, device
        self.num_ranks = mesh.ranks
        self._shard, self._replica = (
            communicator(mesh.shard, device),
            communicator(mesh.replica, device),
        )

    def gather(self, value: object) -> list[Any]:
        """Return every rank's small ``value``, rank 0's first. Collective."""
        return [
            its
            for row in self._replica.gather_objects(self._shard.gather_objects(value))
            for its in row
        ]

    def tell(self, value: object) -> Any:
        """Return rank 0's ``value``, which is small. Collective."""
        return self.gather(value if self.is_here else None)[0]

    def send(self, values: Sequence[torch.Tensor | Outline], what: str) -> list[torch.Tensor]:
        """Return rank 0's tensors, in one message; views of it, on the device. Collective.

        values: tensors on rank 0, their outlines on the others.
        """
        outlines = [
            Outline(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in values
        ]
        starts, end = [], 0
        for outline in outlines:
            starts.append(end)
            end += -(-outline.nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
        message = torch.zeros(end, dtype=torch.uint8, device=self.device)
        places = [
            message[s : s + o.nbytes].view(o.dtype).view(o.shape)
            for s, o in zip(starts, outlines, strict=True)
        ]
        for place, value in zip(places, values, strict=True):
            if self.is_here:
                place.copy_(typing.cast(torch.Tensor, value))
        self._broadcast(message, what)
        return places

    def send_object(self, value: object, what: str) -> Any:
        """Return rank 0's ``value``, of any size; tensors in it are on the CPU.
        Collective."""
        packed = packed_bytes(value) if self.is_here else None
        numel = self.tell(None if packed is None else packed.numel())
        message = (
            torch.empty(numel, dtype=torch.uint8, device=self.device)
            if packed is None
            else packed.to(self.device)
        )
        self._broadcast(message, what)
        return unpacked(message.cpu(), torch.device("cpu"))

    def _broadcast(self, message: torch.Tensor, what: str) -> None:
        """First to the first rank of every copy, then within each copy."""
        if self._shard.rank == 0:
            self._replica.broadcast([message], what)
        self._shard.broadcast([message], what)
