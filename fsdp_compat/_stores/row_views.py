"""Views of buffers that a RowLayout divides, of any dtype: one segment ``[S]`` or all ``[ranks *
S]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .. import _torch_private
from .._engine.dtypes import as_bytes
from .._layout.rows import Cut, RowLayout


class RowViews(RowLayout):
    """A RowLayout that returns the views of buffers."""

    def view(self, segment: torch.Tensor, index: int, rank: int) -> torch.Tensor:
        """segment: [S], of ``rank``. Return its part of a parameter, contiguous, in the part's
        shape."""
        return segment[self.part(index, rank).slice].view(self.cuts[index].part_shape(rank))

    def views(self, segment: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """segment: [S], of ``rank``. Return its parts of all parameters."""
        return [self.view(segment, index, rank) for index in range(len(self.cuts))]

    def block(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """buffer: [ranks * S]. Return the slots of a parameter, [ranks, numel of the slot]."""
        return buffer.view(self.ranks, self.numel)[:, self.slot(index).slice]

    def pieces(self, buffer: torch.Tensor, index: int) -> list[torch.Tensor]:
        """buffer: [ranks * S]. Return the views that together hold a parameter, without padding; of
        one that every rank holds whole, all copies. ``cut_up`` divides a value in the same way."""
        cut, block = self.cuts[index], self.block(buffer, index)
        if not cut.numel:
            return []
        shape = (*cut.lead, cut.chunk, *cut.tail)
        pieces = [block[: cut.full_ranks].view(cut.full_ranks, *shape)]
        if cut.rest:
            partial = block[cut.full_ranks, : cut.rest * cut.row_numel]
            pieces.append(partial.view(*cut.lead, cut.rest, *cut.tail))
        return pieces

    def copies(
        self, buffer: torch.Tensor, params: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """buffer: [ranks * S]. Return (to, from): the copies that fill whole parameters."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, (cut, param) in enumerate(zip(self.cuts, params, strict=True)):
            # `.data`: autograd has noted the version counter, which a copy may not move.
            value = _torch_private.local_part(param).data
            if not cut.numel:
                continue
            if cut.dim is None:
                pairs.append((value, self.view(buffer[: self.numel], index, 0)))
            elif cut.is_contiguous:
                slots = value.as_strided((cut.ranks, cut.numel), (cut.numel, 1))
                pairs.append((slots, self.block(buffer, index)))
            else:
                pairs += zip(cut_up(value, cut), self.pieces(buffer, index), strict=True)
        return [as_bytes(to) for to, _ in pairs], [as_bytes(source) for _, source in pairs]

    def padding(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """buffer: [ranks * S]. Return the views of what belongs to no parameter."""
        segments = buffer.view(self.ranks, self.numel)
        found = [segments[:, gap.slice] for gap in self.gaps()]
        for index, cut in enumerate(self.cuts):
            if not cut.is_even and cut.numel:
                block = self.block(buffer, index)
                found.append(block[cut.full_ranks, cut.rest * cut.row_numel :])
                found.append(block[cut.full_ranks + 1 :])
        return [view for view in found if view.numel()]

    def whole(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """buffer: [ranks * S]. Return a parameter, in its shape: a view where its parts follow each
        other, a copy otherwise."""
        cut, start = self.cuts[index], self.starts[index]
        if cut.dim is None or self.ranks == 1 or (cut.is_contiguous and cut.numel == self.numel):
            return buffer[start : start + cut.full_numel].view(cut.shape)
        value = buffer.new_empty(cut.shape)
        for part, piece in zip(cut_up(value, cut), self.pieces(buffer, index), strict=True):
            as_bytes(part).copy_(as_bytes(piece))
        return value


def cut_up(value: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """value: in the shape of the parameter, any strides. Return views of it in the shapes of
    ``RowViews.pieces``. One that every rank holds is repeated: its view cannot be written to."""
    if not cut.numel:
        return []
    if cut.dim is None:
        return [value.expand(cut.ranks, 1, *cut.shape)]
    full = cut.full_ranks * cut.chunk
    rows = value.narrow(cut.dim, 0, full) if cut.rest else value
    pieces = [rows.unflatten(cut.dim, (cut.full_ranks, cut.chunk)).movedim(cut.dim, 0)]
    if cut.rest:
        pieces.append(value.narrow(cut.dim, full, cut.rest))
    return pieces


def own_rows(value: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """value: in the shape of the parameter. Return the view of what ``rank`` holds of it."""
    if cut.dim is None:
        return value
    rows = cut.rows(rank)
    return value.narrow(cut.dim, rows.start, rows.numel)
