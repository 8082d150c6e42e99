"""Checkpoints of torch.distributed.checkpoint: FSDP1's SHARDED kind, FSDP2, our own front ends,
Megatron-FSDP, and what Accelerate, Lightning and others save through it.

The metadata say where each chunk of a tensor lies; each is a torch.save file of its own inside a
larger one. Both are read as data: no class that they name is imported."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._layout.box import Box
from ...errors import CheckpointError
from .._header import TensorInfo, is_quantized, read_header
from .._texts import brief, found_in, open_file, parse_json, read_text, shape_in, size, text_in
from .archive import Archive, Piece, StoredTensor, coverage_problem, whole
from .paths import member
from .pickles import Record
from .safetensors_files import of_info
from .torch_save import load, records_at
from .tree import archive_of
from .walk import LEFT_OUT

KIND = "torch.distributed.checkpoint"
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_FILE_OF_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")
_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"
_MAX_BYTES = 100_000_000  # of pickled values, together
_MAX_LIST = 100_000
_ZIP = b"PK\x03\x04"
_UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

_Keys = tuple[str | int, ...]


class _Place(NamedTuple):
    """A range of bytes in a file of the directory. ``file`` is not checked yet."""

    file: str
    start: int
    nbytes: int


class _Entry(NamedTuple):
    """One value of the flattened state dict: a tensor, or a pickled value."""

    name: str
    keys: _Keys  # where it is in the nested state dict
    dtype: torch.dtype | None  # None: a pickled value, at the only place
    shape: tuple[int, ...]
    places: dict[Box, _Place]


def is_dcp(path: Path) -> bool:
    """Return whether a directory has the metadata of a torch.distributed.checkpoint."""
    return path.is_dir() and bool(_metadata_files(path))


def read_dcp(path: Path) -> Archive:
    """Return what a directory with ``.metadata`` holds (or ``__0.metadata``, ``__1.metadata``, ...,
    which ranks write that do not coordinate). Values that are no tensors and cannot be read without
    importing classes are named in ``left_out``.

    Raises CheckpointError for content that is damaged or missing, and for chunks that overlap or do
    not cover their tensor; OSError.
    """
    tree, world_size, left_out = tree_of(path)
    return archive_of(path, KIND, tree, world_size=world_size, left_out=left_out)


def tree_of(path: Path) -> tuple[dict[Any, Any], int | None, list[str]]:
    """Return the nested state dict, the number of ranks that wrote it, if the names of the files
    say so, and what could not be read. Raises what ``read_dcp`` raises."""
    metadata = _metadata_files(path)
    if not metadata:
        raise damaged(path, "no file .metadata")
    directory, left_out = _Directory(path), list[str]()
    values = [
        (entry.keys, directory.value_of(entry, left_out))
        for entry in _merged(itertools.chain.from_iterable(map(_entries_of, metadata)))
    ]
    tree = _nested([(keys, value) for keys, value in values if value is not LEFT_OUT], path)
    left_out += directory.unused()
    return tree, directory.world_size(), left_out


def damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError.of(
        f"{path.name} is damaged, or not of a torch.distributed.checkpoint.",
        expected="values as torch.distributed.checkpoint writes them",
        got=got,
        where=str(path),
        fix="restore the checkpoint from an intact copy; nothing was loaded",
    )


# -- metadata


def _metadata_files(path: Path) -> list[Path]:
    """Return ``.metadata``, or the files of all ranks if each wrote its own; none if a directory is
    no such checkpoint. Raises OSError and CheckpointError."""
    one = path / ".metadata"
    if one.exists() or one.is_symlink():
        return [member(path, one.name)]
    ranks = {
        int(match[1]): match[0] for match in map(_OF_RANK.fullmatch, os.listdir(path)) if match
    }
    return [member(path, ranks[rank]) for rank in sorted(ranks)]


def _entries_of(path: Path) -> Iterator[_Entry]:
    """Yield the entries that one metadata file describes. Raises CheckpointError and OSError."""
    try:
        found = load(read_text(path), path)
        if not found.name.endswith(".Metadata"):
            raise ValueError(f"a {found.name}")
        places = {}
        for index, info in found.fields["storage_data"].items():
            if extensions := info.fields.get("transform_descriptors"):
                name = index.fields["fqn"]
                raise ValueError(f"{name!r} was saved through extensions ({extensions!r:.100})")
            offset = index.fields.get("offset")
            where = None if offset is None else shape_in(list(offset))
            places[text_in(index.fields["fqn"]), where] = _Place(
                text_in(info.fields["relative_path"]),
                size(info.fields["offset"]),
                size(info.fields["length"]),
            )
        paths = found.fields.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        for name, facts in found.fields["state_dict_metadata"].items():
            yield _entry(text_in(name), facts, _keys(name, paths.get(name)), places)
    except _UNEXPECTED as error:
        raise damaged(path, brief(error)) from error


def _keys(name: str, keys: Any) -> _Keys:
    """Return the path of an entry; metadata without paths are of a flat state dict."""
    if keys is None:
        return (name,)
    if not isinstance(keys, (tuple, list)) or not keys or len(keys) > 60:
        raise ValueError(f"{name!r} at the path {keys!r:.100}")
    return tuple(key if type(key) is int and key >= 0 else text_in(key) for key in keys)


def _entry(name: str, facts: Record, keys: _Keys, places: dict[Any, _Place]) -> _Entry:
    kind = facts.name.rpartition(".")[2]
    if kind == "BytesStorageMetadata":
        return _Entry(name, keys, None, (), {whole(()): places[name, None]})
    if kind != "TensorStorageMetadata":
        raise ValueError(f"{name!r} is a {facts.name:.100}")
    properties = facts.fields["properties"]
    dtype = (properties.state if not properties.fields else [properties.fields["dtype"]])[0]
    if not isinstance(dtype, torch.dtype) or is_quantized(dtype):
        raise TypeError(f"{name!r} has a dtype {dtype!r:.100}")
    shape = shape_in(list(facts.fields["size"]))
    found = {}
    for chunk in facts.fields["chunks"]:
        box = Box(*(shape_in(list(chunk.fields[key])) for key in ("offsets", "sizes")))
        if len(box.offsets) != len(box.sizes) or (box.numel and len(box.sizes) != len(shape)):
            raise ValueError(f"{name!r}, of shape {list(shape)}, has a chunk {box}")
        if box.numel:
            if (name, box.offsets) not in places:
                raise ValueError(f"no file has {name!r} at {list(box.offsets)}")
            found[box] = places[name, box.offsets]
    return _Entry(name, keys, dtype, shape, found)


def _merged(entries: Iterable[_Entry]) -> list[_Entry]:
    """Return one entry per name: ranks that do not coordinate each describe their own chunks."""
    found: dict[str, _Entry] = {}
    for entry in entries:
        other = found.setdefault(entry.name, entry)
        if other is not entry and other[2:4] == entry[2:4]:
            other.places.update(entry.places)
    return list(found.values())


# -- chunks


class _Directory:
    """The files of one checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, tuple[Path, int]] = {}  # files with values: path, number of bytes
        self._headers: dict[Path, dict[str, TensorInfo] | None] = {}  # None: of torch.save
        self._bytes_left = _MAX_BYTES

    def value_of(self, entry: _Entry, left_out: list[str]) -> Any:
        if entry.dtype is None:
            return self._plain_value(entry, left_out)
        pieces = [self._piece(entry, box, place) for box, place in entry.places.items()]
        problem = coverage_problem(entry.shape, [piece.box for piece in pieces])
        if problem is not None:
            raise damaged(self._path, f"{entry.name!r}, of shape {list(entry.shape)}: {problem}")
        return StoredTensor(entry.name, entry.dtype, entry.shape, tuple(pieces))

    def _plain_value(self, entry: _Entry, left_out: list[str]) -> Any:
        (place,) = entry.places.values()
        path = self._checked(place)
        self._bytes_left -= place.nbytes
        if self._bytes_left < 0:
            raise damaged(path, f"more than {_MAX_BYTES} bytes of values that are no tensors")
        content = _bytes_of(path, place.start, place.nbytes)
        try:
            if content.startswith(_ZIP):
                return records_at(path, place.start, place.nbytes)
            return load(content, path)
        except CheckpointError as error:
            left_out.append(f"{entry.name}: {found_in(error)}")
            return LEFT_OUT

    def _piece(self, entry: _Entry, box: Box, place: _Place) -> Piece:
        path = self._checked(place)
        match = _FILE_OF_RANK.fullmatch(path.name)
        if (header := self._header(path)) is not None:
            found = of_info(header[entry.name], path) if entry.name in header else None
        elif _bytes_of(path, place.start, 4) == _ZIP:
            found = records_at(path, place.start, place.nbytes)
        else:
            found = None
        if not isinstance(found, StoredTensor) or (found.dtype, found.shape) != (
            entry.dtype,
            box.sizes,
        ):
            text = f"{found.dtype} of shape {list(found.shape)}" if found else "no tensor"
            raise damaged(
                path,
                f"at byte {place.start} {text} instead of {entry.dtype} of shape "
                f"{list(box.sizes)}, which the metadata give for a chunk of {entry.name!r}",
            )
        (piece,) = found.pieces
        return Piece(box, piece.source, int(match[1]) if match else None)

    def _header(self, path: Path) -> dict[str, TensorInfo] | None:
        """Return what the header of a safetensors file says; None for other files."""
        if path not in self._headers:
            is_header = _bytes_of(path, 8, 1) == b"{"
            self._headers[path] = read_header(path)[0] if is_header else None
        return self._headers[path]

    def _checked(self, place: _Place) -> Path:
        """Return the path of a file; its name, its existence and the range are checked."""
        if place.file not in self._found:
            path = member(self._path, place.file)
            try:
                descriptor = open_file(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise damaged(path, "no such file, although the metadata name it") from error
            self._found[place.file] = path, os.fstat(descriptor).st_size
            os.close(descriptor)
        path, nbytes = self._found[place.file]
        if place.start + place.nbytes > nbytes:
            raise damaged(
                path,
                f"{nbytes} bytes, where the metadata have bytes {place.start} to "
                f"{place.start + place.nbytes}",
            )
        return path

    def _files_of_ranks(self) -> dict[str, int]:
        """Return the number of bytes of each file with values in the directory."""
        names = filter(_FILE_OF_RANK.fullmatch, sorted(os.listdir(self._path)))
        return {name: os.path.getsize(self._path / name) for name in names}

    def unused(self) -> list[str]:
        """Return a text for each file with values that the metadata do not mention."""
        return [
            f"{name}: not mentioned in the metadata, so it may be of an older checkpoint"
            for name, nbytes in self._files_of_ranks().items()
            if nbytes and name not in self._found
        ]

    def world_size(self) -> int | None:
        """A rank without values writes an empty file, or none."""
        empty = [name for name, nbytes in self._files_of_ranks().items() if not nbytes]
        matches = map(_FILE_OF_RANK.fullmatch, [*self._found, *empty])
        return max((int(match[1]) + 1 for match in matches if match), default=None)


def _bytes_of(path: Path, start: int, nbytes: int) -> bytes:
    with open(open_file(path), "rb") as file:
        return os.pread(file.fileno(), nbytes, start)


# -- nesting


def _nested(entries: Iterable[tuple[tuple[str | int, ...], Any]], path: Path) -> dict[Any, Any]:
    """Return nested containers. Numbers in the keys are indices of lists."""
    root: dict[Any, Any] = {}
    containers = {id(root)}
    lists: list[tuple[dict[Any, Any], Any]] = []
    for keys, value in entries:
        node = root
        for key, following in itertools.pairwise(keys):
            if key not in node:
                node[key] = {}
                containers.add(id(node[key]))
                if isinstance(following, int):
                    lists.append((node, key))
            node = node[key]
            if id(node) not in containers:
                raise damaged(path, f"the path {list(keys)} leads through a value")
        if keys[-1] in node:
            raise damaged(path, f"two values have the path {list(keys)}")
        node[keys[-1]] = value
    for node, key in reversed(lists):  # the inner ones first
        node[key] = _list_of(node[key], path)
    return root


def _list_of(items: dict[Any, Any], path: Path) -> Any:
    """Return a list; where there is no value was an empty container."""
    if not all(isinstance(key, int) for key in items):
        return {str(key): value for key, value in items.items()}
    length = max(items) + 1
    if length > len(items) + _MAX_LIST:
        raise damaged(path, f"a list of {length} elements, of which {len(items)} have values")
    return [items.get(index) for index in range(length)]


# -- safetensors files with parts of tensors


def is_sharded_safetensors(path: Path) -> bool:
    """Return whether a directory has what HuggingFaceStorageWriter writes with save_distributed:
    safetensors files with a part of each tensor."""
    return path.is_dir() and any(_SHARD.fullmatch(name) for name in os.listdir(path))


def read_sharded_safetensors(path: Path) -> Archive:
    """Return what such a directory holds. Shapes follow from the parts: nothing says where a tensor
    ends, so a missing last file is noticed only if the tensors' other sizes need it.

    Raises CheckpointError for damaged files and for parts that overlap or leave gaps; OSError.
    """
    parts: dict[str, list[Piece]] = {}
    dtypes: dict[str, torch.dtype] = {}
    names = sorted(name for name in os.listdir(path) if _SHARD.fullmatch(name))
    for holder, name in enumerate(names):
        file = member(path, name)
        header, metadata = read_header(file)
        try:
            places = parse_json(metadata.get(_SHARDING, "{}").encode())
            for key, found in header.items():
                offsets = shape_in(places[key]["saved_offsets"])
                if len(offsets) != len(found.shape) or dtypes.get(key, found.dtype) != found.dtype:
                    raise ValueError(f"{key!r}: offsets {offsets}, {found.dtype}")
                (whole_part,) = of_info(found, file, holder).pieces
                piece = dataclasses.replace(whole_part, box=Box(offsets, found.shape))
                parts.setdefault(key, []).append(piece)
                dtypes[key] = found.dtype
        except (ValueError, TypeError, LookupError) as error:
            raise damaged(file, brief(error)) from error
    tree = {}
    for key, pieces in parts.items():
        ends = [map(sum, zip(p.box.offsets, p.box.sizes, strict=True)) for p in pieces]
        shape = tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])
        unique = {piece.box: piece for piece in pieces if piece.box.numel}
        problem = coverage_problem(shape, list(unique))
        if problem is not None:
            raise damaged(path, f"{key!r}: {problem}")
        tree[key] = StoredTensor(key, dtypes[key], shape, tuple(unique.values()))
    return archive_of(path, "sharded safetensors", tree, world_size=len(names))
