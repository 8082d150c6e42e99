"""The values of all ranks as one: parts put together, and replicas beside one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._comm.host_memory import memory_of
from ..._layout.box import Box
from ...errors import CheckpointError
from .archive import Piece, StoredTensor, coverage_problem
from .reading import Files, boxes_of, read_box
from .sharded_records import RankPart

_SAMPLE_NUMEL = 4096
_NESTED = (dict, list, tuple, StoredTensor, RankPart)


class Merger:
    """Merges nested values of several ranks.

    differing: paths of plain tensors that differ between ranks, whose first is taken; with a text
    if their shapes do. num_sharded: how many tensors were put together. left_out: what was dropped.
    """

    def __init__(self, where: Path, files: Files) -> None:
        self.differing: dict[tuple[str, ...], str] = {}
        self.num_sharded = 0
        self.left_out: list[str] = []
        self._where, self._files = where, files

    def merge(self, values: Mapping[int, Any], path: tuple[str, ...] = ()) -> Any:
        """values: by rank. Returns the merged value, in the containers of the first rank. Raises
        CheckpointError."""
        first = next(iter(values.values()))
        kinds = {type(value) for value in values.values()}
        if kinds & {RankPart, StoredTensor}:
            if len(kinds) > 1:
                found = " and ".join(sorted(kind.__name__ for kind in kinds))
                raise self.disagreement(path, "values of one kind on all ranks", found)
            return self._together(values, path) if RankPart in kinds else self._one(values, path)
        alike = {rank: value for rank, value in values.items() if type(value) is type(first)}
        if isinstance(first, dict):
            return self._dict(alike, path)
        if not isinstance(first, (list, tuple)) or not any(isinstance(x, _NESTED) for x in first):
            return first
        alike = {rank: value for rank, value in alike.items() if len(value) == len(first)}
        return type(first)(
            self.merge({rank: value[at] for rank, value in alike.items()}, (*path, str(at)))
            for at in range(len(first))
        )

    def disagreement(self, path: tuple[str, ...], expected: str, got: str) -> CheckpointError:
        """Return the error for files that do not belong together."""
        return disagreement(self._where, "/".join(path), expected, got)

    def _dict(self, values: Mapping[int, dict[Any, Any]], path: tuple[str, ...]) -> dict[Any, Any]:
        before = len(self.differing)
        merged = {
            key: self.merge(
                {rank: value[key] for rank, value in values.items() if key in value},
                (*path, str(key)),
            )
            for key in dict.fromkeys(key for value in values.values() for key in value)
        }
        inside = [*self.differing][before:]
        if merged.keys() >= {"state", "param_groups"} and any(
            each[: len(path) + 1] == (*path, "state") for each in inside
        ):  # those of FSDP1's flat parameters, which nothing describes
            for each in inside:
                del self.differing[each]
            self.left_out.append(
                f"{'/'.join(path) or 'optimizer'}: each rank holds values of its own, without "
                "shapes or names; save FSDP.optim_state_dict(model, optimizer) instead"
            )
            return {}
        return merged

    def _together(self, parts: Mapping[int, RankPart], path: tuple[str, ...]) -> StoredTensor:
        """Return the tensor that the parts of the ranks make up; those that occur again are
        copies."""
        self.num_sharded += 1
        facts = {(part.shape, part.dtype) for part in parts.values()}
        if len(facts) > 1:
            found = " and ".join(f"{list(shape)} of {dtype}" for shape, dtype in facts)
            raise self.disagreement(path, "the same shape on all ranks", found)
        ((shape, dtype),) = facts
        pieces: dict[Box, Piece] = {}
        copies = []
        for rank, part in parts.items():
            for piece in part.pieces:
                piece = dataclasses.replace(piece, holder=rank)
                if pieces.setdefault(piece.box, piece) is not piece:
                    copies.append(piece)
        problem = coverage_problem(shape, [*pieces])
        if problem is not None:
            raise self.disagreement(path, "parts that cover the tensor once", problem)
        return StoredTensor("", dtype, shape, tuple(pieces.values()), tuple(copies))

    def _one(self, values: Mapping[int, StoredTensor], path: tuple[str, ...]) -> StoredTensor:
        """Return the first rank's tensor, with those of the others as copies if they are equal."""
        first = next(iter(values.values()))
        for rank, other in values.items():
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                text = f"shape {list(first.shape)} and, on rank {rank}, {list(other.shape)}"
                self.differing[path] = text
        if (
            path not in self.differing
            and len({sample(each, self._files) for each in values.values()}) > 1
        ):
            self.differing[path] = ""
        pieces, *copies = (
            dataclasses.replace(piece, holder=rank)
            for rank, value in values.items()
            for piece in value.pieces
        )
        is_same = path not in self.differing
        return dataclasses.replace(first, pieces=(pieces,), copies=tuple(copies) if is_same else ())


def sample(tensor: StoredTensor, files: Files) -> bytes:
    """Return the first and the last values of a tensor: copies are known by them."""
    box = next(iter(boxes_of(tensor.shape, _SAMPLE_NUMEL)), None)
    if box is None:
        return b""
    last = Box(tuple(map(int.__sub__, tensor.shape, box.sizes)), box.sizes)
    return b"".join(bytes(memory_of(read_box(tensor, each, files))) for each in (box, last))


def disagreement(where: Path, name: str, expected: str, got: str) -> CheckpointError:
    """Return the error for files that do not belong together."""
    return CheckpointError.of(
        "The files of the ranks do not belong together.",
        expected=expected,
        got=f"{name}: {got}" if name else got,
        where=str(where),
        fix="pass the files of all ranks of one run and one step",
    )
