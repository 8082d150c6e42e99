"""Values of untrusted pickles. Nothing is imported or called on a file's behalf.

Every name in a pickle is looked up in a closed table and means a *stand-in*: a class whose objects
only keep what the pickle says about them. At the end the values are copied, within limits of depth
and number, and functions of this package make values of the stand-ins.

Not limited: the time and memory that ``pickle.Unpickler`` takes for a crafted pickle. Like
torch.load it may run out of memory, or of stack, where keys are tuples nested 100,000 deep."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import datetime
import functools
import io
import math
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..._archive.archive import NotRead, StoredTensor, of_memory
from ..._archive.texts import brief
from ...errors import CheckpointError

_MAX_DEPTH = 128
_MAX_VALUES = 50_000_000  # or a value per byte
_MAX_NAME_LENGTH = 200
_MAX_DIMS = 64
_MAX_NUMEL = 1 << 60
_MAX_KEY_LENGTH = 1000  # characters of a tuple that is a key


class Refused(ValueError):
    """The pickle is damaged, or asks for something that is not in the table."""


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Stands for an object that was left out."""

    name: str  # of its class

    def __repr__(self) -> str:
        return f"<ignored: {self.name}>"


@dataclasses.dataclass(eq=False, repr=False)
class Record:
    """An object of a class that is known, as its pickle describes it. Compared by identity."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None  # attributes, or a pair of attributes and slots, or anything else

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The attributes."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        found = (part.items() for part in parts if isinstance(part, dict))
        return {str(key): item for items in found for key, item in items}

    def __repr__(self) -> str:
        return f"<{self.name}>"


Make = Callable[..., Any]
# ^ makes the value of a stand-in from the arguments of its call and, if they were set later, from
# "state", "elements" and "items"
Table = Callable[[str], Make | torch.dtype | None]
# ^ returns what the full name of a class or a function means; None: refused


@contextlib.contextmanager
def refusing(where: Path) -> Iterator[None]:
    """Raise CheckpointError for whatever damaged pickles and wrong values raise inside."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise refused(where, error) from error


def refused(
    where: Path,
    error: Exception | str,
    fix: str = "restore the file from an intact copy, or save it again with tensors and plain "
    "values alone; nothing in it was executed",
    kind: type[CheckpointError] = CheckpointError,
) -> CheckpointError:
    """Return the error for a file that is damaged, or holds what is not read."""
    return kind.of(
        f"{where.name} was refused.",
        expected="tensors, numbers, strings and plain containers",
        got=" ".join(str(error).split())[:500]
        if isinstance(error, Refused | str)
        else brief(error),
        where=str(where),
        fix=fix,
    )


def unpickled(
    data: bytes,
    where: Path,
    persistent: Callable[[Any], Any] | None = None,
    ignore_class: Collection[str] = (),
    *,
    table: Table,
) -> Any:
    """Return the value of one pickle: plain containers and values, with StoredTensor, RankPart,
    Record (metadata of dcp) and Ignored as leaves. Sizes become tuples, devices and paths texts,
    time spans seconds, namespaces dicts, arrays tensors. persistent: returns the storage of an id.
    ignore_class: full names of classes. Raises CheckpointError for any name that is not in the
    table, and for damage."""
    with refusing(where):
        if getattr(copyreg, "_extension_cache", None):
            raise Refused("names that this program has registered with copyreg.add_extension")
        unpickler = _Unpickler(data, where, table, ignore_class)
        if persistent is not None:
            unpickler.persistent_load = persistent  # type: ignore[method-assign]
        return _Values(max(_MAX_VALUES, len(data))).of(unpickler.load())


# -- what the Unpickler makes


class Sealed(type):
    """The class of stand-ins. A pickle can set attributes of classes, but not of these."""

    name: str  # with that of its module
    make: Make | None  # None: its objects are ignored

    def __setattr__(cls, name: str, value: Any) -> None:
        raise Refused("a state for a class")


class StandIn(metaclass=Sealed):
    """An object, or the result of a call, of a name of the table."""

    __slots__ = ("args", "given")
    args: tuple[Any, ...]
    given: dict[str, Any]  # what was set later

    def __new__(cls, *args: Any) -> StandIn:
        self = super().__new__(cls)
        self.args, self.given = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.given["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.given.setdefault("items", {})[key] = value

    def append(self, value: Any) -> None:
        self.given.setdefault("elements", []).append(value)


@functools.lru_cache(1000)
def _stand_in(name: str, make: Make | None) -> Sealed:
    return Sealed(name, (StandIn,), {"__slots__": (), "name": name, "make": make})


class _Function:
    """A function that is called while the pickle is read."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, state: Any) -> None:
        raise Refused("a state for a function")


def _with_attributes(function: Any, kind: Any, args: Any, state: Any) -> StandIn:
    """``torch._tensor._rebuild_from_type_v2``: calls another function of the table."""
    if not isinstance(function, Sealed) or not isinstance(args, tuple):
        raise Refused("a tensor that no known function builds")
    made: StandIn = function(*args)
    made.__setstate__(state)
    return made


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, where: Path, table: Table, ignore_class: Collection[str]
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")  # of the texts of Python 2
        self._where, self._table, self._ignored = where, table, ignore_class
        self._known: dict[str, Any] = {
            "builtins.getattr": _Function(self._inside),
            "__builtin__.getattr": _Function(self._inside),
            "torch._tensor._rebuild_from_type_v2": _Function(_with_attributes),
        }

    def find_class(self, module: str, name: str) -> Any:
        return self._meaning(f"{module}.{name}")

    def _meaning(self, name: str) -> Any:
        if name not in self._known:
            found = self._table(name)
            if found is None and name not in self._ignored:
                name = name[:_MAX_NAME_LENGTH]
                raise refused(
                    self._where,
                    f"{name}, which is not a dense tensor or a plain value",
                    f"to leave such objects out, set ignore_class=[{name!r}] (--ignore-class "
                    f"{name}) in checkpoint.load(path, ...); nothing in the file was executed",
                    NotRead,
                )
            is_dtype = isinstance(found, torch.dtype)
            self._known[name] = found if is_dtype else _stand_in(name, found)
        return self._known[name]

    def _inside(self, owner: Any, name: Any) -> Any:
        """``getattr``, by which protocol 2 names a class inside of a class."""
        if isinstance(owner, Sealed) and isinstance(name, str):
            return self._meaning(f"{owner.name}.{name}")
        raise Refused("getattr, which runs code")


# -- from stand-ins to values

_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_ATOMS = frozenset({int, float, bool, type(None), bytes, bytearray, complex, torch.dtype})


class _Values:
    """Copies the values of one pickle. Shared containers stay shared."""

    def __init__(self, most: int) -> None:
        self._most = most  # along all ways through shared containers
        self._done: dict[int, tuple[Any, Any, int]] = {}  # by id: value, result, number of values
        self._depth = self._num = 0

    def of(self, value: Any) -> Any:
        """Return what a value stands for. Raises Refused, and whatever wrong values raise."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is str:
            return value if value.isascii() else value.encode().decode()  # no half surrogates
        if id(value) in self._done:
            _, result, num = self._done[id(value)]
            self._num += num
        else:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise Refused(f"more than {_MAX_DEPTH} levels of containers, or one in itself")
            before = self._num
            result = self._made(value) if type(kind) is Sealed else self._copied(value, kind)
            self._done[id(value)] = value, result, self._num - before
            self._depth -= 1
        if self._num > self._most:
            raise Refused(f"more than {self._most} values, by references")
        return result

    def _made(self, value: StandIn) -> Any:
        self._num += 1
        kind: Any = type(value)
        if kind.make is None:
            return Ignored(kind.name)
        # Meshes refer to others, and those to them.
        self._done[id(value)] = value, Ignored(kind.name), 1
        given = {name: self.of(item) for name, item in value.given.items()}
        return kind.make(*map(self._argument, value.args), **given)

    def _argument(self, value: Any) -> Any:
        kind = type(value)
        is_value = kind in _ATOMS or kind in _CONTAINERS or kind is str or type(kind) is Sealed
        return self.of(value) if is_value else value

    def _copied(self, value: Any, kind: Any) -> Any:
        if kind not in _CONTAINERS:
            raise Refused("a class, a function or a storage in place of a value")
        self._num += 1 + len(value)
        of = self.of
        if kind is dict:
            return {_key(of(key)): of(item) for key, item in value.items()}
        if kind in (set, frozenset):
            return kind(_key(of(item)) for item in value)
        for item in value:
            if type(item) not in _ATOMS:
                return kind([of(item) for item in value])
        return value


def _key(key: Any) -> Any:
    """Return a key. Raises Refused for a long or nested tuple, as its text is part of names."""
    if isinstance(key, tuple):
        nchars = sum(len(part) if isinstance(part, (str, bytes)) else 1 for part in key)
        if nchars > _MAX_KEY_LENGTH or any(isinstance(part, (tuple, frozenset)) for part in key):
            raise Refused(f"a key of {nchars} characters, or that is a nested tuple")
    return key


def counts_of(value: Any) -> tuple[int, ...]:
    """Return a short sequence of numbers from 0 on, such as strides. Raises Refused."""
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIMS:
        raise Refused("a shape that is not a short sequence")
    if not all(type(number) is int and 0 <= number < _MAX_NUMEL for number in value):
        raise Refused("a shape that is not whole numbers from 0 on, below 2**60")
    return tuple(value)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the sizes of a pickled shape. Raises Refused."""
    shape = counts_of(value)
    if math.prod(size or 1 for size in shape) >= _MAX_NUMEL:
        raise Refused("a shape of more than 2**60 elements")
    return shape


# -- values of the standard library and of numpy


def no_value(*args: Any, **given: Any) -> Any:
    """Refuse an object of a class that other names have as an argument."""
    raise Refused("a call of a class, which is only known as an argument")


def _mapping(*args: Any, items: Any = (), state: Any = None) -> dict[Any, Any]:
    """A dict, of pairs or of another mapping, and of items that were set later."""
    given: Any = next((arg for arg in args if not isinstance(arg, Sealed)), ())
    return {_key(key): value for key, value in dict(given).items()} | dict(items)


def _list(items: Iterable[Any] = (), *unused: Any, elements: Iterable[Any] = ()) -> list[Any]:
    return [*items, *elements]


def _set(items: Iterable[Any] = ()) -> set[Any]:
    return set(map(_key, items))


def _bytes(content: Any = b"", encoding: Any = "latin-1") -> bytes:
    """Bytes, which protocol 2 pickles as a text in latin-1."""
    if isinstance(content, (bytes, bytearray)):
        return bytes(content)
    if not isinstance(content, str) or encoding not in ("latin1", "latin-1"):
        raise Refused(f"_codecs.encode to {str(encoding)[:50]}")
    return content.encode("latin-1")


_datetime: Any = datetime.datetime  # takes the ten bytes that pickles hold


def _path(*parts: Any) -> str:
    return str(PurePosixPath(*map(str, parts)))


_NUMPY_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


def _numpy_dtype(letters: Any, *unused: Any, state: Any = (3, "<")) -> Any:
    """Return the dtype of torch for numpy's letters of kind and size; a text for other dtypes."""
    kind, size = letters[:1], letters[1:]
    if state[1] != ">" and kind in _NUMPY_KINDS and size in ("1", "2", "4", "8", "16"):
        name = _NUMPY_KINDS[kind] + ("" if kind == "b" else str(8 * int(size)))
        return getattr(torch, name, letters)
    return f"{state[1]}{letters}"


def _array(content: Any, dtype: Any, shape: Any, order: Any = "C") -> StoredTensor:
    sizes = shape_of(shape)
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"a numpy array of {str(dtype)[:50]!r}: only arrays of numbers are read")
    raw = content if isinstance(content, bytearray) else _bytes(content)
    if math.prod(sizes) * dtype.itemsize != len(raw):
        raise Refused(f"a numpy array of shape {list(sizes)} in {len(raw)} bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read-only, and nothing writes to them
        values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    if order == "F":
        return of_memory("", values.view(sizes[::-1]).permute(*reversed(range(len(sizes)))))
    return of_memory("", values.view(sizes))


def _array_of_state(*unused: Any, state: Any) -> StoredTensor:
    _, shape, dtype, is_column_major, content = state
    return _array(content, dtype, shape, "F" if is_column_major else "C")


def _numpy_scalar(dtype: Any, content: Any) -> Any:
    (piece,) = _array(content, dtype, ()).pieces
    return piece.source.item()  # type: ignore[union-attr]


PLAIN: dict[str, Make] = {
    **dict.fromkeys(("builtins.dict", "collections.OrderedDict"), _mapping),
    **dict.fromkeys(("collections.defaultdict", "collections.Counter"), _mapping),
    **dict.fromkeys(("builtins.list", "collections.deque"), _list),
    **dict.fromkeys(("builtins.bytes", "_codecs.encode"), _bytes),
    "_io.BytesIO": lambda state: io.BytesIO(_bytes(state[0])),
    "builtins.bytearray": lambda *args: bytearray(_bytes(*args)),
    "builtins.complex": complex,
    "builtins.frozenset": lambda *args: frozenset(_set(*args)),
    "builtins.set": _set,
    "builtins.slice": lambda *args: args,
    "builtins.tuple": lambda items=(): tuple(items),
    **dict.fromkeys((f"builtins.{name}" for name in ("int", "float", "str", "bool")), no_value),
    "argparse.Namespace": lambda state=None: Record("", state=state).fields,
    "datetime.datetime": lambda content: _datetime(_bytes(content)).isoformat(),
    "datetime.timedelta": lambda *parts: datetime.timedelta(*parts).total_seconds(),
    **dict.fromkeys(("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.Path"), _path),
    **dict.fromkeys(("pathlib.PurePosixPath", "pathlib.PurePath"), _path),
    **{"numpy.dtype": _numpy_dtype, "numpy.ndarray": no_value},
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _array_of_state,
    "numpy.core.numeric._frombuffer": _array,
}
_OTHER_NAMES = {"__builtin__": "builtins", "pathlib._local": "pathlib", "numpy._core": "numpy.core"}


def plain(name: str) -> Make | None:
    """Return what a name of the standard library or of numpy means."""
    for other, usual in _OTHER_NAMES.items():
        if name.startswith(f"{other}."):
            name = usual + name.removeprefix(other)
    return PLAIN.get(name)
