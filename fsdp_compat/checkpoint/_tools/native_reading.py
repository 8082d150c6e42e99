"""Reading a native checkpoint without a model: the manifest says where each element lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from ..._layout.box import Box
from ..._layout.spec import Interval
from ..._layout.transfer import runs_of_part
from .._blocks import damaged
from .._directory import latest
from .._head import Head
from .._header import TensorInfo
from .._manifest import MANIFEST, FlatGroup, file_name
from .._rank_files import RankFiles
from .._texts import sizes
from .._values import decode, tensor_from_text
from .archive import Archive, Piece, Span, StoredTensor, of_memory, pieces_of_run, row_major, whole
from .paths import member

__all__ = ["is_native", "read_native"]


def is_native(path: Path) -> bool:
    """Return whether a directory is a native checkpoint, or a folder of such."""
    return (path / MANIFEST).is_file() or latest(path) is not None


def read_native(path: Path) -> Archive:
    """Return the content of a checkpoint that ``checkpoint.save`` wrote; of a folder of these, that
    of the latest."""
    if not (path / MANIFEST).is_file():
        path = latest(path) or path
    return _Reader(path).archive()


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
            "native checkpoint of fsdp_compat",
            {},
            world_size=len(manifest.files),
            step=manifest.step,
            checksums={
                member(self._path, file_name(number)): facts
                for number, facts in enumerate(manifest.files)
            },
        )
        for group in manifest.groups:
            for index, names in enumerate(group.names):
                archive.tensors[names[0]] = self._parameter(group, index)
                archive.aliases.update((name, names[0]) for name in names[1:])
                states = dict(self._states(group, index))
                if states:
                    archive.states[names[0]] = states
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
                str(key): self._value(value, f"{name}.{key}", manifest.common)
                for key, value in items
            }
        if manifest.param_groups is not None:
            archive.param_groups = [
                {
                    **decode(group["settings"], "parameter group", tensor_from_text),
                    "params": list(group["params"]),
                }
                for group in manifest.param_groups
            ]
        archive.extra = {"extra": self._value(common.extra, "extra", manifest.common)}
        if extra_state:
            archive.extra["extra_state"] = extra_state
        heads = [self._head(number) for number in range(len(manifest.files))]
        if any(head.extra != heads[0].extra for head in heads):
            self._left_out.append("the extra values of all ranks but the first, which differ")
        self._left_out += sorted({name for head in heads for name in head.left_out})
        archive.left_out = self._left_out
        return archive

    def _head(self, number: int) -> Head:
        return self._files.head(number)

    def _file(self, number: int) -> Path:
        return member(self._path, file_name(number))

    def _parameter(self, group: FlatGroup, index: int) -> StoredTensor:
        spec = group.layout.params[index]
        pieces = [
            piece
            for number, run, first in self._runs(group, index)
            for piece in self._pieces(number, group.name, group.dtype, spec.shape, run, first)
        ]
        return StoredTensor(spec.name, group.dtype, spec.shape, tuple(pieces))

    def _runs(self, group: FlatGroup, index: int) -> Iterator[tuple[int, Interval, int]]:
        """Yield the runs of a parameter: (file, its elements, the first of them in the shard)."""
        axis = self._manifest.axes[group.axis]
        numel = group.layout.params[index].numel
        for run in runs_of_part(group.layout, index, Interval(0, numel)):
            elements = Interval(run.start, run.start + run.in_shard.numel)
            yield axis[run.rank], elements, run.in_shard.start

    def _pieces(
        self,
        number: int,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        run: Interval,
        first: int,
    ) -> list[Piece]:
        info = self._info(number, name)
        if (first + run.numel) * dtype.itemsize > info.nbytes:
            raise damaged(
                self._file(number),
                f"{first + run.numel} elements of {dtype} under {name!r}",
                f"{info.nbytes} bytes",
            )
        start = info.start + first * dtype.itemsize
        return pieces_of_run(shape, run, self._file(number), start, dtype.itemsize, number)

    def _info(self, number: int, name: str) -> TensorInfo:
        info = self._head(number).tensors.get(name)
        if info is None:
            raise damaged(self._file(number), f"a tensor {name!r}", "no such tensor")
        return info

    def _states(self, group: FlatGroup, index: int) -> Iterator[tuple[str, Any]]:
        spec = group.layout.params[index]
        runs = list(self._runs(group, index))
        found: dict[Any, tuple[torch.dtype, list[Piece]]] = {}
        axis = self._manifest.axes[group.axis]
        for number, run, first in runs or [(axis[0], Interval(0, 0), 0)]:
            for state in self._head(number).states.get(group.name, []):
                if state.of is None or index in state.of:
                    dtype, pieces = found.setdefault(state.key, (state.dtype, []))
                    if dtype == state.dtype and run:
                        pieces += self._pieces(number, state.tensor, dtype, spec.shape, run, first)
        for key, (dtype, pieces) in found.items():
            holders = {piece.holder for piece in pieces}
            for number, run, _ in runs:  # a rank whose part had no gradient yet
                if number not in holders:
                    pieces += _zeros(spec.shape, run, dtype, number)
            yield str(key), StoredTensor(f"{spec.name}.{key}", dtype, spec.shape, tuple(pieces))
        seen = set(map(str, found))
        for number in dict.fromkeys([*(number for number, _, _ in runs), *axis]):
            head = self._head(number)
            for key, of, value in head.scalars.get(group.name, []):
                if str(key) not in seen and (of is None or index in of):
                    seen.add(str(key))
                    found_value = decode(value, f"state {key!r}", tensor_from_text)
                    if isinstance(found_value, torch.Tensor):
                        yield str(key), of_memory(f"{spec.name}.{key}", found_value)
                    else:
                        yield str(key), found_value
            self._left_out += [
                f"{spec.name}.{key}, which belongs to the part of rank {number}"
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


def _zeros(shape: tuple[int, ...], run: Interval, dtype: torch.dtype, holder: int) -> list[Piece]:
    pieces = pieces_of_run(shape, run, Path(), 0, 1)
    return [Piece(piece.box, _zero_box(piece.box, dtype), holder) for piece in pieces]


def _zero_box(box: Box, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(box.sizes)
