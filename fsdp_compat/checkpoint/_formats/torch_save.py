"""Files of torch.save: a zip archive with the pickled values in ``data.pkl`` and an uncompressed
record per storage."""

from __future__ import annotations

import functools
import io
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._archive.archive import Archive, Checksum, Span, StoredTensor, in_one_piece, is_user
from ..._archive.blocks import damaged, new_file, sync_directory
from ..._archive.header import is_quantized
from ..._archive.reader import Files
from ..._archive.texts import MAX_TEXT_NBYTES, brief, identity_of, open_file
from ..._comm.host_memory import memory_of
from ..._layout.spec import extent, row_major_strides
from ...errors import CheckpointError
from .pickles import (
    Ignored,
    Make,
    Record,
    Refused,
    Sealed,
    counts_of,
    no_value,
    plain,
    refusing,
    shape_of,
    unpickled,
)
from .sharded_records import boxed_tensor, d_tensor, sharded_tensor
from .writers import Elements, WriteOptions, dtype_to_write, nbytes_to_write

ZIP = b"PK\x03\x04"  # how a record of a zip archive begins
_HEADER_NBYTES = 30


class ReadOptions(NamedTuple):
    """How checkpoints with files of torch.save are read."""

    shapes: Archive | None  # of whole tensors of the model, for flat parameters
    ignore_class: Collection[str]  # full names of classes whose objects are left out


def read_torch_file(path: Path, ignore_class: Collection[str]) -> Any:
    """Return the values of a torch.save file, see ``unpickle``. Raises CheckpointError; OSError."""
    with open(open_file(path), "rb") as file:
        start = os.pread(file.fileno(), 8, 0)
        if not start.startswith(ZIP):
            raise CheckpointError.of(
                f"{path.name} is not a file of torch.save.",
                expected="a zip archive, as torch.save writes them since torch 1.6",
                got=f"a file that begins with {start!r}",
                where=str(path),
                fix="load it with torch.load(path, weights_only=True), and save the result with "
                "torch.save; nothing in it was executed",
            )
        nbytes = os.fstat(file.fileno()).st_size
        return read_torch_range(file.fileno(), path, 0, nbytes, ignore_class)


def read_torch_range(
    descriptor: int, path: Path, start: int, nbytes: int, ignore_class: Collection[str] = ()
) -> Any:
    """Return the values of a torch.save file of ``nbytes`` in a larger file, see ``unpickle``."""
    with refusing(path):
        records = _Records(descriptor, path, start, nbytes)
        if "byteorder" in records and records.content("byteorder") != b"little":
            raise Refused("a file in big-endian byte order")
        return unpickle(records.content("data.pkl"), path, records.storage, ignore_class)


# -- zip archives


class _Range(io.RawIOBase):
    """A part of a file, as a file of its own for zipfile."""

    def __init__(self, descriptor: int, start: int, nbytes: int) -> None:
        self._descriptor, self._start, self._nbytes, self._at = descriptor, start, nbytes, 0

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
    """The records of a torch.save file, by name without the common directory. Raises Refused for
    what torch does not write, and CheckpointError for a truncated or changed file."""

    def __init__(self, descriptor: int, path: Path, start: int, nbytes: int) -> None:
        self._descriptor, self._path, self._start, self._nbytes = descriptor, path, start, nbytes
        self._file = identity_of(descriptor)
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
        """Return where a record lies. Its CRC-32 is 0 if not computed, as by ``skip_data``."""
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

    def storage(self, reference: Any) -> _Storage:
        """Return what a persistent id of the pickle means."""
        if not isinstance(reference, tuple) or len(reference) < 3 or reference[0] != "storage":
            raise Refused("a reference to something else than a storage")
        _, kind, key, *_ = reference
        if not isinstance(kind, Sealed) or kind.name not in STORAGES:
            raise Refused("a storage of an unknown class")
        place = self.place(f"data/{key}")
        return _Storage(self._path, place, STORAGES[kind.name], self._file)

    def content(self, name: str) -> bytes:
        place = self.place(name)
        if place.nbytes > MAX_TEXT_NBYTES:
            raise Refused(f"{place.nbytes} bytes in {name}; the limit is {MAX_TEXT_NBYTES}")
        content = os.pread(self._descriptor, place.nbytes, place.start)
        if place.crc32 not in (0, found := zlib.crc32(content)):
            raise damaged(self._path, f"checksum {place.crc32:08x} of {name}", f"{found:08x}")
        return content


# -- tensors


class _Storage(NamedTuple):
    """A storage in a file. Immutable, as pickles can refer to it."""

    path: Path
    place: Checksum
    dtype: torch.dtype | None  # None: bytes
    file: tuple[int, ...] | None = None


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


def _tensor(
    storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any, state: Any = None
) -> StoredTensor:
    """Return a strided tensor in a storage. rest: requires_grad, hooks, dtype, flags."""
    if not isinstance(storage, _Storage):
        raise Refused("a tensor without a storage")
    flags = [each for each in rest[2:] if isinstance(each, dict) and any(each.values())]
    if flags:
        raise Refused(f"a tensor with the flags {sorted(map(str, flags[0]))}")
    dtype = next((each for each in rest if isinstance(each, torch.dtype)), storage.dtype)
    if dtype is None or is_quantized(dtype):
        raise Refused(f"a tensor of the dtype {dtype}")
    shape, steps = shape_of(sizes), counts_of(strides)
    if len(shape) != len(steps) or type(offset) is not int or offset < 0:
        raise Refused(f"a tensor of {len(shape)} dims with {len(steps)} strides")
    if 0 in shape:
        steps, offset = row_major_strides(shape), 0
    end = offset + extent(shape, steps)
    if end * dtype.itemsize > storage.place.nbytes:
        raise Refused(
            f"a tensor that ends at byte {end * dtype.itemsize} of a storage of "
            f"{storage.place.nbytes}"
        )
    checksum = storage.place if storage.place.crc32 else None
    start = storage.place.start + offset * dtype.itemsize
    span = Span(storage.path, start, steps, checksum, storage.file)
    return in_one_piece("", dtype, shape, span)


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
    **{f"torch._utils._rebuild_tensor{version}": _tensor for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
    "torch.Size": lambda sizes=(): shape_of(sizes),
    "torch.device": lambda *parts: ":".join(map(str, parts)),
    "torch.serialization._get_layout": str,
    **dict.fromkeys(("torch.Tensor", "torch._tensor.Tensor", *STORAGES), no_value),
}
# Classes below these modules describe tensors: they become Records.
_DESCRIBING = ("torch.distributed.", "torch.nn.parameter.", "fsdp_compat._")


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
    if is_class and full_name.startswith(_DESCRIBING):
        return lambda *args, state=None: Record(full_name, args, state)
    return None


unpickle = functools.partial(unpickled, table=_meaning)


# -- writing

_ALIGN_NBYTES = 64  # of the start of each record
# Classes of storages by dtype. All others are storages of bytes.
_KINDS = {
    dtype: getattr(torch, name.removeprefix("torch."))
    for name, dtype in STORAGES.items()
    if dtype is not None
}


def write_torch(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write a torch.save file of ``state_dict_of``, in which tied tensors share storages.
    Raises CheckpointError and OSError."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(state_dict_of(archive))
    with new_file(path) as file, zipfile.ZipFile(file, "w") as target:
        _add(target, "data.pkl", text.getvalue())
        _add(target, ".format_version", b"1")
        _add(target, ".storage_alignment", b"%d" % _ALIGN_NBYTES)
        _add(target, "byteorder", b"little")
        for number, tensor in enumerate(pickler.tensors):
            with _record(target, f"data/{number}", nbytes_to_write(tensor)) as record:
                for _, values in Elements.all_of(tensor, files).chunks():
                    record.write(memory_of(values))
                    options.tick(values.nbytes)
        _add(target, "version", b"3\n")
        checksums = b"".join(info.CRC.to_bytes(4, "little") for info in target.infolist())
        _add(target, ".data/serialization_id", f"{zlib.crc32(checksums):040d}".encode())
    sync_directory(path.parent)


def _record(target: zipfile.ZipFile, name: str, nbytes: int) -> Any:
    """Open a record for writing; its values are aligned, so that they can be mapped."""
    assert target.fp is not None
    info = zipfile.ZipInfo(f"archive/{name}")  # of 1980: the same bytes every time
    info.file_size = nbytes
    is_wide = nbytes > zipfile.ZIP64_LIMIT // 2
    # The header, its field for sizes beyond 4 GiB, and the one of the padding come first.
    head = target.fp.tell() + 30 + len(info.filename) + 20 * is_wide + 4
    gap = -head % _ALIGN_NBYTES
    info.extra = b"FB" + gap.to_bytes(2, "little") + b"Z" * gap
    return target.open(info, "w", force_zip64=is_wide)


def _add(target: zipfile.ZipFile, name: str, content: bytes) -> None:
    with _record(target, name, len(content)) as record:
        record.write(content)


def state_dict_of(archive: Archive) -> Any:
    """Return the values as they were saved, if the archive says so; or else the model's state dict,
    or {"model": ..., "optimizer": ..., **others}."""
    if archive.as_saved is not None:
        return archive.as_saved
    model: OrderedDict[str, Any] = OrderedDict(archive.tensors)
    model.update((name, archive.tensors[first]) for name, first in archive.aliases.items())
    if archive.param_groups is None and not archive.states and not archive.extra:
        return model
    values: dict[str, Any] = {"model": model}
    if archive.param_groups is not None or archive.states:
        values["optimizer"] = {
            "state": {
                _key(archive, name): state[None] if is_user(state) else dict(state)
                for name, state in archive.states.items()
            },
            "param_groups": [
                {**group, "params": [_key(archive, name) for name in group["params"]]}
                for group in archive.param_groups or ()
            ],
        }
    for key, value in archive.extra.items():
        values[key if key not in values else f"extra_{key}"] = value
    return values


def _key(archive: Archive, name: Any) -> Any:
    """Return the key of a parameter's state, as torch.optim has it: a number, where it was one."""
    return int(name) if archive.is_by_number and str(name).isdecimal() else name


class _Reference(NamedTuple):
    persistent_id: tuple[Any, ...]  # of a storage


class _Pickler(pickle.Pickler):
    """Writes StoredTensors as torch does: a call that makes a tensor of a storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[StoredTensor] = []  # whose values the storages hold, by number

    def persistent_id(self, value: Any) -> Any:
        return value.persistent_id if isinstance(value, _Reference) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return NotImplemented
        dtype, key = dtype_to_write(value), str(len(self.tensors))
        self.tensors.append(value)
        # The function that torch itself would call, with arguments of our own.
        function = torch.empty(0, dtype=dtype).__reduce_ex__(2)[0]
        hooks: OrderedDict[str, Any] = OrderedDict()
        rest = (0, value.shape, row_major_strides(value.shape), False, hooks)
        if dtype in _KINDS:
            reference = _Reference(("storage", _KINDS[dtype], key, "cpu", value.numel))
            return function, (reference, *rest)
        kind, nbytes = torch.UntypedStorage, nbytes_to_write(value)
        return function, (_Reference(("storage", kind, key, "cpu", nbytes)), *rest, dtype)
