"""The values of all ranks as one: parts put together, and replicas beside one another."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._layout.box import Box
from ...errors import CheckpointError
from .archive import Piece, StoredTensor, coverage_problem
from .pickles import Refused
from .reading import Files, boxes_of, read_box
from .sharded_records import DTensorRecord, ShardedTensorRecord, SplitLimit

_SAMPLE_NUMEL = 4096


def part_of(tensor: StoredTensor, inside: Box, box: Box, holder: int | None) -> Piece:
    """Return the elements ``inside`` a tensor that one piece holds, as the piece ``box`` of another
    tensor. Both boxes have the same sizes."""
    (piece,) = tensor.pieces
    source = piece.source
    if isinstance(source, torch.Tensor):
        place = tuple(
            slice(at, at + size) for at, size in zip(inside.offsets, inside.sizes, strict=True)
        )
        return Piece(box, source[place], holder)
    first = sum(map(int.__mul__, inside.offsets, source.strides))
    start = source.start + first * tensor.dtype.itemsize
    return Piece(box, dataclasses.replace(source, start=start), holder)


def tensor_of_parts(
    dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[Piece], name: str, where: Path
) -> StoredTensor:
    """Return the tensor of the parts of all ranks; parts that occur again are copies. Raises
    CheckpointError unless they cover it once."""
    pieces: dict[Box, Piece] = {}
    copies = []
    for part in parts:
        if not part.box.numel:
            continue
        if part.box in pieces:
            copies.append(part)
        else:
            pieces[part.box] = part
    problem = coverage_problem(shape, list(pieces))
    if problem is not None:
        raise disagreement(where, name, "parts that cover the tensor once", problem)
    return StoredTensor("", dtype, shape, tuple(pieces.values()), tuple(copies))


def disagreement(where: Path, name: str, expected: str, got: str) -> CheckpointError:
    """Return the error for files that do not belong together."""
    return CheckpointError.of(
        "The files of the ranks do not belong together.",
        expected=expected,
        got=f"{name}: {got}" if name else got,
        where=str(where),
        fix="pass the files of all ranks of one run and one step",
    )


class Merger:
    """Merges nested values of several ranks.

    differing: paths of plain tensors whose values differ between ranks; the first rank's stay.
    conflicts: those whose shapes differ. num_sharded: how many tensors were put together.
    """

    def __init__(self, where: Path, files: Files) -> None:
        self.differing: dict[tuple[str, ...], None] = {}
        self.conflicts: dict[tuple[str, ...], str] = {}
        self.num_sharded = 0
        self._where, self._files, self._limit = where, files, SplitLimit()

    def merge(self, values: Mapping[int, Any], path: tuple[str, ...] = ()) -> Any:
        """values: by rank. Returns the merged value, in the containers of the first rank. Raises
        CheckpointError."""
        first = next(iter(values.values()))
        kinds = {type(value) for value in values.values()}
        name = "/".join(path)
        if any(kind in kinds for kind in (DTensorRecord, ShardedTensorRecord, StoredTensor)):
            if len(kinds) > 1:
                found = " and ".join(sorted(kind.__name__ for kind in kinds))
                raise disagreement(self._where, name, "values of one kind on all ranks", found)
            if kinds == {StoredTensor}:
                return self._replicated(values, path)
            return self._together(values, name)
        if kinds == {dict}:
            return self._dict(values, path)
        is_list = kinds in ({list}, {tuple})
        if is_list and len({len(value) for value in values.values()}) == 1:
            if not _nests(values.values()):
                return first
            items = [
                self.merge(
                    {rank: value[index] for rank, value in values.items()}, (*path, str(index))
                )
                for index in range(len(first))
            ]
            return items if isinstance(first, list) else tuple(items)
        if kinds & {dict, list, tuple}:
            return self.merge({next(iter(values)): first}, path)
        return first

    def _dict(self, values: Mapping[int, dict[Any, Any]], path: tuple[str, ...]) -> dict[Any, Any]:
        keys: dict[Any, None] = {}
        for value in values.values():
            keys |= dict.fromkeys(value)
        return {
            key: self.merge(
                {rank: value[key] for rank, value in values.items() if key in value},
                (*path, str(key)),
            )
            for key in keys
        }

    def _together(self, values: Mapping[int, Any], name: str) -> StoredTensor:
        """Return the tensor that the parts of the ranks make up."""
        self.num_sharded += 1
        facts = {(value.shape, value.dtype) for value in values.values()}
        if len(facts) > 1:
            found = " and ".join(f"{list(shape)} of {dtype}" for shape, dtype in facts)
            raise disagreement(self._where, name, "the same shape on all ranks", found)
        ((shape, dtype),) = facts
        parts: list[Piece] = []
        try:
            for rank, value in values.items():
                parts += _parts(value, rank, self._limit)
        except Refused as error:
            raise disagreement(self._where, name, "parts that fit", str(error)) from error
        return tensor_of_parts(dtype, shape, parts, name, self._where)

    def _replicated(
        self, values: Mapping[int, StoredTensor], path: tuple[str, ...]
    ) -> StoredTensor:
        (_, first), *others = values.items()
        copies = []
        for rank, other in others:
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                self.conflicts.setdefault(
                    path, f"shape {list(first.shape)} and, on rank {rank}, {list(other.shape)}"
                )
            elif path not in self.differing:
                if self._look_equal(first, other):
                    copies += [dataclasses.replace(piece, holder=rank) for piece in other.pieces]
                else:
                    self.differing[path] = None
        pieces = tuple(
            dataclasses.replace(piece, holder=next(iter(values))) for piece in first.pieces
        )
        is_same = path not in self.differing and path not in self.conflicts
        return dataclasses.replace(first, pieces=pieces, copies=tuple(copies) if is_same else ())

    def _look_equal(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Compare the first and the last values."""
        box = next(iter(boxes_of(one.shape, _SAMPLE_NUMEL)), None)
        if box is None:
            return True
        last = Box(tuple(map(int.__sub__, one.shape, box.sizes)), box.sizes)
        return all(
            torch.equal(
                *(
                    read_box(each, place, self._files).view(-1).view(torch.uint8)
                    for each in (one, other)
                )
            )
            for place in {box, last}
        )


def _parts(value: DTensorRecord | ShardedTensorRecord, rank: int, limit: SplitLimit) -> list[Piece]:
    if isinstance(value, DTensorRecord):
        return [part_of(value.local, inside, box, rank) for inside, box in value.boxes(limit)]
    found = []
    for box, tensor in value.shards:
        if box.numel:
            found.append(part_of(tensor, Box((0,) * len(box.sizes), box.sizes), box, rank))
    return found


def _nests(values: Iterable[Sequence[Any]]) -> bool:
    kinds = (dict, list, tuple, StoredTensor, DTensorRecord, ShardedTensorRecord)
    return any(isinstance(item, kinds) for item in itertools.chain.from_iterable(values))
