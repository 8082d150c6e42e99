"""Allocates and frees the memory of parameters and gradient buffers, as no other file does, by
resizing storages under tensors that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from .._comm.communicator import allocate_shard
from .._comm.host_memory import HUGE_NBYTES, prefer_huge_pages


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, *, ranks: int, pin: bool
) -> Tensor:
    """Return zeros [numel] for one of ``ranks`` shards; on the CPU in shared memory, where other
    ranks of the host can read them. pin: a GPU reads it."""
    if device.type == "cpu" and ranks > 1 and not pin:
        return allocate_shard(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pin)


class Segments(dict[int, Tensor]):
    """The views [S] of a buffer [ranks * S], by rank, made at the first access: backends use one or
    two, and with 16,384 ranks all of them would take more memory than a shard."""

    def __init__(self, buffer: Tensor, ranks: int) -> None:
        self._buffer, self._numel = buffer, buffer.numel() // ranks

    def __missing__(self, rank: int) -> Tensor:
        view = self[rank] = self._buffer.narrow(0, rank * self._numel, self._numel)
        return view


class Storage:
    """A storage that is freed and allocated again under its views, which stay valid."""

    __slots__ = ("_has_huge_pages", "nbytes", "untyped")

    def __init__(self, tensor: Tensor) -> None:
        self.untyped = tensor.untyped_storage()
        self.nbytes = self.untyped.nbytes()
        self._has_huge_pages = tensor.device.type == "cpu" and self.nbytes >= HUGE_NBYTES

    def allocate(self) -> None:
        if self.untyped.nbytes() != self.nbytes:
            self.untyped.resize_(self.nbytes)
            if self._has_huge_pages:
                prefer_huge_pages(self.untyped.data_ptr(), self.nbytes)

    def free(self) -> None:
        # A tensor that was passed to numpy keeps its memory, because an array may still view it.
        if self.untyped.nbytes() and self.untyped.resizable():
            self.untyped.resize_(0)
