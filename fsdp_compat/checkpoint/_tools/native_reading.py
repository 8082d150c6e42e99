"""Reading a native checkpoint: the manifest says where each element lies, and each file's head
which optimizer state its rank had.

Heads are read when they are needed. A tool needs all of them; a rank only those of the files that
hold its own part, and a directory may lack the others (a folder per node)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..._comm.host_memory import memory_of
from ..._layout.box import Box
from ..._layout.pieces import Piece as Part
from ..._layout.spec import FlatLayout, Interval, row_major_strides
from ..._layout.transfer import runs_of_part, same_parts
from ...errors import CheckpointError
from .._blocks import BLOCK_NBYTES, damaged
from .._directory import latest
from .._head import Head
from .._header import TensorInfo, is_known, length_of_header, parse_header
from .._manifest import MANIFEST, FlatGroup, SavedParameter, file_name, read_manifest
from .._texts import brief
from .._values import decode, tensor_from_text
from .archive import (
    Archive,
    LazyPieces,
    Piece,
    Span,
    StoredTensor,
    intersection,
    moved,
    of_memory,
    pieces_of_run,
    row_major,
    whole,
)
from .paths import member
from .reading import Files, Read
from .walk import map_values

KIND = "native checkpoint of fsdp_compat"

# Keys in ``Archive.extra``: an extra value that is no dict of names, and modules' extra state.
EXTRA, EXTRA_STATE = "extra", "extra_state"


def is_native(path: Path) -> bool:
    """Return whether a directory is a native checkpoint, or a folder of such."""
    return (path / MANIFEST).is_file() or latest(path) is not None


def read_native(path: Path) -> Archive:
    """Return the content of a checkpoint that ``checkpoint.save`` wrote; of a folder of these, that
    of the latest."""
    return NativeCheckpoint(_in_folder(path)).archive()


def files_of_native(path: Path) -> Archive:
    """Return an archive without tensors, with the checksums of the files of a native checkpoint,
    whose files may be damaged; without any if the manifest is."""
    path = _in_folder(path)
    archive = Archive(path, KIND, {})
    with contextlib.suppress(CheckpointError):
        files = read_manifest(path).files
        archive.checksums = {path / file_name(number): each for number, each in enumerate(files)}
    return archive


def _in_folder(path: Path) -> Path:
    return path if (path / MANIFEST).is_file() else latest(path) or path


@dataclasses.dataclass(frozen=True)
class OwnPart:
    """What a rank is to get of one parameter."""

    part: Part  # what its group shards: all of the parameter, or a tensor-parallel part
    boxes: tuple[Box, ...]  # of the parameter: its elements
    rank: int = 0  # of the ranks that share the part
    ranks: int = 1
    cut: tuple[FlatLayout, int] | None = None  # how the part is cut; None: not at all
    is_flattened: bool = False
    # It has optimizer states also where the part is empty: in a FlatParameter or a DTensor.
    always_has_states: bool = False

    @staticmethod
    def of_whole(shape: tuple[int, ...]) -> OwnPart:
        return OwnPart(Part.of_whole(shape), (whole(shape),))


class NativeCheckpoint:
    """One checkpoint, as tools and ranks read it."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        self.parameters = self.manifest.parameters()
        self.checksums = {
            member(path, file_name(number)): facts
            for number, facts in enumerate(self.manifest.files)
        }
        self._paths = list(self.checksums)
        self._files = Files(self.checksums)
        self._heads: dict[int, Head] = {}
        self._taken: set[tuple[int, str]] = set()  # (file, tensor) that a value refers to

    def head(self, number: int) -> Head:
        """Return a file's head. It is read immediately, and parsed after its checksums match."""
        if number not in self._heads:
            path, nbytes = self._paths[number], self.manifest.files[number].nbytes
            first = self._content(number, 0, min(BLOCK_NBYTES, nbytes))
            stop = 8 + length_of_header(first[:8], nbytes, path)
            if stop > len(first):
                first += self._content(number, len(first), stop - len(first))
            try:
                tensors, metadata = parse_header(first[8:stop], nbytes, path)
                head = Head.of_metadata(metadata, tensors)
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
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
        """Return the names of states and settings that were not saved, according to the heads
        read so far."""
        return sorted({name for head in self._heads.values() for name in head.left_out})

    # -- as an archive

    def archive(self) -> Archive:
        """Return everything that the files hold."""
        archive = self.outline()
        for name, saved in self.parameters.items():
            if name == saved.names[0]:
                states = self.state_of(name, OwnPart.of_whole(saved.shape))
                if states:
                    archive.states[name] = states
        archive.states |= {name: self._other_states(name) for name in self._common.other_states}
        extra = self.extra_of(self.manifest.common)
        is_named = isinstance(extra, dict) and all(isinstance(key, str) for key in extra)
        if is_named and extra.keys().isdisjoint((EXTRA, EXTRA_STATE)):
            archive.extra |= extra
        elif extra is not None:
            archive.extra[EXTRA] = extra
        archive.extra |= {EXTRA_STATE: archive.extra.pop(EXTRA_STATE, None)}  # last
        archive.extra = {
            key: value
            for key, value in archive.extra.items()
            if key != EXTRA_STATE or value is not None
        }
        heads = [self.head(number) for number in range(len(self._paths))]
        archive.left_out += [
            f"{group.names[index][0]}.{key}, which belongs to the part of rank {head.number}"
            for head in heads
            for group in self.manifest.groups
            for index, key, _ in head.rank_local.get(group.name, [])
        ]
        if not self.manifest.shares_extra and any(head.extra != heads[0].extra for head in heads):
            archive.left_out.append("the extra values of all ranks but the first, which differ")
        archive.left_out += self.left_out()
        return archive

    def outline(self) -> Archive:
        """Return what the manifest and the common file say: the tensors and settings, without the
        optimizer's states, and of the extra values only those of modules."""
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
            if name != saved.names[0]:
                archive.aliases[name] = saved.names[0]
                continue
            pieces = _Shards(self, saved, saved.dtype, lambda group, *_: group.name)
            archive.tensors[name] = StoredTensor(name, saved.dtype, saved.shape, pieces)
        others = {
            name: self._value(value, name, manifest.common)
            for name, value in self._common.others.items()
        }
        archive.tensors |= {
            name: value for name, value in others.items() if isinstance(value, StoredTensor)
        }
        rest = {name: value for name, value in others.items() if name not in archive.tensors}
        if rest:
            archive.extra[EXTRA_STATE] = rest
        if manifest.param_groups is not None:
            archive.param_groups = [
                {**self._settings(group["settings"]), "params": list(group["params"])}
                for group in manifest.param_groups
            ]
        return archive

    def _settings(self, encoded: Any) -> dict[str, Any]:
        settings = decode(encoded, "parameter group", tensor_from_text)
        if not isinstance(settings, dict):
            raise CheckpointError.of(
                "The settings of a parameter group are invalid.",
                expected="settings by name",
                got=f"a {type(settings).__name__}",
                where="param_groups of the optimizer",
                fix="load an older checkpoint; nothing was loaded",
            )
        return {key: _stored(value, f"settings/{key}") for key, value in settings.items()}

    def extra_of(self, number: int) -> Any:
        """Return the extra values of a file."""
        return self._value(self.head(number).extra, "extra", number)

    # -- optimizer states

    def state_of(self, name: str, own: OwnPart) -> dict[Any, Any]:
        """Return the optimizer state of a part of a parameter, by key: StoredTensors, of the
        parameter's shape where they have an element per element, and plain values."""
        if name not in self.parameters:
            return self._other_states(name)
        saved = self.parameters[name]
        found: dict[Any, Any] = {}
        rest: dict[Any, Any] = {}
        for group, index, numbers in self._places(saved, own):
            for number in numbers:
                for state in self.head(number).states.get(group.name, []):
                    if state.key not in found and (state.of is None or index in state.of):
                        found[state.key] = self._state(saved, state.key, state.dtype)
                for key, of, value in self.head(number).scalars.get(group.name, []):
                    if key not in rest and (of is None or index in of):
                        decoded = decode(value, f"state {key!r}", tensor_from_text)
                        rest[key] = _stored(decoded, f"{saved.names[0]}.{key}")
        return {**found, **{key: value for key, value in rest.items() if key not in found}}

    def _state(self, saved: SavedParameter, key: Any, dtype: torch.dtype) -> StoredTensor:
        def tensor_in(group: FlatGroup, index: int, number: int) -> str | None:
            for state in self.head(number).states.get(group.name, []):
                is_it = state.key == key and state.dtype == dtype
                if is_it and (state.of is None or index in state.of):
                    return state.tensor
            return None

        pieces = _Shards(self, saved, dtype, tensor_in)
        return StoredTensor(f"{saved.names[0]}.{key}", dtype, saved.shape, pieces)

    def rank_local_states(self, name: str, own: OwnPart) -> dict[Any, Any]:
        """Return the states that fit only the part of one rank, if this is the same part. Raises
        CheckpointError if it is another one."""
        states: dict[Any, Any] = {}
        saved = self.parameters.get(name)
        for group, index, numbers in self._places(saved, own) if saved is not None else ():
            is_same = _is_alike(group, index, own)
            number = self.manifest.axes[group.axis][own.rank] if is_same else numbers[0]
            for its_index, key, value in self.head(number).rank_local.get(group.name, []):
                if its_index != index:
                    continue
                if not is_same:
                    raise self._parts_have_changed(name, key, group, own)
                states[key] = self._value(value, f"state {key!r}", number)
        return states

    def _places(
        self, saved: SavedParameter, own: OwnPart
    ) -> list[tuple[FlatGroup, int, list[int]]]:
        """Return the groups that have something of a part, the index of the parameter in each, and
        the files. At least one, whose file says which states there are if the part is empty."""
        found = []
        for group, index in saved.places:
            runs = (run for box in own.boxes for run in self.runs(group, index, box))
            if numbers := list(dict.fromkeys(number for number, _, _ in runs)):
                found.append((group, index, numbers))
        if found:
            return found
        group, index = next(
            (place for place in saved.places if place[0].piece(place[1]) == own.part),
            saved.places[0],
        )
        axis, spec = self.manifest.axes[group.axis], group.layout.params[index]
        number = axis[own.rank * len(axis) // own.ranks]
        if own.always_has_states and spec.numel:
            # A rank that had no part may have saved no states; the one with the first row has.
            other = axis[spec.start // group.layout.shard_numel]
            if not self.head(number).has_states(group.name, index) and self._paths[other].exists():
                number = other
        return [(group, index, [number])]

    def _other_states(self, name: str) -> dict[Any, Any]:
        """Return the states of a parameter that the checkpoint does not have in its groups."""
        return {
            key: self._value(value, f"{name}.{key}", self.manifest.common)
            for key, value in self._common.other_states.get(name, [])
        }

    def _parts_have_changed(
        self, name: str, key: Any, group: FlatGroup, own: OwnPart
    ) -> CheckpointError:
        return CheckpointError.of(
            "An optimizer state belongs to one rank's part of a parameter, and the "
            "parts have changed.",
            expected=f"{group.layout.ranks} ranks and the wrapping that it was saved "
            f"with, for state {key!r}",
            got=f"{own.ranks} ranks, or another wrapping or use_orig_params",
            where=f"{name}, in {self.path}",
            fix="load with as many ranks and the same wrapping, or without the optimizer",
        )

    # -- where things lie

    @property
    def _common(self) -> Head:
        return self.head(self.manifest.common)

    def runs(self, group: FlatGroup, index: int, box: Box) -> Iterator[tuple[int, Interval, int]]:
        """Yield where a group has the elements of a box of a parameter, with those between them in
        its own order: (file, elements of the group's part, the first of them in the shard)."""
        part = group.piece(index)
        common = intersection(Box(part.offsets, part.shape), box)
        if common is None:
            return
        strides, starts = row_major_strides(part.shape), moved(common, [-at for at in part.offsets])
        first = sum(map(int.__mul__, starts.offsets, strides))
        last = first + sum(
            (size - 1) * step for size, step in zip(common.sizes, strides, strict=True)
        )
        axis = self.manifest.axes[group.axis]
        for run in runs_of_part(group.layout, index, Interval(first, last + 1)):
            elements = Interval(0, run.in_shard.numel).shifted(first + run.start)
            yield axis[run.rank], elements, run.in_shard.start

    def start_of(self, number: int, name: str, dtype: torch.dtype, stop: int) -> int:
        """Return the first byte of a tensor in a file that has at least ``stop`` elements."""
        info = self.head(number).tensors.get(name)
        described_as = dtype if is_known(dtype) else torch.uint8
        if info is None or info.dtype != described_as or stop * dtype.itemsize > info.nbytes:
            got = "no such tensor" if info is None else f"{info.nbytes} bytes of {info.dtype}"
            raise damaged(self._paths[number], f"{stop} elements of {dtype} under {name!r}", got)
        return info.start

    def path_of(self, number: int) -> Path:
        return self._paths[number]

    def _value(self, encoded: Any, where: str, number: int) -> Any:
        """Return an encoded value, with StoredTensors in the place of tensors."""

        def get(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
            info = self.head(number).tensors.get(name)
            if info is None:
                raise damaged(self._paths[number], f"a tensor {name!r}", "no such tensor")
            return self._whole(info, number, where, dtype, shape)

        return decode(encoded, where, get)

    def _whole(
        self, info: TensorInfo, number: int, where: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> StoredTensor:
        box = whole(shape)
        if box.numel * dtype.itemsize != info.nbytes:
            raise ValueError(f"{info.nbytes} bytes for shape {list(shape)} of {dtype}")
        span = Span(self._paths[number], info.start, row_major(shape))
        return StoredTensor(where, dtype, shape, (Piece(box, span, number),))


class _Shards(LazyPieces):
    """The pieces of a parameter, or of a state of it, in the shards of its groups.

    tensor_in: returns the tensor that has it, from group, index of the parameter, and file; None
    if its rank had no state, which counts as zeros.
    """

    def __init__(
        self,
        checkpoint: NativeCheckpoint,
        saved: SavedParameter,
        dtype: torch.dtype,
        tensor_in: Callable[[FlatGroup, int, int], str | None],
    ) -> None:
        self._checkpoint, self._saved = checkpoint, saved
        self._dtype, self._tensor_in = dtype, tensor_in

    def within(self, box: Box | None = None) -> Iterator[Piece]:
        box = whole(self._saved.shape) if box is None else box
        checkpoint, dtype = self._checkpoint, self._dtype
        for group, index in self._saved.places:
            part = group.piece(index)
            for number, run, first in checkpoint.runs(group, index, box):
                name = self._tensor_in(group, index, number)
                start = 0
                if name is not None:
                    start = checkpoint.start_of(number, name, dtype, first + run.numel)
                    start += first * dtype.itemsize
                path = checkpoint.path_of(number)
                for piece in pieces_of_run(part.shape, run, path, start, dtype.itemsize, number):
                    place = moved(piece.box, part.offsets)
                    source = piece.source
                    if name is None:
                        source = torch.zeros((), dtype=dtype).expand(place.sizes)
                    yield Piece(place, source, number)


def _is_alike(group: FlatGroup, index: int, own: OwnPart) -> bool:
    """Return whether this rank has the part that the file of the same rank has."""
    if own.cut is None or group.piece(index) != own.part:
        return False
    layout, its_index = own.cut
    # The rank-local state of a flat parameter is stored under the first parameter in it, and
    # fits only where all of them have their old offsets.
    starts = [[spec.start for spec in each.params] for each in (group.layout, layout)]
    is_same = same_parts(group.layout, index, layout, its_index)
    return is_same and (not own.is_flattened or starts[0] == starts[1])


def _stored(value: Any, name: str) -> Any:
    """Return plain values with the tensors in them as StoredTensors."""
    return map_values(
        value,
        lambda leaf: of_memory(name, leaf) if isinstance(leaf, torch.Tensor) else leaf,
    )
