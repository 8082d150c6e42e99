"""The bytes of tensors on the CPU, and freed pages that go back to the system."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

__all__ = ["give_back_freed", "memory_of", "of_its_own_size"]

# None where the C library has no such function.
_malloc_trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed() -> None:
    """Give pages that were freed on the CPU back to the system.

    glibc keeps what lies between blocks that live on. Whole parameters that come and go while
    shards are made leave holes, each a little too small for the next one: together as large as the
    model.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy. They keep the tensor."""
    if not tensor.nbytes:
        return memoryview(b"")
    held: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    held.tensor = tensor
    return memoryview(held).cast("B")


def of_its_own_size(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose storage object ends where it ends, as writers copy
    what keeps more than it shows.

    tensor: contiguous; one that is not on the CPU is returned as it is.
    """
    if (
        tensor.device.type != "cpu"
        or tensor.untyped_storage().nbytes() == tensor.nbytes
        or not tensor.nbytes
    ):
        return tensor
    return torch.frombuffer(memory_of(tensor), dtype=tensor.dtype).view(tensor.shape)
