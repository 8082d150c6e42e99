"""Native checkpoints: the manifest says where each element lies, and the head of each file which
optimizer state its rank had.

Tools read all heads; a rank reads those of the files that hold its own part, and for each parameter
one file with some of it. The directory may lack the others (a folder per node)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._archive.archive import (
    Archive,
    LazyPieces,
    Span,
    StoredPiece,
    StoredTensor,
    in_one_piece,
    is_per_element,
    is_user,
    of_memory,
    pieces_of_run,
)
from ..._archive.blocks import BLOCK_NBYTES, FileFacts, damaged
from ..._archive.header import TensorInfo, dtype_name, is_known, length_of_header, parse_header
from ..._archive.reader import Files, Read, read_all
from ..._archive.texts import brief
from ..._archive.threads import for_each
from ..._archive.walk import map_values
from ..._comm.host_memory import memory_of
from ..._layout.box import Box, Piece, Share
from ..._layout.spec import Interval, extent, flat_layout, row_major_strides, runs_of_part
from ..._progress import Tick
from ...errors import UsageError
from .._folder.directory import latest
from .._folder.publishing import write_text
from .._live.values import Put, decode, encode, tensor_as_text, tensor_from_text
from .manifest import (
    MANIFEST,
    FlatGroup,
    Head,
    Indices,
    Manifest,
    SavedParameter,
    StateTensor,
    file_name,
    read_manifest,
)
from .paths import member
from .writers import Elements, FilePart, FileTensor, WriteOptions, dtype_to_write, write_file

KIND = "native"

# Keys in ``Archive.extra``: an extra value that is not a dict of names, and modules' extra state.
EXTRA, EXTRA_STATE = "extra", "extra_state"

_ALIGN_NBYTES = 16
_COMMON = 0  # of an archive: the file with what is the same on all ranks


def native_in(path: Path) -> Path | None:
    """Return a directory if it is a native checkpoint, or the latest in a run's folder."""
    return path if (path / MANIFEST).is_file() else latest(path)


def read_native(path: Path) -> Archive:
    """Return the content of a native checkpoint."""
    return NativeCheckpoint(path, read_manifest(path)).archive()


def files_of_native(path: Path) -> Archive:
    """Return what a manifest says of the files: their checksums, ranks and step."""
    manifest = read_manifest(path)
    checksums = {path / file_name(at): facts for at, facts in enumerate(manifest.files)}
    num_ranks, step = len(manifest.files), manifest.step
    return Archive(path, KIND, {}, world_size=num_ranks, step=step, checksums=checksums)


class NativeCheckpoint:
    """One checkpoint, as tools and ranks read it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.parameters = manifest.parameters
        self.checksums = {
            member(path, file_name(number)): facts
            for number, facts in enumerate(self.manifest.files)
        }
        self._paths = list(self.checksums)
        self._files = Files(self.checksums)
        self._heads: dict[int, Head] = {}
        self._infos: dict[int, dict[str, TensorInfo]] = {}  # of the files whose heads were read

    def head(self, number: int) -> Head:
        """Return a file's head. It is read once, and parsed after its checksums match."""
        if number not in self._heads:
            path, nbytes = self._paths[number], self.manifest.files[number].nbytes
            first = self._content(number, 0, min(BLOCK_NBYTES, nbytes))
            stop = 8 + length_of_header(first[:8], nbytes, path)
            if stop > len(first):
                first += self._content(number, len(first), stop - len(first))
            try:
                self._infos[number], metadata = parse_header(first[8:stop], nbytes, path)
                head = Head.of_metadata(metadata)
            except (LookupError, TypeError, ValueError, RecursionError) as error:
                raise damaged(path, "the head that a rank writes", brief(error)) from error
            if (head.identity, head.number) != (self.manifest.identity, number):
                got = f"file {head.number} of save {head.identity[:40]}"
                raise damaged(path, f"file {number} of save {self.manifest.identity[:40]}", got)
            self._heads[number] = head
        return self._heads[number]

    def _content(self, number: int, start: int, nbytes: int) -> bytes:
        content = torch.empty(nbytes, dtype=torch.uint8)
        self._files.read([Read.of_bytes(self._paths[number], start, content)], anew=True)
        return bytes(memory_of(content))

    def left_out(self) -> list[str]:
        """Return the states and settings that were not saved, from the heads read so far."""
        return sorted({name for head in self._heads.values() for name in head.left_out})

    # -- as an archive

    def archive(self) -> Archive:
        """Return everything that the files hold."""
        archive, manifest = self.outline(), self.manifest
        for name, saved in self.parameters.items():
            if name == saved.names[0] and (states := self.state_of(name)):
                archive.states[name] = states
        archive.states |= {name: self.state_of(name) for name in self._common.other_states}
        extra = self.extra_of(manifest.common)
        is_named = isinstance(extra, dict) and all(isinstance(key, str) for key in extra)
        if not is_named or not extra.keys().isdisjoint((EXTRA, EXTRA_STATE)):
            extra = {} if extra is None else {EXTRA: extra}
        archive.extra = {**extra, **archive.extra}
        heads = [self.head(number) for number in range(len(self._paths))]
        archive.left_out += [
            f"{group.names[index][0]}.{key}, which belongs to the part of rank {head.number}"
            for head in heads
            for group in manifest.groups
            for index, key, _ in head.own.get(group.name, [])
        ]
        if not manifest.shares_extra and any(head.extra != heads[0].extra for head in heads):
            archive.left_out.append("the extra values of all ranks but the first, which differ")
        archive.left_out += self.left_out()
        return archive

    def outline(self) -> Archive:
        """Return everything but extra values and the states of parameters."""
        manifest = self.manifest
        archive = Archive(
            self.path,
            KIND,
            {},
            world_size=len(manifest.files),
            step=manifest.step,
            optimizer_classes=manifest.optimizer_classes,
            checksums=self.checksums,
        )
        for name, saved in self.parameters.items():
            if name == saved.names[0]:
                archive.tensors[name] = self._tensor(saved)
            else:
                archive.aliases[name] = saved.names[0]
        for name, encoded in self._common.others.items():
            value = self._value(encoded, name, manifest.common)
            if isinstance(value, StoredTensor):
                archive.tensors[name] = value
            else:
                archive.extra.setdefault(EXTRA_STATE, {})[name] = value
        for name, state in self._common.other_states.items():
            if is_user(dict(state)):
                archive.states[name] = self.state_of(name)
        if manifest.param_groups is not None:
            archive.param_groups = [
                {**self._settings(group["settings"]), "params": list(group["params"])}
                for group in manifest.param_groups
            ]
        return archive

    def _settings(self, encoded: Any) -> dict[str, Any]:
        settings = decode(encoded, "parameter group", tensor_from_text)
        if not isinstance(settings, dict):
            raise damaged(self.path / MANIFEST, "settings by name", f"a {type(settings).__name__}")
        return {key: _stored(value, f"settings/{key}") for key, value in settings.items()}

    def extra_of(self, number: int) -> Any:
        """Return the extra values of a file."""
        return self._value(self.head(number).extra, "extra", number)

    @property
    def _common(self) -> Head:
        return self.head(self.manifest.common)

    # -- optimizer states

    def state_of(self, name: str) -> dict[Any, Any]:
        """Return the optimizer state of a parameter by key: StoredTensors and plain values."""
        owners, common = self.manifest.owners, self.manifest.common
        if name in owners or name not in self.parameters:
            number = owners.get(name, common)
            return {
                key: self._value(value, f"{name}.{key}", number)
                for key, value in self.head(number).other_states.get(name, [])
            }
        saved, found = self.parameters[name], dict[Any, Any]()
        heads = [(group.name, index, self.head(n)) for group, index, n in self._files_with(saved)]
        for group, index, head in heads:
            for state in head.states.get(group, []):
                if state.key not in found and _has(state.of, index):
                    found[state.key] = self._tensor(saved, state)
        for group, index, head in heads:
            for key, values in head.scalars.get(group, []):
                for of, value in values:
                    if key not in found and _has(of, index):
                        decoded = decode(value, f"state {key!r}", tensor_from_text)
                        found[key] = _stored(decoded, f"{saved.names[0]}.{key}")
        return found

    def _files_with(self, saved: SavedParameter) -> list[tuple[FlatGroup, int, int]]:
        """Return (group, index, a file whose rank knew all states) of a parameter: the first
        present one with a part; else any of the group, for a part of a flat parameter."""
        found = []
        for group, index in saved.places:
            axis, place = self.manifest.axes[group.axis], group.layout.params[index].in_full
            numel = group.layout.shard_numel
            with_some = axis[place.start // numel : -(-place.stop // numel)]
            there = (n for n in (*with_some, *axis) if self._paths[n].name in self._names_here)
            found += [(group, index, number) for number in itertools.islice(there, 1)]
        (group, index), *_ = saved.places
        return found or [(group, index, self.manifest.axes[group.axis][0])]

    @functools.cached_property
    def _names_here(self) -> set[str]:
        return {file.name for file in self.path.iterdir()}

    def rank_local_states(
        self, name: str, share: Share | None, is_flattened: bool
    ) -> tuple[dict[Any, Any], dict[Any, dict[Interval, Any]]]:
        """Return the states of one rank's part; or, if that is not as ``share``, see
        ``FlatGroup.is_cut_as``, those of all parts that share elements with it, by these. None: an
        unmanaged tensor."""
        places = self._files_with(self.parameters[name]) if name in self.parameters else []
        for group, index, _ in places:
            if share is not None and group.is_cut_as(index, share, is_flattened):
                return self._own_states(group, index, share.rank), {}
        others: dict[Any, dict[Interval, Any]] = {}
        for group, index, number in places:
            layout, axis = group.layout, self.manifest.axes[group.axis]
            parts = {axis.index(number): Interval(0, 0)}  # to tell whether there are any states
            if share is not None and group.pieces[index].is_whole and layout.params[index].block:
                of_all = ((rank, layout.part(index, rank)) for rank in range(layout.ranks))
                parts = {rank: part for rank, part in of_all if part.clipped(share.part)}
            for rank, part in parts.items():
                for key, value in self._own_states(group, index, rank).items():
                    others.setdefault(key, {})[part] = value
        return {}, others

    def _own_states(self, group: FlatGroup, index: int, rank: int) -> dict[Any, Any]:
        number = self.manifest.axes[group.axis][rank]
        return {
            key: self._value(value, f"state {key!r}", number)
            for its_index, key, value in self.head(number).own.get(group.name, [])
            if its_index == index
        }

    # -- where things lie

    def _tensor(self, saved: SavedParameter, state: StateTensor | None = None) -> StoredTensor:
        """Return a parameter, or a state of it, in the shards of its groups."""
        name, dtype = saved.names[0], saved.dtype
        if state is not None:
            name, dtype = f"{name}.{state.key}", state.dtype
        pieces = LazyPieces(functools.partial(self._pieces, saved, state, dtype))
        return StoredTensor(name, dtype, saved.shape, pieces)

    def _pieces(
        self, saved: SavedParameter, state: StateTensor | None, dtype: torch.dtype, box: Box | None
    ) -> Iterator[StoredPiece]:
        zero = torch.zeros((), dtype=dtype)
        for group, index in saved.places:
            part, numel = group.pieces[index], group.layout.shard_numel
            for number, run, first in self._runs(group, index, box or Box.of_whole(saved.shape)):
                source: Span | torch.Tensor = zero.expand(run.numel)
                if (entry := self._entry(group, index, number, state)) is not None:
                    start = self._start_of(number, entry, dtype, numel) + first * dtype.itemsize
                    source = Span(self._paths[number], start, (1,))
                yield from pieces_of_run(
                    part.shape, run, source, dtype.itemsize, number, part.offsets
                )

    def _entry(
        self, group: FlatGroup, index: int, number: int, state: StateTensor | None
    ) -> str | None:
        """Return which tensor of a file holds a parameter, or a state of it; None: no state there,
        so zeros."""
        if state is None:
            return group.name
        for each in self.head(number).states.get(group.name, []):
            if (each.key, each.dtype) == (state.key, state.dtype) and _has(each.of, index):
                return each.entry
        return None

    def _runs(self, group: FlatGroup, index: int, box: Box) -> Iterator[tuple[int, Interval, int]]:
        """Yield where a group has the elements of a box, with those between them: (file, elements
        of the group's part, the first of them in the shard)."""
        part = group.pieces[index]
        common = Box(part.offsets, part.shape).intersection(box)
        if common is None:
            return
        strides = row_major_strides(part.shape)
        first = sum(map(int.__mul__, common.in_part(part.offsets).offsets, strides))
        stop = first + extent(common.sizes, strides)
        axis = self.manifest.axes[group.axis]
        for run in runs_of_part(group.layout, index, Interval(first, stop)):
            elements = Interval(0, run.in_shard.numel).shifted(first + run.start)
            yield axis[run.rank], elements, run.in_shard.start

    def _start_of(self, number: int, name: str, dtype: torch.dtype, numel: int) -> int:
        """Return the first byte of a tensor of ``numel`` elements in a file."""
        self.head(number)
        info = self._infos[number].get(name)
        described_as = dtype if is_known(dtype) else torch.uint8
        if info is None or (info.dtype, info.nbytes) != (described_as, numel * dtype.itemsize):
            got = "no such tensor" if info is None else f"{info.nbytes} bytes of {info.dtype}"
            raise damaged(self._paths[number], f"{numel} elements of {dtype} under {name!r}", got)
        return info.start

    def _value(self, encoded: Any, where: str, number: int) -> Any:
        """Return an encoded value, with StoredTensors in place of tensors."""

        def get(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
            start = self._start_of(number, name, dtype, math.prod(shape))
            span = Span(self._paths[number], start, row_major_strides(shape))
            return in_one_piece(where, dtype, shape, span, number)

        return decode(encoded, where, get)


def _has(of: Indices, index: int) -> bool:
    return of is None or index in of


def _stored(value: Any, name: str) -> Any:
    """Return plain values with the tensors in them as StoredTensors."""
    return map_values(
        value, lambda leaf: of_memory(name, leaf) if isinstance(leaf, torch.Tensor) else leaf
    )


# -- writing


class RankFile:
    """The content of one rank's file. values_of: returns a tensor's values, 1-D."""

    def __init__(self, values_of: Callable[[Any], torch.Tensor | Elements] | None = None) -> None:
        self.head = Head()
        self.tensors: list[FileTensor] = []
        self._values_of = values_of or (lambda tensor: tensor.contiguous().reshape(-1))
        self._names: set[str] = set()

    def add(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], parts: Iterable[FilePart] = ()
    ) -> FileTensor:
        """Add a tensor, under a name of its own that begins with ``name``."""
        base, number = name, 0
        while name in self._names:
            number += 1
            name = f"{base}/{number}"
        self._names.add(name)
        self.tensors.append(FileTensor(name, dtype, tuple(shape), list(parts)))
        return self.tensors[-1]

    def under(self, *path: str) -> Put:
        """Return the `Put` that adds tensors under names that begin with ``path``."""

        def put(tensor: Any) -> str:
            part = FilePart(0, self._values_of(tensor))
            return self.add("/".join(path), tensor.dtype, tensor.shape, [part]).name

        return put

    def add_others(self, others: Mapping[str, Any]) -> None:
        """Add buffers, unmanaged parameters and extra state, by name."""
        self.head.others = {
            name: encode(value, name, self.under("other", name)) for name, value in others.items()
        }

    def add_states(
        self,
        group: str,
        numel: int,
        num_params: int,
        states: Iterable[tuple[Any, Sequence[int], Any]],
    ) -> None:
        """Add a group's states: (key, parameters, part of ``numel`` elements or encoded value)."""
        tensors: dict[tuple[Any, torch.dtype], tuple[FileTensor, list[int]]] = {}
        scalars: dict[Any, dict[str, list[int]]] = {}  # by key: parameters by encoded value
        for key, indices, value in states:
            if isinstance(value, FilePart):
                which = key, value.values.dtype
                if which not in tensors:
                    tensors[which] = self.add(f"{group}.{key}", which[1], (numel,)), []
                tensors[which][0].parts.append(value)
                tensors[which][1].extend(indices)
            else:
                scalars.setdefault(key, {}).setdefault(json.dumps(value), []).extend(indices)

        def brief(indices: Sequence[int]) -> Indices:
            return None if len(indices) == num_params else frozenset(indices)

        self.head.states[group] = [
            StateTensor(key, tensor.name, dtype, brief(indices))
            for (key, dtype), (tensor, indices) in tensors.items()
        ]
        self.head.scalars[group] = [
            (key, [(brief(indices), json.loads(text)) for text, indices in values.items()])
            for key, values in scalars.items()
        ]


def write_native(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write a native checkpoint for ``options.world_size`` ranks. Parameters whose names begin with
    the same match of ``options.unit`` share a unit. Raises UsageError for unfit values."""
    path.mkdir()
    target = _target_of(archive, options, files)

    def write(number: int, stop: Tick) -> FileFacts:
        file = target.file(number)
        place, metadata = path / file_name(number), file.head.as_metadata()
        return write_file(place, file.tensors, metadata, lambda n: (stop(0), options.tick(n)))

    facts = for_each(range(options.world_size), write)
    write_text(path / MANIFEST, target.manifest(facts).as_text())


@dataclasses.dataclass(frozen=True)
class _Target:
    """The checkpoint to write: a file per rank, all with the same groups."""

    archive: Archive
    options: WriteOptions
    files: Files
    identity: str
    groups: tuple[FlatGroup, ...]
    owned: set[str]  # parameters whose states lie whole in the common file: one rank had them
    small: dict[tuple[str, Any], Any]  # encoded states that are not cut as their parameter is

    def file(self, rank: int) -> RankFile:
        """Return the content of the file of a rank."""
        file = RankFile(lambda tensor: Elements.all_of(tensor, self.files))
        file.head.identity, file.head.number = self.identity, rank
        for group in self.groups:
            params = [self.archive.tensors[names[0]] for names in group.names]
            parts = [self._part(group, at, rank, param) for at, param in enumerate(params)]
            file.add(group.name, group.dtype, (group.layout.shard_numel,), parts)
        for group in self.groups:
            states = self._states(group, rank)
            file.add_states(group.name, group.layout.shard_numel, len(group.names), states)
        if rank == _COMMON:
            self._add_common(file)
        return file

    def _part(self, group: FlatGroup, index: int, rank: int, tensor: StoredTensor) -> FilePart:
        part = group.layout.part(index, rank)
        values = Elements(tensor, part, self.files)
        return FilePart(group.layout.part_in_shard(index, rank).start, values)

    def _states(self, group: FlatGroup, rank: int) -> Iterator[tuple[Any, list[int], Any]]:
        for index, (name, *_) in enumerate(group.names):
            states = self.archive.states.get(name, {}) if name not in self.owned else {}
            for key, value in states.items():
                if (name, key) in self.small:
                    yield key, [index], self.small[name, key]
                else:
                    yield key, [index], self._part(group, index, rank, value)

    def _add_common(self, file: RankFile) -> None:
        """Add extra values, extra state, whole states, and those of parameters that are not
        there."""
        extra: Any = dict(self.archive.extra)
        extra_state = extra.get(EXTRA_STATE)
        extra_state = extra.pop(EXTRA_STATE) if isinstance(extra_state, dict) else {}
        if set(extra) == {EXTRA, "step"} and extra["step"] == self.archive.step:
            del extra["step"]  # where another format has put it
        if set(extra) == {EXTRA}:
            extra = extra[EXTRA]
        file.head.extra = encode(extra if extra != {} else None, "extra", file.under("extra"))
        cut = self.archive.tensors.keys() - self.owned
        for name in [name for name in self.archive.states if name not in cut]:
            put = file.under("other state", name)
            file.head.other_states[name] = [
                (key, encode(value, f"{name}.{key}", put))
                for key, value in self.archive.states[name].items()
            ]
        file.add_others(extra_state)

    def manifest(self, facts: list[FileFacts]) -> Manifest:
        """facts: of the ranks' files."""
        param_groups = self.archive.param_groups
        return Manifest(
            self.identity,
            self.options.step,
            _COMMON,
            (tuple(range(self.options.world_size)),),
            self.groups,
            tuple(facts),
            param_groups and list(map(self._param_group, param_groups)),
            optimizer_classes=() if param_groups is None else self.archive.optimizer_classes,
            shares_extra=True,
            owners=dict.fromkeys(sorted(self.owned), _COMMON),
        )

    def _param_group(self, group: dict[str, Any]) -> dict[str, Any]:
        settings = {key: value for key, value in group.items() if key != "params"}
        text = encode(read_all(settings, self.files), "parameter group", tensor_as_text)
        return {"params": list(group["params"]), "settings": text}


def _target_of(archive: Archive, options: WriteOptions, files: Files) -> _Target:
    if archive.is_by_number and archive.param_groups is not None:
        raise UsageError.of(
            "The parameters of the optimizer are numbered, and their names are not known.",
            expected="optimizer state by parameter name",
            got="numbers, as torch.optim saves them",
            where=str(archive.path),
            fix="pass their names as optimizer_names (--optimizer-names FILE), or leave the "
            "optimizer out",
        )
    owned, small = set[str](), dict[tuple[str, Any], Any]()
    for name, param in archive.tensors.items():
        state = archive.states.get(name, {}).items()
        not_cut = {key: its for key, its in state if not is_per_element(key, its, param.shape)}
        if any(isinstance(its, StoredTensor) and its.numel > 1 for its in not_cut.values()):
            owned.add(name)
            continue
        for key, value in read_all(not_cut, files).items():
            small[name, key] = encode(value, f"{name}.{key}", tensor_as_text)
    groups = _groups(archive, options)
    return _Target(archive, options, files, uuid.uuid4().hex, groups, owned, small)


def _groups(archive: Archive, options: WriteOptions) -> tuple[FlatGroup, ...]:
    """Return the groups of the parameters, by the prefix of their unit and their dtype."""
    units: dict[tuple[str, torch.dtype], list[str]] = {}
    for name, tensor in archive.tensors.items():
        match = re.match(options.unit, name) if options.unit is not None else None
        prefix = match[0] if match is not None else ""
        units.setdefault((prefix, dtype_to_write(tensor)), []).append(name)
    names = {name: [name] for name in archive.tensors}
    for alias, name in archive.aliases.items():
        names[name].append(alias)
    found: dict[str, FlatGroup] = {}
    for (prefix, dtype), params in units.items():
        shapes = [archive.tensors[name].shape for name in params]
        align = max(_ALIGN_NBYTES // dtype.itemsize, 1)
        layout = flat_layout(params, shapes, ranks=options.world_size, align=align)
        group = f"{prefix}{'.' if prefix and not prefix.endswith('.') else ''}flat_"
        group += dtype_name(dtype)
        while group in found:  # units "a" and "a."
            group += "_"
        all_names = tuple(tuple(names[name]) for name in params)
        pieces = tuple(map(Piece.of_whole, shapes))
        found[group] = FlatGroup(group, dtype, 0, layout, all_names, pieces)
    return tuple(found.values())
