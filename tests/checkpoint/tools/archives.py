"""Made by hand: archives whose pieces lie in raw files, of which a test knows every byte, and what
pickles of DTensors hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_compat._comm.host_memory import memory_of
from fsdp_compat._layout.box import Box
from fsdp_compat._layout.spec import row_major_strides
from fsdp_compat.checkpoint._tools import recognition
from fsdp_compat.checkpoint._tools.archive import Archive, Span, StoredPiece, StoredTensor
from fsdp_compat.checkpoint._tools.pickles import Record


def raw(values: Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(memory_of(values.contiguous()))


def archive(path: Path, tensors: dict[str, Tensor], **facts: Any) -> Archive:
    """Write tensors to one file per rank, each cut into its rows, and return where they lie.

    Rank 0 has the first half of the rows, rank 1 the second; a tensor without rows is rank 0's."""
    path.mkdir()
    contents = [bytearray(b"head"), bytearray(b"head")]
    stored = {}
    for name, values in tensors.items():
        half = (values.shape[0] + 1) // 2 if values.ndim else 0
        parts = [values[:half], values[half:]] if values.ndim else [values]
        pieces = []
        for rank, part in enumerate(parts):
            offsets = (rank * half, *(0,) * (values.ndim - 1)) if values.ndim else ()
            start = len(contents[rank])
            contents[rank] += raw(part)
            span = Span(path / f"rank{rank}", start, row_major_strides(part.shape))
            pieces.append(StoredPiece(Box(offsets, tuple(part.shape)), span, rank))
        stored[name] = StoredTensor(name, values.dtype, tuple(values.shape), tuple(pieces))
    for rank, content in enumerate(contents):
        (path / f"rank{rank}").write_bytes(content)
    return Archive(path, "by hand", stored, world_size=2, **facts)


def opens(monkeypatch: pytest.MonkeyPatch, *archives: Archive) -> None:
    """Let the tools find these archives at their paths."""
    found = {made.path: made for made in archives}
    monkeypatch.setattr(recognition, "_read_directory", lambda path, *given: found[path])


# -- DTensors as their pickles describe them


def record(name: str, /, *args: Any, **fields: Any) -> Record:
    """An object of a class, with what it was made of and its attributes."""
    return Record(name, args, fields)


def spec_of(
    shape: Sequence[int],
    sizes: Sequence[int],
    coordinate: Sequence[int] | None,
    placements: Sequence[tuple[Any, ...]],
    **mesh: Any,
) -> Record:
    """A DTensorSpec.

    placements: kinds, each with a dim, and a split factor.
    """
    known = mesh or {"_layout": record("_MeshLayout", shape=tuple(sizes))}
    cuts = [
        record(f"torch.{kind}", **dict(zip(("dim", "split_factor"), numbers, strict=False)))
        for kind, *numbers in placements
    ]
    return record(
        "spec",
        mesh=record("mesh", _coordinate_on_dim=coordinate and list(coordinate), **known),
        placements=tuple(cuts),
        tensor_meta=record("meta", tuple(shape), (), torch.float32),
    )
