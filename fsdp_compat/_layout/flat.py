"""Lay parameters out one after the other and cut the whole over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .spec import FlatLayout, ParamSpec

__all__ = ["flat_layout"]


def flat_layout(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], *, ranks: int, align: int
) -> FlatLayout:
    """Return the layout of a group: every parameter, and every rank's shard, starts at a multiple
    of ``align`` elements.

    An empty group, and one whose parameters are all empty, still gets one aligned element run per
    rank, so that collectives always have something to carry.
    """
    params, end = [], 0
    for name, shape in zip(names, shapes, strict=True):
        params.append(ParamSpec(name, tuple(shape), end))
        end += _aligned(math.prod(shape), align)
    return FlatLayout(tuple(params), ranks, _aligned(-(-max(end, 1) // ranks), align))


def _aligned(numel: int, align: int) -> int:
    return -(-numel // align) * align
