"""What the writers of all formats share: their options, and the values in the order in which files
hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from .archive import StoredTensor
from .reading import SLAB_NBYTES, Files, slabs


def _nothing(nbytes: int) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How a target is written. A format ignores what it has no use for."""

    world_size: int = 1  # ranks that the shards are cut for
    unit: str | None = None  # regular expression: parameters with the same match share a unit
    max_file_nbytes: int = 5_000_000_000  # of tensors in one file
    step: int = 0
    slab_nbytes: int = SLAB_NBYTES  # of values in memory at a time, per worker
    workers: int = 1  # threads
    tick: Callable[[int], object] = _nothing  # called with the number of bytes just written


def dtype_to_write(tensor: StoredTensor) -> torch.dtype:
    return tensor.dtype if tensor.written_as is None else tensor.written_as


def nbytes_to_write(tensor: StoredTensor) -> int:
    return tensor.numel * dtype_to_write(tensor).itemsize


def slabs_to_write(
    tensor: StoredTensor, files: Files, options: WriteOptions
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield all values in row-major order, in the dtype to write: the number of the first element,
    and a 1-D tensor, whose memory may be used again for the next one."""
    dtype = dtype_to_write(tensor)
    for first, values in slabs(tensor, files, options.slab_nbytes):
        values = values.to(dtype)
        yield first, values
        options.tick(values.nbytes)
