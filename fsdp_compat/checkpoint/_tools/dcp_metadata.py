"""What the metadata of a torch.distributed.checkpoint directory say: names, chunks and where each
lies. They are read as data; no class that they name is imported."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..._layout.box import Box
from ...errors import CheckpointError
from .._header import is_quantized
from .._texts import MAX_TEXT_NBYTES, brief, open_file, shape_in, size, text_in
from . import unpickling

_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_Key = tuple[str, tuple[int, ...] | None]


@dataclasses.dataclass(frozen=True)
class Place:
    """A range of bytes in a file of the directory. ``file`` is not checked yet."""

    file: str
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    box: Box
    place: Place


@dataclasses.dataclass(frozen=True)
class Entry:
    """One value of the flattened state dict: a tensor, or a pickled value (``place``)."""

    name: str
    keys: tuple[str | int, ...]  # where it is in the nested state dict
    dtype: torch.dtype | None = None  # None: a pickled value
    shape: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    place: Place | None = None


def metadata_files(path: Path) -> list[Path]:
    """Return ``.metadata``, or the files of all ranks if each wrote its own; none if a directory is
    no such checkpoint. Raises OSError."""
    one = path / ".metadata"
    if one.exists() or one.is_symlink():
        return [one]
    found = {}
    for name in os.listdir(path):
        if match := _OF_RANK.fullmatch(name):
            found[int(match[1])] = path / name
    return [found[rank] for rank in sorted(found)]


def read_metadata(path: Path) -> list[Entry]:
    """Return the entries that one metadata file describes, in its order. Raises CheckpointError and
    OSError."""
    with open(open_file(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > MAX_TEXT_NBYTES:
            raise damaged(path, f"{nbytes} bytes of metadata; the limit is {MAX_TEXT_NBYTES}")
        found = unpickling.load(file, path)
    with _refusing(path):
        if not found.name.endswith(".Metadata"):
            raise ValueError(f"a {found.name}")
        fields = found.fields
        places = _places(fields["storage_data"])
        paths = fields.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        described = fields["state_dict_metadata"]
        return [
            _entry(text_in(name), facts, _keys(name, paths.get(name)), places)
            for name, facts in described.items()
        ]


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn what unexpected content raises into CheckpointError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise damaged(path, brief(error)) from error


def damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError.of(
        f"{path.name} is damaged, or not of a torch.distributed.checkpoint.",
        expected="values as torch.distributed.checkpoint writes them",
        got=got,
        where=str(path),
        fix="restore the checkpoint from an intact copy; nothing was loaded",
    )


def _places(storage: Any) -> dict[_Key, Place]:
    found = {}
    for index, info in storage.items():
        if info.fields.get("transform_descriptors"):
            raise ValueError(
                f"{index.fields['fqn']!r} was saved through extensions "
                f"({info.fields['transform_descriptors']!r:.100}), which cannot be read"
            )
        offset = index.fields.get("offset")
        key = text_in(index.fields["fqn"]), None if offset is None else _shape(offset)
        found[key] = Place(
            text_in(info.fields["relative_path"]),
            size(info.fields["offset"]),
            size(info.fields["length"]),
        )
    return found


def _keys(name: str, keys: Any) -> tuple[str | int, ...]:
    """Return the path of an entry; metadata without paths are of a flat state dict."""
    if keys is None:
        return (name,)
    if not isinstance(keys, (tuple, list)) or not keys or len(keys) > 60:
        raise ValueError(f"{name!r} at the path {keys!r:.100}")
    return tuple(key if type(key) is int and key >= 0 else text_in(key) for key in keys)


def _entry(name: str, facts: Any, keys: tuple[str | int, ...], places: dict[_Key, Place]) -> Entry:
    kind = facts.name.rpartition(".")[2]
    if kind == "BytesStorageMetadata":
        return Entry(name, keys, place=places[name, None])
    if kind != "TensorStorageMetadata":
        raise ValueError(f"{name!r} is a {facts.name:.100}")
    properties = facts.fields["properties"]
    dtype = properties.fields["dtype"] if properties.state is None else properties.state[0]
    if not isinstance(dtype, torch.dtype) or is_quantized(dtype):
        raise TypeError(f"{name!r} has a dtype {dtype!r:.100}")
    shape = _shape(facts.fields["size"])
    chunks = {}
    for chunk in facts.fields["chunks"]:
        box = Box(_shape(chunk.fields["offsets"]), _shape(chunk.fields["sizes"]))
        if len(box.offsets) != len(box.sizes) or (box.numel and len(box.sizes) != len(shape)):
            raise ValueError(f"{name!r}, of shape {list(shape)}, has a chunk {box}")
        if box.numel:
            place = places.get((name, box.offsets))
            if place is None:
                raise ValueError(f"no file has {name!r} at {list(box.offsets)}")
            chunks[box] = Chunk(box, place)
    return Entry(name, keys, dtype, shape, tuple(chunks.values()))


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"a {type(value).__name__} instead of a shape")
    return shape_in(list(value))
