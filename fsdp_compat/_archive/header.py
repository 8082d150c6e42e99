"""The header of a safetensors file: where each tensor lies.

The format: 8 bytes with the length of the JSON text, little-endian; the text, which maps each
tensor's name to dtype, shape and offsets behind the text, and ``__metadata__`` to texts; then the
tensors, without gaps. The library writes whole tensors from memory, but here each process writes
its own bytes, so the header is made separately.

Gaps, and names that occur twice in one object, are refused. Other JSON is read as Python's parser
reads it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .texts import (
    MAX_TEXT_NBYTES,
    brief,
    count_in,
    identity_of,
    open_file,
    parse_json,
    parsed,
    require_readable,
    shape_in,
    text_in,
)

METADATA = "__metadata__"

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
# Read, but not written: many versions of the library do not know it.
_DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
# Bits of an element of dtypes that torch does not have: tensors of these are read as their bytes.
_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # first byte in the file
    packed: str | None = None  # the dtype in the file, if torch does not have it
    file: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)  # its identity

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


def dtype_of(name: object, of_tensor: bool = True) -> torch.dtype:
    """Return torch's dtype of this name, or raise ValueError. of_tensor: refuse quantized ones."""
    found = vars(torch).get(str(name))  # getattr would import modules that torch loads lazily
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this version of torch")
    if of_tensor and is_quantized(found):
        raise ValueError(f"{name!r} is a quantized dtype, whose values need a scale")
    return found


def is_quantized(dtype: torch.dtype) -> bool:
    return dtype_name(dtype).startswith("q")


def is_known(dtype: torch.dtype) -> bool:
    """Return whether the format has a name for a dtype."""
    return dtype in _NAMES


def encode_header(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[TensorInfo]]:
    """Return the header of a file of tensors (name, dtype, shape), and where each will lie, wide
    dtypes first, so that all are aligned. An unknown dtype is described as bytes, and the reader
    has to know it. Raises UsageError if it would be too large to be read again."""
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
    require_readable(text)
    head = len(text).to_bytes(8, "little") + text
    return head, [
        TensorInfo(name, dtype, shape, len(head) + at)
        for (name, dtype, shape), at in zip(order, places, strict=True)
    ]


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata. Raises CheckpointError; OSError."""
    with open(open_file(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        text = file.read(length_of_header(file.read(8), nbytes, path))
        identity = identity_of(file.fileno())
    found, metadata = parse_header(text, nbytes, path)
    return {n: dataclasses.replace(info, file=identity) for n, info in found.items()}, metadata


def length_of_header(first: bytes, nbytes: int, path: Path) -> int:
    """Return the length of the JSON text, from the first 8 bytes. Raises CheckpointError."""
    length = int.from_bytes(first, "little")
    if nbytes < 8 or length > min(nbytes - 8, MAX_TEXT_NBYTES):
        raise _not_safetensors(path, f"a header of {length} bytes in a file of {nbytes}")
    return length


def parse_header(
    text: bytes, nbytes: int, path: Path
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return what ``read_header`` does, of the JSON text in a file of ``nbytes``."""
    try:
        described = parse_json(text, parse_constant=_refuse_constant)
        return _parsed(described, 8 + len(text), nbytes)
    except (TypeError, ValueError, RecursionError) as error:
        raise _not_safetensors(path, brief(error)) from error


_TENSOR = {"dtype": text_in, "shape": shape_in, "data_offsets": (count_in, count_in)}


def _parsed(content: Any, start: int, nbytes: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return tensors from byte ``start`` on, and metadata. Raises TypeError or ValueError."""
    described = parsed(content, {...: lambda facts: facts})
    metadata = described.pop(METADATA, None)
    metadata = parsed({} if metadata is None else metadata, {...: text_in})
    places: list[tuple[int, int, str, str, tuple[int, ...]]] = []
    for name, facts in described.items():
        try:
            dtype, shape, offsets = parsed(facts, _TENSOR).values()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name!r}: {brief(error)}, in {reprlib.repr(facts)}") from error
        places.append((*offsets, name, dtype, shape))
    entries, end = {}, 0
    for first, stop, name, dtype, shape in sorted(places):
        said, packed = f"{dtype} of shape {reprlib.repr(shape)}", None
        if dtype in _PACKED and not (num_bits := math.prod(shape) * _PACKED[dtype]) % 8:
            packed, dtype, shape = dtype, "U8", (num_bits // 8,)
        if dtype not in _DTYPES:
            raise ValueError(f"{name!r}: dtype {dtype!r}, which cannot be loaded")
        entries[name] = TensorInfo(name, _DTYPES[dtype], shape, start + first, packed)
        if first != end or stop - first != entries[name].nbytes:
            raise ValueError(f"{name!r}: {said} at bytes {first} to {stop}, after byte {end}")
        end = stop
    if start + end != nbytes:
        raise ValueError(f"tensors up to byte {start + end}, in a file of {nbytes}")
    return entries, metadata


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text}, which is not JSON")


def _not_safetensors(path: Path, got: str) -> CheckpointError:
    return CheckpointError.of(
        f"{path.name} is not a safetensors file, or not a complete one.",
        expected="a JSON header with the offsets of all tensors, without gaps",
        got=got,
        where=str(path),
        fix="restore the file from an intact copy; nothing was loaded",
    )
