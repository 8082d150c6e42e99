"""Writing a native checkpoint without a model or a process group, for any number of ranks."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..._comm.host_memory import memory_of
from ..._layout.box import cut_into_boxes
from ..._layout.spec import Interval, flat_layout
from ...errors import UsageError
from .._blocks import BlockWriter, FileFacts
from .._head import TEXT
from .._header import dtype_name, encode_header
from .._manifest import MANIFEST, FlatGroup, Manifest, file_name, versions
from .._texts import require_readable
from .._values import encode, tensor_as_text
from .archive import Archive, StoredTensor
from .native_reading import EXTRA, EXTRA_STATE
from .reading import AT_ONCE_NBYTES, Files, boxes_of, read, read_box
from .work import for_each
from .writing import WriteOptions, dtype_to_write

_ALIGN_NBYTES = 16
_COMMON = 0  # the file with what is the same on all ranks


def write_native(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write a checkpoint that ``checkpoint.load`` reads into any wrapping on any number of ranks.

    Its shards are cut for ``options.world_size`` ranks, with a file each. Parameters whose names
    begin with the same match of ``options.unit`` share a unit. Raises UsageError for values that a
    native checkpoint cannot hold.
    """
    path.mkdir()
    target = _Target(archive, path, options, files)
    facts = for_each(
        range(options.world_size),
        lambda number, _: target.write(number),
        workers=options.workers,
    )
    with open(path / MANIFEST, "x", encoding="utf-8", newline="\n") as text:
        text.write(target.manifest(facts))
        text.flush()
        os.fsync(text.fileno())


@dataclasses.dataclass(frozen=True)
class _State:
    """A state with one element per element, of some parameters of a group."""

    key: Any
    name: str  # of the tensor in the files
    dtype: torch.dtype
    of: dict[int, StoredTensor]  # by the index of the parameter


@dataclasses.dataclass(frozen=True)
class _Group:
    facts: FlatGroup
    tensors: tuple[StoredTensor, ...]
    states: tuple[_State, ...]
    scalars: dict[Any, dict[str, list[int]]]  # by key and encoded value: parameters


class _Target:
    """The checkpoint to write: a file per rank, all with the same groups."""

    def __init__(self, archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
        self._archive, self._path, self._options, self._files = archive, path, options, files
        self._identity = uuid.uuid4().hex
        if archive.is_by_number and archive.param_groups is not None:
            raise _numbered(archive)
        self._names: set[str] = set()  # of groups and of their states
        self._groups = [
            self._group(prefix, dtype, names)
            for (prefix, dtype), names in _units(archive, options.unit).items()
        ]
        self._other_states = {
            name: states for name, states in archive.states.items() if name not in archive.tensors
        }

    def _group(self, prefix: str, dtype: torch.dtype, names: list[str]) -> _Group:
        archive = self._archive
        tensors = tuple(archive.tensors[name] for name in names)
        align = max(_ALIGN_NBYTES // dtype.itemsize, 1)
        layout = flat_layout(
            names,
            [tensor.shape for tensor in tensors],
            ranks=self._options.world_size,
            align=align,
        )
        others: dict[str, list[str]] = {}
        for alias, name in archive.aliases.items():
            others.setdefault(name, []).append(alias)
        name = f"{prefix}{'.' if prefix and not prefix.endswith('.') else ''}flat_"
        name += dtype_name(dtype)
        name = self._fresh(name)
        facts = FlatGroup(
            name, dtype, 0, layout, tuple((name, *others.get(name, [])) for name in names)
        )
        per_element: dict[tuple[Any, torch.dtype], dict[int, StoredTensor]] = {}
        scalars: dict[Any, dict[str, list[int]]] = {}
        for index, (param, tensor) in enumerate(zip(names, tensors, strict=True)):
            for key, value in archive.states.get(param, {}).items():
                if _is_per_element(key, value, tensor):
                    state = per_element.setdefault((key, dtype_to_write(value)), {})
                    state[index] = value
                else:
                    text = json.dumps(self._as_text(value, f"{param}.{key}"))
                    scalars.setdefault(key, {}).setdefault(text, []).append(index)
        states = tuple(
            _State(key, self._fresh(f"{name}.{key}.{dtype_name(its_dtype)}"), its_dtype, of)
            for (key, its_dtype), of in per_element.items()
        )
        return _Group(facts, tensors, states, scalars)

    def _fresh(self, name: str) -> str:
        """Return a name that no tensor has yet: the keys 0 and "0" differ, their texts do not."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def _as_text(self, value: Any, where: str) -> Any:
        """Return a small state as JSON. Raises UsageError for one that is not small."""
        if isinstance(value, StoredTensor):
            if value.numel > 1:
                raise UsageError.of(
                    "A native checkpoint cannot hold this optimizer state.",
                    expected="a state of the shape of its parameter, or a single value",
                    got=f"shape {list(value.shape)}",
                    where=where,
                    fix="leave the optimizer out with optimizer=False",
                )
            value = read(value, self._files)
        return encode(value, where, tensor_as_text)

    # -- one rank's file

    def write(self, number: int) -> FileFacts:
        """Write the file of a rank."""
        own: dict[str, StoredTensor] = {}  # tensors of the extra values and of other states
        common = self._encoded_common(own) if number == _COMMON else {"extra": None}
        described = [(name, dtype_to_write(tensor), tensor.shape) for name, tensor in own.items()]
        head, infos = encode_header(
            [*self._described(), *described], {TEXT: self._text(number, common)}
        )
        shards = {
            name: (group, tensors)
            for group in self._groups
            for name, _, tensors in _shards_of(group)
        }
        writer = BlockWriter(self._path / file_name(number), self._options.tick)
        try:
            writer.write(memoryview(head))
            for info in infos:
                if info.name in own:
                    for values in self._elements(own[info.name], Interval(0, info.numel)):
                        writer.write(memory_of(values))
                else:
                    group, tensors = shards[info.name]
                    self._write_shard(writer, group, tensors, info.dtype, number)
            return writer.finish()
        finally:
            writer.close()

    def _described(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [
            (name, dtype, (group.facts.layout.shard_numel,))
            for group in self._groups
            for name, dtype, _ in _shards_of(group)
        ]

    def _write_shard(
        self,
        writer: BlockWriter,
        group: _Group,
        tensors: Mapping[int, StoredTensor],
        dtype: torch.dtype,
        rank: int,
    ) -> None:
        """Write one shard: the parts of ``tensors``, by parameter, and zeros between them."""
        layout, position = group.facts.layout, 0
        for index in range(len(layout.params)):
            place = layout.part_in_shard(index, rank)
            if index in tensors and place:
                _write_zeros(writer, (place.start - position) * dtype.itemsize)
                for values in self._elements(tensors[index], layout.part(index, rank)):
                    writer.write(memory_of(values))
                position = place.stop
        _write_zeros(writer, (layout.shard_numel - position) * dtype.itemsize)

    def _elements(self, tensor: StoredTensor, part: Interval) -> Iterator[torch.Tensor]:
        """Yield row-major elements of a tensor, each time in memory of its own: the writer's second
        thread still reads it."""
        dtype = dtype_to_write(tensor)
        most = max(min(self._options.slab_nbytes, AT_ONCE_NBYTES) // tensor.dtype.itemsize, 1)
        for box in cut_into_boxes(tensor.shape, part):
            for inner in boxes_of(box.sizes, most):
                offsets = tuple(map(int.__add__, box.offsets, inner.offsets))
                values = read_box(tensor, dataclasses.replace(inner, offsets=offsets), self._files)
                yield values.to(dtype).contiguous()

    # -- texts

    def _text(self, number: int, common: dict[str, Any]) -> str:
        text: dict[str, Any] = {
            "identity": self._identity,
            "number": number,
            "left_out": [],
            "states": {},
            "scalars": {},
            "own": {},
            **common,
        }
        for group in self._groups:
            num_params = len(group.tensors)
            text["states"][group.facts.name] = [
                {
                    "key": state.key,
                    "entry": state.name,
                    "dtype": dtype_name(state.dtype),
                    "of": None if len(state.of) == num_params else sorted(state.of),
                }
                for state in group.states
            ]
            text["scalars"][group.facts.name] = [
                [
                    key,
                    [
                        [None if len(of) == num_params else of, json.loads(value)]
                        for value, of in values.items()
                    ],
                ]
                for key, values in group.scalars.items()
            ]
        encoded = json.dumps(text, separators=(",", ":"))
        require_readable(encoded.encode("ascii"))
        return encoded

    def _encoded_common(self, own: dict[str, StoredTensor]) -> dict[str, Any]:
        """Return the extra values, the states of parameters that are not there, and modules' extra
        state, encoded, as they stand in the text of one file; their tensors are entered in
        ``own``."""
        stand_ins: dict[int, StoredTensor] = {}
        held: list[torch.Tensor] = []  # so that no memory is used twice

        def stand_in(value: Any) -> Any:
            if isinstance(value, StoredTensor):
                tensor = torch.empty(1, dtype=dtype_to_write(value))
                held.append(tensor)
                stand_ins[tensor.data_ptr()] = value
                if not value.numel or not value.shape:
                    return tensor[: value.numel].view(value.shape)
                return tensor.expand(value.shape)
            if isinstance(value, collections.OrderedDict):
                return collections.OrderedDict((key, stand_in(item)) for key, item in value.items())
            if type(value) is dict:
                return {key: stand_in(item) for key, item in value.items()}
            if isinstance(value, collections.deque):
                return collections.deque(map(stand_in, value), value.maxlen)
            if type(value) in (list, tuple):
                return type(value)(map(stand_in, value))
            return value

        def put(tensor: torch.Tensor) -> str:
            stored = stand_ins[tensor.untyped_storage().data_ptr()]
            name = f"{len(own)}/{stored.name}"
            own[name] = stored
            return name

        extra: Any = dict(self._archive.extra)
        extra_state = extra.get(EXTRA_STATE)
        extra_state = extra.pop(EXTRA_STATE) if isinstance(extra_state, dict) else {}
        if set(extra) == {EXTRA, "step"} and extra["step"] == self._archive.step:
            del extra["step"]  # where another format has put it
        if set(extra) == {EXTRA}:
            extra = extra[EXTRA]
        encoded = encode(stand_in(extra) if extra != {} else None, "extra", put)
        states = {
            name: [
                [key, encode(stand_in(value), f"{name}.{key}", put)] for key, value in of.items()
            ]
            for name, of in self._other_states.items()
        }
        others = {name: encode(stand_in(value), name, put) for name, value in extra_state.items()}
        arrays = {name for name, tensor in own.items() if tensor.is_array}
        return {
            "extra": _with_arrays(encoded, arrays),
            "others": others,
            "other_states": states,
        }

    def manifest(self, facts: list[FileFacts]) -> str:
        """Return the text of the manifest. facts: of the ranks' files."""
        groups = self._archive.param_groups
        return Manifest(
            self._identity,
            self._options.step,
            _COMMON,
            (tuple(range(self._options.world_size)),),
            tuple(group.facts for group in self._groups),
            tuple(facts),
            None
            if groups is None
            else [
                {"params": list(group["params"]), "settings": self._settings(group, number)}
                for number, group in enumerate(groups)
            ],
            versions(),
            () if groups is None else self._archive.optimizer_classes,
            shares_extra=True,
        ).as_text()

    def _settings(self, group: Mapping[str, Any], number: int) -> Any:
        where = f"parameter group {number}"
        settings = {
            key: read(value, self._files) if isinstance(value, StoredTensor) else value
            for key, value in group.items()
            if key != "params"
        }
        return encode(settings, where, tensor_as_text)


def _with_arrays(encoded: Any, arrays: set[str]) -> Any:
    """Return encoded values in which some tensors, by their names, are arrays of numpy."""
    if isinstance(encoded, list):
        return [_with_arrays(item, arrays) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if list(encoded) == ["@tensor"] and encoded["@tensor"][0] in arrays:
        return {"@array": encoded["@tensor"]}
    return {key: _with_arrays(item, arrays) for key, item in encoded.items()}


def _units(archive: Archive, unit: str | None) -> dict[tuple[str, torch.dtype], list[str]]:
    """Return the names of the parameters of each group, by the prefix of its unit and its dtype."""
    pattern = None if unit is None else re.compile(unit)
    found: dict[tuple[str, torch.dtype], list[str]] = {}
    for name, tensor in archive.tensors.items():
        match = pattern.match(name) if pattern is not None else None
        prefix = match[0] if match is not None else ""
        found.setdefault((prefix, dtype_to_write(tensor)), []).append(name)
    return found


def _shards_of(group: _Group) -> Iterator[tuple[str, torch.dtype, Mapping[int, StoredTensor]]]:
    """Yield the shards of a group: (name, dtype, the tensors in it by parameter)."""
    yield group.facts.name, group.facts.dtype, dict(enumerate(group.tensors))
    for state in group.states:
        yield state.name, state.dtype, state.of


def _is_per_element(key: object, value: Any, param: StoredTensor) -> bool:
    if not isinstance(value, StoredTensor) or value.shape != param.shape:
        return False
    return bool(param.shape) or key != "step"  # for a 0-d parameter a count looks like a state


_ZEROS = memoryview(bytes(1 << 20))


def _write_zeros(writer: BlockWriter, nbytes: int) -> None:
    for start in range(0, nbytes, len(_ZEROS)):
        writer.write(_ZEROS[: min(len(_ZEROS), nbytes - start)])


def _numbered(archive: Archive) -> UsageError:
    return UsageError.of(
        "The parameters of the optimizer are numbered, and their names are not known.",
        expected="optimizer state by parameter name",
        got="numbers, as torch.optim saves them, which do not tell which parameters they are",
        where=str(archive.path),
        fix="pass their names as optimizer_names (--optimizer-names FILE), or leave the "
        "optimizer out",
    )
