"""Values as JSON, and back, without pickle: reading runs no code from the file and instantiates no
class that the file names.

Kept, with their type and order:
- None, bool, int (of any size), float, complex, str, bytes, bytearray;
- dense tensors of any device, which are read to the CPU; the JSON holds their names;
- NumPy arrays of numbers;
- list, tuple, torch.Size, set, frozenset, deque, dict, OrderedDict and Counter of these; keys and
  elements of sets are numbers, texts, bytes, None, dtypes, devices, and tuples and frozensets of
  these;
- torch.dtype and torch.device, by name.
Kept as the plain type: a NumPy number as a Python number, a named tuple as a tuple, a defaultdict
as a dict, a subclass of Tensor (such as Parameter) as a Tensor.

Everything else is refused: objects of other classes, among them enums, dataclasses and functions;
sharded, quantized, sparse, nested and meta tensors; values that contain themselves.

In JSON, None, bool, int, float, str, lists and dicts with plain text keys stand for themselves.
Every other value is a dict with a single key from a fixed list; these keys begin with ``@``."""

from __future__ import annotations

import base64
import collections
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from .. import _torch_private
from ..errors import CheckpointError, FsdpCompatError, UsageError
from ._header import dtype_name, dtype_of
from ._texts import brief, listed, parse_json, shape_in, text_in

Put = Callable[[torch.Tensor], str]  # stores a plain tensor, returns its name
# Returns what stands for the tensor of a name, dtype and shape: it may be read later.
Get = Callable[[str, torch.dtype, tuple[int, ...]], Any]

MAX_LEVELS = 64  # of nested containers; each takes at most three levels of JSON

_SEQUENCES: dict[str, type[Any]] = {
    "@tuple": tuple,
    "@set": set,
    "@frozenset": frozenset,
    "@size": torch.Size,
}
_TAG_OF_SEQUENCE: dict[type[Any], str] = {kind: tag for tag, kind in _SEQUENCES.items()}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "@dict": dict,
    "@ordered": collections.OrderedDict,
    "@counter": lambda items: collections.Counter(dict(items)),
}
_TAG_OF_MAPPING: dict[type[Any], str] = {
    dict: "@dict",
    collections.defaultdict: "@dict",  # its factory is code, and not kept
    collections.OrderedDict: "@ordered",
    collections.Counter: "@counter",
}
_KEYS = (
    type(None),
    bool,
    int,
    float,
    str,
    bytes,
    complex,
    torch.dtype,
    torch.device,
)  # of keys and of elements of sets


def encode(value: Any, where: str, put: Put) -> Any:
    """Return ``value`` as JSON values; ``put`` is called for every tensor. where: a description of
    the value for errors. Raises UsageError for values that are not kept, see the module."""
    return _encoded(value, where, put, ())


def _encoded(value: Any, where: str, put: Put, around: tuple[int, ...]) -> Any:
    """around: the ids of the containers that the value is in."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if abs(value) < 1 << 63 else {"@int": hex(value)}
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, where, put)
    if id(value) in around:
        raise _not_data(where, "a value that contains itself")
    if len(around) > MAX_LEVELS:
        raise _not_data(where, f"a value nested more than {MAX_LEVELS} levels deep")
    around = (*around, id(value))
    if kind is list:
        return [_encoded(item, f"{where}[{i}]", put, around) for i, item in enumerate(value)]
    if kind in _TAG_OF_MAPPING:
        if kind is dict and all(type(key) is str and not key.startswith("@") for key in value):
            return {
                key: _encoded(item, f"{where}[{key!r}]", put, around) for key, item in value.items()
            }
        items = [
            [
                _encoded_key(key, f"a key of {where}", put, around),
                _encoded(item, f"{where}[{key!r}]", put, around),
            ]
            for key, item in value.items()
        ]
        return {_TAG_OF_MAPPING[kind]: items}
    if kind in (set, frozenset):
        return {
            _TAG_OF_SEQUENCE[kind]: [
                _encoded_key(item, f"an element of {where}", put, around) for item in value
            ]
        }
    if kind in _TAG_OF_SEQUENCE or isinstance(value, tuple):  # a named tuple becomes a tuple
        tag = _TAG_OF_SEQUENCE.get(kind, "@tuple")
        return {
            tag: [
                _encoded(item, f"{where}[{i}]", put, around)
                for i, item in enumerate(tuple.__iter__(value))
            ]
        }
    if kind is collections.deque:
        return {
            "@deque": [
                [_encoded(item, f"{where}[{i}]", put, around) for i, item in enumerate(value)],
                value.maxlen,
            ]
        }
    if kind in (bytes, bytearray):
        return {f"@{kind.__name__}": base64.b64encode(value).decode()}
    if kind is complex:
        return {"@complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"@dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"@device": str(value)}
    if kind.__module__.partition(".")[0] == "numpy":
        return _encoded_numpy(value, where, put)
    if kind is type(torch.__version__):  # TorchVersion, a subclass of str
        return str.__str__(value)
    raise _not_data(where, f"a {kind.__module__}.{kind.__qualname__}")


def _encoded_key(value: Any, where: str, put: Put, around: tuple[int, ...]) -> Any:
    if not _may_be_key(value):
        raise _not_data(where, f"a {type(value).__module__}.{type(value).__qualname__}")
    return _encoded(value, where, put, around)


def _may_be_key(value: Any) -> bool:
    if type(value) in (frozenset, tuple):
        return all(map(_may_be_key, value))
    return type(value) in _KEYS


def _encoded_tensor(value: torch.Tensor, where: str, put: Put) -> Any:
    value = value.detach()
    if isinstance(value, ShardedTensor) or not _torch_private.is_plain(value):
        raise _not_data(where, f"a {type(value).__name__}, sharded over the ranks")
    if hasattr(value, "__tensor_flatten__"):
        raise _not_data(where, f"a {type(value).__name__}, made of several tensors")
    strided = value.layout is torch.strided and not (value.is_quantized or value.is_nested)
    if value.is_meta or not strided or (value.numel() and not value.untyped_storage().data_ptr()):
        raise _not_data(
            where,
            f"a tensor of {value.layout}, {value.dtype}"
            if not strided
            else "a tensor without values",
        )
    plain = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return {"@tensor": [put(plain), dtype_name(plain.dtype), list(plain.shape)]}


def _encoded_numpy(value: Any, where: str, put: Put) -> Any:
    numpy = sys.modules["numpy"]
    try:
        if isinstance(value, (numpy.datetime64, numpy.timedelta64, numpy.ma.MaskedArray)):
            raise TypeError("more than numbers")
        if isinstance(value, numpy.generic):
            item = value.item()
            if isinstance(item, (bool, int, float, complex, str, bytes)):
                return _encoded(item, where, put, ())
        elif isinstance(value, numpy.ndarray):
            native = numpy.array(
                value, dtype=value.dtype.newbyteorder("="), order="C", copy=True, subok=False
            )
            tensor = torch.from_numpy(native)
            return {"@array": [put(tensor), dtype_name(tensor.dtype), list(tensor.shape)]}
    except (TypeError, ValueError) as error:
        raise _not_data(where, f"a {type(value).__name__} of {value.dtype}") from error
    raise _not_data(where, f"a numpy.{type(value).__name__}")


def decode(value: Any, where: str, get: Get) -> Any:
    """Return the value that ``encode`` was called with; ``get`` is called for every tensor. Raises
    CheckpointError for a value that this version cannot read."""
    try:
        return _decoded(value, where, get)
    except FsdpCompatError:
        raise
    except Exception as error:  # a forged file may hold anything
        raise _unreadable(where, "a value that save writes", brief(error)) from error


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
        return _MAPPINGS[tag](
            [
                (_as_key(_decoded(key, where, get)), _decoded(item, where, get))
                for key, item in listed(content)
            ]
        )
    if tag in ("@set", "@frozenset"):
        return _SEQUENCES[tag](_as_key(_decoded(item, where, get)) for item in listed(content))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_decoded(listed(content), where, get))
    if tag == "@deque":
        items, maxlen = listed(content)
        return collections.deque(_decoded(listed(items), where, get), maxlen)
    if tag in ("@tensor", "@array"):
        name, dtype, shape = listed(content)
        tensor = get(text_in(name), dtype_of(dtype), shape_in(shape))
        return tensor if tag == "@tensor" else tensor.numpy()
    if tag == "@int":
        return int(content, 16)
    if tag in ("@bytes", "@bytearray"):
        found = base64.b64decode(content, validate=True)
        return found if tag == "@bytes" else bytearray(found)
    if tag == "@complex":
        real, imag = listed(content)
        return complex(float(real), float(imag))
    if tag == "@dtype":
        return dtype_of(content, of_tensor=False)
    if tag == "@device":
        return torch.device(text_in(content))
    raise _unreadable(
        where,
        "a number, a text, a tensor or a container",
        f"{tag[:40]!r}, which this version does not know",
    )


def tensor_as_text(tensor: torch.Tensor) -> str:
    """Return a small tensor as a text: a `Put` for values that no file holds the tensors of."""
    values = tensor.detach().cpu()
    if values.dtype.is_complex:
        values = torch.view_as_real(values)
    return json.dumps([dtype_name(tensor.dtype), list(tensor.shape), values.reshape(-1).tolist()])


def tensor_from_text(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of ``tensor_as_text``, a `Get`."""
    name, sizes, values = parse_json(text.encode("utf-8"))
    if (dtype_of(name), shape_in(sizes)) != (dtype, shape):
        raise ValueError(f"{name!r} of shape {sizes} for {dtype} of shape {list(shape)}")
    if dtype.is_complex:
        real = torch.tensor(listed(values)).to(dtype.to_real())
        return torch.view_as_complex(real.view(*shape, 2)).clone()
    return torch.tensor(listed(values), dtype=dtype).view(shape)


def _as_key(value: Any) -> Any:
    if not _may_be_key(value):
        raise TypeError(f"a {type(value).__name__} cannot be a key")
    return value


def _not_data(where: str, got: str) -> UsageError:
    return UsageError.of(
        "A value cannot be saved: checkpoints do not use pickle.",
        expected="None, numbers, strings, tensors, arrays, and lists, tuples, sets and dicts "
        "of these",
        got=got,
        where=where if len(where) <= 300 else f"{where[:300]}...",
        fix="save its data: state_dict() of an object, asdict() of a dataclass, the value of "
        "an enum",
    )


def _unreadable(where: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError.of(
        "A value of the checkpoint cannot be read.",
        expected=expected,
        got=got,
        where=where if len(where) <= 300 else f"{where[:300]}...",
        fix="load an older checkpoint, or use the version that saved this one; nothing was loaded",
    )
