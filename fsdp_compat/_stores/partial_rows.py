"""What is left of unsharded parameters between forward and backward when backward all-gathers them
among fewer ranks than hold them between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._engine.store import Kind, as_unsharded_param
from .._layout.rows import Cut, RowLayout
from .._layout.spec import row_major_strides
from .._torch_private import dtensor as torch_dtensor
from .row_views import RowViews, as_bytes, cut_up, own_rows

__all__ = ["PartialRows"]


class PartialRows:
    """The rows that one of ``ranks`` ranks keeps of each unsharded parameter: every parameter is
    cut along its first dim."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        kinds: Sequence[Kind],
        sharded_params: Sequence[nn.Parameter],
        mesh: Any,
        *,
        rank: int,
        ranks: int,
        dtype: torch.dtype,
    ) -> None:
        """mesh: a 2-D DeviceMesh of which the ranks are the last dimension; None: no DTensors.
        sharded_params: the kept rows are shown with their requires_grad. dtype: of the unsharded
        parameters."""
        self._cuts = [Cut(shape, 0 if shape else None, ranks) for shape in shapes]
        self._layout = RowLayout.in_order(self._cuts, ranks, dtype.itemsize)
        self._views = RowViews(self._layout)
        self._kinds, self._sharded_params = list(kinds), list(sharded_params)
        self._specs = [None if mesh is None else _spec(mesh, cut, dtype) for cut in self._cuts]
        self._rank = rank
        self.numel, self.dtype = self._layout.numel, dtype

    def parts(self, held: torch.Tensor) -> list[torch.Tensor]:
        """held: [numel]. Return views of it in the shapes of this rank's rows."""
        return [self._views.part(held, index, self._rank) for index in range(len(self._cuts))]

    def own_rows(self, unsharded_params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Return views of this rank's rows of the unsharded parameters, which have memory."""
        return [
            own_rows(param.data, cut, self._rank)
            for param, cut in zip(unsharded_params, self._cuts, strict=True)
        ]

    def copies(
        self, full: torch.Tensor, unsharded_params: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """full: [ranks * numel]. Return (to, from): the copies that fill the unsharded
        parameters."""
        to: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, (param, cut) in enumerate(zip(unsharded_params, self._cuts, strict=True)):
            if cut.dim is None:
                to.append(param.data)
                sources.append(self._views.part(full[: self.numel], index, 0))
            else:
                to += cut_up(param.data, cut)
                sources += self._views.pieces(full, index)
        return [as_bytes(each) for each in to], [as_bytes(each) for each in sources]

    def params(self, held: torch.Tensor) -> list[nn.Parameter]:
        """held: [numel]. Return the parameters that modules show meanwhile, over it."""
        parts = self.parts(held)
        if self._specs[0] is None:
            return [
                as_unsharded_param(part, sharded.requires_grad, kind)
                for part, sharded, kind in zip(
                    parts, self._sharded_params, self._kinds, strict=True
                )
            ]
        shown = []
        for value, sharded, kind in zip(
            torch_dtensor.dtensors(parts, self._specs),
            self._sharded_params,
            self._kinds,
            strict=True,
        ):
            param = nn.Parameter(value, requires_grad=sharded.requires_grad)
            param.__dict__ = kind.attributes
            shown.append(param)
        return shown


def _spec(mesh: Any, cut: Cut, dtype: torch.dtype) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    own = Replicate() if cut.dim is None else Shard(0)
    return torch_dtensor.spec_for(
        mesh, (Replicate(), own), cut.shape, row_major_strides(cut.shape), dtype
    )
