"""Writing a native checkpoint without a model or a process group, for any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..._layout.spec import Interval, flat_layout
from ...errors import UsageError
from .._blocks import FileFacts
from .._head import Head, Indices, StateTensor, brief_indices
from .._header import dtype_name
from .._manifest import MANIFEST, FlatGroup, Manifest, file_name, versions
from .._values import encode, tensor_as_text
from .archive import Archive, StoredTensor
from .native_reading import EXTRA, EXTRA_STATE
from .reading import Files, read
from .walk import map_values
from .work import for_each
from .writing import Elements, FilePart, FileTensor, WriteOptions, dtype_to_write, write_file

_ALIGN_NBYTES = 16
_COMMON = 0  # the file with what is the same on all ranks


def write_native(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write a checkpoint that ``checkpoint.load`` reads into any wrapping on any number of ranks.

    Its shards are cut for ``options.world_size`` ranks, with a file each. Parameters whose names
    begin with the same match of ``options.unit`` share a unit. Raises UsageError for values that a
    native checkpoint cannot hold.
    """
    path.mkdir()
    target = _Target(archive, options, files)
    facts = for_each(
        range(options.world_size),
        lambda number, _: write_file(
            path / file_name(number), *target.content(number), options.tick
        ),
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
    tensors: dict[int, StoredTensor]  # by the index of the parameter
    states: tuple[_State, ...]
    scalars: list[tuple[Any, Indices, Any]]  # as in a head

    def shards(self) -> Iterator[tuple[str, torch.dtype, Mapping[int, StoredTensor]]]:
        """Yield (name, dtype, the tensors in it by parameter)."""
        yield self.facts.name, self.facts.dtype, self.tensors
        for state in self.states:
            yield state.name, state.dtype, state.of


class _Target:
    """The checkpoint to write: a file per rank, all with the same groups."""

    def __init__(self, archive: Archive, options: WriteOptions, files: Files) -> None:
        self._archive, self._options, self._files = archive, options, files
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
        of_values = [
            (key, brief_indices(of, len(names)), json.loads(text))
            for key, values in scalars.items()
            for text, of in values.items()
        ]
        return _Group(facts, dict(enumerate(tensors)), states, of_values)

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

    def content(self, rank: int) -> tuple[list[FileTensor], dict[str, str]]:
        """Return the tensors and the metadata of the file of a rank."""
        head, tensors = Head(self._identity, rank), []
        for group in self._groups:
            layout = group.facts.layout
            for name, dtype, of in group.shards():
                parts = [
                    FilePart(place.start, self._elements(tensor, layout.part(index, rank)))
                    for index, tensor in of.items()
                    if (place := layout.part_in_shard(index, rank))
                ]
                tensors.append(FileTensor(name, dtype, (layout.shard_numel,), parts))
            head.states[group.facts.name] = [
                StateTensor(
                    state.key,
                    state.name,
                    state.dtype,
                    brief_indices([*state.of], len(group.tensors)),
                )
                for state in group.states
            ]
            head.scalars[group.facts.name] = group.scalars
        if rank == _COMMON:
            self._add_common(head, tensors)
        return tensors, head.as_metadata()

    def _elements(self, tensor: StoredTensor, part: Interval) -> Elements:
        return Elements(tensor, part, self._files, self._options.slab_nbytes)

    def _add_common(self, head: Head, tensors: list[FileTensor]) -> None:
        """Add the extra values, the states of parameters that are not there, and modules' extra
        state, with the tensors in them."""

        def put(tensor: torch.Tensor) -> str:
            stored = stand_ins[tensor.untyped_storage().data_ptr()]
            name = f"{len(tensors)}/{stored.name}"
            values = self._elements(stored, Interval(0, stored.numel))
            parts = [FilePart(0, values)] if stored.numel else []
            tensors.append(FileTensor(name, dtype_to_write(stored), stored.shape, parts))
            if stored.is_array:
                arrays.add(name)
            return name

        def encoded(value: Any, where: str) -> Any:
            return _with_arrays(encode(map_values(value, stand_in), where, put), arrays)

        def stand_in(value: Any) -> Any:
            if not isinstance(value, StoredTensor):
                return value
            tensor = torch.empty(1, dtype=dtype_to_write(value))
            held.append(tensor)
            stand_ins[tensor.data_ptr()] = value
            if not value.numel or not value.shape:
                return tensor[: value.numel].view(value.shape)
            return tensor.expand(value.shape)

        stand_ins: dict[int, StoredTensor] = {}
        held: list[torch.Tensor] = []  # so that no memory is used twice
        arrays: set[str] = set()
        extra: Any = dict(self._archive.extra)
        extra_state = extra.get(EXTRA_STATE)
        extra_state = extra.pop(EXTRA_STATE) if isinstance(extra_state, dict) else {}
        if set(extra) == {EXTRA, "step"} and extra["step"] == self._archive.step:
            del extra["step"]  # where another format has put it
        if set(extra) == {EXTRA}:
            extra = extra[EXTRA]
        head.extra = encoded(extra if extra != {} else None, "extra")
        for name, states in self._other_states.items():
            head.other_states[name] = [
                (key, encoded(value, f"{name}.{key}")) for key, value in states.items()
            ]
        head.others = {name: encoded(value, name) for name, value in extra_state.items()}

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


def _is_per_element(key: object, value: Any, param: StoredTensor) -> bool:
    if not isinstance(value, StoredTensor) or value.shape != param.shape:
        return False
    return bool(param.shape) or key != "step"  # for a 0-d parameter a count looks like a state


def _numbered(archive: Archive) -> UsageError:
    return UsageError.of(
        "The parameters of the optimizer are numbered, and their names are not known.",
        expected="optimizer state by parameter name",
        got="numbers, as torch.optim saves them, which do not tell which parameters they are",
        where=str(archive.path),
        fix="pass their names as optimizer_names (--optimizer-names FILE), or leave the "
        "optimizer out",
    )
