"""What is left of unsharded parameters between forward and backward when backward all-gathers them
among fewer ranks than hold them between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._engine.store import Kind
from .._engine.tensor_parallel import TensorParallel
from .._layout.rows import Cut
from .row_params import RowParam
from .row_views import RowViews, own_rows


class PartialRows:
    """The rows that one of ``ranks`` ranks keeps of each unsharded parameter: every parameter is
    cut along its first dim."""

    def __init__(
        self,
        params: Sequence[RowParam],
        mesh: Any,
        *,
        rank: int,
        ranks: int,
        dtype: torch.dtype,
    ) -> None:
        """mesh: a 2-D DeviceMesh of which the ranks are the last dimension; None: no DTensors.
        dtype: of the unsharded parameters."""
        cuts = [Cut(p.cut.shape, 0 if p.cut.shape else None, ranks) for p in params]
        self._layout = RowViews.in_order(cuts, ranks, dtype.itemsize)
        self.numel, self.dtype = self._layout.numel, dtype
        self._params, self._rank = params, rank
        self._kinds = [param.kind if mesh is None else _kind_on(mesh, param) for param in params]

    def own_rows(self, unsharded_params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        return [
            own_rows(param.data, cut, self._rank)
            for param, cut in zip(unsharded_params, self._layout.cuts, strict=True)
        ]

    def copies(
        self, full: torch.Tensor, unsharded_params: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self._layout.copies(full, unsharded_params)

    def params(self, held: torch.Tensor) -> list[nn.Parameter]:
        return [
            kind.parameter(part, param.sharded.requires_grad)
            for kind, part, param in zip(
                self._kinds, self._layout.views(held, self._rank), self._params, strict=True
            )
        ]


def _kind_on(mesh: Any, param: RowParam) -> Kind:
    from torch.distributed.tensor import Replicate, Shard

    shape = param.cut.shape
    own = Shard(0) if shape else Replicate()
    return param.kind._replace(parallel=TensorParallel(mesh, (Replicate(), own), shape))
