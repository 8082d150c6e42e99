"""The head of a safetensors file: which tensor lies where.

The format, after the safetensors library's own description: 8 bytes, the length of the JSON text, little-endian; the JSON text, one
entry per tensor with its dtype, shape and place behind the text, and texts under ``__metadata__``; then the tensors, without gaps.
The library writes whole tensors from memory; here each process writes its own bytes, so the head is made apart.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..errors import CheckpointError, explain

__all__ = [
    "METADATA",
    "Entry",
    "dtype_name",
    "dtype_of",
    "encode_header",
    "is_known",
    "length_of_header",
    "parse_header",
    "read_header",
]

METADATA = "__metadata__"
MAX_HEADER_NBYTES = 100_000_000  # as the library has it

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of one of torch's names; raises ValueError for anything else."""
    found = vars(torch).get(str(name))  # no getattr: a module may import on being asked
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of this torch")
    return found


def is_known(dtype: torch.dtype) -> bool:
    """True for a dtype that the format has a name for."""
    return dtype in _NAMES


def encode_header(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[Entry]]:
    """Return the head of a file of ``tensors`` (name, dtype, shape), and where each will lie: wide dtypes first, so that all are
    aligned. The head's length is a multiple of 8 bytes.

    A dtype that the format does not know is described as bytes; who reads it has to know.
    """
    order = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    if len({name for name, _, _ in order} | {METADATA}) < len(order) + 1:
        raise ValueError("two tensors have one name, or one has the name of the metadata")
    described: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    start, places = 0, []
    for name, dtype, shape in order:
        nbytes = math.prod(shape) * dtype.itemsize
        known = _NAMES.get(dtype)
        described[name] = {
            "dtype": known or "U8",
            "shape": list(shape) if known else [nbytes],
            "data_offsets": [start, start + nbytes],
        }
        places.append(start)
        start += nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [Entry(name, dtype, shape, len(head) + at) for (name, dtype, shape), at in zip(order, places, strict=True)]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file by name, and its texts. Raises CheckpointError for a file that is none, OSError."""
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        text = file.read(length_of_header(file.read(8), nbytes, path))
    return parse_header(text, nbytes, path)


def length_of_header(first: bytes, nbytes: int, path: Path) -> int:
    """Return the length of the JSON text after the first 8 bytes of a file of ``nbytes``. Raises CheckpointError if it has none."""
    length = int.from_bytes(first, "little")
    if nbytes < 8 or length > min(nbytes - 8, MAX_HEADER_NBYTES):
        raise _no_safetensors(path, f"a header of {length} bytes in a file of {nbytes}")
    return length


def parse_header(text: bytes, nbytes: int, path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """text: the JSON text in a file of ``nbytes``. Return as ``read_header`` does."""
    length = len(text)
    try:
        described = json.loads(text)
        metadata = described.pop(METADATA, {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("the metadata are no texts")
        entries, end = {}, 0
        for name, facts in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (start, stop) = _DTYPES[facts["dtype"]], tuple(facts["shape"]), facts["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
                raise ValueError(f"{name}: shape {shape} at bytes {start} to {stop}")
            entries[name] = Entry(name, dtype, shape, 8 + length + start)
            if stop - start != entries[name].nbytes or not end <= start <= stop <= nbytes - 8 - length:
                raise ValueError(f"{name}: shape {shape} at bytes {start} to {stop}, after {end}")
            end = stop
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise _no_safetensors(path, f"{type(error).__name__}: {error}") from error
    return entries, metadata


def _no_safetensors(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"{path.name} is no safetensors file, or not a complete one.",
            expected="a header that says where each tensor lies inside of the file",
            got=got,
            where=str(path),
            fix="copy the file again from where it is intact; nothing was loaded",
        )
    )
