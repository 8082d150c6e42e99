"""Reading a native checkpoint without a model: the manifest says where each element lies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from ..._layout.box import Box
from ..._layout.spec import Interval
from ..._layout.transfer import runs_of_part
from ...errors import CheckpointError
from .._blocks import damaged
from .._directory import latest
from .._head import Head
from .._header import TensorInfo
from .._manifest import MANIFEST, FlatGroup, SavedParameter, file_name, read_manifest
from .._rank_files import RankFiles
from .._texts import sizes
from .._values import decode, tensor_from_text
from .archive import Archive, Piece, Span, StoredTensor, of_memory, pieces_of_run, row_major, whole
from .paths import member

KIND = "native checkpoint of fsdp_compat"


def is_native(path: Path) -> bool:
    """Return whether a directory is a native checkpoint, or a folder of such."""
    return (path / MANIFEST).is_file() or latest(path) is not None


def read_native(path: Path) -> Archive:
    """Return the content of a checkpoint that ``checkpoint.save`` wrote; of a folder of these, that
    of the latest."""
    if not (path / MANIFEST).is_file():
        path = latest(path) or path
    return _Reader(path).archive()


def files_of_native(path: Path) -> Archive:
    """Return an archive without tensors, with the checksums of the files of a native checkpoint,
    whose files may be damaged; without any if the manifest is."""
    if not (path / MANIFEST).is_file():
        path = latest(path) or path
    archive = Archive(path, KIND, {})
    with contextlib.suppress(CheckpointError):
        files = read_manifest(path).files
        archive.checksums = {path / file_name(number): each for number, each in enumerate(files)}
    return archive


# Keys in ``Archive.extra``: an extra value that is no dict of names, and modules' extra state.
EXTRA, EXTRA_STATE = "extra", "extra_state"


class _Reader:
    def __init__(self, path: Path) -> None:
        self._files = RankFiles(path)
        self._path, self._manifest = path, self._files.manifest
        self._left_out: list[str] = []

    def archive(self) -> Archive:
        manifest = self._manifest
        common = self._head(manifest.common)
        archive = Archive(
            self._path,
            KIND,
            {},
            world_size=len(manifest.files),
            step=manifest.step,
            optimizer_classes=manifest.optimizer_classes,
            checksums={
                member(self._path, file_name(number)): facts
                for number, facts in enumerate(manifest.files)
            },
        )
        for name, saved in self._files.parameters.items():
            if name != saved.names[0]:
                archive.aliases[name] = saved.names[0]
                continue
            archive.tensors[name] = self._parameter(saved)
            states = self._states(saved)
            if states:
                archive.states[name] = states
        others = {
            name: self._value(value, name, manifest.common) for name, value in common.others.items()
        }
        archive.tensors |= {
            name: value for name, value in others.items() if isinstance(value, StoredTensor)
        }
        extra_state = {
            name: value for name, value in others.items() if not isinstance(value, StoredTensor)
        }
        for name, items in common.other_states.items():
            archive.states[name] = {
                key: self._value(value, f"{name}.{key}", manifest.common) for key, value in items
            }
        if manifest.param_groups is not None:
            archive.param_groups = [
                {
                    **_stored(
                        decode(group["settings"], "parameter group", tensor_from_text), "settings"
                    ),
                    "params": list(group["params"]),
                }
                for group in manifest.param_groups
            ]
        extra = self._value(common.extra, "extra", manifest.common)
        is_named = isinstance(extra, dict) and all(isinstance(key, str) for key in extra)
        if is_named and extra.keys().isdisjoint((EXTRA, EXTRA_STATE)):
            archive.extra = extra
        elif extra is not None:
            archive.extra = {EXTRA: extra}
        if extra_state:
            archive.extra[EXTRA_STATE] = extra_state
        heads = [self._head(number) for number in range(len(manifest.files))]
        if not manifest.shares_extra and any(head.extra != heads[0].extra for head in heads):
            self._left_out.append("the extra values of all ranks but the first, which differ")
        self._left_out += sorted({name for head in heads for name in head.left_out})
        archive.left_out = self._left_out
        return archive

    def _head(self, number: int) -> Head:
        return self._files.head(number)

    def _file(self, number: int) -> Path:
        return member(self._path, file_name(number))

    def _parameter(self, saved: SavedParameter) -> StoredTensor:
        pieces = [
            piece
            for group, index in saved.places
            for number, run, first in self._runs(group, index)
            for piece in self._pieces(group, index, number, group.name, group.dtype, run, first)
        ]
        return StoredTensor(saved.names[0], saved.dtype, saved.shape, tuple(pieces))

    def _runs(self, group: FlatGroup, index: int) -> Iterator[tuple[int, Interval, int]]:
        """Yield the runs of a parameter: (file, its elements, the first of them in the shard)."""
        axis = self._manifest.axes[group.axis]
        numel = group.layout.params[index].numel
        for run in runs_of_part(group.layout, index, Interval(0, numel)):
            elements = Interval(run.start, run.start + run.in_shard.numel)
            yield axis[run.rank], elements, run.in_shard.start

    def _pieces(
        self,
        group: FlatGroup,
        index: int,
        number: int,
        name: str,
        dtype: torch.dtype,
        run: Interval,
        first: int,
    ) -> list[Piece]:
        """Return the pieces of a run, which a tensor of a file holds from element ``first`` on."""
        info = self._info(number, name)
        if (first + run.numel) * dtype.itemsize > info.nbytes:
            raise damaged(
                self._file(number),
                f"{first + run.numel} elements of {dtype} under {name!r}",
                f"{info.nbytes} bytes",
            )
        start = info.start + first * dtype.itemsize
        part, path = group.piece(index), self._file(number)
        found = pieces_of_run(part.shape, run, path, start, dtype.itemsize, number)
        return [_moved(piece, part.offsets) for piece in found]

    def _info(self, number: int, name: str) -> TensorInfo:
        info = self._head(number).tensors.get(name)
        if info is None:
            raise damaged(self._file(number), f"a tensor {name!r}", "no such tensor")
        return info

    def _states(self, saved: SavedParameter) -> dict[Any, Any]:
        """Return the optimizer state of a parameter, by key."""
        found: dict[Any, tuple[torch.dtype, list[Piece]]] = {}
        rest: dict[Any, Any] = {}
        for group, index in saved.places:
            runs = list(self._runs(group, index))
            axis = self._manifest.axes[group.axis]
            for number, run, first in runs or [(axis[0], Interval(0, 0), 0)]:
                for state in self._head(number).states.get(group.name, []):
                    if state.of is None or index in state.of:
                        dtype, pieces = found.setdefault(state.key, (state.dtype, []))
                        if dtype == state.dtype and run:
                            pieces += self._pieces(
                                group, index, number, state.tensor, dtype, run, first
                            )
            for number in dict.fromkeys([*(number for number, _, _ in runs), *axis]):
                self._add_scalars(rest, saved.names[0], group, index, number)
        for key, (dtype, pieces) in found.items():
            pieces += self._missing(saved, pieces, dtype)
            name = f"{saved.names[0]}.{key}"
            rest[key] = StoredTensor(name, dtype, saved.shape, tuple(pieces))
        return {**{key: rest[key] for key in found}, **rest}

    def _missing(
        self, saved: SavedParameter, pieces: list[Piece], dtype: torch.dtype
    ) -> Iterator[Piece]:
        """Yield zeros for the parts of ranks that had no state, as `load` reads them."""
        holders = {piece.holder for piece in pieces}
        for group, index in saved.places:
            part = group.piece(index)
            for number, run, _ in self._runs(group, index):
                if number not in holders:
                    for piece in pieces_of_run(part.shape, run, Path(), 0, 1, number):
                        zeros = torch.zeros((), dtype=dtype).expand(piece.box.sizes)
                        yield _moved(Piece(piece.box, zeros, number), part.offsets)

    def _add_scalars(
        self, found: dict[Any, Any], name: str, group: FlatGroup, index: int, number: int
    ) -> None:
        head = self._head(number)
        for key, of, value in head.scalars.get(group.name, []):
            if key not in found and (of is None or index in of):
                decoded = decode(value, f"state {key!r}", tensor_from_text)
                is_tensor = isinstance(decoded, torch.Tensor)
                found[key] = of_memory(f"{name}.{key}", decoded) if is_tensor else decoded
        self._left_out += [
            f"{name}.{key}, which belongs to the part of rank {number}"
            for its_index, key, _ in head.rank_local.get(group.name, [])
            if its_index == index
        ]

    def _value(self, value: Any, where: str, number: int) -> Any:
        """Return an encoded value, with StoredTensors in the place of tensors."""

        def get(name: str) -> torch.Tensor:
            place = _Place(self._info(number, name), self._file(number), number, where)
            return cast(torch.Tensor, place)

        return decode(value, where, get)


class _Place:
    """Stands for a tensor while a value is decoded: `_values` views what it gets as bytes, then as
    a dtype, then as a shape."""

    def __init__(self, info: TensorInfo, path: Path, holder: int, name: str) -> None:
        self._info, self._path, self._holder, self._name = info, path, holder, name
        self._dtype = info.dtype

    def view(self, how: int | torch.dtype | list[int]) -> _Place | StoredTensor:
        if isinstance(how, torch.dtype):
            self._dtype = how
        elif isinstance(how, list):
            shape = tuple(sizes(how))
            box = whole(shape)
            if box.numel * self._dtype.itemsize != self._info.nbytes:
                raise ValueError(f"{self._info.nbytes} bytes for shape {how} of {self._dtype}")
            span = Span(self._path, self._info.start, row_major(shape))
            piece = Piece(box, span, self._holder)
            return StoredTensor(self._name, self._dtype, shape, (piece,))
        return self


def _stored(value: Any, name: str) -> Any:
    """Return plain values with the tensors in them as StoredTensors."""
    if isinstance(value, torch.Tensor):
        return of_memory(name, value)
    if isinstance(value, dict):
        return {key: _stored(item, f"{name}/{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_stored(item, name) for item in value)
    return value


def _moved(piece: Piece, offsets: tuple[int, ...]) -> Piece:
    """Return a piece of a part as one of the whole tensor. offsets: where the part begins in it."""
    box = Box(tuple(map(int.__add__, piece.box.offsets, offsets)), piece.box.sizes)
    return dataclasses.replace(piece, box=box)
