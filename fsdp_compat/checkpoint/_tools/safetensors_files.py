"""safetensors files: reading a file, an index or a directory, and writing them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch

from ..._comm.host_memory import memory_of
from ...errors import UsageError
from .._header import METADATA, TensorInfo, encode_header, is_known
from .._safetensors_load import tensors_of
from .._safetensors_parts import INDEX, ONE_FILE
from .archive import Archive, Piece, Span, StoredTensor, row_major, whole
from .paths import require_inside
from .reading import Files
from .tree import archive_of
from .work import for_each
from .writing import WriteOptions, dtype_to_write, nbytes_to_write, slabs_to_write


def of_info(info: TensorInfo, path: Path, holder: int | None = None) -> StoredTensor:
    """Return a tensor of a safetensors file."""
    span = Span(path, info.start, row_major(info.shape))
    return StoredTensor(
        info.name, info.dtype, info.shape, (Piece(whole(info.shape), span, holder),)
    )


def read_safetensors(path: Path) -> Archive:
    """Return the content of a file, of the files of an index, or of a directory with either."""
    directory = path if path.is_dir() else path.parent
    found = tensors_of(path)
    tree = {
        name: of_info(info, require_inside(directory, file)) for name, (file, info) in found.items()
    }
    left_out = [
        f"{name}: its dtype {info.packed}, which torch does not have; its bytes are taken as uint8"
        for name, (_, info) in found.items()
        if info.packed
    ]
    return archive_of(path, "safetensors", {"model": tree} if tree else {}, left_out=left_out)


# -- writing


@dataclasses.dataclass
class _PlannedFile:
    tensors: dict[str, StoredTensor]
    nbytes: int = 0


def write_safetensors(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write the model's tensors to a directory: ``model.safetensors``, or several files of at most
    ``options.max_file_nbytes`` with an index, as Hugging Face lays them out. Tied tensors are
    written once. Raises UsageError for a dtype that the format does not know."""
    path.mkdir()
    planned = _planned(archive, options.max_file_nbytes)
    if len(planned) == 1:
        names = [ONE_FILE]
    else:
        names = [
            f"model-{number + 1:05d}-of-{len(planned):05d}.safetensors"
            for number in range(len(planned))
        ]
    for name, file in zip(names, planned, strict=True):
        _write_file(file.tensors, path / name, options, files)
    if len(planned) > 1:
        file_of = {
            tensor: name
            for name, file in zip(names, planned, strict=True)
            for tensor in file.tensors
        }
        total = sum(file.nbytes for file in planned)
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        with open(path / INDEX, "x", encoding="utf-8") as text:
            json.dump(index, text, indent=2)
            text.flush()
            os.fsync(text.fileno())


def write_safetensors_file(
    archive: Archive, path: Path, options: WriteOptions, files: Files
) -> None:
    """Write the model's tensors to one file. Raises as ``write_safetensors`` does."""
    _require_writable(archive)
    _write_file(archive.tensors, path, options, files)


def _planned(archive: Archive, max_file_nbytes: int) -> list[_PlannedFile]:
    _require_writable(archive)
    planned = [_PlannedFile({})]
    for name, tensor in archive.tensors.items():
        nbytes = nbytes_to_write(tensor)
        if planned[-1].tensors and planned[-1].nbytes + nbytes > max_file_nbytes:
            planned.append(_PlannedFile({}))
        planned[-1].tensors[name] = tensor
        planned[-1].nbytes += nbytes
    return planned


def _require_writable(archive: Archive) -> None:
    for name, tensor in archive.tensors.items():
        if name == METADATA or not is_known(dtype_to_write(tensor)):
            raise UsageError.of(
                "safetensors cannot store this tensor.",
                expected=f"a supported dtype, and another name than {METADATA!r}",
                got=f"{dtype_to_write(tensor)}",
                where=name,
                fix=("pass dtype=torch.float32, " if tensor.dtype.is_floating_point else "")
                + "leave it out with exclude, or write another format",
            )


def _write_file(
    tensors: dict[str, StoredTensor], path: Path, options: WriteOptions, files: Files
) -> None:
    described = [(name, dtype_to_write(tensor), tensor.shape) for name, tensor in tensors.items()]
    header, infos = encode_header(described, {"format": "pt"})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_at(descriptor, memoryview(header), 0)
        os.truncate(descriptor, max([len(header), *(info.stop for info in infos)]))

        def write(info: TensorInfo, _: object) -> None:
            size = info.dtype.itemsize
            for first, values in slabs_to_write(tensors[info.name], files, options):
                _write_at(descriptor, _bytes_of(values), info.start + first * size)

        for_each(infos, write, workers=options.workers)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(values: torch.Tensor) -> memoryview:
    return memory_of(values.contiguous())


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        num_written = os.pwrite(descriptor, data, start)
        data, start = data[num_written:], start + num_written
