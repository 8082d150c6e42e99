"""The bytes of CPU tensors, and returning freed pages to the system."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

__all__ = ["give_back_freed", "memory_of", "of_its_own_size"]

# None if the C library has no such function.
_malloc_trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed() -> None:
    """Return freed CPU pages to the system.

    glibc keeps free pages between live blocks. Whole parameters that are allocated and freed while
    shards are made leave holes, each slightly too small for the next one, which add up to the size
    of the model.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy. They keep the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    held: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    held.tensor = tensor
    return memoryview(held).cast("B")


def of_its_own_size(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory with a storage of exactly its size. Writers copy a
    tensor whose storage is larger.

    tensor: contiguous. A tensor on another device than the CPU is returned unchanged.
    """
    if (
        tensor.device.type != "cpu"
        or tensor.untyped_storage().nbytes() == tensor.nbytes
        or not tensor.nbytes
    ):
        return tensor
    return torch.frombuffer(memory_of(tensor), dtype=tensor.dtype).view(tensor.shape)
