"""Checkpoints of torch.distributed.checkpoint, as FSDP1's SHARDED kind, FSDP2, Accelerate,
Lightning and Megatron-FSDP save them.

The metadata say where each chunk of a tensor lies; each chunk is a torch.save file inside a larger
one. Both are read as data, so no class is imported. torch's own writer would hold all values of a
file in memory, and needs one process per rank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._archive.archive import Archive, Chunk, NotRead, Span, StoredPiece, StoredTensor, of_parts
from ..._archive.blocks import damaged, new_file, sync_directory
from ..._archive.header import TensorInfo, is_quantized, read_header
from ..._archive.reader import SLAB_NBYTES, Files, read_all, read_box
from ..._archive.texts import brief, count_in, found_in, identity_of, open_file, text_in
from ..._archive.threads import for_each
from ..._archive.walk import LEFT_OUT
from ..._layout.box import Box
from ..._progress import Tick
from ..._torch_private import place_in_file
from ...errors import CheckpointError, UsageError
from .paths import member
from .pickles import Record, counts_of, shape_of
from .safetensors_files import of_info
from .torch_save import ZIP, read_torch_range, state_dict_of, unpickle
from .writers import WriteOptions, dtype_to_write

KIND = "torch.distributed.checkpoint"
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_FILE_OF_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")
_MAX_BYTES = 100_000_000  # of pickled values, together
_MAX_GAPS = 100_000  # in lists, together

_Keys = tuple[str | int, ...]


class _FileRange(NamedTuple):
    """A range of bytes in a file of the directory, neither of which is checked yet."""

    file: str
    start: int
    nbytes: int


class _Entry(NamedTuple):
    """One value of the flattened state dict: a tensor, or a pickled value."""

    name: str
    keys: _Keys  # in the nested state dict
    dtype: torch.dtype | None  # None: a pickled value, at the only place
    shape: tuple[int, ...]
    places: dict[Box, _FileRange]


def is_dcp(path: Path) -> bool:
    """Return whether a directory has the metadata of a torch.distributed.checkpoint."""
    return path.is_dir() and bool(_metadata_files(path))


def read_dcp(path: Path) -> Archive:
    """Return what is described by ``.metadata``, or by ``__0.metadata``, ... of ranks that do not
    coordinate. Raises CheckpointError for damage, gaps and overlaps; OSError."""
    metadata = _metadata_files(path)
    if not metadata:
        raise _damaged(path, "no file .metadata")
    entries: dict[str, _Entry] = {}
    with Files() as files:
        for entry in itertools.chain.from_iterable(map(_entries_of, metadata)):
            other = entries.get(entry.name)
            if other is not None:  # each rank described the chunks that it wrote
                if (other.dtype, len(other.shape)) != (entry.dtype, len(entry.shape)):
                    raise _damaged(path, f"{entry.name!r}: {other.dtype} and {entry.dtype}")
                shape = tuple(map(max, other.shape, entry.shape))
                entry = entry._replace(shape=shape, places=other.places | entry.places)
            entries[entry.name] = entry
        directory = _Directory(path, files)
        values = [(entry.keys, directory.value_of(entry)) for entry in entries.values()]
    places = [place for entry in entries.values() for place in entry.places.values()]
    if len({*places}) < len(places):
        raise _damaged(path, "two values at one place in the files")
    tree = _nested([(keys, value) for keys, value in values if value is not LEFT_OUT], path)
    num_ranks, left_out = directory.world_size(), directory.left_out
    return Archive(path, KIND, {}, as_saved=tree, world_size=num_ranks, left_out=left_out)


def _damaged(path: Path, got: str) -> CheckpointError:
    return damaged(path, "values as torch.distributed.checkpoint writes them", got)


# -- metadata


def _metadata_files(path: Path) -> list[Path]:
    """Return ``.metadata``, or the file of each rank; none if this is another directory."""
    if os.path.lexists(path / ".metadata"):
        return [member(path, ".metadata")]
    matches = filter(None, map(_OF_RANK.fullmatch, os.listdir(path)))
    return [member(path, match[0]) for match in sorted(matches, key=lambda match: int(match[1]))]


def _entries_of(path: Path) -> Iterator[_Entry]:
    """Yield the entries that one metadata file describes. Raises CheckpointError and OSError."""
    try:
        with open(open_file(path), "rb") as file:
            content = file.read()  # of any length: only a small file must not ask for much
        found = unpickle(content, path)
        if not found.name.endswith(".Metadata"):
            raise ValueError(f"a {found.name}")
        places = {}
        for index, info in found.fields["storage_data"].items():
            name, offset = text_in(index.fields["fqn"]), index.fields.get("offset")
            if extensions := info.fields.get("transform_descriptors"):
                raise ValueError(f"{name!r} was saved through extensions ({extensions!r:.100})")
            places[name, None if offset is None else counts_of(offset)] = _FileRange(
                text_in(info.fields["relative_path"]),
                count_in(info.fields["offset"]),
                count_in(info.fields["length"]),
            )
        paths = found.fields.get("planner_data")
        for name, facts in found.fields["state_dict_metadata"].items():
            keys = paths.get(name) if isinstance(paths, dict) else None
            keys = (text_in(name),) if keys is None else keys  # of a flat state dict
            if not isinstance(keys, (tuple, list)) or not 0 < len(keys) <= 60:
                raise ValueError(f"{name!r} at the path {keys!r:.100}")
            path_of = tuple(k if type(k) is int and k >= 0 else text_in(k) for k in keys)
            yield _Entry(name, path_of, *_described(name, facts, places))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _damaged(path, brief(error)) from error


def _described(
    name: str, facts: Record, places: dict[Any, _FileRange]
) -> tuple[torch.dtype | None, tuple[int, ...], dict[Box, _FileRange]]:
    """Return dtype, shape and places of an entry."""
    kind = facts.name.rpartition(".")[2]
    if kind == "BytesStorageMetadata":
        return None, (), {Box.of_whole(()): places[name, None]}
    if kind != "TensorStorageMetadata":
        raise ValueError(f"{name!r} is a {facts.name:.100}")
    properties = facts.fields["properties"]
    dtype = (properties.state if not properties.fields else [properties.fields["dtype"]])[0]
    if not isinstance(dtype, torch.dtype) or is_quantized(dtype):
        raise TypeError(f"{name!r} has a dtype {dtype!r:.100}")
    shape = shape_of(facts.fields["size"])
    found = {}
    for chunk in facts.fields["chunks"]:
        box = Box(counts_of(chunk.fields["offsets"]), shape_of(chunk.fields["sizes"]))
        if len(box.offsets) != len(box.sizes) or (box.numel and len(box.sizes) != len(shape)):
            raise ValueError(f"{name!r}, of shape {list(shape)}, has a chunk {box}")
        if box.numel:
            if (name, box.offsets) not in places:
                raise ValueError(f"no file has {name!r} at {list(box.offsets)}")
            found[box] = places[name, box.offsets]
    return dtype, shape, found


# -- chunks


def _rank_of(name: str) -> int | None:
    """Return the rank that wrote a file, if its name says so."""
    match = _FILE_OF_RANK.fullmatch(name)
    return int(match[1]) if match else None


class _File(NamedTuple):
    path: Path
    rank: int | None  # that wrote it, if its name says so
    identity: tuple[int, ...]
    nbytes: int
    header: dict[str, TensorInfo] | None  # None: of torch.save, not of safetensors


def _span_in(
    file: _File, place: _FileRange, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Span:
    """Return where the elements of a chunk lie. Raises CheckpointError for anything else; OSError.
    It is the file that the directory had when it was read, or reading the elements raises."""
    found: Any = None
    if file.header is not None:
        if info := file.header.get(name):
            found = of_info(info, file.path)
    else:
        with open(open_file(file.path), "rb") as opened:
            descriptor = opened.fileno()
            if os.pread(descriptor, len(ZIP), place.start) == ZIP:
                found = read_torch_range(descriptor, file.path, place.start, place.nbytes)
    is_tensor = isinstance(found, StoredTensor)
    if not is_tensor or (found.dtype, found.shape) != (dtype, shape):
        text = f"{found.dtype} of shape {list(found.shape)}" if is_tensor else "not a tensor"
        raise _damaged(
            file.path,
            f"at byte {place.start} of {file.path.name} {text} instead of {dtype} of shape "
            f"{list(shape)}, which the metadata give for a chunk of {name!r}",
        )
    span: Span = found.pieces[0].source
    return dataclasses.replace(span, file=file.identity)


class _Directory:
    """The files of one checkpoint. Chunks of tensors are opened when they are needed."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path, self._files = path, files
        self._found: dict[str, _File] = {}  # by the name in the metadata
        self._bytes_left = _MAX_BYTES
        self.left_out: list[str] = []

    def value_of(self, entry: _Entry) -> Any:
        name, _, dtype, shape, places = entry
        if dtype is None:
            return self._plain_value(name, *places.values())
        pieces = [self._piece(name, dtype, box, place) for box, place in places.items()]
        try:
            return of_parts(name, dtype, shape, pieces)
        except ValueError as error:
            got = f"{name!r}, of shape {list(shape)}: {error}"
            raise _damaged(self._path, got) from error

    def _plain_value(self, name: str, place: _FileRange) -> Any:
        path = self._file(place).path
        self._bytes_left -= place.nbytes
        if self._bytes_left < 0:
            raise _damaged(path, f"more than {_MAX_BYTES} bytes of values other than tensors")
        try:
            with self._files.descriptor(path) as descriptor:
                return read_torch_range(descriptor, path, place.start, place.nbytes)
        except NotRead as error:
            self.left_out.append(f"{name}: {found_in(error)}")
            return LEFT_OUT

    def _piece(self, name: str, dtype: torch.dtype, box: Box, place: _FileRange) -> StoredPiece:
        file = self._file(place)
        span = functools.partial(_span_in, file, place, name, dtype, box.sizes)
        chunk = Chunk(file.path, place.start, place.nbytes, span)
        return StoredPiece(box, chunk if file.header is None else span(), file.rank)

    def _file(self, place: _FileRange) -> _File:
        """Return the file of a place; its name, its existence and the range are checked."""
        if place.file not in self._found:
            path = member(self._path, place.file)
            try:
                with self._files.descriptor(path) as descriptor:
                    identity, nbytes = identity_of(descriptor), os.fstat(descriptor).st_size
                    is_header = os.pread(descriptor, 1, 8) == b"{"
            except (FileNotFoundError, NotADirectoryError) as error:
                raise _damaged(path, "no such file, although the metadata name it") from error
            header = read_header(path)[0] if is_header else None
            self._found[place.file] = _File(path, _rank_of(path.name), identity, nbytes, header)
        file = self._found[place.file]
        if place.start + place.nbytes > file.nbytes:
            raise _damaged(
                file.path,
                f"{file.nbytes} bytes, where the metadata have bytes {place.start} to "
                f"{place.start + place.nbytes}",
            )
        return file

    def world_size(self) -> int | None:
        """Return the number of ranks; a rank without values may have an empty file, or none. Files
        that the metadata do not mention go to ``left_out``."""
        ranks = []
        for name in sorted(os.listdir(self._path)):
            rank = _rank_of(name)
            if rank is not None:
                if name in self._found or not os.path.getsize(self._path / name):
                    ranks.append(rank)
                else:
                    why = "not mentioned in the metadata, so it may be of an older checkpoint"
                    self.left_out.append(f"{name}: {why}")
        return max(ranks, default=-1) + 1 or None


# -- nesting


class _Node(dict[Any, Any]):
    """A container that is being filled."""


def _nested(entries: Iterable[tuple[_Keys, Any]], path: Path) -> dict[Any, Any]:
    """Return nested containers. Numbers in the keys are indices of lists."""
    root = _Node()
    for keys, value in entries:
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise _damaged(path, f"the path {list(keys)} leads through a value")
        if keys[-1] in node:
            raise _damaged(path, f"two values have the path {list(keys)}")
        node[keys[-1]] = value
    gaps = [0]
    return {key: _finished(value, path, gaps) for key, value in root.items()}


def _finished(value: Any, path: Path, gaps: list[int]) -> Any:
    """Return a node as a list if it has only numbers; ``gaps`` counts what its lists lack."""
    if not isinstance(value, _Node):
        return value
    items = {key: _finished(item, path, gaps) for key, item in value.items()}
    if not all(isinstance(key, int) for key in items):
        return {str(key): item for key, item in items.items()}
    length = max(items) + 1  # of a list, in which an empty container has left a gap
    gaps[0] += length - len(items)
    if gaps[0] > _MAX_GAPS:
        raise _damaged(path, f"a list of {length} elements, of which {len(items)} have values")
    return [items.get(index) for index in range(length)]


# -- writing


def write_dcp(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write a directory that ``torch.distributed.checkpoint`` loads, also into this package's front
    ends. Tensors are cut along dim 0 for ``options.world_size`` ranks, one file each, and into
    chunks of 16 MiB or one row, of which a thread holds one. Tied tensors are written under each
    name. Imports torch.distributed.checkpoint, which may import torch's FSDP.
    Raises UsageError if two values would get one name, CheckpointError and OSError."""
    from torch.distributed.checkpoint import metadata as described

    values = _flattened(archive)
    entries: dict[str, Any] = {}
    ranks: list[list[tuple[Any, Any, Box | None]]] = [[] for _ in range(options.world_size)]
    for name, (_, value) in values.items():
        if not isinstance(value, StoredTensor):
            entries[name] = described.BytesStorageMetadata()
            ranks[0].append((described.MetadataIndex(name), value, None))
            continue
        chunks = []
        for rank, box in _boxes(value, options):
            offsets = torch.Size(box.offsets)
            chunks.append(described.ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
            ranks[rank].append((described.MetadataIndex(name, offsets), value, box))
        properties = described.TensorProperties(dtype_to_write(value))
        entries[name] = described.TensorStorageMetadata(properties, torch.Size(value.shape), chunks)

    def write(rank: int, stop: Tick) -> dict[Any, Any]:
        places: dict[Any, Any] = {}
        if ranks[rank]:
            name = f"__{rank}_0.distcp"
            with new_file(path / name) as file:
                for index, value, box in ranks[rank]:
                    stop(0)
                    start = file.tell()
                    if box is None:
                        content = read_all(value, files)
                    else:
                        content = read_box(value, box, files).to(dtype_to_write(value))
                        options.tick(content.nbytes)
                    torch.save(content, file)
                    places[index] = place_in_file(name, start, file.tell() - start)
        return places

    path.mkdir()
    written = for_each(range(options.world_size), write)
    paths: Any = {name: keys for name, (keys, _) in values.items()}
    places = {index: place for of_rank in written for index, place in of_rank.items()}
    with new_file(path / ".metadata") as file:
        pickle.dump(described.Metadata(entries, paths, places), file)
    sync_directory(path)


def _flattened(archive: Archive) -> dict[str, tuple[_Keys, Any]]:
    """Return (path, value) by name, from mappings, and lists that hold tensors or mappings."""
    entries: dict[str, tuple[_Keys, Any]] = {}

    def add(keys: _Keys, value: Any) -> None:
        name = ".".join(map(str, keys))
        if isinstance(value, dict):
            for key, item in value.items():
                add((*keys, str(key)), item)
        elif isinstance(value, list) and _is_nested(value):
            for number, item in enumerate(value):
                add((*keys, number), item)
        elif name in entries:
            raise UsageError.of(
                "Two values would get the same name in the checkpoint.",
                expected="paths that differ when they are joined by dots",
                got=f"{list(entries[name][0])} and {list(keys)}",
                where="torch.distributed.checkpoint as the target",
                fix="rename one of them, or leave it out",
            )
        else:
            entries[name] = keys, value

    values = state_dict_of(archive)
    if archive.step is not None and not isinstance(values, OrderedDict):  # more than a model
        values.setdefault("step", archive.step)
    add((), values)
    return entries


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_nested, value))
    return isinstance(value, (StoredTensor, dict))


def _boxes(tensor: StoredTensor, options: WriteOptions) -> Iterator[tuple[int, Box]]:
    """Yield the chunks of a tensor with their ranks, which hold rows as torch.chunk cuts them."""
    if not tensor.shape or not tensor.numel:
        yield 0, Box.of_whole(tensor.shape)
        return
    rows, *rest = tensor.shape
    share, at_once = -(-rows // options.world_size), SLAB_NBYTES // tensor.dtype.itemsize
    for rank, first in enumerate(range(0, rows, share)):
        part = Box((first, *(0,) * len(rest)), (min(share, rows - first), *rest))
        for box in part.cut(max(at_once, math.prod(rest))):
            yield rank, box
