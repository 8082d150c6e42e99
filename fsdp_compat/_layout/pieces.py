"""Parts of a parameter that are stored each by itself, as the ranks of tensor parallelism hold
them, and where two ways to cut a parameter meet."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator

from .box import cut_into_boxes
from .spec import Interval, row_major_strides


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a parameter that is stored row-major by itself, or the whole parameter."""

    whole_shape: tuple[int, ...]  # of the parameter
    offsets: tuple[int, ...]  # of the box in it
    shape: tuple[int, ...]  # of the box

    def __post_init__(self) -> None:
        if not len(self.whole_shape) == len(self.offsets) == len(self.shape):
            raise ValueError(f"a part {self.shape} at {self.offsets} of {self.whole_shape}")
        for size, offset, extent in zip(self.whole_shape, self.offsets, self.shape, strict=True):
            if offset < 0 or extent < 0 or offset + extent > size:
                raise ValueError(f"a part {self.shape} at {self.offsets} of {self.whole_shape}")

    @staticmethod
    def of_whole(shape: tuple[int, ...]) -> Piece:
        return Piece(shape, (0,) * len(shape), shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole_shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Rows:
    """``count`` rows of ``numel`` consecutive elements each, at regular distances both in a source
    and in a target."""

    numel: int
    count: int
    start: int  # of the first row in the source
    stride: int  # from row to row in the source
    to: int  # of the first row in the target
    to_stride: int

    @property
    def span(self) -> int:
        """Elements of the source from the first to the last one, gaps included."""
        return (self.count - 1) * self.stride + self.numel

    @property
    def to_span(self) -> int:
        """Elements of the target from the first to the last one, gaps included."""
        return (self.count - 1) * self.to_stride + self.numel

    def shifted(self, by: int) -> Rows:
        """Return the same rows of a source that begins ``by`` elements earlier."""
        return dataclasses.replace(self, start=self.start + by)

    def part(self, first: int, count: int) -> Rows:
        """Return ``count`` of the rows, from row ``first`` on."""
        return dataclasses.replace(
            self,
            count=count,
            start=self.start + first * self.stride,
            to=self.to + first * self.to_stride,
        )

    def within(self, place: Interval) -> Iterator[Rows]:
        """Yield the elements of these rows that lie in ``place`` of the source: at most a partial
        row, whole rows, and a partial row."""
        first = max(0, -(-(place.start - self.start - self.numel + 1) // self.stride))
        stop = min(self.count, -(-(place.stop - self.start) // self.stride))
        while first < stop:
            start = self.start + first * self.stride
            skipped = max(place.start - start, 0)
            numel = min(place.stop - start, self.numel) - skipped
            if numel == self.numel:
                end = stop
                if self.start + (stop - 1) * self.stride + self.numel > place.stop:
                    end -= 1  # the last row is cut
                yield self.part(first, end - first)
                first = end
                continue
            row = self.part(first, 1)
            yield dataclasses.replace(
                row, numel=numel, start=row.start + skipped, to=row.to + skipped
            )
            first += 1


def common_rows(own: Piece, part: Interval, other: Piece) -> Iterator[Rows]:
    """Yield what two pieces of one parameter have in common. Source: the row-major elements of
    ``other``. Target: ``part`` of the row-major elements of ``own``, counted from its first one."""
    if not part:
        return
    if (own.offsets, own.shape) == (other.offsets, other.shape):
        yield Rows(part.numel, 1, part.start, part.numel, 0, part.numel)
        return
    strides, other_strides = row_major_strides(own.shape), row_major_strides(other.shape)
    for box in cut_into_boxes(own.shape, part):
        start, other_start, sizes = -part.start, 0, []
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            low = max(own.offsets[dim] + offset, other.offsets[dim])
            high = min(own.offsets[dim] + offset + size, other.offsets[dim] + other.shape[dim])
            sizes.append(max(high - low, 0))
            start += (low - own.offsets[dim]) * strides[dim]
            other_start += (low - other.offsets[dim]) * other_strides[dim]
        if math.prod(sizes):
            yield from _rows(sizes, start, strides, other_start, other_strides)


def _rows(
    sizes: list[int],
    start: int,
    strides: tuple[int, ...],
    other_start: int,
    other_strides: tuple[int, ...],
) -> Iterator[Rows]:
    """Yield a box of two row-major tensors as few rows: dims that follow each other in both are
    joined."""
    dims: list[tuple[int, int, int]] = [(1, 1, 1)]  # (size, stride, other stride), innermost first
    for size, stride, other_stride in zip(
        reversed(sizes), reversed(strides), reversed(other_strides), strict=True
    ):
        last, last_stride, last_other = dims[-1]
        if (stride, other_stride) == (last * last_stride, last * last_other):
            dims[-1] = last * size, last_stride, last_other
        elif size > 1:
            dims.append((size, stride, other_stride))
    (numel, _, _), *outer = dims
    count, to_stride, stride = outer.pop(0) if outer else (1, numel, numel)
    for position in itertools.product(*(range(size) for size, _, _ in reversed(outer))):
        to, at = start, other_start
        for number, (_, outer_stride, outer_other) in zip(position, reversed(outer), strict=True):
            to, at = to + number * outer_stride, at + number * outer_other
        yield Rows(numel, count, at, stride, to, to_stride)


def require_grid(pieces: Collection[Piece]) -> None:
    """Raise ValueError unless the pieces hold each element of one parameter exactly once, as a
    grid: cut along every dim at the same places. Takes time in proportion to their number."""
    shapes = {piece.whole_shape for piece in pieces}
    if len(shapes) != 1:
        raise ValueError(f"parts of parameters of the shapes {sorted(shapes)[:4]}")
    whole = shapes.pop()
    filled = [piece for piece in pieces if piece.numel]
    if not math.prod(whole):
        return
    expected = 1
    for dim, size in enumerate(whole):
        cuts = {(piece.offsets[dim], piece.offsets[dim] + piece.shape[dim]) for piece in filled}
        end = 0
        for start, stop in sorted(cuts):
            if start != end:
                raise ValueError(f"parts that leave out or repeat elements of dim {dim} at {end}")
            end = stop
        if end != size:
            raise ValueError(f"parts that end at {end} of {size} in dim {dim}")
        expected *= len(cuts)
    found = collections.Counter(piece.offsets for piece in filled)
    if len(found) != len(filled) or len(filled) != expected:
        raise ValueError(f"{len(filled)} parts, of which {expected} fill the parameter once")
