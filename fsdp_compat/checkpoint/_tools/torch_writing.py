"""Writing files that torch.load reads, with ``weights_only=True`` and by memory map, too."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from ..._comm.host_memory import memory_of
from .._blocks import sync_directory
from .archive import Archive, StoredTensor, row_major
from .pickles import Ignored, Record
from .reading import Files
from .torch_save import STORAGES
from .walk import LEFT_OUT, map_leaves
from .writing import Elements, WriteOptions, dtype_to_write, nbytes_to_write

_ALIGN_NBYTES = 64  # of the start of each record
# Classes of storages by dtype. All others are storages of bytes.
_KINDS = {
    dtype: getattr(torch, name.removeprefix("torch."))
    for name, dtype in STORAGES.items()
    if dtype is not None
}


def write_torch(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write a checkpoint as one file of torch.save: the model's state dict or, with optimizer or
    other values, {"model": ..., "optimizer": {"state": ..., "param_groups": ...}, **others}.

    Tied tensors share their storage. path: must not exist. Tensors go through a buffer of
    ``options.slab_nbytes``. Raises CheckpointError and OSError.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    # What a reader left out cannot be written either.
    pickler.dump(map_leaves(state_dict_of(archive), _known))
    with open(path, "xb") as file:
        with zipfile.ZipFile(file, "w") as target:
            _add(target, "data.pkl", text.getvalue())
            _add(target, ".format_version", b"1")
            _add(target, ".storage_alignment", str(_ALIGN_NBYTES).encode())
            _add(target, "byteorder", b"little")
            for number, tensor in enumerate(pickler.tensors):
                with _record(target, f"data/{number}", nbytes_to_write(tensor)) as record:
                    for _, values in Elements.of(tensor, files, options).chunks():
                        record.write(memory_of(values))
                        options.tick(values.nbytes)
            _add(target, "version", b"3\n")
            checksums = b"".join(info.CRC.to_bytes(4, "little") for info in target.infolist())
            _add(target, ".data/serialization_id", f"{zlib.crc32(checksums):040d}".encode())
        file.flush()
        os.fsync(file.fileno())
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


def state_dict_of(archive: Archive) -> dict[str, Any]:
    """Return the model's state dict or, with optimizer or other values, {"model": ...,
    "optimizer": {"state": ..., "param_groups": ...}, **others}, with StoredTensors as leaves."""
    model: OrderedDict[str, Any] = OrderedDict(archive.tensors)
    model.update((name, archive.tensors[first]) for name, first in archive.aliases.items())
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
    for key, value in archive.extra.items():
        values[key if key not in values else f"extra_{key}"] = value
    return values


def _known(leaf: Any, path: str) -> Any:
    return LEFT_OUT if isinstance(leaf, (Ignored, Record)) else leaf


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
        kind = _KINDS.get(dtype, torch.UntypedStorage)
        numel = value.tensor.numel if dtype in _KINDS else nbytes_to_write(value.tensor)
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
        return function, args if dtype in _KINDS else (*args, dtype)
