"""Files of torch.save: what they hold, without loading it.

A file is a zip archive with the pickled values in ``data.pkl`` and a record per storage, stored as
it is. Files of torch before 1.6 are several pickles and then the storages, one after the other."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from ...errors import CheckpointError
from .._blocks import damaged
from .._header import is_quantized
from .._texts import MAX_TEXT_NBYTES, brief, open_file
from .archive import Checksum, Piece, Span, StoredTensor, row_major, whole
from .pickles import (
    PLAIN,
    Ignored,
    Of,
    Record,
    Refused,
    Sealed,
    StandIn,
    of_arguments,
    record_of,
    refused,
    shape_of,
    unpickled,
)
from .sharded_records import boxed_tensor, d_tensor, sharded_tensor

_ZIP = b"PK\x03\x04"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_START = b"\x80\x02\x8a\x0a" + _LEGACY_MAGIC.to_bytes(10, "little") + b"."
_LOCAL_HEADER_NBYTES = 30


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins as torch.save's do. Raises OSError, and CheckpointError for what
    is not a regular file."""
    with open(open_file(path), "rb") as file:
        start = file.read(len(_LEGACY_START))
    return start.startswith(_ZIP) or start == _LEGACY_START


def read_torch_file(path: Path, *, ignored: Collection[str] = ()) -> Any:
    """Return the nested values of a file of torch.save, with StoredTensor leaves that read from it;
    DTensorRecord and ShardedTensorRecord for the parts of one rank. ignored: as for ``load``.
    Raises CheckpointError and OSError."""
    with open(open_file(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        start = file.read(len(_LEGACY_START))
        if start == _LEGACY_START:
            file.seek(0)
            return _guarded(path, lambda: _legacy(file, path, nbytes, ignored))
        if not start.startswith(_ZIP):
            raise _not_torch(path, start)
        return _guarded(path, lambda: _zipped(file, path, 0, nbytes, ignored))


def records_at(path: Path, start: int, nbytes: int, *, ignored: Collection[str] = ()) -> Any:
    """Return the values of a torch.save file of ``nbytes`` that lies in a larger file at byte
    ``start``, as ``read_torch_file`` does."""
    with open(open_file(path), "rb") as file:
        end = os.fstat(file.fileno()).st_size
        if not 0 <= start <= start + nbytes <= end:
            raise refused(path, f"bytes {start} to {start + nbytes} of {end}")
        return _guarded(path, lambda: _zipped(file, path, start, nbytes, ignored))


def load(
    data: bytes | io.BytesIO,
    where: Path,
    persistent: Callable[[Any], Any] | None = None,
    *,
    ignored: Collection[str] = (),
) -> Any:
    """Return the value of one pickle: plain containers and values, with StoredTensor,
    DTensorRecord, ShardedTensorRecord, Record (metadata of torch.distributed.checkpoint) and
    Ignored as leaves. Sizes are tuples, devices and paths are texts, spans of time are seconds,
    namespaces are dicts, and arrays of numpy are tensors.

    where: the file, for errors. persistent: returns the storage of a persistent id. ignored: full
    names of classes whose objects become Ignored. Raises CheckpointError for any other name, and
    for a damaged pickle.
    """
    return unpickled(data, where, _meaning, persistent, ignored)


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # whatever wrong values raise
        raise refused(path, error) from error


def _not_torch(path: Path, start: bytes) -> CheckpointError:
    is_old = start[:1] in (b"\x80", b"(", b"}")
    return CheckpointError.of(
        f"{path.name} is not a file of torch.save.",
        expected="a zip archive, as torch.save writes them since torch 1.6",
        got="a pickle" if is_old else f"a file that begins with {start[:8]!r}",
        where=str(path),
        fix="save it again with torch.save; nothing in it was executed",
    )


# -- storages


class _Storage(NamedTuple):
    """A storage in a file. dtype: None for bytes. Immutable, as pickles can refer to it."""

    path: Path
    start: int  # of its first byte
    nbytes: int
    dtype: torch.dtype | None
    checksum: Checksum | None = None


STORAGES: dict[str, torch.dtype | None] = {
    **{"torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64},
    **{"torch.HalfStorage": torch.float16, "torch.BFloat16Storage": torch.bfloat16},
    **{"torch.ByteStorage": torch.uint8, "torch.CharStorage": torch.int8},
    **{"torch.ShortStorage": torch.int16, "torch.IntStorage": torch.int32},
    **{"torch.LongStorage": torch.int64, "torch.BoolStorage": torch.bool},
    **{"torch.ComplexFloatStorage": torch.complex64},
    **{"torch.ComplexDoubleStorage": torch.complex128},
    **{"torch.UntypedStorage": None, "torch.storage.UntypedStorage": None},
}


class _Storages:
    """The storages that the pickle of a file refers to. find: returns where the bytes of a key lie,
    given how many they are."""

    def __init__(self, path: Path, find: Callable[[str, int], tuple[int, Checksum | None]]) -> None:
        self._path, self._find = path, find
        self.found: dict[str, _Storage] = {}

    def __call__(self, reference: Any) -> _Storage:
        if not isinstance(reference, tuple) or len(reference) < 5 or reference[0] != "storage":
            raise Refused("a reference to something else than a storage")
        _, kind, key, _, numel, *view = reference
        if not isinstance(kind, Sealed) or kind.full_name not in STORAGES:
            raise Refused("a storage of an unknown class")
        if type(numel) is not int or numel < 0 or any(view):
            raise Refused("a view of a storage, as torch 0.4 wrote them")
        dtype = STORAGES[kind.full_name]
        nbytes = numel * (1 if dtype is None else dtype.itemsize)
        start, checksum = self._find(str(key), nbytes)
        storage = _Storage(self._path, start, nbytes, dtype, checksum)
        if self.found.setdefault(str(key), storage)[3] != dtype:
            raise Refused(f"storage {str(key)[:50]!r} twice, and different")
        return storage


# -- zip archives


class _Window:
    """A part of a file, as a file of its own for zipfile."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._place = file, start, nbytes, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = (0, self._place, self._nbytes)[whence] + offset
        if self._place < 0:
            raise ValueError("a place before the file")
        return self._place

    def read(self, nbytes: int | None = -1) -> bytes:
        rest = max(self._nbytes - self._place, 0)
        self._file.seek(self._start + self._place)
        found = self._file.read(rest if nbytes is None or nbytes < 0 else min(nbytes, rest))
        self._place += len(found)
        return found


class _Entry(NamedTuple):
    """A record of a zip archive. crc32: 0 if it was not computed, as with
    ``torch.serialization.set_crc32_options(False)`` and ``skip_data``."""

    start: int  # of its content, in the window
    nbytes: int
    crc32: int


class _Archive:
    """The records of a zip archive that torch.save wrote, by their names without the directory that
    all have in common. Raises Refused for what torch does not write, and CheckpointError for a file
    that was cut off or changed."""

    def __init__(self, window: _Window, path: Path) -> None:
        self._window, self._path = window, path
        try:
            with zipfile.ZipFile(window) as archive:
                infos, end = archive.infolist(), archive.start_dir
        except Exception as error:  # of many classes, where the directory is damaged
            raise self._broken(f"{brief(error)} (was it copied completely?)") from error
        infos.sort(key=lambda info: info.header_offset)
        ends = [info.header_offset for info in infos[1:]] + [end]
        self._infos: dict[str, tuple[zipfile.ZipInfo, int]] = {}  # and where the next one begins
        for info, limit in zip(infos, ends, strict=True):
            name = info.orig_filename.partition("/")[2]
            if self._infos.setdefault(name, (info, limit))[0] is not info:
                raise Refused(f"two records {name!r}")

    def _broken(self, got: str) -> CheckpointError:
        return damaged(self._path, "a complete zip archive, as torch.save writes it", got)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def entry(self, name: str) -> _Entry:
        if name not in self._infos:
            raise self._broken(f"no record {name[:200]!r}")
        info, limit = self._infos[name]
        self._window.seek(info.header_offset)
        head = self._window.read(_LOCAL_HEADER_NBYTES)
        if head[:4] != _ZIP or len(head) < _LOCAL_HEADER_NBYTES:
            raise self._broken(f"the record {name!r} without a header")
        if any((info.compress_type, *head[8:10])) or info.compress_size != info.file_size:
            raise Refused(f"the compressed record {name!r}, which torch.save does not write")
        if info.flag_bits & 0x2041:
            raise Refused(f"the encrypted record {name!r}")
        lengths = [int.from_bytes(head[at : at + 2], "little") for at in (26, 28)]
        encoding = "utf-8" if info.flag_bits & 0x800 else "cp437"
        if self._window.read(lengths[0]) != info.orig_filename.encode(encoding):
            raise self._broken(f"the record {name!r} under another name")
        start = info.header_offset + _LOCAL_HEADER_NBYTES + sum(lengths)
        if start + info.file_size > limit:
            raise self._broken(f"the record {name!r} that reaches into the next one")
        return _Entry(start, info.file_size, info.CRC)

    def content(self, name: str) -> bytes:
        entry = self.entry(name)
        if entry.nbytes > MAX_TEXT_NBYTES:
            raise Refused(f"{entry.nbytes} bytes in {name}; the limit is {MAX_TEXT_NBYTES}")
        self._window.seek(entry.start)
        content = self._window.read(entry.nbytes)
        if entry.crc32 not in (0, found := zlib.crc32(content)):
            raise damaged(self._path, f"checksum {entry.crc32:08x} of {name}", f"{found:08x}")
        return content


def _zipped(file: BinaryIO, path: Path, start: int, nbytes: int, ignored: Collection[str]) -> Any:
    archive = _Archive(_Window(file, start, nbytes), path)
    if "constants.pkl" in archive:
        raise Refused(
            "a TorchScript archive, which holds a program; save model.state_dict() with torch.save"
        )
    if "byteorder" in archive and archive.content("byteorder") != b"little":
        raise Refused("a file in big-endian byte order")

    def find(key: str, wanted: int) -> tuple[int, Checksum | None]:
        entry = archive.entry(f"data/{key}")
        if wanted > entry.nbytes:
            raise Refused(f"storage {key[:50]!r} of {wanted} bytes in a record of {entry.nbytes}")
        at = start + entry.start
        return at, Checksum(at, entry.nbytes, entry.crc32) if entry.crc32 else None

    return load(archive.content("data.pkl"), path, _Storages(path, find), ignored=ignored)


# -- files of torch before 1.6


def _legacy(file: BinaryIO, path: Path, nbytes: int, ignored: Collection[str]) -> Any:
    """The storages follow the pickles in the order of a list of their keys: each a number of
    elements in 8 bytes, and the elements."""
    stream = io.BytesIO(file.read(MAX_TEXT_NBYTES))
    _, version, system = (load(stream, path) for _ in range(3))
    if version != 1001 or not isinstance(system, dict) or not system.get("little_endian"):
        raise Refused("another version of the format, or big-endian byte order")
    first, places = stream.tell(), dict[str, int]()
    storages = _Storages(path, lambda key, nbytes: (places.get(key, 0), None))
    load(stream, path, storages, ignored=ignored)
    keys = load(stream, path)
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages.found):
        raise Refused("other storages than the values need")
    place = stream.tell()
    for key in map(str, keys):
        _, _, size, dtype, _ = storages.found[key]
        file.seek(place)
        if int.from_bytes(file.read(8), "little") * (dtype or torch.uint8).itemsize != size:
            raise Refused(f"a storage of another size than {size} bytes")
        places[key] = place + 8
        place += 8 + size
    if place > nbytes:
        raise Refused(f"storages of {place} bytes in a file of {nbytes}")
    stream.seek(first)  # now that the places are known, once more
    return load(stream, path, storages, ignored=ignored)


# -- tensors


def tensor_in(
    storage: Any, offset: Any, sizes: Any, strides: Any, dtype: Any = None
) -> StoredTensor:
    """Return a strided tensor in a storage. offset, strides: in elements. Raises Refused if it does
    not lie in the storage."""
    if not isinstance(storage, _Storage):
        raise Refused("a tensor without a storage")
    dtype = storage.dtype if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or is_quantized(dtype):
        raise Refused(f"a tensor of the dtype {dtype}")
    shape, steps = shape_of(sizes), shape_of(strides)
    if len(shape) != len(steps) or type(offset) is not int or offset < 0:
        raise Refused(f"a tensor of {len(shape)} dims with {len(steps)} strides")
    if 0 in shape:
        steps, last = row_major(shape), 0
        offset = min(offset, storage.nbytes // dtype.itemsize)
    else:
        last = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    if (offset + last) * dtype.itemsize > storage.nbytes:
        raise Refused(
            f"a tensor that ends at byte {(offset + last) * dtype.itemsize} of a storage of "
            f"{storage.nbytes}"
        )
    start = storage.start + offset * dtype.itemsize
    span = Span(storage.path, start, steps, storage.checksum)
    return StoredTensor("", dtype, shape, (Piece(whole(shape), span),))


def _tensor(made: StandIn, of: Of) -> StoredTensor:
    """storage, offset, sizes, strides; from version 2 on requires_grad and hooks, in version 3 the
    dtype, and flags."""
    storage, offset, sizes, strides, *rest = made.args
    rest = [of(each) for each in rest[2:]]
    dtype = rest.pop(0) if type(made).name == "_rebuild_tensor_v3" else None
    if rest and isinstance(rest[0], dict) and any(rest[0].values()):
        raise Refused(f"a tensor with the flags {sorted(map(str, rest[0]))}")
    return tensor_in(storage, offset, of(sizes), of(strides), dtype)


def _data(made: StandIn, of: Of) -> Any:
    """The tensor of a parameter, without its attributes."""
    return of(made.args[0])


def _meta_tensor(dtype: Any, sizes: Any, *unused: Any) -> Ignored:
    return Ignored(f"a tensor of {dtype} and shape {list(shape_of(sizes))}, without values")


def _with_attributes(made: StandIn, of: Of) -> Any:
    """A tensor of a subclass, or with attributes: those of plain tensors are left out."""
    function, _, args, state = made.args
    if not isinstance(function, Sealed) or not isinstance(args, tuple):
        raise Refused("a tensor that no known function builds")
    if function.name != "_rebuild_wrapper_subclass":
        return of(function(*args))
    kind = args[0]
    if isinstance(kind, Sealed) and kind.name == "DTensor":
        fields = Record("DTensor", (), of(state)).fields
        return d_tensor(fields["_local_tensor"], fields["_spec"])
    if isinstance(kind, Sealed) and kind.name == "ShardedTensor" and isinstance(state, tuple):
        shards, metadata, *_ = state
        return sharded_tensor(of(shards), of(metadata))
    return of(function(*args))


def _subclass(made: StandIn, of: Of) -> Ignored:
    kind = made.args[0]
    if isinstance(kind, Sealed) and isinstance(found := of(kind()), Ignored):
        return found
    raise Refused(f"a tensor of the class {getattr(kind, '__name__', '')}")


def _mesh(made: StandIn, of: Of) -> Record:
    """A mesh. Others refer to it, and it to them, in circles: only its sizes are taken."""
    fields = made.state if isinstance(made.state, dict) else {}
    wanted = ("mesh", "_mesh", "_layout", "_coordinate_on_dim")
    return Record(
        type(made).full_name, (), {key: of(fields[key]) for key in wanted & fields.keys()}
    )


def _refuse(made: StandIn, of: Of) -> Any:
    raise Refused(f"an object of {type(made).name} in the place of a value")


# -- names

_FUNCTIONS: dict[tuple[str, str], Callable[[StandIn, Of], Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _data,
    ("torch._utils", "_rebuild_parameter_with_state"): _data,
    ("torch._utils", "_rebuild_wrapper_subclass"): _subclass,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): of_arguments(_meta_tensor),
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
    ("torch", "Size"): of_arguments(lambda sizes=(): shape_of(sizes)),
    ("torch", "device"): of_arguments(lambda *parts: ":".join(map(str, parts))),
    ("torch.serialization", "_get_layout"): of_arguments(str),
    ("torch.distributed.device_mesh", "DeviceMesh"): _mesh,
    ("torch", "Tensor"): _refuse,
    ("torch._tensor", "Tensor"): _refuse,
}
# Classes in these modules, and below those with a dot, describe tensors: they become Records.
_DESCRIBING = (
    *("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard."),
    *("torch.distributed.device_mesh", "torch.distributed._mesh_layout"),
    *("torch.distributed.remote_device", "torch.distributed.checkpoint.metadata"),
    *("torch.distributed.checkpoint.filesystem", "torch.nn.parameter"),
    *("fsdp_compat._layout.", "fsdp_compat._state."),
)


def _meaning(module: str, name: str) -> Any:
    """Return what a name in a pickle means, see ``pickles.Table``."""
    if f"{module}.{name}" in STORAGES:
        return _refuse
    if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
        return dtype
    if known := _FUNCTIONS.get((module, name)) or PLAIN.get((module, name)):
        return known
    if module.startswith("fsdp_compat._state.") and name == "_rebuilt":
        return of_arguments(boxed_tensor)
    is_class = name.lstrip("_")[:1].isupper() or name == "_remote_device"
    return record_of if is_class and f"{module}.".startswith(_DESCRIBING) else None
