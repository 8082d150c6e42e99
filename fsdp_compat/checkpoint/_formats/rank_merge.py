"""The values of all ranks as one: parts put together, and replicas beside one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._archive.archive import StoredPiece, StoredTensor, coverage_problem
from ..._archive.reader import Files, boxes_of, read_box
from ..._comm.host_memory import memory_of
from ..._layout.box import Box
from ...errors import CheckpointError
from .sharded_records import RankPart

_SAMPLE_NUMEL = 4096
_NESTED = (dict, list, tuple, StoredTensor, RankPart)


class Merger:
    """Merges nested values of ranks. differing: by path ("model/w/"), plain tensors of which the
    first is taken, and how their shapes differ."""

    def __init__(self, where: Path, files: Files) -> None:
        self.differing: dict[str, str] = {}
        self.left_out: list[str] = []
        self._where, self._files = where, files

    def merge(self, values: Mapping[int, Any], path: str = "") -> Any:
        """Return the merged value, in the containers of the first rank. Raises CheckpointError."""
        first = next(iter(values.values()))
        kinds = {type(value) for value in values.values()}
        if kinds & {RankPart, StoredTensor}:
            if len(kinds) > 1:
                found = " and ".join(sorted(kind.__name__ for kind in kinds))
                raise disagreement(self._where, path, "values of one kind on all ranks", found)
            return self._tensor(values, path)
        alike = {rank: value for rank, value in values.items() if type(value) is type(first)}
        if isinstance(first, dict):
            return self._dict(alike, path)
        if not isinstance(first, (list, tuple)) or not any(isinstance(x, _NESTED) for x in first):
            return first
        alike = {rank: value for rank, value in alike.items() if len(value) == len(first)}
        return type(first)(
            self.merge({rank: value[at] for rank, value in alike.items()}, f"{path}{at}/")
            for at in range(len(first))
        )

    def _dict(self, values: Mapping[int, dict[Any, Any]], path: str) -> dict[Any, Any]:
        before = len(self.differing)
        merged = {
            key: self.merge(
                {rank: value[key] for rank, value in values.items() if key in value},
                f"{path}{key}/",
            )
            for key in dict.fromkeys(key for value in values.values() for key in value)
        }
        inside = [*self.differing][before:]
        is_optimizer = merged.keys() >= {"state", "param_groups"}
        if not is_optimizer or not any(name.startswith(f"{path}state/") for name in inside):
            return merged
        # The state of FSDP1's flat parameters: nothing describes it.
        for name in inside:
            del self.differing[name]
        self.left_out.append(
            f"{path[:-1] or 'optimizer'}: each rank holds its own values, without shapes or "
            "names; save FSDP.optim_state_dict(model, optimizer) instead"
        )
        return {}

    def _tensor(self, values: Mapping[int, Any], path: str) -> StoredTensor:
        """Return the tensor that ranks have parts of, or each has; repeated pieces are copies."""
        first: StoredTensor = next(iter(values.values()))
        facts = dict.fromkeys(f"shape {[*x.shape]} of {x.dtype}" for x in values.values())
        problem = " and ".join(facts) if len(facts) > 1 else None
        pieces: dict[Box, StoredPiece] = {}
        copies = []
        for rank, value in values.items():
            for piece in value.pieces:
                held = dataclasses.replace(piece, holder=rank)
                if pieces.setdefault(piece.box, held) is not held:
                    copies.append(held)
        if isinstance(first, RankPart):
            problem = problem or coverage_problem(first.shape, [*pieces])
            if problem is not None:
                raise disagreement(self._where, path, "parts that make up one tensor", problem)
            first = StoredTensor("", first.dtype, first.shape, ())
        elif problem or len({sample(value, self._files) for value in values.values()}) > 1:
            self.differing[path] = problem or ""
            return first
        return dataclasses.replace(first, pieces=tuple(pieces.values()), copies=tuple(copies))


def sample(tensor: StoredTensor, files: Files, num_parts: int = 1) -> bytes:
    """Return the first and the last values of about ``num_parts`` parts, which copies share."""
    found = []
    for part in boxes_of(tensor.shape, max(_SAMPLE_NUMEL, tensor.numel // num_parts)):
        first = next(boxes_of(part.sizes, _SAMPLE_NUMEL))
        last = Box(tuple(map(int.__sub__, part.sizes, first.sizes)), first.sizes)
        found += [read_box(tensor, box.moved(part.offsets), files) for box in (first, last)]
    return b"".join(bytes(memory_of(values)) for values in found)


def disagreement(where: Path, path: str, expected: str, got: str) -> CheckpointError:
    """Return the error for files that do not belong together."""
    return CheckpointError.of(
        "The files of the ranks do not belong together.",
        expected=expected,
        got=f"{path[:-1]}: {got}" if path else got,
        where=str(where),
        fix="pass the files of all ranks of one run and one step",
    )
