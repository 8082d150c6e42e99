"""Values of untrusted pickles. Nothing is imported or called on a file's behalf.

``pickle.Unpickler`` follows the opcodes. Every name in a pickle is looked up in a closed table and
means a *stand-in*: a class whose objects keep what the pickle says about them, and do nothing. When
the pickle has ended, its values are copied, within limits of depth and number. Functions of this
package then make values of the stand-ins.

Not limited: the time and the memory that the Unpickler itself takes for a crafted pickle. Like
torch.load it may run out of memory, or of stack, where keys are tuples nested 100,000 deep."""

from __future__ import annotations

import copyreg
import datetime
import functools
import io
import math
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from .._texts import MAX_TEXT_NBYTES, brief
from .archive import NotRead, StoredTensor, of_memory

_MAX_DEPTH = 128
_MAX_VALUES = 50_000_000  # along all ways through shared containers
_MAX_NAME_LENGTH = 200
_MAX_DIMS = 64
_MAX_KEY_LENGTH = 1000  # characters of a tuple that is a key


class Refused(ValueError):
    """The pickle is damaged, or asks for something that is not in the table."""


class RefusedName(Refused):
    """The pickle has an object of a class that is not in the table. name: the class's full name."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Ignored:
    """Stands for an object that was left out. ``name``: of its class."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<ignored: {self.name}>"


class Record:
    """An object of a class that is known, as its pickle describes it. Compared by identity."""

    __slots__ = ("args", "fields", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.name, self.args = name, args
        self.state = state  # attributes, or a pair of attributes and slots, or anything else
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        self.fields: dict[str, Any] = {}  # the attributes
        if all(part is None or isinstance(part, dict) for part in parts):
            self.fields = {str(key): item for part in parts for key, item in (part or {}).items()}

    def __repr__(self) -> str:
        return f"<{self.name}>"


# -- what the Unpickler makes


class Sealed(type):
    """The class of stand-ins. A pickle can set attributes of classes, but not of these."""

    module: str
    name: str  # inside the module
    make: Callable[[Any, Of], Any]

    def __setattr__(cls, name: str, value: Any) -> None:
        raise Refused("a state for a class")

    @property
    def full_name(cls) -> str:
        return f"{cls.module}.{cls.name}"


class StandIn(metaclass=Sealed):
    """An object, or the result of a call, of a name of the table."""

    __slots__ = ("args", "elements", "items", "state")
    args: tuple[Any, ...]
    elements: list[Any]
    items: dict[Any, Any]
    state: Any
    module, name = "", ""

    def __new__(cls, *args: Any) -> StandIn:
        self = super().__new__(cls)
        self.args, self.state, self.elements, self.items = args, None, [], {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.elements.append(value)


@functools.lru_cache(1000)
def _stand_in(module: str, name: str, make: Callable[[StandIn, Of], Any]) -> Sealed:
    names = {"__slots__": (), "module": module, "name": name, "make": make}
    return Sealed(name, (StandIn,), names)


class _GetAttribute:
    """Classes inside of classes, which protocol 2 pickles as a call of getattr."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[str, str], Any]) -> None:
        self._find = find

    def __call__(self, owner: Any, name: Any) -> Any:
        if isinstance(owner, Sealed) and isinstance(name, str):
            return self._find(owner.module, f"{owner.name}.{name}")
        raise Refused("getattr, which runs code")

    def __setstate__(self, state: Any) -> None:
        raise Refused("a state for a function")


Of = Callable[[Any], Any]  # returns the value that an unpickled one stands for
Table = Callable[[str, str], Any]
# ^ what a module and a name in it mean: a dtype; a function that makes the value of a stand-in, to
# which ``Of`` is passed; None: refused


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        table: Table,
        persistent: Callable[[Any], Any] | None,
        ignored: Collection[str],
    ) -> None:
        # The strings of Python 2 are bytes, see ``_text``.
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._table, self._persistent, self._ignored = table, persistent, ignored
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            self._known[module, name] = self._meaning(module, name)
        return self._known[module, name]

    def _meaning(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _GetAttribute(self.find_class)
        meaning, full = self._table(module, name), f"{module}.{name}"
        if isinstance(meaning, torch.dtype):
            return meaning
        if meaning is None and full in self._ignored:
            meaning = _ignored
        if meaning is None:
            full = full[:_MAX_NAME_LENGTH]
            raise RefusedName(f"{full}, which is not a dense tensor or a plain value", full)
        return _stand_in(module, name, meaning)

    def persistent_load(self, reference: Any) -> Any:
        if self._persistent is None:
            raise Refused("a reference to another file (a persistent id)")
        return self._persistent(reference)


def unpickled(
    data: bytes | io.BytesIO,
    where: Path,
    table: Table,
    persistent: Callable[[Any], Any] | None = None,
    ignored: Collection[str] = (),
) -> Any:
    """Return the value of one pickle. A stream is read to the pickle's end, and not further.

    where: the file, for errors. persistent: returns the value of a persistent id; it is immutable.
    ignored: full names of classes whose objects become Ignored. Raises CheckpointError.
    """
    try:
        stream = io.BytesIO(data) if isinstance(data, bytes) else data
        if stream.getbuffer().nbytes > MAX_TEXT_NBYTES:
            raise Refused(f"more than {MAX_TEXT_NBYTES} bytes of values that are not tensors")
        if getattr(copyreg, "_extension_cache", None):
            raise Refused("names that this program has registered with copyreg.add_extension")
        return _Values().of(_Unpickler(stream, table, persistent, ignored).load())
    except CheckpointError:
        raise
    except Exception as error:  # whatever damaged pickles and wrong arguments raise
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
    elif isinstance(error, EOFError):
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


# -- from stand-ins to values


_ATOMS = frozenset({int, float, bool, type(None), bytes, bytearray, complex, torch.dtype})


class _Values:
    """Copies the values of one pickle. Shared containers stay shared."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any, int]] = {}  # by id: value, result, number of values
        self._depth = self._num = 0

    def of(self, value: Any) -> Any:
        """Return what a value stands for. Raises Refused, and whatever wrong values raise."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is str:
            return value if value.isascii() else _text(value)
        if id(value) in self._done:
            _, result, num = self._done[id(value)]
            self._num += num
        else:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise Refused(f"more than {_MAX_DEPTH} levels of containers, or one in itself")
            before = self._num
            result = self._copied(value, kind)
            self._done[id(value)] = value, result, self._num - before
            self._depth -= 1
        if self._num > _MAX_VALUES:
            raise Refused(f"more than {_MAX_VALUES} values, by references")
        return result

    def _copied(self, value: Any, kind: Any) -> Any:
        if type(kind) is Sealed:
            self._num += 1
            return kind.make(value, self.of)
        if kind not in (dict, list, tuple, set, frozenset):
            raise Refused("a class, a function or a storage in the place of a value")
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


def _text(text: str) -> str:
    """Return a text, of which Python 2 may have written the bytes."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape").decode("latin-1")


def _key(key: Any) -> Any:
    """Return a key unchanged. Raises TypeError for what cannot be one, and Refused for a tuple
    that is long, or nested, as its text is part of names."""
    if isinstance(key, tuple):
        parts = [len(part) if isinstance(part, (str, bytes)) else 1 for part in key]
        if len(key) > _MAX_KEY_LENGTH or sum(parts) > _MAX_KEY_LENGTH:
            raise Refused(f"a key of {sum(parts)} characters")
        if any(isinstance(part, (tuple, frozenset)) for part in key):
            raise Refused("a key that is a nested tuple")
    return key


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the sizes of a pickled shape. Raises Refused."""
    shape = whole_numbers(value, _MAX_DIMS)
    numel = 1
    for size in shape:
        numel *= max(size, 1)
        if numel >= 1 << 60:  # before the product of huge numbers takes long
            raise Refused("a shape of more than 2**60 elements")
    return shape


def whole_numbers(value: Any, most: int) -> tuple[int, ...]:
    """Return at most so many numbers from 0 on, as a tuple. Raises Refused."""
    if not isinstance(value, (tuple, list)) or len(value) > most:
        raise Refused("a shape that is not a short sequence")
    if not all(type(size) is int and size >= 0 for size in value):
        raise Refused("a shape that is not whole numbers from 0 on")
    return tuple(value)


# -- values of the standard library and of numpy


def of_arguments(function: Callable[..., Any]) -> Callable[[StandIn, Of], Any]:
    """Return what makes the value of a stand-in from the arguments of its call alone."""

    def make(made: StandIn, of: Of) -> Any:
        if made.elements or made.items:
            raise Refused(f"elements of a {type(made).name}")
        return function(*map(of, made.args))

    return make


def record_of(made: StandIn, of: Of) -> Record:
    if made.elements or made.items:
        raise Refused(f"elements of a {type(made).name}")
    return Record(type(made).full_name, of(made.args), of(made.state))


def _ignored(made: StandIn, of: Of) -> Ignored:
    return Ignored(type(made).full_name)


def _mapping(made: StandIn, of: Of) -> dict[Any, Any]:
    """A dict, of pairs or of another mapping, and of items that were set later."""
    args = [arg for arg in made.args if not isinstance(arg, Sealed)]  # of the values' class
    given = of(args[0]) if args else {}
    pairs = given.items() if isinstance(given, dict) else map(_pair, given)
    return {_key(key): value for key, value in pairs} | of(made.items)


def _pair(pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise Refused("an element of a mapping that is not a pair")
    return pair[0], pair[1]


def _sequence(made: StandIn, of: Of) -> list[Any]:
    return [*(of(made.args[0]) if made.args else ()), *of(made.elements)]


def _set(items: Iterable[Any] = ()) -> set[Any]:
    return {_key(item) for item in items}


def _default(made: StandIn, of: Of) -> Any:
    raise Refused("a call of a class of plain values")  # it is the class of a mapping's values


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes, as protocol 2 pickles them: as a text in latin-1."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise Refused(f"_codecs.encode to {str(encoding)[:50]}")
    return text.encode("latin-1")


def _bytes(content: Any = b"", encoding: Any = "latin1") -> bytes:
    return bytes(content) if isinstance(content, (bytes, bytearray)) else _encoded(content)


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    if not all(isinstance(part, (int, float)) for part in (real, imaginary)):
        raise Refused("a complex number of texts")
    return complex(real, imaginary)


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts)).replace("//", "/") if parts else "."


def _time(content: Any, *zone: Any) -> str:
    make: Any = datetime.datetime  # from the ten bytes that pickles hold
    return str(make(_bytes(content)).isoformat())


# numpy's letters for kinds and sizes -> torch's dtypes
_NUMPY_DTYPES = {
    **{"b1": torch.bool, "?": torch.bool},
    **{"i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64},
    **{"u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64},
    **{"f2": torch.float16, "f4": torch.float32, "f8": torch.float64},
    **{"c8": torch.complex64, "c16": torch.complex128},
}


def _numpy_dtype(made: StandIn, of: Of) -> str:
    """Return the letters of a dtype, behind its byte order."""
    letters, state = str(of(made.args[0])), of(made.state)
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else letters[:1]
    return (">" if order == ">" else "<") + letters.lstrip("<|=>")


def _torch_dtype(letters: Any) -> torch.dtype:
    """Return the dtype of an array of numbers. Raises Refused."""
    found = _NUMPY_DTYPES.get(str(letters)[1:])
    if found is None or str(letters)[0] != "<":
        raise Refused(f"a numpy array of {str(letters)[:50]!r}: only arrays of numbers are read")
    return found


def _numpy_scalar(letters: Any, content: Any = b"") -> Any:
    kind, raw = _torch_dtype(letters), _bytes(content)
    if len(raw) != kind.itemsize:
        raise Refused(f"a number of {kind} in {len(raw)} bytes")
    return torch.frombuffer(bytearray(raw), dtype=kind)[0].item()


def _numpy_array(made: StandIn, of: Of) -> StoredTensor:
    """An array of which the state has the values."""
    if not isinstance(made.state, tuple) or len(made.state) != 5:
        raise Refused("a numpy array without values")
    _, shape, letters, is_column_major, content = made.state
    return _array(of(content), of(letters), of(shape), "F" if is_column_major else "C")


def _array(content: Any, letters: Any, shape: Any, order: Any = "C") -> StoredTensor:
    sizes, kind = shape_of(shape), _torch_dtype(letters)
    raw = content if isinstance(content, bytearray) else _bytes(content)
    if math.prod(sizes) * kind.itemsize != len(raw):
        raise Refused(f"a numpy array of shape {list(sizes)} in {len(raw)} bytes")
    if not raw:
        return of_memory("", torch.empty(sizes, dtype=kind))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read-only, and nothing writes to them
        values = torch.frombuffer(raw, dtype=kind)
    if order == "F":
        return of_memory("", values.view(sizes[::-1]).permute(*reversed(range(len(sizes)))))
    return of_memory("", values.view(sizes))


PLAIN: Mapping[tuple[str, str], Callable[[StandIn, Of], Any]] = {
    ("collections", "OrderedDict"): _mapping,
    ("collections", "defaultdict"): _mapping,
    ("collections", "Counter"): _mapping,
    ("collections", "deque"): _sequence,
    ("_codecs", "encode"): of_arguments(_encoded),
    ("datetime", "datetime"): of_arguments(_time),
    ("datetime", "timedelta"): of_arguments(
        lambda *parts: datetime.timedelta(*parts).total_seconds()
    ),
    ("argparse", "Namespace"): lambda made, of: record_of(made, of).fields,
    ("numpy", "dtype"): _numpy_dtype,
    ("numpy", "ndarray"): _default,
    **{
        (module, name): make
        for module in ("builtins", "__builtin__")
        for name, make in {
            **{"dict": _mapping, "list": _sequence, "complex": of_arguments(_complex)},
            **{
                "set": of_arguments(_set),
                "frozenset": of_arguments(lambda *a: frozenset(_set(*a))),
            },
            **{"bytes": of_arguments(_bytes), "slice": of_arguments(lambda *args: args)},
            "bytearray": of_arguments(lambda *args: bytearray(_bytes(*args))),
            "tuple": of_arguments(lambda items=(): tuple(items)),
            **dict.fromkeys(("int", "float", "str", "bool"), _default),
        }.items()
    },
    **{
        (module, name): of_arguments(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath")
    },
    **{
        (f"numpy.{core}.{module}", name): make
        for core in ("core", "_core")
        for module, name, make in (
            ("multiarray", "scalar", of_arguments(_numpy_scalar)),
            ("multiarray", "_reconstruct", _numpy_array),
            ("numeric", "_frombuffer", of_arguments(_array)),
        )
    },
}
