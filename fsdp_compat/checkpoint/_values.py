"""Python values as JSON, and back, without pickle: to read a file runs no code out of it, nor any that it names, but for tensors of
classes of their own, which are put together by their class's ``__tensor_unflatten__``.

What JSON has stands for itself; everything else is a dict with one key that begins with ``@``. Tensors are kept apart: the JSON has
their names. Objects of other classes are what their attributes are; to be read back, their class has to be imported already, and to
have no code that would run then.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import enum
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from .._engine import torch_private
from ..errors import CheckpointError, FsdpCompatError, UsageError, explain
from ._header import dtype_name, dtype_of

__all__ = ["decode", "encode"]

Put = Callable[[torch.Tensor], str]  # keeps a plain tensor, returns its name
Get = Callable[[str], torch.Tensor]  # its bytes, as a tensor of its dtype or of uint8

_SEQUENCES: dict[str, type[Any]] = {"@tuple": tuple, "@set": set, "@frozenset": frozenset, "@size": torch.Size}
_TAG_OF_SEQUENCE: dict[type[Any], str] = {kind: tag for tag, kind in _SEQUENCES.items()}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "@dict": dict,
    "@ordered": collections.OrderedDict,
    "@counter": lambda items: collections.Counter(dict(items)),
}
_TAG_OF_MAPPING: dict[type[Any], str] = {
    dict: "@dict",
    collections.defaultdict: "@dict",  # its factory is code
    collections.OrderedDict: "@ordered",
    collections.Counter: "@counter",
}
# What may be a key, or in a set: things whose hash is none of a user's code.
_KEYS = (type(None), bool, int, float, str, bytes, complex, tuple, frozenset, torch.dtype, torch.device)
_CODE = ("__del__", "__setstate__", "__getattribute__", "__getattr__", "state_dict", "__call__", "__next__")  # runs, or is meant to


def encode(value: Any, where: str, put: Put) -> Any:
    """Return ``value`` as something that JSON holds. where: what it is, for errors. Raises UsageError for what is not data."""
    try:
        return _encoded(value, where, put, ())
    except RecursionError as error:
        raise _no_data(where, "a value nested too deeply") from error


def _encoded(value: Any, where: str, put: Put, around: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if abs(value) < 1 << 63 else {"@int": hex(value)}
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, where, put, around)
    if id(value) in around:
        raise _no_data(where, "a value that contains itself")
    around = (*around, id(value))
    if kind is list:
        return [_encoded(item, f"{where}[{i}]", put, around) for i, item in enumerate(value)]
    if kind in _TAG_OF_MAPPING:
        if kind is dict and all(type(key) is str and not key.startswith("@") for key in value):
            return {key: _encoded(item, f"{where}[{key!r}]", put, around) for key, item in value.items()}
        items = [
            [_encoded_key(key, f"a key of {where}", put, around), _encoded(item, f"{where}[{key!r}]", put, around)]
            for key, item in value.items()
        ]
        return {_TAG_OF_MAPPING[kind]: items}
    if kind in (set, frozenset):
        return {_TAG_OF_SEQUENCE[kind]: [_encoded_key(item, f"an element of {where}", put, around) for item in value]}
    if kind in _TAG_OF_SEQUENCE:
        return {_TAG_OF_SEQUENCE[kind]: [_encoded(item, f"{where}[{i}]", put, around) for i, item in enumerate(value)]}
    if kind is collections.deque:
        return {"@deque": [[_encoded(item, f"{where}[{i}]", put, around) for i, item in enumerate(value)], value.maxlen]}
    if kind in (bytes, bytearray):
        return {f"@{kind.__name__}": base64.b64encode(value).decode()}
    if kind is complex:
        return {"@complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"@dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"@device": str(value)}
    if isinstance(value, enum.Enum):
        return _encoded_member(value, where)
    if kind.__module__.partition(".")[0] == "numpy":
        return _encoded_numpy(value, where, put)
    if isinstance(value, tuple) and "_fields" in kind.__dict__:
        items = [_encoded(item, f"{where}[{i}]", put, around) for i, item in enumerate(value)]
        return {"@named_tuple": [_path_of(kind, where), items]}
    if isinstance(value, str) and not getattr(value, "__dict__", None):  # torch.__version__
        return str.__str__(value)
    if _holds_attributes_only(kind):
        attributes = {**_slots_of(value), **getattr(value, "__dict__", {})}
        encoded = {name: _encoded(item, f"{where}.{name}", put, around) for name, item in attributes.items()}
        return {"@object": [_path_of(kind, where), encoded]}
    raise _no_data(where, f"a {kind.__module__}.{kind.__qualname__}")


def _encoded_key(value: Any, where: str, put: Put, around: tuple[int, ...]) -> Any:
    if not _may_be_key(value):
        raise _no_data(where, f"a {type(value).__module__}.{type(value).__qualname__}")
    return _encoded(value, where, put, around)


def _may_be_key(value: Any) -> bool:
    if isinstance(value, enum.Enum):
        return type(value).__hash__ in (enum.Enum.__hash__, int.__hash__, str.__hash__)
    kind: Any = type(value)
    if kind is frozenset or (isinstance(value, tuple) and (kind.__hash__, kind.__eq__) == (tuple.__hash__, tuple.__eq__)):
        return all(map(_may_be_key, value))
    return kind in _KEYS


def _encoded_member(value: enum.Enum, where: str) -> Any:
    path = _path_of(type(value), where)
    if isinstance(value, enum.Flag):
        if not _has_plain_members(type(value)):
            raise _no_data(where, f"a {path}, whose members are made by code of its own")
        return {"@flag": [path, value.value]}
    return {"@enum": [path, value.name]}


def _has_plain_members(kind: type[enum.Enum]) -> bool:
    return getattr(kind._missing_, "__func__", None) is getattr(enum.Flag._missing_, "__func__", None)


def _encoded_tensor(value: torch.Tensor, where: str, put: Put, around: tuple[int, ...]) -> Any:
    value = value.detach()
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None and torch_private.is_plain(value):
        names, context = flatten()
        inner = {name: _encoded(getattr(value, name), f"{where}.{name}", put, around) for name in names}
        its_context = _encoded(context, f"{where}, its context", put, around)
        return {"@tensor_of": [_path_of(type(value), where), inner, its_context, list(value.shape), list(value.stride())]}
    if isinstance(value, ShardedTensor) or not torch_private.is_plain(value):
        raise _no_data(where, f"a {type(value).__name__}, of which every rank has a part")
    strided = value.layout is torch.strided and not (value.is_quantized or value.is_nested)
    if value.is_meta or not strided or (value.numel() and not value.untyped_storage().data_ptr()):
        raise _no_data(where, f"a tensor of {value.layout}, {value.dtype}" if not strided else "a tensor without values")
    plain = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return {"@tensor": [put(plain), dtype_name(plain.dtype), list(plain.shape)]}


def _encoded_numpy(value: Any, where: str, put: Put) -> Any:
    numpy = sys.modules["numpy"]
    try:
        if isinstance(value, (numpy.datetime64, numpy.timedelta64, numpy.ma.MaskedArray)):
            raise TypeError("its values are more than numbers")
        if isinstance(value, numpy.generic):
            item = value.item()
            if isinstance(item, (bool, int, float, complex, str, bytes)):
                return _encoded(item, where, put, ())
        elif isinstance(value, numpy.ndarray):
            native = numpy.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True, subok=False)
            tensor = torch.from_numpy(native)
            return {"@array": [put(tensor), dtype_name(tensor.dtype), list(tensor.shape)]}
    except (TypeError, ValueError) as error:
        raise _no_data(where, f"a {type(value).__name__} of {value.dtype}") from error
    raise _no_data(where, f"a numpy.{type(value).__name__}")


def _slots_of(value: Any) -> dict[str, Any]:
    found = {}
    for name, slot in _slots(type(value)).items():
        with contextlib.suppress(AttributeError):  # it may be empty
            found[name] = slot.__get__(value)
    return found


def _slots(kind: type[Any]) -> dict[str, types.MemberDescriptorType]:
    """The attributes that objects of a class have in slots: what reads and writes each, which is the interpreter's own."""
    found: dict[str, types.MemberDescriptorType] = {}
    for base in kind.__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                found.setdefault(name, slot)
    return found


def _holds_attributes_only(kind: type[Any]) -> bool:
    """True for a class of which an object can be made and filled without running any code of the class."""
    return (
        all(getattr(kind, name) is getattr(object, name) for name in ("__new__", "__setattr__", "__reduce_ex__", "__reduce__"))
        and not any(name in base.__dict__ for base in kind.__mro__[:-1] for name in _CODE)
        and kind.__module__ != "builtins"
        and bool(kind.__flags__ & (1 << 9))  # a heap type: made by a class statement, so its state is its attributes
    )


def _path_of(kind: type[Any], where: str) -> str:
    path = f"{kind.__module__}:{kind.__qualname__}"
    if _class_at(path) is not kind:
        raise _no_data(where, f"an object of {path}, a class that cannot be found under its name")
    return path


def _class_at(path: str) -> Any:
    """Return what is at ``path``, or None. Nothing is imported, and no ``__getattr__`` is asked."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(found, (type, type(sys))):
            return None
        found = vars(found).get(part)
    return found


def decode(value: Any, where: str, get: Get) -> Any:
    """Return what was encoded. Raises CheckpointError for what cannot be read here."""
    try:
        return _decoded(value, where, get)
    except FsdpCompatError:
        raise
    except Exception as error:  # whatever stands in a file
        raise _unreadable(where, "what save has written", f"{type(error).__name__}: {error}") from error


def _decoded(value: Any, where: str, get: Get) -> Any:
    if isinstance(value, list):
        return [_decoded(item, where, get) for item in value]
    if not isinstance(value, Mapping):
        return value
    single: tuple[str, Any] = next(iter(value.items())) if len(value) == 1 else ("", None)
    tag, content = single
    if not tag.startswith("@"):
        return {key: _decoded(item, f"{where}[{key!r}]", get) for key, item in value.items()}
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]([(_as_key(_decoded(key, where, get)), _decoded(item, where, get)) for key, item in content])
    if tag in ("@set", "@frozenset"):
        return _SEQUENCES[tag](_as_key(_decoded(item, where, get)) for item in _listed(content))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_decoded(_listed(content), where, get))
    if tag == "@deque":
        items, maxlen = content
        return collections.deque(_decoded(_listed(items), where, get), maxlen)
    if tag in ("@tensor", "@array"):
        name, dtype, shape = content
        tensor = get(name).view(-1).view(dtype_of(dtype)).view([int(size) for size in shape])
        return tensor if tag == "@tensor" else tensor.numpy()
    if tag == "@int":
        return int(content, 16)
    if tag in ("@bytes", "@bytearray"):
        found = base64.b64decode(content, validate=True)
        return found if tag == "@bytes" else bytearray(found)
    if tag == "@complex":
        real, imag = content
        return complex(float(real), float(imag))
    if tag == "@dtype":
        return dtype_of(content)
    if tag == "@device":
        return torch.device(str(content))
    return _decoded_object(tag, content, where, get)


def _listed(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError(f"a list, not a {type(content).__name__}")
    return content


def _as_key(value: Any) -> Any:
    if not _may_be_key(value):
        raise TypeError(f"a {type(value).__name__} is no key")
    return value


def _decoded_object(tag: str, content: Any, where: str, get: Get) -> Any:
    path, *rest = _listed(content)
    kind = _class_at(path)
    fits = isinstance(kind, type) and (
        (tag == "@enum" and issubclass(kind, enum.Enum))
        or (tag == "@flag" and issubclass(kind, enum.Flag) and _has_plain_members(kind))
        or (tag == "@named_tuple" and issubclass(kind, tuple) and "_fields" in kind.__dict__)
        or (tag == "@object" and _holds_attributes_only(kind))
        or (tag == "@tensor_of" and issubclass(kind, torch.Tensor) and kind not in (torch.Tensor, nn.Parameter))
    )
    if not fits:
        raise _unreadable(
            where,
            f"the class {path}, imported before, and as it was when the checkpoint was saved",
            "no such class" if kind is None else f"{kind!r}",
            f"import {str(path).partition(':')[0]} before loading, in the version it was saved with",
        )
    if tag == "@enum":
        return kind.__members__[rest[0]]
    if tag == "@flag":
        return kind(int(rest[0]))
    if tag == "@named_tuple":
        items = _decoded(_listed(rest[0]), where, get)
        if len(items) != len(kind.__dict__["_fields"]):
            raise TypeError(f"{len(items)} values for {path}")
        return tuple.__new__(kind, items)
    if tag == "@tensor_of":
        inner, context, shape, stride = rest
        return kind.__tensor_unflatten__(
            {name: _decoded(item, f"{where}.{name}", get) for name, item in inner.items()},
            _decoded(context, where, get),
            torch.Size(shape),
            tuple(stride),
        )
    made = object.__new__(kind)
    slots = _slots(kind)
    for name, item in rest[0].items():
        decoded = _decoded(item, f"{where}.{name}", get)
        if name in slots:
            slots[name].__set__(made, decoded)
        else:
            made.__dict__[name] = decoded  # not by way of a property
    return made


def _no_data(where: str, got: str) -> UsageError:
    return UsageError(
        explain(
            "This cannot be saved without pickle, which a checkpoint does not use.",
            expected="numbers, texts, None, tensors, arrays, and lists, tuples, dicts and plain objects of these",
            got=got,
            where=where,
            fix="save what state_dict() of it returns, or the values that it is made of",
        )
    )


def _unreadable(where: str, expected: str, got: str, fix: str = "load an older checkpoint") -> CheckpointError:
    return CheckpointError(
        explain(
            "A checkpoint holds a value that cannot be made here.",
            expected=expected,
            got=got,
            where=where,
            fix=f"{fix}; nothing was loaded",
        )
    )
