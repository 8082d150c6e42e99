"""Files of torch.save: what they hold, without loading it.

A file is a zip archive with the pickled values in ``data.pkl`` and a record per storage, stored as
it is. Files of torch before 1.6 are several pickles and then the storages, one after the other."""

from __future__ import annotations

import functools
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from .._blocks import damaged
from .._header import is_quantized
from .._texts import MAX_TEXT_NBYTES, brief, open_file
from .archive import Checksum, Piece, Span, StoredTensor, row_major, whole
from .pickles import (
    Ignored,
    Make,
    Record,
    Refused,
    Sealed,
    no_value,
    plain,
    refusing,
    shape_of,
    unpickled,
)
from .sharded_records import boxed_tensor, d_tensor, sharded_tensor

ZIP = b"PK\x03\x04"  # how a record of a zip archive begins
_LEGACY = b"\x80\x02\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little") + b"."
_HEADER_NBYTES = 30


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins as torch.save's do. Raises OSError, and CheckpointError for what
    is not a regular file."""
    with open(open_file(path), "rb") as file:
        return file.read(len(_LEGACY)).startswith((ZIP, _LEGACY))


def read_torch_file(path: Path, *, ignored: Collection[str] = ()) -> Any:
    """Return the nested values of a file of torch.save, with StoredTensor leaves that read from it;
    RankPart for the parts of one rank. ignored: as for ``load``.
    Raises CheckpointError and OSError."""
    with open(open_file(path), "rb") as file, refusing(path):
        nbytes = os.fstat(file.fileno()).st_size
        start = os.pread(file.fileno(), len(_LEGACY), 0)
        if start == _LEGACY:
            return _legacy(file.fileno(), path, nbytes, ignored)
        if not start.startswith(ZIP):
            raise _not_torch(path, start)
        return read_torch_range(file.fileno(), path, 0, nbytes, ignored)


def read_torch_range(
    descriptor: int, path: Path, start: int, nbytes: int, ignored: Collection[str] = ()
) -> Any:
    """Return the values of a torch.save file of ``nbytes`` that lies at byte ``start`` of a larger
    file, as ``read_torch_file`` does."""
    with refusing(path):
        records = _Records(descriptor, path, start, nbytes)
        if "constants.pkl" in records:
            raise Refused(
                "a TorchScript archive, which holds a program; save model.state_dict() with "
                "torch.save"
            )
        if "byteorder" in records and records.content("byteorder") != b"little":
            raise Refused("a file in big-endian byte order")
        storages = _storages(path, lambda key, nbytes: records.place(f"data/{key}"))
        return load(records.content("data.pkl"), path, storages, ignored=ignored)


def load(
    data: bytes | io.BytesIO,
    where: Path,
    persistent: Callable[[Any], Any] | None = None,
    *,
    ignored: Collection[str] = (),
) -> Any:
    """Return the value of one pickle: plain containers and values, with StoredTensor,
    RankPart, Record (metadata of torch.distributed.checkpoint) and
    Ignored as leaves. Sizes are tuples, devices and paths are texts, spans of time are seconds,
    namespaces are dicts, and arrays of numpy are tensors.

    where: the file, for errors. persistent: returns the storage of a persistent id. ignored: full
    names of classes whose objects become Ignored. Raises CheckpointError for any other name, and
    for a damaged pickle.
    """
    return unpickled(data, where, _meaning, persistent, ignored)


def _not_torch(path: Path, start: bytes) -> CheckpointError:
    is_old = start[:1] in (b"\x80", b"(", b"}")
    return CheckpointError.of(
        f"{path.name} is not a file of torch.save.",
        expected="a zip archive, as torch.save writes them since torch 1.6",
        got="a pickle" if is_old else f"a file that begins with {start[:8]!r}",
        where=str(path),
        fix="save it again with torch.save; nothing in it was executed",
    )


# -- zip archives


class _Range(io.RawIOBase):
    """A part of a file, as a file of its own for zipfile."""

    def __init__(self, descriptor: int, start: int, nbytes: int) -> None:
        self._descriptor, self._start, self._nbytes, self._at = descriptor, start, nbytes, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max((0, self._at, self._nbytes)[whence] + offset, 0)
        return self._at

    def readinto(self, memory: Any) -> int:
        rest = max(self._nbytes - self._at, 0)
        memory = memoryview(memory)[:rest]
        num_read = os.preadv(self._descriptor, [memory], self._start + self._at)
        self._at += num_read
        return num_read


class _Records:
    """The records of a zip archive that torch.save wrote, by their names without the directory that
    all have in common. Raises Refused for what torch does not write, and CheckpointError for a file
    that was cut off or changed."""

    def __init__(self, descriptor: int, path: Path, start: int, nbytes: int) -> None:
        self._descriptor, self._path, self._start, self._nbytes = descriptor, path, start, nbytes
        self._infos: dict[str, zipfile.ZipInfo] = {}
        try:
            infos = zipfile.ZipFile(_Range(descriptor, start, nbytes)).infolist()
        except Exception as error:  # of many classes, where the directory is damaged
            raise self._broken(f"{brief(error)} (was it copied completely?)") from error
        for info in infos:
            name = info.orig_filename.partition("/")[2]
            if self._infos.setdefault(name, info) is not info:
                raise Refused(f"two records {name!r}")

    def _broken(self, got: str) -> CheckpointError:
        return damaged(self._path, "a complete zip archive, as torch.save writes it", got)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def place(self, name: str) -> Checksum:
        """Return where a record lies in the file. Its CRC-32 is 0 if it was not computed, as with
        ``torch.serialization.set_crc32_options(False)`` and ``skip_data``."""
        if name not in self._infos:
            raise self._broken(f"no record {name!r:.200}")
        info = self._infos[name]
        if info.compress_type or info.compress_size != info.file_size:
            raise Refused(f"the compressed record {name!r}, which torch.save does not write")
        at = max(info.header_offset, 0)  # negative in damaged files
        header = os.pread(self._descriptor, _HEADER_NBYTES, self._start + at)
        lengths = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = at + _HEADER_NBYTES + lengths
        if not header.startswith(ZIP) or start + info.file_size > self._nbytes:
            raise self._broken(f"the record {name!r} without a header, or beyond the end")
        return Checksum(self._start + start, info.file_size, info.CRC)

    def content(self, name: str) -> bytes:
        place = self.place(name)
        if place.nbytes > MAX_TEXT_NBYTES:
            raise Refused(f"{place.nbytes} bytes in {name}; the limit is {MAX_TEXT_NBYTES}")
        content = os.pread(self._descriptor, place.nbytes, place.start)
        if place.crc32 not in (0, found := zlib.crc32(content)):
            raise damaged(self._path, f"checksum {place.crc32:08x} of {name}", f"{found:08x}")
        return content


# -- files of torch before 1.6


def _legacy(descriptor: int, path: Path, nbytes: int, ignored: Collection[str]) -> Any:
    """The storages follow the pickles in the order of a list of their keys: each a number of
    elements in 8 bytes, and the elements."""
    stream = io.BytesIO(os.pread(descriptor, MAX_TEXT_NBYTES, 0))
    _, version, system = (load(stream, path) for _ in range(3))
    if version != 1001 or not isinstance(system, dict) or not system.get("little_endian"):
        raise Refused("another version of the format, or big-endian byte order")
    first, wanted, places = stream.tell(), dict[str, int](), dict[str, Checksum]()

    def storage(key: str, nbytes: int) -> Checksum:
        wanted[key] = nbytes
        return places.get(key, Checksum(0, nbytes, 0))

    load(stream, path, _storages(path, storage), ignored=ignored)
    keys = load(stream, path)
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(wanted):
        raise Refused("other storages than the values need")
    place = stream.tell()
    for key in map(str, keys):
        numel = int.from_bytes(os.pread(descriptor, 8, place), "little")
        if not numel <= wanted[key] <= 16 * numel:
            raise Refused(f"a storage of another size than {wanted[key]} bytes")
        places[key] = Checksum(place + 8, wanted[key], 0)
        place += 8 + wanted[key]
    if place > nbytes:
        raise Refused(f"storages of {place} bytes in a file of {nbytes}")
    stream.seek(first)  # now that the places are known, once more
    return load(stream, path, _storages(path, storage), ignored=ignored)


# -- tensors


class _Storage(NamedTuple):
    """A storage in a file. Immutable, as pickles can refer to it."""

    path: Path
    place: Checksum
    dtype: torch.dtype | None  # None: bytes


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


def _storages(path: Path, place: Callable[[str, int], Checksum]) -> Callable[[Any], _Storage]:
    """Return what gives the storage of a persistent id. place: of a key, and of the number of bytes
    that the pickle has for it."""

    def storage(reference: Any) -> _Storage:
        if not isinstance(reference, tuple) or len(reference) < 5 or reference[0] != "storage":
            raise Refused("a reference to something else than a storage")
        _, kind, key, _, numel, *view = reference
        if not isinstance(kind, Sealed) or kind.name not in STORAGES:
            raise Refused("a storage of an unknown class")
        if type(numel) is not int or numel < 0 or any(view):
            raise Refused("a view of a storage, as torch 0.4 wrote them")
        dtype = STORAGES[kind.name]
        nbytes = numel * (1 if dtype is None else dtype.itemsize)
        return _Storage(path, place(str(key), nbytes), dtype)

    return storage


def _tensor(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    flags: Any = None,
    *,
    dtype: Any = None,
    state: Any = None,
) -> StoredTensor:
    """Return a strided tensor in a storage. offset, strides: in elements. state: attributes. Raises
    Refused if it does not lie in the storage."""
    if not isinstance(storage, _Storage):
        raise Refused("a tensor without a storage")
    if isinstance(flags, dict) and any(flags.values()):
        raise Refused(f"a tensor with the flags {sorted(map(str, flags))}")
    dtype = storage.dtype if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or is_quantized(dtype):
        raise Refused(f"a tensor of the dtype {dtype}")
    shape, steps = shape_of(sizes), shape_of(strides)
    if len(shape) != len(steps) or type(offset) is not int or offset < 0:
        raise Refused(f"a tensor of {len(shape)} dims with {len(steps)} strides")
    end = offset + 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    if 0 in shape:
        steps, offset, end = row_major(shape), 0, 0
    if end * dtype.itemsize > storage.place.nbytes:
        raise Refused(
            f"a tensor that ends at byte {end * dtype.itemsize} of a storage of "
            f"{storage.place.nbytes}"
        )
    checksum = storage.place if storage.place.crc32 else None
    span = Span(storage.path, storage.place.start + offset * dtype.itemsize, steps, checksum)
    return StoredTensor("", dtype, shape, (Piece(whole(shape), span),))


def _tensor_of_dtype(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    *rest: Any,
    state: Any = None,
) -> StoredTensor:
    dtype, *flags = rest
    return _tensor(storage, offset, sizes, strides, False, hooks, *flags, dtype=dtype)


def _parameter(data: Any, *unused: Any, **given: Any) -> Any:
    return data


def _meta_tensor(dtype: Any, sizes: Any, *unused: Any, **given: Any) -> Ignored:
    return Ignored(f"a tensor of {dtype} and shape {list(shape_of(sizes))}, without values")


def _wrapper(kind: Any, *unused: Any, state: Any = None) -> Any:
    """A tensor that wraps others, which its attributes hold."""
    name = kind.name.rpartition(".")[2] if isinstance(kind, Sealed) else ""
    if name == "DTensor":
        fields = Record(name, state=state).fields
        return d_tensor(fields["_local_tensor"], fields["_spec"])
    if name == "ShardedTensor":
        shards, metadata, *_ = state
        return sharded_tensor(shards, metadata)
    if name and kind.make is None:
        return Ignored(kind.name)
    raise Refused(f"a tensor of the class {name}")


# -- names

_FUNCTIONS: dict[str, Make] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
    "torch.Size": lambda sizes=(): shape_of(sizes),
    "torch.device": lambda *parts: ":".join(map(str, parts)),
    "torch.serialization._get_layout": str,
    **dict.fromkeys(("torch.Tensor", "torch._tensor.Tensor", *STORAGES), no_value),
}
# Classes in these modules, and below those with a dot, describe tensors: they become Records.
_DESCRIBING = (
    *("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard."),
    *("torch.distributed.device_mesh", "torch.distributed._mesh_layout"),
    *("torch.distributed.remote_device", "torch.distributed.checkpoint.metadata"),
    *("torch.distributed.checkpoint.filesystem", "torch.nn.parameter"),
    *("fsdp_compat._layout.", "fsdp_compat._state."),
)


@functools.lru_cache(1000)
def _meaning(full_name: str) -> Make | torch.dtype | None:
    """Return what a name in a pickle means, see ``pickles.Table``."""
    if known := _FUNCTIONS.get(full_name) or plain(full_name):
        return known
    module, _, name = full_name.rpartition(".")
    if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
        return dtype
    if module.startswith("fsdp_compat._state.") and name == "_rebuilt":
        return boxed_tensor
    is_class = name.lstrip("_")[:1].isupper() or name == "_remote_device"
    if is_class and f"{module}.".startswith(_DESCRIBING):
        return lambda *args, state=None: Record(full_name, args, state)
    return None
