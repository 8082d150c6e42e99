"""safetensors files: reading a file, an index or a directory, and writing them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from ..._archive.archive import Archive, Span, StoredPiece, StoredTensor, in_one_piece, of_parts
from ..._archive.blocks import damaged
from ..._archive.header import METADATA, TensorInfo, encode_header, is_known, read_header
from ..._archive.reader import Files
from ..._archive.texts import brief, parse_json, parsed, read_text, shape_in, text_in
from ..._archive.threads import for_each
from ..._comm.host_memory import memory_of
from ..._layout.box import Box
from ..._layout.spec import row_major_strides
from ...errors import CheckpointError, UsageError
from .._folder.publishing import write_text
from .paths import member, require_inside
from .writers import Elements, WriteOptions, dtype_to_write

_T = TypeVar("_T")
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_SHARD = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")  # ranks from 1 on
_SHARDING = "DCP_SHARDING_INFO"


def span_of(info: TensorInfo, path: Path) -> Span:
    return Span(path, info.start, row_major_strides(info.shape), file=info.file)


def of_info(info: TensorInfo, path: Path) -> StoredTensor:
    """Return a tensor of a safetensors file."""
    return in_one_piece(info.name, info.dtype, info.shape, span_of(info, path))


def read_safetensors(path: Path) -> Archive:
    """Return the content of a file, of the files of an index, or of a directory with either."""
    index = path / INDEX if path.is_dir() else path
    if index.suffix == ".json" and index.exists():
        found = by_index(index, _infos_in)
    else:
        found = {}
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            infos = _infos_in(require_inside(path if path.is_dir() else path.parent, file))
            if twice := found.keys() & infos.keys():
                name = min(twice)
                raise CheckpointError.of(
                    "Two files hold a tensor of the same name.",
                    expected="each tensor in one file of the directory",
                    got=f"{name!r} in {found[name][0].name} and in {file.name}",
                    where=str(path),
                    fix="pass one file, or remove the files that belong to other weights",
                )
            found |= infos
    tree = {name: of_info(info, file) for name, (file, info) in found.items()}
    left_out = [
        f"{name}: its dtype {info.packed}, which torch does not have; its bytes are taken as uint8"
        for name, (_, info) in found.items()
        if info.packed
    ]
    values = {"model": tree} if tree else {}
    return Archive(path, "safetensors", {}, as_saved=values, left_out=left_out)


def _infos_in(file: Path) -> dict[str, tuple[Path, TensorInfo]]:
    return {name: (file, info) for name, info in read_header(file)[0].items()}


def by_index(index: Path, read: Callable[[Path], Mapping[str, _T]]) -> dict[str, _T]:
    """Return what an index lists, by name, in the order of the files, which lie beside it. read:
    returns what a file has. Raises CheckpointError if a file has less, and what ``read`` raises."""
    try:
        found = parsed(parse_json(read_text(index)), {"weight_map": {...: text_in}})
        places: dict[str, str] = found["weight_map"]
        for name in places.values():
            if Path(name).name != name or "\0" in name:
                raise ValueError(f"{name!r} is not the name of a file")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError.of(
            "The index cannot be read.",
            expected="JSON with a 'weight_map' from tensor names to names of files beside the "
            "index",
            got=brief(error),
            where=str(index),
            fix="copy it again, or remove it and pass the directory to read all its files",
        ) from error
    files = {
        file: read(require_inside(index.parent, index.parent / file))
        for file in dict.fromkeys(places.values())
    }
    if missing := [name for name, file in places.items() if name not in files[file]]:
        raise CheckpointError.of(
            "The index does not match the files.",
            expected=f"{missing[0]!r} in {places[missing[0]]}",
            got=f"{len(missing)} of {len(places)} tensors are not in the file that the index names",
            where=str(index),
            fix="copy the index and the files from the same source",
        )
    return {
        name: value
        for file, values in files.items()
        for name, value in values.items()
        if places.get(name) == file
    }


# -- reading parts of tensors


def read_sharded_safetensors(path: Path) -> Archive | None:
    """Return the content of a directory of HuggingFaceStorageWriter with save_distributed; None for
    others. A missing last file may go unnoticed: shapes follow from parts."""
    files = sorted(filter(None, map(_SHARD.fullmatch, os.listdir(path))), key=lambda each: each[0])
    if not files:
        return None
    parts: dict[str, list[StoredPiece]] = {}
    infos: dict[str, TensorInfo] = {}
    for file in files:
        header, metadata = read_header(member(path, file[0]))
        try:
            offsets = parse_json(metadata.get(_SHARDING, "{}").encode())
            for name, info in header.items():
                box = Box(shape_in(offsets[name]["saved_offsets"]), info.shape)
                first = infos.setdefault(name, info)
                dims = {len(first.shape), len(box.sizes), len(box.offsets)}
                if info.dtype != first.dtype or len(dims) > 1:
                    raise ValueError(f"{name!r}: {first.dtype}, and {box} of {info.dtype}")
                piece = StoredPiece(box, span_of(info, path / file[0]), int(file[1]) - 1)
                parts.setdefault(name, []).append(piece)
        except (ValueError, TypeError, LookupError) as error:
            raise damaged(
                path / file[0], "parts of tensors, with their offsets", brief(error)
            ) from error
    tree = {}
    for name, pieces in parts.items():
        ends = (map(int.__add__, piece.box.offsets, piece.box.sizes) for piece in pieces)
        shape = tuple(map(max, zip(*ends, strict=True)))
        try:
            tree[name] = of_parts(name, infos[name].dtype, shape, pieces)
        except ValueError as error:
            expected = f"every element of {name!r}, of shape {list(shape)}"
            raise damaged(path, expected, str(error)) from error
    num_ranks = int(files[-1][1])
    return Archive(path, "sharded safetensors", {}, as_saved=tree, world_size=num_ranks)


# -- writing


@dataclasses.dataclass(frozen=True)
class FileImage:
    """A file to write: where each tensor will lie."""

    name: str
    header: bytes
    tensors: dict[str, TensorInfo]  # by the key that the caller has for each

    @property
    def nbytes(self) -> int:
        return max([len(self.header), *(info.stop for info in self.tensors.values())])

    def create(self, path: Path) -> None:
        """Create the file in its final length. Never overwrites."""
        with open(path, "xb") as created:
            created.write(self.header)
            created.truncate(self.nbytes)

    def write(
        self,
        path: Path,
        contents: Callable[[str], Iterable[tuple[Box, torch.Tensor]]],
        in_threads: bool = False,
    ) -> int:
        """Write values durably, (box, values) by key; return how many bytes."""
        descriptor = os.open(path, os.O_WRONLY)

        def write(item: tuple[str, TensorInfo], _: object = None) -> int:
            key, info = item
            return sum(_write_box(descriptor, info, *each) for each in contents(key))

        try:
            items = list(self.tensors.items())
            nbytes = sum(for_each(items, write) if in_threads else map(write, items))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return nbytes


Described = tuple[str, torch.dtype, tuple[int, ...]]  # name in the file, dtype, shape


def images_of(tensors: Mapping[str, Described], max_file_size: int | None) -> list[FileImage]:
    """Plan files of at most so many bytes. Raises UsageError for what the format cannot hold."""
    files: list[dict[str, Described]] = [{}]
    nbytes = 0
    for key, described in tensors.items():
        name, dtype, shape = described
        if name == METADATA or not is_known(dtype):
            raise UsageError.of(
                "safetensors cannot store this tensor.",
                expected=f"a supported dtype, and another name than {METADATA!r}",
                got=f"{dtype}, as {name!r}",
                where=key,
                fix=("pass dtype=torch.float32, " if dtype.is_floating_point else "")
                + "leave it out, or write another format",
            )
        size = math.prod(shape) * dtype.itemsize
        if max_file_size is not None and nbytes and nbytes + size > max_file_size:
            files.append({})
            nbytes = 0
        files[-1][key] = described
        nbytes += size
    images = []
    for number, of_file in enumerate(files, 1):
        header, infos = encode_header(list(of_file.values()), {"format": "pt"})
        by_name = {info.name: info for info in infos}
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if files[1:] else ONE_FILE
        places = {key: by_name[described[0]] for key, described in of_file.items()}
        images.append(FileImage(name, header, places))
    return images


def write_index(images: Sequence[FileImage], path: Path) -> None:
    """Write the index of several files, durably."""
    infos = [(image.name, info) for image in images for info in image.tensors.values()]
    index = {
        "metadata": {"total_size": sum(info.nbytes for _, info in infos)},
        "weight_map": {info.name: name for name, info in infos},
    }
    write_text(path, json.dumps(index, indent=2))


def _write_box(descriptor: int, info: TensorInfo, box: Box, values: torch.Tensor) -> int:
    """Write the values of a box of a tensor to their place in a file; return how many bytes."""
    data = memory_of(values.to("cpu", info.dtype).contiguous())
    outer = len(box.sizes)  # dims before those that follow one another in the file
    while outer and box.sizes[outer:] == info.shape[outer:]:
        outer -= 1
    strides = row_major_strides(info.shape)
    first = sum(map(int.__mul__, box.offsets, strides))
    run = math.prod(box.sizes[outer:]) * info.dtype.itemsize
    for number, position in enumerate(itertools.product(*map(range, box.sizes[:outer]))):
        place = first + sum(map(int.__mul__, position, strides))
        start, rest = info.start + place * info.dtype.itemsize, data[number * run :][:run]
        while rest:
            num_written = os.pwrite(descriptor, rest, start)
            rest, start = rest[num_written:], start + num_written
    return len(data)


def write_safetensors(
    archive: Archive, path: Path, options: WriteOptions, files: Files, in_one_file: bool = False
) -> None:
    """Write the model's tensors, each once, to a directory: one file, or several of at most
    ``options.max_file_size`` with an index. in_one_file: to a file instead. Raises UsageError for
    an unknown dtype."""

    def contents(name: str) -> Iterator[tuple[Box, torch.Tensor]]:
        for box, values in Elements.all_of(archive.tensors[name], files).chunks():
            yield box, values
            options.tick(values.nbytes)

    tensors = archive.tensors.items()
    described = {name: (name, dtype_to_write(its), its.shape) for name, its in tensors}
    images = images_of(described, None if in_one_file else options.max_file_size)
    if not in_one_file:
        path.mkdir()
    for image in images:
        place = path if in_one_file else path / image.name
        image.create(place)
        image.write(place, contents, in_threads=True)
    if images[1:]:
        write_index(images, path / INDEX)
