"""How the gradients of parameters that are cut by rows travel: the rows of the trainable ones, and
nothing else."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch_private
from .._engine.gradients import LARGE
from .._engine.tensor_parallel import TensorParallel
from .._layout.rows import Cut, RowLayout
from .._torch_private import dtensor as torch_dtensor
from .row_views import RowViews, cut_up

__all__ = ["RowReduceForm"]


class RowReduceForm:
    """The layout of the reduce buffer for one set of trainable parameters. (A ReduceForm.)"""

    pieces_are_whole = False

    def __init__(
        self,
        indices: Sequence[int],
        cuts: Sequence[Cut],
        specs: Sequence[Any],
        parallel: Sequence[TensorParallel | None],
        *,
        rank: int,
        ranks: int,
        dtype: torch.dtype,
    ) -> None:
        """indices: of the trainable parameters, ascending. cuts, specs, parallel: of all parameters
        of the store. specs: of the gradients as DTensors; None: they stay plain tensors.
        """
        self.indices, self.dtype = list(indices), dtype
        self._form_of = functools.partial(
            RowReduceForm, cuts=cuts, specs=specs, parallel=parallel, rank=rank, ranks=ranks
        )
        self._cuts = [cuts[index] for index in self.indices]
        self._layout = layout = RowLayout.packed(self._cuts, ranks, dtype.itemsize)
        self.numel = layout.numel
        self._views = RowViews(layout)
        self._specs = [specs[index] for index in self.indices]
        self._parallel = [parallel[index] for index in self.indices]
        self._num_params = len(cuts)
        shapes = [cut.part_shape(rank) for cut in self._cuts]
        # of this rank's parts in its segment
        self._places = shapes, list(map(_contiguous_strides, shapes)), list(layout.starts)
        self.takes_all = bool(layout.order) and all(
            (cut.is_contiguous or cut.dim is None) and parallel is None
            for cut, parallel in zip(self._cuts, self._parallel, strict=True)
        )
        self._is_simple = layout.order == tuple(range(len(self._cuts))) and all(
            cut.dim == 0 for cut in self._cuts
        )

    def places(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = [[] for _ in range(self._num_params)]
        for position, index in enumerate(self.indices):
            found[index] = self._views.pieces(buffer, position)
        return [*found, self._views.padding(buffer)]

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Collective for a DTensor that is placed in another way than the parameter."""
        position = self.indices.index(index)
        parallel = self._parallel[position]
        return cut_up(value if parallel is None else parallel.local(value), self._cuts[position])

    def put_all(self, rows: torch.Tensor, grads: list[torch.Tensor]) -> None:
        if not self._is_simple:
            grads = [
                _with_rows_first(grads[position], self._cuts[position])
                for position in self._layout.order
            ]
        _torch_private.chunk_together(grads, self._layout.ranks, rows)

    def grads(self, total: torch.Tensor) -> list[torch.Tensor | None]:
        # one call for each view: narrow and view would be two
        shapes, strides, starts = self._places
        if offset := int(total.storage_offset()):
            starts = [start + offset for start in starts]
        parts = list(map(torch.as_strided, itertools.repeat(total), shapes, strides, starts))
        if self._specs and self._specs[0] is not None:
            if total.dtype is not self.dtype:
                parts = torch_dtensor.dtensors(parts, self._specs_in(total.dtype))
            else:
                parts = torch_dtensor.dtensors(parts, self._specs)
        if len(parts) == self._num_params:
            return list(parts)
        found: list[torch.Tensor | None] = [None] * self._num_params
        for index, part in zip(self.indices, parts, strict=True):
            found[index] = part
        return found

    def in_pieces(self) -> list[RowReduceForm]:
        large = [
            index
            for index, cut in zip(self.indices, self._cuts, strict=True)
            if cut.ranks * cut.numel >= LARGE
        ]
        rest = [index for index in self.indices if index not in large]
        return [
            self._form_of(indices, dtype=self.dtype)
            for indices in (*([index] for index in large), rest)
            if indices
        ]

    def _specs_in(self, dtype: torch.dtype) -> list[Any]:
        return [
            dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
            for spec in self._specs
        ]


def _with_rows_first(grad: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return a gradient so that chunks of dim 0 are what each rank receives."""
    if cut.dim is None:
        return grad.expand(cut.ranks, *cut.shape)
    return grad.view(grad.shape[cut.dim :]) if cut.ranks > 1 else grad


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
