"""CPU memory: the bytes of tensors, whole and huge pages, and returning freed pages to the
system."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

from .environment import map_from_nbytes

HUGE_NBYTES = 1 << 21
_libc = ctypes.CDLL(None)


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for new CPU memory, to which the first write is faster then."""
    start = -(-address // HUGE_NBYTES) * HUGE_NBYTES
    size = (address + nbytes) // HUGE_NBYTES * HUGE_NBYTES - start
    if size > 0 and sys.platform == "linux":
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def give_back_freed() -> None:
    """Return freed CPU pages to the system: glibc keeps those between blocks in use. Unsharded
    parameters that are freed while shards are created leave holes as large as the model."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(ctypes.c_size_t(0))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy; they keep the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    held: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    held.tensor = tensor
    return memoryview(held).cast("B")


def of_its_own_size(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory whose storage is no larger: writers copy tensors with a
    larger one. tensor: contiguous; returned unchanged if it is not on the CPU."""
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    if is_whole or tensor.device.type != "cpu" or not tensor.nbytes:
        return tensor
    return torch.frombuffer(memory_of(tensor), dtype=tensor.dtype).view(tensor.shape)


def in_whole_pages(numel: int, dtype: torch.dtype) -> int:
    """Return [numel] padded to whole pages, if a CPU shard is large enough to be mapped."""
    if numel * dtype.itemsize < map_from_nbytes():
        return numel
    page_numel = mmap.PAGESIZE // dtype.itemsize
    return -(-numel // page_numel) * page_numel


def is_in_pages(numel: int, dtype: torch.dtype) -> bool:
    """True if shards [numel] are large enough to be mapped and consist of whole pages."""
    nbytes = numel * dtype.itemsize
    return nbytes >= map_from_nbytes() and nbytes % mmap.PAGESIZE == 0
