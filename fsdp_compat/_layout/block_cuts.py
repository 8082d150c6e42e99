"""Flat layouts whose cuts, the borders of shards, lie between blocks of parameters.

A cut inside a parameter is at a multiple of its block, counted from its first element. Padding lies
between parameters and at the end, so that parameters stay contiguous in the flat tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from .spec import aligned

_TRIES = 1024  # after so many sizes of shards, the distance between those that are tried doubles


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What must stay together of a parameter of ``numel`` elements: ``size`` consecutive ones and,
    if it is cut, ``least`` in each part."""

    numel: int
    size: int
    least: int = 1

    def last_cut(self, room: int, shard: int, align: int) -> int:
        """Return the last place, among the first ``room`` elements, of a first cut that others
        follow every ``shard`` elements; 0: there is none."""
        grain = math.lcm(self.size, align)
        for cut in range(room // grain * grain, self.least - 1, -grain):
            rest = self.numel - cut
            if rest > shard and (shard % self.size or shard < self.least):
                return 0
            if (rest - 1) % shard + 1 >= self.least:
                return cut
        return 0


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where parameters start in shards of ``shard_numel`` elements, in the order they lie there."""

    shard_numel: int
    order: tuple[int, ...]  # the numbers of the parameters
    starts: tuple[int, ...]


@functools.lru_cache(maxsize=64)  # layers are alike
def smallest(
    params: tuple[Blocks, ...], ranks: int, align: int, unit: int, high: int
) -> Placement | None:
    """Return a placement in the smallest shards, of at most ``high`` elements, with the parameters
    in their order, or those with large blocks, or the large ones, first; None if there is none.
    align: of starts; unit: of shards, a multiple of it."""
    found: Placement | None = None
    numels = [param.numel for param in params]
    whole = [min(param.size, param.numel) for param in params]
    low = max([1, -(-sum(numels) // ranks), *whole])
    given = tuple(range(len(params)))
    by_block = tuple(sorted(given, key=lambda number: (-whole[number], -numels[number])))
    by_numel = tuple(sorted(given, key=lambda number: -numels[number]))
    for order in dict.fromkeys((given, by_block, by_numel)):
        its = [params[number] for number in order]
        fits = functools.partial(_starts, its, ranks, align)
        if size := _first_fit(its, fits, low, high, unit):
            found, high = Placement(size, order, fits(size) or ()), size - 1
    return found


def _starts(params: Sequence[Blocks], ranks: int, align: int, shard: int) -> tuple[int, ...] | None:
    """Return where the parameters start, each as early as possible, in ``ranks`` shards of a size;
    None if they do not fit."""
    starts, end = list[int](), 0
    for param in params:
        start = aligned(end, align)
        for room in (shard - start % shard, shard):  # before the next cut, then between two
            cut = room if param.numel <= room else param.last_cut(room, shard, align)
            start += room - cut  # if there is none, to the next shard
            if cut:
                break
        else:
            return None
        starts.append(start)
        end = start + param.numel
    return tuple(starts) if end <= ranks * shard else None


def _first_fit(
    params: Sequence[Blocks], fits: Callable[[int], object], low: int, high: int, unit: int
) -> int:
    """Return the first size of shards from ``low`` to ``high`` that fits, or 0. If there are many,
    they are tried at distances that grow, and then those between the last two."""
    size, failed = low, 0
    while size <= high:
        # Two shards inside a parameter: one of them is cut at both ends, and is of whole blocks.
        large = [param for param in params if param.numel > 2 * size]
        bound = min([high + 1, *((param.numel + 1) // 2 for param in large)])
        step = math.lcm(unit, *(param.size for param in large))
        size = aligned(size, step)
        if size < bound:
            if fits(size) is not None:
                return _first_fit(params, fits, low, size - 1, unit) or size
            low, size, failed = size + 1, size + (step << failed // _TRIES), failed + 1
        if size >= bound:
            size, failed = bound, 0
    return 0
