"""Plan the copies from one layout to another: a different number of ranks, different groups, or no
sharding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from .spec import FlatLayout, Interval

__all__ = [
    "Move",
    "Piece",
    "Run",
    "pieces_of_rank",
    "pieces_of_whole",
    "plan_moves",
    "runs_of_part",
    "same_parts",
]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive row-major elements of a parameter, and their position in a 1-D tensor."""

    name: str
    part: Interval  # of the parameter
    # The tensor with the elements: (group, rank) for a shard, (index of the parameter,) for a full
    # tensor.
    holder: tuple[int, ...]
    start: int  # position of the elements in that tensor


@dataclasses.dataclass(frozen=True)
class Move:
    """Copy ``numel`` elements of parameter ``name`` from one holder's 1-D tensor to another's."""

    name: str
    source: tuple[int, ...]
    source_start: int
    target: tuple[int, ...]
    target_start: int
    numel: int


def pieces_of_rank(layouts: Sequence[FlatLayout], rank: int) -> list[Piece]:
    """Return the pieces that ``rank`` holds: at most one per parameter, because a shard is one
    interval. Holder: (group, rank)."""
    pieces = []
    for group, layout in enumerate(layouts):
        for index, param in enumerate(layout.params):
            part = layout.part(index, rank)
            if part:
                start = layout.part_in_shard(index, rank).start
                pieces.append(Piece(param.name, part, (group, rank), start))
    return pieces


def pieces_of_whole(layouts: Iterable[FlatLayout]) -> list[Piece]:
    """Return one piece per parameter, for full tensors. Holder: (index in order of appearance,)."""
    params = [param for layout in layouts for param in layout.params]
    return [
        Piece(p.name, Interval(0, p.numel), (index,), 0)
        for index, p in enumerate(params)
        if p.numel
    ]


def plan_moves(sources: Iterable[Piece], targets: Iterable[Piece]) -> list[Move]:
    """Return the moves that fill ``targets`` from ``sources``, in the order of the targets and
    their elements.

    Each target element that any source holds is moved exactly once, from the first such source.
    """
    by_name: dict[str, list[Piece]] = {}
    for piece in sources:
        by_name.setdefault(piece.name, []).append(piece)
    for pieces in by_name.values():
        pieces.sort(key=lambda piece: (piece.part, piece.holder))
    moves = []
    for target in targets:
        position = target.part.start
        for source in by_name.get(target.name, ()):
            run = source.part.clipped(Interval(min(position, target.part.stop), target.part.stop))
            if run:
                source_start = source.start + run.start - source.part.start
                target_start = target.start + run.start - target.part.start
                moves.append(
                    Move(
                        target.name,
                        source.holder,
                        source_start,
                        target.holder,
                        target_start,
                        run.numel,
                    )
                )
                position = run.stop
    return moves


@dataclasses.dataclass(frozen=True)
class Run:
    """Elements that are consecutive both in one rank's shard and in a part of a parameter."""

    rank: int
    in_shard: Interval
    start: int  # position of the run in the part


def runs_of_part(layout: FlatLayout, index: int, part: Interval) -> Iterator[Run]:
    """Yield, in order, the runs of the shards of ``layout`` that hold the elements ``part`` of
    parameter ``index``.

    Takes one step per shard that holds any of them, however many ranks there are.
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

    Comparing two runs is enough, however many ranks there are: all later runs are as long as the
    second.
    """
    alike = one.ranks == other.ranks and one.params[index].numel == other.params[its_index].numel
    return alike and _first_runs(one, index) == _first_runs(other, its_index)


def _first_runs(layout: FlatLayout, index: int) -> list[tuple[int, int, int]]:
    """Return (rank, start, number of elements) of the first two runs of a parameter."""
    runs = runs_of_part(layout, index, Interval(0, layout.params[index].numel))
    return [(run.rank, run.start, run.in_shard.numel) for run in itertools.islice(runs, 2)]
