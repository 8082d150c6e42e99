"""Cuts every parameter by itself along one of its dims, and lays the parts out in a segment."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Sequence

from .spec import FlatLayout, Interval, ParamSpec, Section, aligned, between

ALIGN_NBYTES = 16  # large parts start at a multiple of it
LARGE_NBYTES = 4096  # the least size of a large part; a gap before a smaller one costs too much


@dataclasses.dataclass(frozen=True)
class Cut:
    """One parameter, cut along ``dim`` into ``ranks`` parts as by torch.chunk: each has ``chunk``
    rows, but the last parts may have fewer. A *row* is an index into ``dim``. dim: None for a 0-d
    parameter, which every rank holds whole."""

    shape: tuple[int, ...]
    dim: int | None
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a cut needs at least one rank, got {self.ranks}")
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise ValueError(f"a tensor of {len(self.shape)} dim(s) has no dim {self.dim}")

    @functools.cached_property
    def num_rows(self) -> int:
        return 1 if self.dim is None else self.shape[self.dim]

    @functools.cached_property
    def chunk(self) -> int:
        """The number of rows of the first rank, and of every slot."""
        return 1 if self.dim is None else -(-self.num_rows // self.ranks)

    @functools.cached_property
    def lead(self) -> tuple[int, ...]:
        """The dims before ``dim``."""
        return self.shape[: self.dim] if self.dim is not None else ()

    @functools.cached_property
    def tail(self) -> tuple[int, ...]:
        """The dims after ``dim``."""
        return self.shape[self.dim + 1 :] if self.dim is not None else self.shape

    @functools.cached_property
    def row_numel(self) -> int:
        return math.prod(self.lead) * math.prod(self.tail)

    @functools.cached_property
    def numel(self) -> int:
        """The number of elements of a slot: of the first rank's part, or a padded smaller one."""
        return self.chunk * self.row_numel

    @property
    def full_numel(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def full_ranks(self) -> int:
        """The number of ranks with ``chunk`` rows. The next has ``rest`` rows, others none."""
        if self.dim is None:
            return self.ranks
        return self.num_rows // self.chunk if self.chunk else self.ranks

    @functools.cached_property
    def rest(self) -> int:
        return 0 if self.dim is None else self.num_rows - self.full_ranks * self.chunk

    @property
    def is_even(self) -> bool:
        """True if all parts have the same size, so that no slot is padded."""
        return self.full_ranks == self.ranks

    @property
    def is_contiguous(self) -> bool:
        """True if the parts of all ranks, concatenated, are the parameter, row-major."""
        return self.ranks == 1 or (self.dim is not None and math.prod(self.lead) == 1)

    def rows(self, rank: int) -> Interval:
        """Return the rows that ``rank`` holds; for a parameter that is not cut, its only one."""
        if self.dim is None:
            return Interval(0, 1)
        start = min(rank * self.chunk, self.num_rows)
        return Interval(start, min(start + self.chunk, self.num_rows))

    def part_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.lead, self.rows(rank).numel, *self.tail)

    def part_numel(self, rank: int) -> int:
        return self.rows(rank).numel * self.row_numel


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where the slots of all parameters lie in a rank's segment ``[numel]``, the same for all ranks
    of a buffer ``[ranks * numel]``, rank-major. A rank's part lies at the start of the slot,
    row-major; the rest of the slot is padding."""

    cuts: tuple[Cut, ...]
    starts: tuple[int, ...]  # of the slots
    numel: int  # S, of a segment
    ranks: int

    @classmethod
    def in_order(cls, cuts: Sequence[Cut], ranks: int, itemsize: int) -> typing.Self:
        """Lay the slots out in the order of the parameters, large ones aligned if there are
        several. None is empty, even for a parameter without elements."""
        starts, end = [], 0
        for cut in cuts:
            starts.append(_start(end, cut.numel, itemsize))
            end = starts[-1] + max(cut.numel, 1)
        return cls(
            tuple(cuts),
            tuple(starts),
            max(_start(end, end, itemsize) if len(cuts) > 1 else end, 1),
            ranks,
        )

    @classmethod
    def packed(cls, cuts: Sequence[Cut], ranks: int, itemsize: int) -> typing.Self:
        """Lay the slots out without gaps, first those of a size that keeps the next aligned."""
        starts, end = [0] * len(cuts), 0
        unit = max(ALIGN_NBYTES // itemsize, 1)
        for index in sorted(range(len(cuts)), key=lambda i: cuts[i].numel % unit != 0):
            starts[index] = end
            end += cuts[index].numel
        return cls(tuple(cuts), tuple(starts), max(end, 1), ranks)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The indices of the parameters in the order of their slots, without empty slots."""
        present = [index for index, cut in enumerate(self.cuts) if cut.numel]
        return tuple(sorted(present, key=self.starts.__getitem__))

    def slot(self, index: int) -> Interval:
        """Return the interval of a parameter's slot in a segment."""
        return Interval(self.starts[index], self.starts[index] + self.cuts[index].numel)

    def part(self, index: int, rank: int) -> Interval:
        """Return the interval of ``rank``'s part of a parameter in its segment."""
        start = self.starts[index]
        return Interval(start, start + self.cuts[index].part_numel(rank))

    def gaps(self) -> list[Interval]:
        """Return the intervals of a segment that belong to no slot, in order."""
        return between(map(self.slot, self.order), self.numel)

    def section(self, index: int, name: str, rank: int) -> Section:
        """Return the section of a parameter in the shard of ``rank``: a flat layout in shards of
        whole rows. If these are not runs of elements, the layout holds the rank's box alone."""
        cut = self.cuts[index]
        if cut.dim is not None and not cut.is_contiguous:
            box = ParamSpec(name, cut.part_shape(rank), 0)
            offsets = (*(0,) * cut.dim, cut.rows(rank).start, *(0,) * len(cut.tail))
            layout = FlatLayout((box,), 1, max(box.numel, 1))
            return Section(layout, self.starts[index], index, offsets)
        spec = ParamSpec(name, cut.shape, 0)
        kind = CopiedLayout if cut.dim is None else FlatLayout
        return Section(kind((spec,), self.ranks, max(cut.numel, 1)), self.starts[index], index)


class CopiedLayout(FlatLayout):
    """The layout of one parameter that every rank holds whole. The first rank's value is saved; a
    loaded value goes to every rank."""

    def part(self, index: int, rank: int) -> Interval:
        return Interval(0, self.params[index].numel)

    def part_in_shard(self, index: int, rank: int) -> Interval:
        return self.part(index, rank)


def _start(position: int, numel: int, itemsize: int) -> int:
    """Return the first valid start of ``numel`` elements from ``position`` on."""
    is_large = numel * itemsize >= LARGE_NBYTES
    return aligned(position, max(ALIGN_NBYTES // itemsize, 1)) if is_large else position
