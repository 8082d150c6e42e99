"""CPU memory: the bytes of tensors, and returning freed pages to the system."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

__all__ = ["give_back_freed", "memory_of", "of_its_own_size"]

# None if the C library does not have the function.
_malloc_trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed() -> None:
    """Return freed CPU pages to the system.

    glibc keeps freed memory that lies between blocks in use. Unsharded parameters that are
    allocated and freed while shards are created leave such holes, each slightly too small for the
    next parameter. Together they can grow as large as the model.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy. They keep the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    held: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    held.tensor = tensor
    return memoryview(held).cast("B")


def of_its_own_size(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose storage is no larger than the tensor. Writers copy
    tensors with a larger storage.

    tensor: contiguous; a tensor that is not on the CPU is returned unchanged.
    """
    if (
        tensor.device.type != "cpu"
        or tensor.untyped_storage().nbytes() == tensor.nbytes
        or not tensor.nbytes
    ):
        return tensor
    return torch.frombuffer(memory_of(tensor), dtype=tensor.dtype).view(tensor.shape)
