"""The types of layouts: an interval, a parameter in a flat tensor, the flat layout of a group, and
the runs of shards that hold a part of a parameter."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence


@dataclasses.dataclass(frozen=True, order=True)
class Interval:
    """Elements ``start`` (inclusive) to ``stop`` (exclusive), counted from 0."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"an interval needs 0 <= start <= stop, got [{self.start}, {self.stop})"
            )

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def __bool__(self) -> bool:
        return self.stop > self.start

    def shifted(self, by: int) -> Interval:
        """Return the interval moved by ``by`` elements."""
        return Interval(self.start + by, self.stop + by)

    def clipped(self, other: Interval) -> Interval:
        """Return the intersection; if it is empty, an empty interval inside ``other``."""
        start = min(max(self.start, other.start), other.stop)
        return Interval(start, min(max(self.stop, start), other.stop))


def between(intervals: Iterable[Interval], end: int) -> list[Interval]:
    """Return the gaps between ``intervals``, which are in order and disjoint, from 0 to ``end``."""
    found, last = [], 0
    for interval in (*intervals, Interval(end, end)):
        if last < interval.start:
            found.append(Interval(last, interval.start))
        last = max(last, interval.stop)
    return found


def aligned(position: int, unit: int) -> int:
    """Return the first multiple of ``unit`` from ``position`` on."""
    return -(-position // unit) * unit


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; without elements, as torch defines them."""
    sizes = [max(size, 1) for size in shape]
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one in memory, gaps included."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model in a flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int  # of its row-major elements in the flat tensor
    block: int = 0  # cuts are at multiples of it, counted in the parameter; 0: anywhere

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def in_full(self) -> Interval:
        """The parameter's elements in the full flat tensor ``[ranks * S]``."""
        return Interval(self.start, self.start + self.numel)

    @functools.cached_property
    def is_in_rows(self) -> bool:
        """True if all cuts lie between rows of dim 0, or between elements with one dim."""
        is_cut_so = self.block > 0 and self.block % max(math.prod(self.shape[1:]), 1) == 0
        return is_cut_so or len(self.shape) < 2

    def part_shape(self, numel: int) -> tuple[int, ...]:
        """Return the shape of a part of ``numel`` elements: 1-D, unless it consists of rows."""
        row = self.shape[1:] if self.is_in_rows else ()
        return (numel // max(math.prod(row), 1), *row)


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The concatenated parameters of one group, split into ``ranks`` shards of ``shard_numel``
    elements, rank-major, with padding between parameters."""

    params: tuple[ParamSpec, ...]
    ranks: int
    shard_numel: int  # S, the same on every rank

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.shard_numel < 1:
            raise ValueError(
                f"a layout needs at least one rank and one element, got {self.ranks} and "
                f"{self.shard_numel}"
            )
        end = 0
        for param in self.params:
            if param.start < end:
                raise ValueError(
                    f"{param.name} starts at {param.start}, but the parameter before it ends at "
                    f"{end}"
                )
            end = param.in_full.stop
        if end > self.full_numel:
            raise ValueError(f"the parameters end at {end}, the flat tensor at {self.full_numel}")

    @property
    def full_numel(self) -> int:
        return self.ranks * self.shard_numel

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    def interval(self, rank: int) -> Interval:
        """Return the elements of the full flat tensor that ``rank`` holds."""
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def part(self, index: int, rank: int) -> Interval:
        """Return the elements of parameter ``index`` that ``rank`` holds, from its first on."""
        param = self.params[index]
        first = rank * self.shard_numel - param.start  # of the shard, counted in the parameter
        start, stop = max(first, 0), min(first + self.shard_numel, param.numel)
        return Interval(start, stop) if start < stop else Interval(0, 0)

    def part_in_shard(self, index: int, rank: int) -> Interval:
        """Return the position of ``rank``'s part of parameter ``index`` in its shard ``[S]``."""
        param, size = self.params[index], self.shard_numel
        first = param.start - rank * size  # of the parameter, counted in the shard
        start = min(max(first, 0), size)
        return Interval(start, min(max(first + param.numel, start), size))

    def cuts(self, index: int) -> list[int]:
        """Return the first elements of parameter ``index`` on the ranks after its first one."""
        param, size = self.params[index], self.shard_numel
        first = size - param.start % size
        return list(range(first, param.numel, size))

    def gaps(self) -> list[Interval]:
        """Return the intervals of padding, in order."""
        return between((param.in_full for param in self.params), self.full_numel)


def flat_layout(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], *, ranks: int, align: int
) -> FlatLayout:
    """Return the layout of a parameter group. Each parameter and shard starts at a multiple of
    ``align`` elements; without elements there are ``align`` per rank: no collective is empty."""
    params, end = [], 0
    for name, shape in zip(names, shapes, strict=True):
        params.append(ParamSpec(name, tuple(shape), end))
        end += aligned(math.prod(shape), align)
    return FlatLayout(tuple(params), ranks, aligned(-(-max(end, 1) // ranks), align))


@dataclasses.dataclass(frozen=True)
class Section:
    """A run of a shard ``[S]`` that belongs to one layout."""

    layout: FlatLayout
    start: int  # in the shard
    first_param: int  # the index, among all parameters of the shard, of the layout's first one
    # If the layout holds a box of one parameter, the part of this rank alone, as parts are not runs
    # of elements: where the box starts. None: the layout cuts whole parameters over all ranks.
    offsets: tuple[int, ...] | None = None

    @property
    def in_shard(self) -> Interval:
        """Its elements in the shard."""
        return Interval(self.start, self.start + self.layout.shard_numel)

    @property
    def params(self) -> range:
        """The indices of the layout's parameters among all parameters of the shard."""
        return range(self.first_param, self.first_param + len(self.layout.params))

    def rank(self, rank: int) -> int:
        """Return the number, in the layout, of a rank of the shard axis."""
        return rank if self.offsets is None else 0


@dataclasses.dataclass(frozen=True)
class Run:
    """Elements that are contiguous both in one rank's shard and in a part of a parameter."""

    rank: int
    in_shard: Interval
    start: int  # position of the run in the part


def runs_of_part(layout: FlatLayout, index: int, part: Interval) -> Iterator[Run]:
    """Yield, in order, the runs of the shards of ``layout`` that hold the elements ``part`` of
    parameter ``index``: one step per run, whatever the number of ranks."""
    place, size = part.shifted(layout.params[index].start), layout.shard_numel
    position = place.start
    while position < place.stop:
        rank = position // size
        end = min(place.stop, (rank + 1) * size)
        yield Run(rank, Interval(position, end).shifted(-rank * size), position - place.start)
        position = end


def same_parts(one: FlatLayout, index: int, other: FlatLayout, its_index: int) -> bool:
    """Return True if every rank holds the same elements of parameter ``index`` of ``one`` and of
    parameter ``its_index`` of ``other``. Two runs tell: all later ones are as long as the
    second."""
    alike = one.ranks == other.ranks and one.params[index].numel == other.params[its_index].numel
    return alike and _first_runs(one, index) == _first_runs(other, its_index)


def _first_runs(layout: FlatLayout, index: int) -> list[tuple[int, int, int]]:
    runs = runs_of_part(layout, index, Interval(0, layout.params[index].numel))
    return [(run.rank, run.start, run.in_shard.numel) for run in itertools.islice(runs, 2)]
