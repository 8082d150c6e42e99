"""Writing files that torch.load reads, with ``weights_only=True`` and by memory map, too."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from ..._comm.host_memory import memory_of
from .._blocks import sync_directory
from .archive import Archive, StoredTensor, row_major
from .pickle_machine import Ignored, Record
from .reading import Files
from .writing import WriteOptions, dtype_to_write, nbytes_to_write, slabs_to_write

_ALIGN_NBYTES = 64  # of the start of each record
_WIDE = 0xFFFFFFFF  # in the place of a number that stands in the fields of zip64
_ZIP64_FROM = 0xFFFFFFFF  # numbers that stand there
_MAX_16 = 0xFFFF
_LEFT_OUT = (Ignored, Record)
_DOS_DATE = (1 << 5) | 1  # the first day that zip archives can say: the same bytes every time
_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


def write_torch(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write a checkpoint as one file of torch.save: the model's state dict or, with optimizer or
    other values, {"model": ..., "optimizer": {"state": ..., "param_groups": ...}, **others}.

    Tied tensors share their storage. path: must not exist. Tensors go through a buffer of
    ``options.slab_nbytes``. Raises CheckpointError and OSError.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(_values_of(archive))
    with _ZipWriter(path) as target:
        target.add("data.pkl", text.getvalue())
        target.add(".format_version", b"1")
        target.add(".storage_alignment", str(_ALIGN_NBYTES).encode())
        target.add("byteorder", b"little")
        for number, tensor in enumerate(pickler.tensors):
            target.begin(f"data/{number}", nbytes_to_write(tensor))
            for _, values in slabs_to_write(tensor, files, options):
                target.write(memory_of(values))
            target.end()
        target.add("version", b"3\n")
        target.add(".data/serialization_id", f"{target.checksum:040d}".encode())
    sync_directory(path.parent)


def _values_of(archive: Archive) -> Any:
    model: OrderedDict[str, Any] = OrderedDict(archive.tensors)
    for name, first in archive.aliases.items():
        model[name] = archive.tensors[first]
    if archive.param_groups is None and not archive.states and not archive.extra:
        return model
    values: dict[str, Any] = {"model": model}
    if archive.param_groups is not None or archive.states:
        values["optimizer"] = {
            "state": {_key(archive, name): dict(state) for name, state in archive.states.items()},
            "param_groups": [
                {**group, "params": [_key(archive, name) for name in group["params"]]}
                for group in archive.param_groups or ()
            ],
        }
    for key, value in _written(archive.extra).items():
        values[key if key not in values else f"extra_{key}"] = value
    return values


def _written(value: Any) -> Any:
    """Return nested containers without what no file can hold: objects that were left out when they
    were read."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not isinstance(item, _LEFT_OUT)}
        return {key: _written(item) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        items = [None if isinstance(item, _LEFT_OUT) else _written(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _key(archive: Archive, name: Any) -> Any:
    """Return the key of a parameter's state, as torch.optim has it: a number, where it was one."""
    return int(name) if archive.is_by_number and str(name).isdecimal() else name


# -- the pickled values


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Stands for the storage of a tensor in the pickle."""

    number: int
    tensor: StoredTensor


class _Pickler(pickle.Pickler):
    """Writes StoredTensors as torch does it: a call that makes a tensor of a storage. One that
    occurs again is a reference to the first.

    tensors: whose values the storages hold, by number.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[StoredTensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        dtype = dtype_to_write(value.tensor)
        kind = _STORAGES.get(dtype, torch.UntypedStorage)
        numel = value.tensor.numel if dtype in _STORAGES else nbytes_to_write(value.tensor)
        return "storage", kind, str(value.number), "cpu", numel

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return NotImplemented
        dtype = dtype_to_write(value)
        # The function that torch itself would call, with arguments of our own.
        function = torch.empty(0, dtype=dtype).__reduce_ex__(2)[0]
        storage = _Storage(len(self.tensors), value)
        self.tensors.append(value)
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (storage, 0, value.shape, row_major(value.shape), False, hooks)
        return function, args if dtype in _STORAGES else (*args, dtype)


# -- the zip archive


@dataclasses.dataclass
class _Record:
    name: bytes
    start: int  # of its header
    nbytes: int
    checksum: int = 0


class _ZipWriter:
    """Writes a zip archive of records that are stored as they are, and makes it durable at the end.
    A context manager. The file is new."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115 (closed at the end)
        self._records: list[_Record] = []
        self._place = 0
        self._left = 0  # bytes of the open record that are still to come
        self.checksum = 0  # of all contents

    def __enter__(self) -> _ZipWriter:
        return self

    def __exit__(self, kind: object, *unused: object) -> None:
        try:
            if kind is None:
                self._end_archive()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def add(self, name: str, content: bytes) -> None:
        self.begin(name, len(content))
        self.write(memoryview(content))
        self.end()

    def begin(self, name: str, nbytes: int) -> None:
        record = _Record(f"archive/{name}".encode(), self._place, nbytes)
        self._records.append(record)
        self._left = nbytes
        self._put(self._local_header(record))

    def write(self, data: memoryview) -> None:
        record = self._records[-1]
        record.checksum = zlib.crc32(data, record.checksum)
        self._left -= len(data)
        self._put(data)

    def end(self) -> None:
        """Enter the checksum of the open record into its header."""
        record = self._records[-1]
        if self._left:
            raise ValueError(f"{self._left} bytes of {record.name!r} are missing")
        self.checksum = zlib.crc32(record.checksum.to_bytes(4, "little"), self.checksum)
        self._file.seek(record.start + 14)
        self._file.write(_little(4, record.checksum))
        self._file.seek(self._place)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._place += len(data)

    def _local_header(self, record: _Record) -> bytes:
        extra = b""
        if record.nbytes >= _ZIP64_FROM:
            extra = _little(2, 1, 16) + _little(8, record.nbytes, record.nbytes)
        start = record.start + 30 + len(record.name) + len(extra) + 4
        gap = -start % _ALIGN_NBYTES
        extra += b"FB" + _little(2, gap) + b"Z" * gap
        size = _narrow(record.nbytes)
        return (
            b"PK\x03\x04"
            + _little(2, 45 if record.nbytes >= _ZIP64_FROM else 20, 0x800, 0, 0, _DOS_DATE)
            + _little(4, 0, size, size)
            + _little(2, len(record.name), len(extra))
            + record.name
            + extra
        )

    def _end_archive(self) -> None:
        start = self._place
        for record in self._records:
            wide = [value for value in (record.nbytes,) if value >= _ZIP64_FROM] * 2
            wide += [value for value in (record.start,) if value >= _ZIP64_FROM]
            extra = _little(2, 1, 8 * len(wide)) + _little(8, *wide) if wide else b""
            size = _narrow(record.nbytes)
            self._put(
                b"PK\x01\x02"
                + _little(2, 45, 45 if wide else 20, 0x800, 0, 0, _DOS_DATE)
                + _little(4, record.checksum, size, size)
                + _little(2, len(record.name), len(extra), 0, 0, 0)
                + _little(4, 0, _narrow(record.start))
                + record.name
                + extra
            )
        nbytes, num = self._place - start, len(self._records)
        if num >= _MAX_16 or max(start, nbytes) >= _ZIP64_FROM:
            wide_end = self._place
            self._put(
                b"PK\x06\x06"
                + _little(8, 44)
                + _little(2, 45, 45)
                + _little(4, 0, 0)
                + _little(8, num, num, nbytes, start)
            )
            self._put(b"PK\x06\x07" + _little(4, 0) + _little(8, wide_end) + _little(4, 1))
        self._put(
            b"PK\x05\x06"
            + _little(2, 0, 0, min(num, _MAX_16), min(num, _MAX_16))
            + _little(4, _narrow(nbytes), _narrow(start))
            + _little(2, 0)
        )


def _narrow(value: int) -> int:
    return _WIDE if value >= _ZIP64_FROM else value


def _little(nbytes: int, *values: int) -> bytes:
    return b"".join(value.to_bytes(nbytes, "little") for value in values)
