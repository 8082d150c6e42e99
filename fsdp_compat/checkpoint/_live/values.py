"""Values as JSON, and back, without pickle: reading runs no code from the file and instantiates no
class that the file names.

Kept, with their type and order:
- None, bool, int (of any size), float, complex, str, bytes, bytearray, io.BytesIO,
  torch.dtype, torch.device;
- dense tensors of any device, which are read to the CPU, and NumPy arrays of numbers; the JSON
  holds their names;
- list, tuple, torch.Size, set, frozenset, deque, dict, OrderedDict and Counter of these; keys and
  elements of sets are numbers, strings, bytes, None, dtypes, devices, and tuples and frozensets of
  these.
Kept as the plain type: a NumPy number as a Python number, a named tuple as a tuple, a defaultdict
as a dict, a subclass of Tensor (such as Parameter) as a Tensor.

Everything else is refused: objects of other classes, among them enums, dataclasses and functions;
sharded, quantized, sparse, nested and meta tensors; values that contain themselves.

In JSON, None, bool, int, float, str, lists and dicts with plain string keys stand for themselves.
Every other value is a dict with a single key from a fixed list; these keys begin with ``@``."""

from __future__ import annotations

import base64
import collections
import io
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from ... import _torch_private
from ..._archive.archive import StoredTensor
from ..._archive.header import dtype_name, dtype_of
from ..._archive.texts import brief, listed, parse_json, shape_in, shortened, text_in
from ...errors import CheckpointError, FsdpCompatError, UsageError

Put = Callable[[Any], str]  # stores a plain tensor or a StoredTensor, returns its name
# Returns what stands for the tensor of a name, dtype and shape: it may be read later.
Get = Callable[[str, torch.dtype, tuple[int, ...]], Any]

MAX_LEVELS = 64  # of nested containers; each takes at most three levels of JSON


def _base64(value: bytes | bytearray | io.BytesIO) -> str:
    value = value.getvalue() if isinstance(value, io.BytesIO) else value
    return base64.b64encode(value).decode()


def _of_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# Values that are one text or a pair of numbers: by tag, the type, to JSON, and from JSON.
_LEAVES: dict[str, tuple[type[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "@int": (int, hex, lambda text: int(text, 16)),
    "@bytes": (bytes, _base64, _of_base64),
    "@bytearray": (bytearray, _base64, lambda text: bytearray(_of_base64(text))),
    "@file": (io.BytesIO, _base64, lambda text: io.BytesIO(_of_base64(text))),
    "@complex": (
        complex,
        lambda value: [value.real, value.imag],
        lambda parts: complex(*map(float, listed(parts))),
    ),
    "@dtype": (torch.dtype, dtype_name, lambda name: dtype_of(name, of_tensor=False)),
    "@device": (torch.device, str, lambda text: torch.device(text_in(text))),
}
_MAPPINGS = {"@dict": dict, "@ordered": collections.OrderedDict, "@counter": collections.Counter}
_SETS = {"@set": set, "@frozenset": frozenset}
_SEQUENCES = {"@tuple": tuple, "@size": torch.Size}
_TAGS: dict[type[Any], str] = {
    **{kind: tag for tag, (kind, _, _) in _LEAVES.items()},
    **{kind: tag for tags in (_MAPPINGS, _SETS, _SEQUENCES) for tag, kind in tags.items()},
    collections.defaultdict: "@dict",  # its factory is code, and not kept
    collections.deque: "@deque",
    list: "",
}
_KEYS = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)


def encode(value: Any, where: str, put: Put) -> Any:
    """Return ``value`` as JSON values; ``put`` is called for every tensor. where: the value, for
    errors. Raises UsageError for values that are not kept, see the module."""
    return _encoded(value, where, put, ())


def _encoded(value: Any, where: str, put: Put, around: tuple[int, ...]) -> Any:
    """around: the ids of the containers that the value is in."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 1 << 63):
        return value
    if (tag := _TAGS.get(kind)) in _LEAVES:
        return {tag: _LEAVES[tag][1](value)}
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, where, put)
    if isinstance(value, StoredTensor):
        tag = "@array" if value.is_array else "@tensor"
        return {tag: [put(value), dtype_name(value.dtype), list(value.shape)]}
    if kind.__module__.partition(".")[0] == "numpy":
        return _encoded_numpy(value, where, put)
    if kind is type(torch.__version__):  # a subclass of str
        return str(value)
    if kind not in _TAGS and not isinstance(value, tuple):
        raise _not_data(where, _name(kind))
    if id(value) in around:
        raise _not_data(where, "a value that contains itself")
    if len(around) > MAX_LEVELS:
        raise _not_data(where, f"a value nested more than {MAX_LEVELS} levels deep")
    return _encoded_container(value, where, put, (*around, id(value)))


def _encoded_container(value: Any, where: str, put: Put, around: tuple[int, ...]) -> Any:
    kind = type(value)
    tag = _TAGS.get(kind, "@tuple")  # a named tuple becomes a tuple

    def item(key: Any, content: Any) -> Any:
        return _encoded(content, f"{where}[{key!r}]", put, around)

    def key(content: Any, what: str) -> Any:
        if not _may_be_key(content):
            raise _not_data(f"{what} of {where}", _name(type(content)))
        return _encoded(content, f"{what} of {where}", put, around)

    if tag in _MAPPINGS:
        if kind is dict and all(type(name) is str and not name.startswith("@") for name in value):
            return {name: item(name, content) for name, content in value.items()}
        return {tag: [[key(name, "a key"), item(name, each)] for name, each in value.items()]}
    if tag in _SETS:
        return {tag: [key(each, "an element") for each in value]}
    items = [item(number, each) for number, each in enumerate(value)]
    if kind is list:
        return items
    return {tag: [items, value.maxlen] if tag == "@deque" else items}


def _may_be_key(value: Any) -> bool:
    """Return whether a value may be a key or an element of a set."""
    if type(value) in (frozenset, tuple):
        return all(map(_may_be_key, value))
    return type(value) in _KEYS


def _encoded_tensor(value: torch.Tensor, where: str, put: Put) -> Any:
    value = value.detach()
    is_one = not (isinstance(value, ShardedTensor) or hasattr(value, "__tensor_flatten__"))
    if not is_one or not _torch_private.is_plain(value):
        raise _not_data(where, f"a {type(value).__name__}, sharded or made of several tensors")
    is_dense = value.layout is torch.strided and not (value.is_quantized or value.is_nested)
    if not is_dense or value.is_meta:
        raise _not_data(where, f"a tensor of {value.layout}, {value.dtype}, on {value.device}")
    if value.numel() and not value.untyped_storage().data_ptr():
        raise _not_data(where, "a tensor without values")
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
            native = value.dtype.newbyteorder("=")
            tensor = torch.from_numpy(numpy.array(value, native, order="C", subok=False))
            return {"@array": [put(tensor), dtype_name(tensor.dtype), list(tensor.shape)]}
    except (TypeError, ValueError) as error:
        raise _not_data(where, f"a {type(value).__name__} of {value.dtype}") from error
    raise _not_data(where, f"a numpy.{type(value).__name__}")


def decode(value: Any, where: str, get: Get) -> Any:
    """Return what ``encode`` got; ``get`` is called for every tensor. Raises CheckpointError."""
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
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if not tag.startswith("@"):
        return {key: _decoded(item, f"{where}[{key!r}]", get) for key, item in value.items()}
    if tag in _LEAVES:
        return _LEAVES[tag][2](content)
    if tag in ("@tensor", "@array"):
        name, dtype, shape = listed(content)
        tensor = get(text_in(name), dtype_of(dtype), shape_in(shape))
        return tensor if tag == "@tensor" else tensor.numpy()
    if tag in _MAPPINGS:
        pairs = _decoded([listed(pair) for pair in listed(content)], where, get)
        return _MAPPINGS[tag]({_as_key(key): item for key, item in pairs})
    if tag in _SETS:
        return _SETS[tag](map(_as_key, _decoded(listed(content), where, get)))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_decoded(listed(content), where, get))
    if tag == "@deque":
        items, maxlen = listed(content)
        return collections.deque(_decoded(listed(items), where, get), maxlen)
    got = f"{tag[:40]!r}, which this version does not know"
    raise _unreadable(where, "a number, a string, a tensor or a container", got)


def tensor_as_text(tensor: torch.Tensor) -> str:
    """Return a small tensor as a text: a `Put` for values without a file."""
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


def _name(kind: type[Any]) -> str:
    return f"a {kind.__module__}.{kind.__qualname__}"


def _not_data(where: str, got: str) -> UsageError:
    return UsageError.of(
        "A value cannot be saved: checkpoints do not use pickle.",
        expected="None, numbers, strings, tensors, arrays, and lists, tuples, sets and dicts "
        "of these",
        got=got,
        where=shortened(where),
        fix="save its data: state_dict() of an object, asdict() of a dataclass, the value of "
        "an enum",
    )


def _unreadable(where: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError.of(
        "A value of the checkpoint cannot be read.",
        expected=expected,
        got=got,
        where=shortened(where),
        fix="load an older checkpoint, or use the version that saved this one; nothing was loaded",
    )
