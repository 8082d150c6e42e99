"""Where a part of a parameter lies in the shards, and whether two layouts cut it alike."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from .spec import FlatLayout, Interval


@dataclasses.dataclass(frozen=True)
class Run:
    """Elements that are contiguous both in one rank's shard and in a part of a parameter."""

    rank: int
    in_shard: Interval
    start: int  # position of the run in the part


def runs_of_part(layout: FlatLayout, index: int, part: Interval) -> Iterator[Run]:
    """Yield, in order, the runs of the shards of ``layout`` that hold the elements ``part`` of
    parameter ``index``.

    Takes one step per shard that holds any of them, whatever the number of ranks.
    """
    place, size = part.shifted(layout.params[index].start), layout.shard_numel
    position = place.start
    while position < place.stop:
        rank = position // size
        end = min(place.stop, (rank + 1) * size)
        yield Run(rank, Interval(position, end).shifted(-rank * size), position - place.start)
        position = end


def same_parts(one: FlatLayout, index: int, other: FlatLayout, its_index: int) -> bool:
    """Return True if every rank holds the same elements of parameter ``index`` of ``one`` and of
    parameter ``its_index`` of ``other``.

    Comparing two runs is enough, because all later runs are as long as the second.
    """
    alike = one.ranks == other.ranks and one.params[index].numel == other.params[its_index].numel
    return alike and _first_runs(one, index) == _first_runs(other, its_index)


def _first_runs(layout: FlatLayout, index: int) -> list[tuple[int, int, int]]:
    """Return (rank, start, number of elements) of the first two runs of a parameter."""
    runs = runs_of_part(layout, index, Interval(0, layout.params[index].numel))
    return [(run.rank, run.start, run.in_shard.numel) for run in itertools.islice(runs, 2)]
