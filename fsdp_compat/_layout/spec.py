"""The words of the layout: an interval, one parameter's place, and the flat layout of one group."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["FlatLayout", "Interval", "ParamSpec", "Section"]


@dataclasses.dataclass(frozen=True, order=True)
class Interval:
    """Elements ``start`` to ``stop`` (exclusive) of something that is counted from 0."""

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
        """Return the same elements, counted from another zero."""
        return Interval(self.start + by, self.stop + by)

    def clipped(self, other: Interval) -> Interval:
        """Return what both hold; an empty interval inside ``other`` where they do not meet."""
        start = min(max(self.start, other.start), other.stop)
        return Interval(start, min(max(self.stop, start), other.stop))


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One original parameter: its name, its shape, and where its row-major elements start in the
    flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> Interval:
        """Its elements in the full flat tensor ``[ranks * S]``."""
        return Interval(self.start, self.start + self.numel)


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The parameters of one group, one after the other, cut into ``ranks`` equal intervals of
    ``shard_numel`` elements.

    The full flat tensor is ``[ranks * shard_numel]``, rank-major; elements that no parameter claims
    are padding.
    """

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
                    f"{param.name} starts at {param.start}, inside of what ends at {end}"
                )
            end = param.place.stop
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
        """Return which elements of parameter ``index``, counted from its own first one, ``rank``
        holds."""
        param = self.params[index]
        return (
            param.place.clipped(self.interval(rank)).shifted(-param.start)
            if self._meets(index, rank)
            else Interval(0, 0)
        )

    def part_in_shard(self, index: int, rank: int) -> Interval:
        """Return where in ``rank``'s shard ``[S]`` its part of parameter ``index`` lies; empty
        where it has none."""
        return (
            self.params[index].place.clipped(self.interval(rank)).shifted(-rank * self.shard_numel)
        )

    def gaps(self) -> list[Interval]:
        """Return the padding: what belongs to no parameter, in order."""
        found, end = [], 0
        for start, stop in [
            *((p.place.start, p.place.stop) for p in self.params),
            (self.full_numel, self.full_numel),
        ]:
            if end < start:
                found.append(Interval(end, start))
            end = max(end, stop)
        return found

    def _meets(self, index: int, rank: int) -> bool:
        place, own = self.params[index].place, self.interval(rank)
        return place.start < own.stop and own.start < place.stop


@dataclasses.dataclass(frozen=True)
class Section:
    """A run of a shard ``[S]`` that belongs to one layout, which cuts some of the shard's
    parameters."""

    layout: FlatLayout
    start: int  # in the shard
    first_param: int  # the index, among all parameters of the shard, of the layout's first one

    @property
    def place(self) -> Interval:
        """Its elements in the shard."""
        return Interval(self.start, self.start + self.layout.shard_numel)
