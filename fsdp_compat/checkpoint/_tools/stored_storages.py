"""Storages of torch.save files: runs of bytes, and the tensors in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from .._header import is_quantized
from .archive import Checksum, Piece, Span, StoredTensor, row_major, whole
from .pickle_machine import Refused
from .sharded_records import shape_of


@dataclasses.dataclass(frozen=True)
class StorageKind:
    """The class of a storage. dtype: None for bytes."""

    dtype: torch.dtype | None

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype is None else self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Storage:
    """A storage in a file."""

    path: Path
    start: int  # of its first byte
    nbytes: int
    dtype: torch.dtype | None
    checksum: Checksum | None = None


def tensor_in(
    storage: Any, offset: Any, sizes: Any, strides: Any, dtype: Any = None
) -> StoredTensor:
    """Return a strided tensor in a storage. offset, strides: in elements. Raises Refused if it does
    not lie in the storage."""
    if not isinstance(storage, Storage):
        raise Refused("a tensor without a storage")
    dtype = storage.dtype if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or is_quantized(dtype):
        raise Refused(f"a tensor of the dtype {dtype}")
    shape, steps = shape_of(sizes), shape_of(strides)
    if len(shape) != len(steps) or type(offset) is not int or offset < 0:
        raise Refused(f"a tensor of {len(shape)} dims with {len(steps)} strides")
    if 0 in shape:
        steps, last = row_major(shape), 0
        offset = min(offset, storage.nbytes // dtype.itemsize)
    else:
        last = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    if (offset + last) * dtype.itemsize > storage.nbytes:
        raise Refused(
            f"a tensor that ends at byte {(offset + last) * dtype.itemsize} of a storage of "
            f"{storage.nbytes}"
        )
    start = storage.start + offset * dtype.itemsize
    span = Span(storage.path, start, steps, storage.checksum)
    return StoredTensor("", dtype, shape, (Piece(whole(shape), span),))
