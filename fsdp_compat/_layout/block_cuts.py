"""Flat layouts whose cuts, the borders of shards, lie between blocks of parameters.

A cut inside a parameter is at a multiple of its block, counted from its first element. Padding lies
between parameters and at the end, so that parameters stay contiguous in the flat tensor."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from .spec import aligned

_TRIES = 1024  # sizes of shards, before those that are tried lie further apart


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
        sizes = (_first_fit(fits, each) for each in _candidates(its, low, high, unit))
        if (size := next(filter(None, sizes), None)) is not None:
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


def _candidates(params: Sequence[Blocks], low: int, high: int, unit: int) -> Iterator[range]:
    """Yield the sizes of shards from ``low`` to ``high`` that may work: a parameter larger than two
    shards is cut more than once, so that a shard consists of whole blocks of it."""
    halves = {(param.numel + 1) // 2 for param in params}
    bounds = sorted({low, high + 1, *(half for half in halves if low < half <= high)})
    for first, end in itertools.pairwise(bounds if low <= high else ()):
        step = math.lcm(unit, *(param.size for param in params if param.numel > 2 * first))
        yield range(aligned(first, step), end, step)


def _first_fit(fits: Callable[[int], object], sizes: range) -> int | None:
    """Return the first of ``sizes`` that fits. If there are many, they are tried at distances that
    grow, and then those between the last two."""
    stride, start = 1, 0
    while start < len(sizes):
        for at in range(start, min(start + _TRIES * stride, len(sizes)), stride):
            if fits(sizes[at]) is not None:
                inner = _first_fit(fits, sizes[max(at - stride + 1, 0) : at])
                return sizes[at] if inner is None else inner
        start, stride = start + _TRIES * stride, 2 * stride
    return None
