"""The closed table of the names that a checkpoint's pickles may use, and what each of them means
here. What is not in it is refused."""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch

from .archive import StoredTensor, of_memory
from .pickle_machine import Global, Ignored, KeyLimit, Record, Refused, RefusedName
from .sharded_records import shape_of
from .stored_storages import StorageKind, tensor_in

_MAX_NAME_LENGTH = 200
_MAX_ODD_KEYS = 500  # keys of one mapping that are neither texts nor small numbers

# numpy's letters for kinds and sizes -> torch's dtypes
_NUMPY_DTYPES = {
    **{"b1": torch.bool, "?": torch.bool},
    **{"i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64},
    **{"u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64},
    **{"f2": torch.float16, "f4": torch.float32, "f8": torch.float64},
    **{"c8": torch.complex64, "c16": torch.complex128},
}

_STORAGES = {
    **{"FloatStorage": torch.float32, "DoubleStorage": torch.float64},
    **{"HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16},
    **{"ByteStorage": torch.uint8, "CharStorage": torch.int8, "ShortStorage": torch.int16},
    **{"IntStorage": torch.int32, "LongStorage": torch.int64, "BoolStorage": torch.bool},
    **{"ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128},
}

# Classes whose objects become Records.
_CLASSES = {
    "torch": ("Tensor",),
    "torch._tensor": ("Tensor",),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch.distributed.tensor": ("DTensor",),
    "torch.distributed.tensor._api": ("DTensor",),
    "torch.distributed._tensor": ("DTensor",),
    "torch.distributed._tensor.api": ("DTensor",),
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed._mesh_layout": ("_MeshLayout", "_FlatLayout"),
    **{
        f"torch.distributed.{package}": ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
        for package in ("tensor._dtensor_spec", "_tensor._dtensor_spec", "_tensor.placement_types")
    },
    "torch.distributed._shard.sharded_tensor.api": (
        "ShardedTensor",
        "ShardedTensor.ProcessGroupState",
    ),
    "torch.distributed._shard.sharded_tensor.shard": ("Shard",),
    "torch.distributed._shard.sharded_tensor.metadata": (
        *("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed._shard.metadata": ("ShardMetadata",),
    "torch.distributed._shard.sharding_spec.api": ("EnumerableShardingSpec",),
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": ("ChunkShardingSpec",),
    "torch.distributed.remote_device": ("_remote_device",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("MetadataIndex", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "fsdp_compat._layout.spec": ("FlatLayout", "ParamSpec"),
    "fsdp_compat._layout.rows": ("CopiedLayout",),
    "fsdp_compat._state.formats": ("FlatOfParameters", "Place", "_rebuilt"),
    "argparse": ("Namespace",),
    "numpy": ("ndarray",),
}
_PLACEMENTS = ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard", "Placement")
for _module in ("tensor.placement_types", "_tensor.placement_types", "tensor"):
    _name = f"torch.distributed.{_module}"
    _CLASSES[_name] = (*_CLASSES.get(_name, ()), *_PLACEMENTS)


class Names:
    """The table for the pickles of one file. ignored: full names of further classes; their objects
    become Ignored."""

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._ignored = frozenset(ignored)
        self._known: dict[tuple[str, str], Any] = {}

    def find(self, module: str, name: str) -> Any:
        """Return the meaning of a global name, always the same one. Raises Refused."""
        key = module, name
        if key not in self._known:
            self._known[key] = self._meaning(module, name)
        return self._known[key]

    def _meaning(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name == "getattr":
            return Global(module, name, self._attribute)
        if name in _CLASSES.get(module, ()):
            return Global(module, name)
        if (module, name) in _FUNCTIONS:
            return Global(module, name, _FUNCTIONS[module, name])
        if module == "torch":
            dtype = vars(torch).get(name)
            if isinstance(dtype, torch.dtype):
                return dtype
            if name in _STORAGES:
                return StorageKind(_STORAGES[name])
        if (module, name) in (("torch.storage", "UntypedStorage"), ("torch", "UntypedStorage")):
            return StorageKind(None)
        full = f"{module}.{name}"
        if full in self._ignored:
            return Ignored(full)
        full = full[:_MAX_NAME_LENGTH]
        raise RefusedName(f"{full}, which {_why(module, name)}", full)

    def _attribute(self, owner: Any, name: Any) -> Any:
        """Classes inside of classes, which protocol 2 pickles as a call of getattr."""
        if isinstance(owner, Global) and isinstance(name, str):
            return self.find(owner.module, f"{owner.name}.{name}")
        raise Refused("getattr, which runs code")


def _why(module: str, name: str) -> str:
    if "sparse" in name or "nested" in name:
        return "builds a tensor that is not dense"
    if "qtensor" in name:
        return "builds a quantized tensor"
    if module == "torch.jit" or module.startswith("__torch__"):
        return "belongs to TorchScript"
    return "is not a tensor or a plain container"


# -- functions: all values that they get are plain, or made here


def _require_plain_metadata(metadata: Any) -> None:
    if isinstance(metadata, dict) and any(metadata.values()):
        raise Refused(f"a tensor with the flags {sorted(map(str, metadata))}")


def _tensor(storage: Any, offset: Any, sizes: Any, strides: Any) -> StoredTensor:
    return tensor_in(storage, offset, sizes, strides)


def _tensor_v2(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> StoredTensor:
    _require_plain_metadata(metadata)
    return tensor_in(storage, offset, sizes, strides)


def _tensor_v3(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> StoredTensor:
    _require_plain_metadata(metadata)
    return tensor_in(storage, offset, sizes, strides, dtype)


def _parameter(data: Any, requires_grad: Any = True, *rest: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes, or of a subclass: decided when all of its parts are known."""
    return Record("torch._tensor._rebuild_from_type_v2", (function, kind, args, state))


def _wrapper_subclass(kind: Any, *args: Any) -> Any:
    return Record("torch._utils._rebuild_wrapper_subclass", (kind, *args))


def _meta_tensor(dtype: Any, sizes: Any, strides: Any, requires_grad: Any = False) -> Ignored:
    return Ignored(f"a tensor of {dtype} and shape {list(shape_of(sizes))}, without values")


def _size(items: Any = ()) -> tuple[int, ...]:
    return shape_of(tuple(items))


def _device(kind: Any, index: Any = None) -> str:
    return str(kind) if index is None else f"{kind}:{index}"


def _layout(name: Any) -> str:
    return str(name)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return [tuple(pair) for pair in value]


def _dict(*args: Any) -> dict[Any, Any]:
    """Return a mapping of the keys of another one, or of pairs."""
    pairs = _items(args[0]) if args else []
    limit = KeyLimit(_MAX_ODD_KEYS)
    for key, _ in pairs:
        limit.require(key)
    return dict(pairs)


def _default_dict(factory: Any = None, *args: Any) -> dict[Any, Any]:
    return _dict(*args)


def _counter(*args: Any) -> dict[Any, Any]:
    return _dict(*args)


def _members(value: Iterable[Any] = ()) -> list[Any]:
    found, limit = list(value), KeyLimit(_MAX_ODD_KEYS)
    for item in found:
        limit.require(item)
    return found


def _set(value: Iterable[Any] = ()) -> set[Any]:
    return set(_members(value))


def _frozenset(value: Iterable[Any] = ()) -> frozenset[Any]:
    return frozenset(_members(value))


def _deque(items: Iterable[Any] = (), limit: Any = None) -> list[Any]:
    return list(items)


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes, as protocol 2 pickles them: as a text in latin-1."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise Refused(f"_codecs.encode to {str(encoding)[:50]}")
    return text.encode("latin-1")


def _bytes(content: Any = b"", encoding: Any = "latin1") -> bytes:
    if isinstance(content, (bytes, bytearray)):
        return bytes(content)
    return _encoded(content, encoding) if content != () else b""


def _bytearray(content: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_bytes(content, encoding))


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    if not all(isinstance(part, (int, float)) for part in (real, imaginary)):
        raise Refused("a complex number of texts")
    return complex(real, imaginary)


def _slice(*args: Any) -> tuple[Any, ...]:
    return args


def _path(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    return "/".join(texts).replace("//", "/") if texts else "."


def _time_span(days: Any = 0, seconds: Any = 0, microseconds: Any = 0) -> float:
    """A span of time, in seconds."""
    return datetime.timedelta(days, seconds, microseconds).total_seconds()


def _time(content: Any, *zone: Any) -> str:
    if isinstance(content, str):
        content = content.encode("latin-1")
    make: Any = datetime.datetime  # from the ten bytes that pickles hold
    return str(make(content).isoformat())


# -- numpy


def _numpy_dtype(name: Any = "", *unused: Any) -> Record:
    return Record("numpy.dtype", (name,))


def _torch_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of a pickled numpy dtype of numbers. Raises Refused."""
    if not isinstance(dtype, Record) or dtype.name != "numpy.dtype":
        raise Refused("a numpy array without a dtype")
    name, state = str(dtype.args[0]), dtype.state
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "<"
    found = _NUMPY_DTYPES.get(name.lstrip("<|="))
    if found is None or order == ">" or name.startswith(">"):
        raise Refused(f"a numpy array of {name[:50]!r}: only arrays of numbers are read")
    return found


def _raw(content: Any) -> bytes:
    return _bytes(content) if isinstance(content, (str, bytes, bytearray)) else b""


def _numpy_scalar(dtype: Any, content: Any = b"") -> Any:
    kind, raw = _torch_dtype(dtype), _raw(content)
    if len(raw) != kind.itemsize:
        raise Refused(f"a number of {kind} in {len(raw)} bytes")
    return torch.frombuffer(bytearray(raw), dtype=kind)[0].item()


def _numpy_array(kind: Any, shape: Any = (0,), letter: Any = None) -> Record:
    """An array whose state follows."""
    return Record("numpy.ndarray")


def _numpy_from_buffer(content: Any, dtype: Any, shape: Any, order: Any = "C") -> Record:
    array = Record("numpy.ndarray")
    array.state = (1, shape, dtype, order == "F", content)
    return array


def array_of(record: Record) -> StoredTensor:
    """Return the values of a pickled numpy array. Raises Refused."""
    if not isinstance(record.state, tuple) or len(record.state) != 5:
        raise Refused("a numpy array without values")
    _, shape, dtype, is_column_major, content = record.state
    sizes, kind, raw = shape_of(shape), _torch_dtype(dtype), _raw(content)
    if math.prod(sizes) * kind.itemsize != len(raw):
        raise Refused(f"a numpy array of shape {list(sizes)} in {len(raw)} bytes")
    if not raw:
        return of_memory("", torch.empty(sizes, dtype=kind))
    values = torch.frombuffer(bytearray(raw), dtype=kind)
    if is_column_major:
        dims = range(len(sizes) - 1, -1, -1)
        return of_memory("", values.view(tuple(reversed(sizes))).permute(*dims).contiguous())
    return of_memory("", values.view(sizes))


def _numpy_names() -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {("numpy", "dtype"): _numpy_dtype}
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray", "scalar"] = _numpy_scalar
        found[f"{core}.multiarray", "_reconstruct"] = _numpy_array
        found[f"{core}.numeric", "_frombuffer"] = _numpy_from_buffer
    for name, letters in {
        **{"Float64": "f8", "Float32": "f4", "Float16": "f2", "Int64": "i8", "Int32": "i4"},
        **{"Int16": "i2", "Int8": "i1", "UInt64": "u8", "UInt32": "u4", "UInt16": "u2"},
        **{"UInt8": "u1", "Bool": "b1", "Complex64": "c8", "Complex128": "c16"},
    }.items():
        found["numpy.dtypes", f"{name}DType"] = lambda letters=letters: Record(
            "numpy.dtype", (letters,)
        )
    return found


_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapper_subclass,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta_tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): _dict,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): _counter,
    ("collections", "deque"): _deque,
    ("_codecs", "encode"): _encoded,
    ("datetime", "timedelta"): _time_span,
    ("datetime", "datetime"): _time,
    **{
        (module, name): make
        for module in ("builtins", "__builtin__")
        for name, make in {
            **{"dict": _dict, "set": _set, "frozenset": _frozenset, "complex": _complex},
            **{"bytearray": _bytearray, "bytes": _bytes, "slice": _slice},
            **{"list": _deque, "tuple": lambda items=(): tuple(items)},
            # as a factory of a defaultdict
            **{"int": lambda: 0, "float": lambda: 0.0, "str": lambda: "", "bool": lambda: False},
        }.items()
    },
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath")
    },
    **_numpy_names(),
}
