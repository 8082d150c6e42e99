"""Shared by reading and writing safetensors weights: this rank's part of each of a model's tensors,
the check of arguments, and the check that all ranks do the same."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import errors
from .._engine.state_store import store_of
from .._layout.pieces import Piece, Rows, common_rows
from .._layout.spec import Interval
from .._state.unmanaged import unmanaged_state
from ..errors import UsageError
from ._named_groups import NamedGroup
from ._progress import require_bar
from ._ranks import Ranks

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

Rename = Callable[[str], str | None]


@dataclasses.dataclass(frozen=True)
class HeldPart:
    """The elements of one tensor that this rank holds: a run of a piece, in row-major order."""

    names: tuple[str, ...]  # of the tensor in the model
    dtype: torch.dtype
    piece: Piece  # all of the tensor, or a tensor-parallel part
    part: Interval  # of the piece
    values: torch.Tensor  # 1-D: a view of the elements in place
    is_written_here: bool  # this rank is the one that writes them

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.piece.whole_shape

    def rows(self) -> Iterator[Rows]:
        """Yield where the elements lie in the whole tensor; target: ``values``."""
        return common_rows(self.piece, self.part, Piece.of_whole(self.shape))


def managed_parts(groups: list[NamedGroup]) -> Iterator[HeldPart]:
    """Yield this rank's part of every parameter of ``groups``; it may be empty."""
    for named in groups:
        store = store_of(named.group)
        for index in named.params:
            part = store.part(index, store.rank)
            # Every rank may hold the one element of a 0-d parameter.
            is_first = store.rank == 0 or part != store.part(index, 0)
            yield HeldPart(
                named.names(index),
                store.dtype,
                named.piece(index),
                part,
                store.local_part(index),
                named.is_written_here and is_first,
            )


def unmanaged_tensors(
    model: nn.Module, groups: list[NamedGroup], is_written_here: bool
) -> Iterator[HeldPart]:
    """Yield buffers and unmanaged parameters, which every rank holds whole; a shared tensor once,
    under all its names."""
    names: dict[tuple[object, ...], list[str]] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in unmanaged_state(model).items():
        if isinstance(value, torch.Tensor):
            memory = value.data_ptr() or name, tuple(value.shape), value.stride(), value.dtype
            names.setdefault(memory, []).append(name)
            values[name] = value.detach()
    for shared in names.values():
        value = values[shared[0]]
        yield HeldPart(
            tuple(shared),
            value.dtype,
            Piece.of_whole(tuple(value.shape)),
            Interval(0, value.numel()),
            value.reshape(-1),
            is_written_here,
        )


def check_arguments(call: str, path: Any, rename: Any, dtype: Any, progress: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise errors.wrong_type("path", "a path", path, call)
    if rename is not None and not callable(rename):
        raise errors.wrong_type("rename", "a function of a name, or None", rename, call)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise errors.wrong_type("dtype", "a floating-point dtype, or None", dtype, call)
    errors.require_bools(call, progress=progress)
    require_bar(progress, f"{call}(..., progress=True)")


def renamed(name: str, rename: Rename | None, call: str) -> str | None:
    new = name if rename is None else rename(name)
    if new is not None and not isinstance(new, str):
        raise errors.wrong_type("the result of rename", f"a name for {name!r}, or None", new, call)
    return new


def digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def require_same_plan(digests: list[str], ranks: Ranks, call: str) -> None:
    """Raise UsageError, on all ranks, if the digests of their plans differ."""
    if len(set(digests)) > 1:
        raise UsageError.of(
            "The ranks' arguments or files differ.",
            expected="the same files, names and dtypes on all ranks",
            got=f"{len(set(digests))} different plans on {ranks.count} ranks",
            where=call,
            fix="pass the same arguments on all ranks, and a path on a shared file system",
        )
