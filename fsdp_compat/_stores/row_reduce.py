"""How the gradients of parameters that are cut by rows travel: the rows of the trainable ones, and
marks, one element per parameter in every rank's segment, that say whether a rank has used it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch_private
from .._engine.tensor_parallel import TensorParallel
from .._layout.rows import ALIGN_NBYTES, Cut, RowLayout
from .._layout.spec import aligned, row_major_strides
from .._torch_private import dtensor as torch_dtensor
from .row_views import RowViews, cut_up


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
        self._cuts = [cuts[index] for index in self.indices]
        # The marks lie like one more parameter. Its rows have whole units of alignment, so that
        # segments stay aligned.
        unit = max(ALIGN_NBYTES // dtype.itemsize, 1)
        marks = Cut((aligned(len(self._cuts), unit) * ranks,), 0, ranks)
        layout = RowLayout.packed([*self._cuts, marks], ranks, dtype.itemsize)
        self._layout, self.numel = layout, layout.numel
        self._mark_slot = layout.slot(len(self._cuts))
        self._set_marks: dict[object, torch.Tensor] = {}  # all of them, by dtype and device
        self._views = RowViews(layout)
        self._specs = [specs[index] for index in self.indices]
        self._parallel = [parallel[index] for index in self.indices]
        self._num_params = len(cuts)
        shapes = [cut.part_shape(rank) for cut in self._cuts]
        # of this rank's parts in its segment
        self._places = shapes, list(map(row_major_strides, shapes)), list(layout.starts[:-1])
        self.takes_all = any(cut.numel for cut in self._cuts) and all(
            (cut.is_contiguous or cut.dim is None) and parallel is None
            for cut, parallel in zip(self._cuts, self._parallel, strict=True)
        )
        self._has_other_dims = any(cut.dim != 0 for cut in self._cuts)

    def places(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = [[] for _ in range(self._num_params)]
        for position, index in enumerate(self.indices):
            found[index] = self._views.pieces(buffer, position)
        marks = self._views.block(buffer, len(self._cuts))
        return [*found, [*self._views.padding(buffer), marks]]

    def marks(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., self._mark_slot.slice][..., : len(self.indices)]

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Collective for a DTensor that is placed in another way than the parameter."""
        position = self.indices.index(index)
        parallel = self._parallel[position]
        return cut_up(value if parallel is None else parallel.local(value), self._cuts[position])

    def put_all(self, rows: torch.Tensor, grads: list[torch.Tensor]) -> None:
        kind = grads[0].dtype, grads[0].device
        if kind not in self._set_marks:
            marks = grads[0].new_zeros(rows.shape[0], self._mark_slot.numel)
            marks[:, : len(grads)] = 1
            self._set_marks[kind] = marks.view(-1)
        if self._has_other_dims:
            grads = list(map(_with_rows_first, grads, self._cuts))
        grads = [*grads, self._set_marks[kind]]
        in_order = list(map(grads.__getitem__, self._layout.order))
        _torch_private.chunk_together(in_order, self._layout.ranks, rows)

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

    def _specs_in(self, dtype: torch.dtype) -> list[Any]:
        return [
            dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
            for spec in self._specs
        ]


def _with_rows_first(grad: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return a gradient so that chunks of dim 0 are what each rank receives."""
    if cut.dim is None:
        return grad.expand(cut.ranks, *cut.shape)
    return grad.view(grad.shape[cut.dim :]) if cut.dim and cut.ranks > 1 else grad
