"""Values of untrusted pickles. Nothing is imported or called on a file's behalf: the names that may
occur are a closed list, and each means a tensor in a file, a plain value, or an inert record."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import CheckpointError
from .._texts import MAX_TEXT_NBYTES, brief
from .archive import NotRead
from .pickle_machine import Global, Ignored, Machine, Record, Refused, RefusedName
from .pickled_names import Names, array_of
from .sharded_records import (
    DTensorRecord,
    ShardedTensorRecord,
    boxed_tensor,
    d_tensor,
    sharded_tensor,
)
from .stored_storages import Storage, StorageKind

__all__ = [
    "MAX_TEXT_NBYTES",
    "DTensorRecord",
    "Ignored",
    "Record",
    "ShardedTensorRecord",
    "load",
    "load_prefix",
    "refused",
]

_MAX_DEPTH = 128
_MAX_VALUES = 50_000_000  # along all ways through shared containers


def load(
    file: BinaryIO | bytes,
    where: Path,
    persistent: Callable[[Any], Any] | None = None,
    *,
    ignored: Collection[str] = (),
) -> Any:
    """Return the value of one pickle: plain containers and values, with StoredTensor,
    DTensorRecord, ShardedTensorRecord, Record (metadata of torch.distributed.checkpoint) and
    Ignored as leaves. Sizes are tuples, devices and paths are texts, spans of time are seconds,
    namespaces are dicts, and arrays of numpy are tensors.

    where: the file, for errors. persistent: returns the value (a Storage) of a persistent id.
    ignored: full names of classes whose objects become Ignored. Raises CheckpointError for any
    other name, and for a damaged pickle.
    """
    data = file if isinstance(file, bytes) else file.read(MAX_TEXT_NBYTES + 1)
    return load_prefix(data, 0, where, persistent, ignored=ignored)[0]


def load_prefix(
    data: bytes,
    start: int,
    where: Path,
    persistent: Callable[[Any], Any] | None = None,
    *,
    ignored: Collection[str] = (),
) -> tuple[Any, int]:
    """Return the value of the pickle that starts at byte ``start``, as ``load`` does, and where it
    ends."""
    try:
        if len(data) - start > MAX_TEXT_NBYTES:
            raise Refused(f"more than {MAX_TEXT_NBYTES} bytes of values that are not tensors")
        machine = Machine(data, Names(ignored).find, persistent, start)
        return _Finished().of(machine.run(), 0), machine.position
    except CheckpointError:
        raise
    except Exception as error:  # whatever wrong arguments raise
        raise refused(where, error) from error


def refused(where: Path, error: BaseException | str) -> CheckpointError:
    """Return the error for a file that is damaged, or holds what is not read."""
    if isinstance(error, RefusedName):
        return NotRead.of(
            f"{where.name} was refused.",
            expected="tensors, numbers, texts and plain containers",
            got=str(error),
            where=str(where),
            fix=f"to leave such objects out, pass ignored=[{error.name!r}] "
            f"(--ignore-class {error.name}); nothing in the file was executed",
        )
    if isinstance(error, Refused):
        got = " ".join(str(error).split())[:500]
    elif isinstance(error, IndexError):
        got = "a file that is damaged or incomplete"
    else:
        got = error if isinstance(error, str) else brief(error)
    return CheckpointError.of(
        f"{where.name} was refused.",
        expected="tensors, numbers, texts and plain containers",
        got=got,
        where=str(where),
        fix="restore the file from an intact copy, or save it again with tensors and plain "
        "values alone; nothing in it was executed",
    )


class _Finished:
    """Replaces the records of tensors and arrays by what they are, once all states are known, and
    limits depth and number of the values. Shared containers stay shared."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any, int]] = {}  # by id: value, result, number of values
        self._open: set[int] = set()

    def of(self, value: Any, depth: int) -> Any:
        return self._counted(value, depth)[0]

    def _counted(self, value: Any, depth: int) -> tuple[Any, int]:
        """Return the result, and how many values a walk through it meets."""
        if not isinstance(value, (dict, list, tuple, set, frozenset, Record)):
            if isinstance(value, (Global, Storage, StorageKind)):
                raise Refused("a class or a storage in the place of a value")
            return value, 1
        if id(value) in self._seen:
            return self._seen[id(value)][1:]
        if id(value) in self._open:
            raise Refused("a container that contains itself")
        if depth > _MAX_DEPTH:
            raise Refused(f"more than {_MAX_DEPTH} levels of containers")
        self._open.add(id(value))
        result, num = self._made(value, depth + 1)
        self._open.discard(id(value))
        if num > _MAX_VALUES:
            raise Refused(f"more than {_MAX_VALUES} values, by references")
        self._seen[id(value)] = value, result, num
        return result, num

    def _made(self, value: Any, depth: int) -> tuple[Any, int]:
        if isinstance(value, Record):
            result = _resolved(value)
            if result is not value:
                return self._counted(result, depth)
            return value, self._filled(value, depth)
        if isinstance(value, dict):
            total = 1
            for key, item in value.items():
                if isinstance(item, _ATOMS):
                    total += 1
                    continue
                value[key], num = self._counted(item, depth)
                total += num
            for key in value:
                if isinstance(key, (Global, StorageKind)):
                    raise Refused("a class as a key")
            return value, total
        if isinstance(value, (set, frozenset)):
            return value, 1 + len(value)
        if all(isinstance(item, _ATOMS) for item in value):
            return value, 1 + len(value)
        parts = [self._counted(item, depth) for item in value]
        total = 1 + sum(num for _, num in parts)
        if isinstance(value, list):
            value[:] = [item for item, _ in parts]
            return value, total
        return tuple(item for item, _ in parts), total

    def _filled(self, record: Record, depth: int) -> int:
        """Finish what a record holds, and return how many values these are."""
        parts = []
        for name in ("args", "fields", "items", "state"):
            if (value := getattr(record, name)) is not None:
                result, num = self._counted(value, depth)
                setattr(record, name, result)
                parts.append(num)
        return 1 + sum(parts)


_ATOMS = (str, int, float, bytes, type(None))


def _resolved(record: Record) -> Any:
    """Return what a record stands for; itself if it stays a record."""
    if record.name == "numpy.ndarray":
        return array_of(record)
    if record.name == "numpy.dtype":
        return str(record.args[0])
    if record.name == "argparse.Namespace":
        return record.fields
    if record.name == "torch.distributed.device_mesh.DeviceMesh":
        return Ignored(record.name)  # these refer to each other in circles
    if record.name == "fsdp_compat._state.formats._rebuilt":
        return boxed_tensor(*record.args)
    if record.name == "torch._utils._rebuild_wrapper_subclass":
        return _subclass(record, None)
    if record.name == "torch._tensor._rebuild_from_type_v2":
        function, _, args, state = record.args
        if not isinstance(function, Global) or function.make is None:
            raise Refused("a tensor that no known function builds")
        made = function.make(*args)
        if isinstance(made, Record) and made.name == "torch._utils._rebuild_wrapper_subclass":
            return _subclass(made, state)
        return made  # attributes of plain tensors are left out
    return record


def _subclass(record: Record, state: Any) -> Any:
    kind = record.args[0]
    if isinstance(kind, Ignored):
        return kind
    name = kind.name if isinstance(kind, Global) else type(kind).__name__
    if name == "DTensor":
        attributes = Record(name)
        attributes.set_state(state)
        return d_tensor(_plain(attributes.fields["_local_tensor"]), attributes.fields["_spec"])
    if name == "ShardedTensor" and isinstance(state, tuple) and len(state) == 5:
        for shard in state[0]:
            shard.fields["tensor"] = _plain(shard.fields["tensor"])
        return sharded_tensor(state[0], state[1])
    raise Refused(f"a tensor of the class {name}")


def _plain(value: Any) -> Any:
    """Return the tensor that a record with attributes holds."""
    return _resolved(value) if isinstance(value, Record) else value
