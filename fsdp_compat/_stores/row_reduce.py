"""How the gradients of parameters that are cut by rows travel: the rows of the trainable ones, and
marks, one element per parameter in every rank's segment, that say whether a rank has used it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch_private
from .._layout.rows import ALIGN_NBYTES, Cut
from .._layout.spec import aligned, row_major_strides
from .._torch_private import dtensor as torch_dtensor
from .row_params import RowParam
from .row_views import RowViews, cut_up


class RowReduceForm:
    """The layout of the reduce buffer for one set of trainable parameters. (A ReduceForm.)"""

    pieces_are_whole = False

    def __init__(
        self, indices: Sequence[int], params: Sequence[RowParam], rank: int, dtype: torch.dtype
    ) -> None:
        """indices: of the trainable parameters, ascending. params: all of the store."""
        self.indices, self.dtype, self._num_params = list(indices), dtype, len(params)
        own = self._params = [params[index] for index in indices]
        cuts, ranks = [param.cut for param in own], params[0].cut.ranks
        # The marks lie like one more parameter. Its rows have whole units of alignment, so that
        # segments stay aligned.
        unit = max(ALIGN_NBYTES // dtype.itemsize, 1)
        marks = Cut((aligned(len(own), unit) * ranks,), 0, ranks)
        layout = self._layout = RowViews.packed([*cuts, marks], ranks, dtype.itemsize)
        self.numel = layout.numel
        self._mark_slot = layout.slot(len(own))
        self._set_marks: dict[object, torch.Tensor] = {}  # all of them, by dtype and device
        self._specs = [param.spec for param in own]
        shapes = [cut.part_shape(rank) for cut in cuts]
        # of this rank's parts in its segment
        self._places = shapes, list(map(row_major_strides, shapes)), list(layout.starts[:-1])
        self.takes_all = any(cut.numel for cut in cuts) and all(
            (param.cut.is_contiguous or param.cut.dim is None) and param.kind.parallel is None
            for param in own
        )
        self._has_other_dims = any(cut.dim != 0 for cut in cuts)

    def places(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = [[] for _ in range(self._num_params)]
        for position, index in enumerate(self.indices):
            found[index] = self._layout.pieces(buffer, position)
        marks = self._layout.block(buffer, len(self._params))
        return [*found, [*self._layout.padding(buffer), marks]]

    def marks(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., self._mark_slot.slice][..., : len(self.indices)]

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Collective for a DTensor that is placed in another way than the parameter."""
        param = self._params[self.indices.index(index)]
        parallel = param.kind.parallel
        return cut_up(value if parallel is None else parallel.local(value), param.cut)

    def put_all(self, rows: torch.Tensor, grads: list[torch.Tensor]) -> None:
        kind = grads[0].dtype, grads[0].device
        if kind not in self._set_marks:
            marks = grads[0].new_zeros(rows.shape[0], self._mark_slot.numel)
            marks[:, : len(grads)] = 1
            self._set_marks[kind] = marks.view(-1)
        if self._has_other_dims:
            grads = list(map(_with_rows_first, grads, self._params))
        grads = [*grads, self._set_marks[kind]]
        in_order = list(map(grads.__getitem__, self._layout.order))
        _torch_private.chunk_together(in_order, self._layout.ranks, rows)

    def grads(self, total: torch.Tensor) -> Sequence[torch.Tensor | None]:
        # one call for each view: narrow and view would be two
        shapes, strides, starts = self._places
        if offset := int(total.storage_offset()):
            starts = [start + offset for start in starts]
        parts = list(map(torch.as_strided, itertools.repeat(total), shapes, strides, starts))
        if self._specs and self._specs[0] is not None:
            parts = torch_dtensor.dtensors(
                parts, self._specs if total.dtype is self.dtype else self._specs_in(total.dtype)
            )
        if len(parts) == self._num_params:
            return parts
        found: list[torch.Tensor | None] = [None] * self._num_params
        for index, part in zip(self.indices, parts, strict=True):
            found[index] = part
        return found

    def _specs_in(self, dtype: torch.dtype) -> list[Any]:
        return [
            dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
            for spec in self._specs
        ]


def _with_rows_first(grad: torch.Tensor, param: RowParam) -> torch.Tensor:
    """Return a gradient so that chunks of dim 0 are what each rank receives."""
    cut = param.cut
    if cut.dim is None:
        return grad.expand(cut.ranks, *cut.shape)
    return grad.view(grad.shape[cut.dim :]) if cut.dim and cut.ranks > 1 else grad
