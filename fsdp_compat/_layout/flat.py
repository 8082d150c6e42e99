"""Concatenate parameters and split the result evenly across ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .spec import FlatLayout, ParamSpec, aligned


def flat_layout(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    *,
    ranks: int,
    align: int,
) -> FlatLayout:
    """Return the layout of a parameter group. Each parameter and each rank's shard starts at a
    multiple of ``align`` elements.

    A group without elements still gets ``align`` elements per rank, so that its collectives are
    never empty.
    """
    params, end = [], 0
    for name, shape in zip(names, shapes, strict=True):
        params.append(ParamSpec(name, tuple(shape), end))
        end += aligned(math.prod(shape), align)
    return FlatLayout(tuple(params), ranks, aligned(-(-max(end, 1) // ranks), align))
