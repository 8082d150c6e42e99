"""Checkpoints of torch.distributed.checkpoint: FSDP1's SHARDED kind, FSDP2, our own front ends,
Megatron-FSDP, and what Accelerate, Lightning and others save through it.

Opening one takes about 0.3 ms per chunk, most of it for the metadata; of the files, two short
ranges per chunk are read."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..._layout.box import Box
from ...errors import CheckpointError
from .._header import TensorInfo, read_header
from .._texts import brief, open_file, parse_json, shape_in
from . import torch_files, unpickling
from .archive import Archive, Piece, Span, StoredTensor, coverage_problem, row_major, whole
from .dcp_metadata import Chunk, Entry, Place, damaged, metadata_files, read_metadata
from .distcp_entries import EntryTemplates
from .paths import member
from .reading import Files
from .tree import archive_of

KIND = "torch.distributed.checkpoint"
_FILE_OF_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")
_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"
_MAX_BYTES = 100_000_000  # of pickled values, together
_MAX_LIST = 100_000


def is_dcp(path: Path) -> bool:
    """Return whether a directory has the metadata of a torch.distributed.checkpoint."""
    return path.is_dir() and bool(metadata_files(path))


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
    metadata = metadata_files(path)
    if not metadata:
        raise damaged(path, "no file .metadata")
    merged = _merged(
        [entry for file in metadata for entry in read_metadata(member(path, file.name))]
    )
    left_out: list[str] = []
    with Files() as files:
        directory = _Directory(path, files)
        flat = [(entry, directory.value_of(entry, left_out)) for entry in merged]
    tree = _nested([(entry.keys, value) for entry, value in flat if value is not _LEFT_OUT], path)
    left_out += directory.unused()
    return tree, directory.world_size(), left_out


_LEFT_OUT: Any = object()


def _merged(entries: Iterable[Entry]) -> list[Entry]:
    """Return one entry per name: ranks that do not coordinate each describe their own chunks."""
    found: dict[str, Entry] = {}
    for entry in entries:
        other = found.setdefault(entry.name, entry)
        if other is not entry and (other.dtype, other.shape) == (entry.dtype, entry.shape):
            chunks = {chunk.box: chunk for chunk in (*entry.chunks, *other.chunks)}
            found[entry.name] = Entry(
                entry.name,
                other.keys,
                other.dtype,
                other.shape,
                tuple(chunks.values()),
                other.place,
            )
    return list(found.values())


class _Directory:
    """The files of one checkpoint."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self._found: dict[str, tuple[Path, int]] = {}  # files with values: path, number of bytes
        self._templates = EntryTemplates(files)
        self._headers: dict[Path, Any] = {}
        self._bytes_left = _MAX_BYTES

    def value_of(self, entry: Entry, left_out: list[str]) -> Any:
        if entry.dtype is not None:
            return self._tensor(entry)
        assert entry.place is not None
        path = self._checked(entry.place)
        self._bytes_left -= entry.place.nbytes
        if self._bytes_left < 0:
            raise damaged(path, f"more than {_MAX_BYTES} bytes of values that are no tensors")
        try:
            return self._plain_value(path, entry.place)
        except CheckpointError as error:
            got = next((line for line in str(error).splitlines() if "got:" in line), str(error))
            left_out.append(f"{entry.name}: {got.partition('got:')[2].strip() or got}"[:400])
            return _LEFT_OUT

    def _plain_value(self, path: Path, place: Place) -> Any:
        with self._files.descriptor(path) as descriptor:
            is_zip = os.pread(descriptor, 4, place.start) == b"PK\x03\x04"
            content = b"" if is_zip else os.pread(descriptor, place.nbytes, place.start)
        if is_zip:
            return torch_files.records_at(path, place.start, place.nbytes)
        return unpickling.load(content, path)

    def _tensor(self, entry: Entry) -> StoredTensor:
        assert entry.dtype is not None
        pieces = tuple(self._piece(entry.name, entry.dtype, chunk) for chunk in entry.chunks)
        problem = coverage_problem(entry.shape, [piece.box for piece in pieces])
        if problem is not None:
            raise damaged(self._path, f"{entry.name!r}, of shape {list(entry.shape)}: {problem}")
        return StoredTensor(entry.name, entry.dtype, entry.shape, pieces)

    def _piece(self, name: str, dtype: torch.dtype, chunk: Chunk) -> Piece:
        path = self._checked(chunk.place)
        match = _FILE_OF_RANK.fullmatch(path.name)
        holder = int(match[1]) if match else None
        found = self._templates.tensor_at(path, chunk.place.start, chunk.place.nbytes)
        if found is None and self._is_safetensors(path):
            found = self._in_safetensors(path, name)
        if found is None or (found.dtype, found.shape) != (dtype, chunk.box.sizes):
            raise damaged(
                path,
                f"at byte {chunk.place.start} {_text(found)} instead of {dtype} of shape "
                f"{list(chunk.box.sizes)}, which the metadata give for a chunk of {name!r}",
            )
        (piece,) = found.pieces
        return Piece(chunk.box, piece.source, holder)

    def _is_safetensors(self, path: Path) -> bool:
        """Return whether the text of a safetensors file begins where it does in such a file."""
        with self._files.descriptor(path) as descriptor:
            return os.pread(descriptor, 1, 8) == b"{"

    def _in_safetensors(self, path: Path, name: str) -> StoredTensor | None:
        if path not in self._headers:
            self._headers[path] = read_header(path)[0]
        found = self._headers[path].get(name)
        return None if found is None else _of_header(found, path)

    def _checked(self, place: Place) -> Path:
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

    def unused(self) -> list[str]:
        """Return a text for each file with values that the metadata do not mention."""
        return [
            f"{name}: not mentioned in the metadata, so it may be of an older checkpoint"
            for name in sorted(os.listdir(self._path))
            if _FILE_OF_RANK.fullmatch(name)
            and name not in self._found
            and (self._path / name).stat().st_size
        ]

    def world_size(self) -> int | None:
        """A rank without values writes an empty file, or none."""
        names = [
            *self._found,
            *(
                name
                for name in os.listdir(self._path)
                if _FILE_OF_RANK.fullmatch(name) and not os.path.getsize(self._path / name)
            ),
        ]
        ranks = [int(match[1]) for name in names if (match := _FILE_OF_RANK.fullmatch(name))]
        return max(ranks) + 1 if ranks else None


def _text(found: StoredTensor | None) -> str:
    return "no tensor" if found is None else f"{found.dtype} of shape {list(found.shape)}"


def _of_header(info: TensorInfo, path: Path) -> StoredTensor:
    source = Span(path, info.start, row_major(info.shape))
    return StoredTensor(info.name, info.dtype, info.shape, (Piece(whole(info.shape), source),))


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
                stored = _of_header(found, file)
                piece = Piece(Box(offsets, found.shape), stored.pieces[0].source, holder)
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
