"""Views of buffers in a RowLayout, one segment ``[S]`` or all ``[ranks * S]``; and gradients in
them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._engine.dtypes import as_bytes
from .._layout.rows import ALIGN_NBYTES, Cut, RowLayout
from .._layout.spec import aligned, row_major_strides
from .._torch_private import dtensor as torch_dtensor
from .placement import RowParam


class RowViews(RowLayout):
    """A RowLayout that returns views of buffers."""

    def view(self, segment: Tensor, index: int, rank: int) -> Tensor:
        """segment: [S], of ``rank``. Return its part of a parameter, in the part's shape."""
        return segment[self.part(index, rank).slice].view(self.cuts[index].part_shape(rank))

    def views(self, segment: Tensor, rank: int) -> list[Tensor]:
        """segment: [S], of ``rank``. Return its parts of all parameters."""
        return [self.view(segment, index, rank) for index in range(len(self.cuts))]

    def block(self, buffer: Tensor, index: int) -> Tensor:
        """buffer: [ranks * S]. Return the slots of a parameter, [ranks, numel of the slot]."""
        return buffer.view(self.ranks, self.numel)[:, self.slot(index).slice]

    def param_views(self, buffer: Tensor, index: int) -> list[Tensor]:
        """buffer: [ranks * S]. Return the views that together hold a parameter, without padding; if
        every rank holds it whole, all copies. ``cut_up`` divides a value in the same way."""
        cut, block = self.cuts[index], self.block(buffer, index)
        if not cut.numel:
            return []
        shape = (*cut.lead, cut.chunk, *cut.tail)
        views = [block[: cut.full_ranks].view(cut.full_ranks, *shape)]
        if cut.rest:
            partial = block[cut.full_ranks, : cut.rest * cut.row_numel]
            views.append(partial.view(*cut.lead, cut.rest, *cut.tail))
        return views

    def copies(
        self, buffer: Tensor, params: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """buffer: [ranks * S]. Return (to, from): the copies that fill whole parameters."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for index, (cut, param) in enumerate(zip(self.cuts, params, strict=True)):
            # `.data`: autograd has recorded the version counter, which a copy must not bump.
            value = _torch_private.local_part(param).data
            if not cut.numel:
                continue
            if cut.is_contiguous or cut.dim is None:  # a 0-d parameter is the first of all copies
                slots = value.as_strided((cut.ranks, cut.numel), (cut.numel, 1))
                pairs.append((slots, self.block(buffer, index)))
            else:
                pairs += zip(cut_up(value, cut), self.param_views(buffer, index), strict=True)
        return [as_bytes(to) for to, _ in pairs], [as_bytes(source) for _, source in pairs]

    def padding(self, buffer: Tensor) -> list[Tensor]:
        """buffer: [ranks * S]. Return the views of the padding."""
        segments = buffer.view(self.ranks, self.numel)
        found = [segments[:, gap.slice] for gap in self.gaps()]
        for index, cut in enumerate(self.cuts):
            if not cut.is_even and cut.numel:
                block = self.block(buffer, index)
                found.append(block[cut.full_ranks, cut.rest * cut.row_numel :])
                found.append(block[cut.full_ranks + 1 :])
        return [view for view in found if view.numel()]

    def whole(self, buffer: Tensor, index: int) -> Tensor:
        """buffer: [ranks * S]. Return a parameter: a view if its parts are contiguous."""
        cut, start = self.cuts[index], self.starts[index]
        if cut.dim is None or self.ranks == 1 or (cut.is_contiguous and cut.numel == self.numel):
            return buffer[start : start + cut.full_numel].view(cut.shape)
        value = buffer.new_empty(cut.shape)
        for part, view in zip(cut_up(value, cut), self.param_views(buffer, index), strict=True):
            as_bytes(part).copy_(as_bytes(view))
        return value


def cut_up(value: Tensor, cut: Cut) -> list[Tensor]:
    """value: in the shape of the parameter, any strides. Return views of it in the shapes of
    ``RowViews.param_views``. If every rank holds it whole, the view is expanded and read-only."""
    if not cut.numel:
        return []
    if cut.dim is None:
        return [value.expand(cut.ranks, 1, *cut.shape)]
    full = cut.full_ranks * cut.chunk
    rows = value.narrow(cut.dim, 0, full) if cut.rest else value
    views = [rows.unflatten(cut.dim, (cut.full_ranks, cut.chunk)).movedim(cut.dim, 0)]
    if cut.rest:
        views.append(value.narrow(cut.dim, full, cut.rest))
    return views


def own_rows(value: Tensor, cut: Cut, rank: int) -> Tensor:
    """value: in the shape of the parameter. Return the view of ``rank``'s rows."""
    if cut.dim is None:
        return value
    rows = cut.rows(rank)
    return value.narrow(cut.dim, rows.start, rows.numel)


class RowReduceForm:
    """A ReduceForm for one set of trainable parameters: their rows, and marks, one element per
    parameter in every segment, that say whether a rank has used it."""

    is_contiguous_per_param = False

    def __init__(
        self, indices: Sequence[int], params: Sequence[RowParam], rank: int, dtype: torch.dtype
    ) -> None:
        """indices: of the trainable parameters, ascending. params: all of the store."""
        self.indices, self.dtype, self._num_params = list(indices), dtype, len(params)
        own = self._params = [params[index] for index in indices]
        cuts, ranks = [param.cut for param in own], params[0].cut.ranks
        # The marks are laid out like one more parameter, padded so that segments stay aligned.
        unit = max(ALIGN_NBYTES // dtype.itemsize, 1)
        marks = Cut((aligned(len(own), unit) * ranks,), 0, ranks)
        layout = self._layout = RowViews.packed([*cuts, marks], ranks, dtype.itemsize)
        self.numel = layout.numel
        self._mark_slot = layout.slot(len(own))
        # Marks of all parameters, and of one, in every segment, by dtype and device.
        self._set_marks: dict[object, tuple[Tensor, Tensor]] = {}
        self._specs = [param.spec for param in own]
        shapes = [cut.part_shape(rank) for cut in cuts]
        # shapes, strides and starts of this rank's parts in its segment
        self._part_views = shapes, list(map(row_major_strides, shapes)), list(layout.starts[:-1])
        self.can_pack_grads = any(cut.numel for cut in cuts) and all(
            (param.cut.is_contiguous or param.cut.dim is None) and param.kind.parallel is None
            for param in own
        )
        self._has_other_dims = any(cut.dim != 0 for cut in cuts)

    def param_views(self, buffer: Tensor) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in range(self._num_params)]
        for position, index in enumerate(self.indices):
            found[index] = self._layout.param_views(buffer, position)
        marks = self._layout.block(buffer, len(self._params))
        return [*found, [*self._layout.padding(buffer), marks]]

    def marks(self, rows: Tensor) -> Tensor:
        return rows[..., self._mark_slot.slice][..., : len(self.indices)]

    def split(self, index: int, value: Tensor) -> Sequence[Tensor]:
        """Collective for a DTensor whose placements differ from the parameter's."""
        param = self._params[self.indices.index(index)]
        parallel = param.kind.parallel
        return cut_up(value if parallel is None else parallel.local(value), param.cut)

    def pack_grads(self, rows: Tensor, grads: list[Tensor], indices: Sequence[int]) -> None:
        kind = grads[0].dtype, grads[0].device
        if kind not in self._set_marks:
            marks = grads[0].new_zeros(rows.shape[0], self._mark_slot.numel)
            marks[:, : len(self.indices)] = 1
            self._set_marks[kind] = marks.view(-1), grads[0].new_ones(rows.shape[0])
        if len(grads) < len(self.indices):
            in_order = self._with_zeros(dict(zip(indices, grads, strict=True)), kind)
        else:
            if self._has_other_dims:
                grads = list(map(_with_rows_first, grads, self._params))
            grads = [*grads, self._set_marks[kind][0]]
            in_order = list(map(grads.__getitem__, self._layout.order))
        _torch_private.chunk_together(in_order, self._layout.ranks, rows)

    def _with_zeros(self, grads: dict[int, Tensor], kind: object) -> list[Tensor]:
        """Return what ``chunk_together`` takes: gradients and marks, or zeros, in their order."""
        cuts, mark = self._layout.cuts, self._set_marks[kind][1]
        # One row that all share: chunk_together fills the other segments with zeros.
        zeros = mark.new_zeros(1, max(cut.numel for cut in cuts))
        runs, marks = list[list[Tensor]](), list[Tensor]()
        for index, param in zip(self.indices, self._params, strict=True):
            grad = grads.get(index)
            empty = zeros[:, : param.cut.numel]
            runs.append([empty if grad is None else _with_rows_first(grad, param)])
            marks.append(zeros[:, :1] if grad is None else mark)
        padding = zeros[:, : self._mark_slot.numel - len(marks)]
        runs.append([*marks, padding] if padding.numel() else marks)
        return list(itertools.chain.from_iterable(map(runs.__getitem__, self._layout.order)))

    def grads(self, total: Tensor) -> Sequence[Tensor | None]:
        # one call per view; narrow and view would be two
        shapes, strides, starts = self._part_views
        if offset := int(total.storage_offset()):
            starts = [start + offset for start in starts]
        parts = list(map(torch.as_strided, itertools.repeat(total), shapes, strides, starts))
        if self._specs and self._specs[0] is not None:
            parts = torch_dtensor.dtensors(
                parts, self._specs if total.dtype is self.dtype else self._specs_in(total.dtype)
            )
        if len(parts) == self._num_params:
            return parts
        found: list[Tensor | None] = [None] * self._num_params
        for index, part in zip(self.indices, parts, strict=True):
            found[index] = part
        return found

    def _specs_in(self, dtype: torch.dtype) -> list[Any]:
        return [
            dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
            for spec in self._specs
        ]


def _with_rows_first(grad: Tensor, param: RowParam) -> Tensor:
    """Return a gradient in a shape whose chunks along dim 0 are the ranks' parts; of a 0-d
    parameter, contiguous copies, as the kernel needs them."""
    cut = param.cut
    if cut.dim is None:
        return grad.expand(cut.ranks).contiguous()
    return grad.view(grad.shape[cut.dim :]) if cut.dim and cut.ranks > 1 else grad
