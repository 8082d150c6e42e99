"""Boxes: contiguous ones that make up an interval of a row-major tensor; pieces, which are stored
by themselves, as the ranks of tensor parallelism hold them; and the share that one rank has."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Collection, Iterator, Sequence

from .spec import FlatLayout, Interval, same_parts


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]  # where it starts in each dimension
    sizes: tuple[int, ...]  # its extent in each dimension

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @staticmethod
    def of_whole(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the box in a tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.offsets, self.sizes, strict=True))

    def moved(self, by: Sequence[int]) -> Box:
        """Return a box of a part as one of the whole tensor, in which the part begins at ``by``."""
        return Box(tuple(map(operator.add, self.offsets, by)), self.sizes)

    def in_part(self, start: Sequence[int]) -> Box:
        """Return the box as one of a part that begins at ``start``: the inverse of ``moved``."""
        return Box(tuple(map(operator.sub, self.offsets, start)), self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """Return the elements that two boxes have in common, or None."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(at + size, its + extent) - start
            for at, size, its, extent, start in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, starts, strict=True
            )
        )
        return Box(starts, sizes) if min(sizes, default=1) > 0 else None

    def cut(self, max_numel: int) -> Iterator[Box]:
        """Yield its parts in row-major order, each contiguous in it, and of at most ``max_numel``
        elements, or 1."""
        if self.numel <= max(max_numel, 1):
            if self.numel:
                yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        num_rows = max(max_numel // (self.numel // self.sizes[dim]), 1)
        for first in range(0, self.sizes[dim], num_rows):
            offsets, sizes = [*self.offsets], [*self.sizes]
            offsets[dim] += first
            sizes[dim] = min(num_rows, self.sizes[dim] - first)
            yield from Box(tuple(offsets), tuple(sizes)).cut(max_numel)

    def __str__(self) -> str:
        ends = (f"{at}:{at + n}" for at, n in zip(self.offsets, self.sizes, strict=False))
        return f"[{', '.join(ends)}]"


def cut_into_boxes(shape: tuple[int, ...], part: Interval) -> list[Box]:
    """Cut the row-major elements ``part`` of a tensor of ``shape`` into at most ``2 * len(shape) -
    1`` boxes, in memory order. Their elements are contiguous: in a 1-D tensor that holds the part,
    box k starts where box k - 1 ends."""
    if not part:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((part.start,), (part.numel,))]
    row = math.prod(shape[1:])
    first_full, end_full = -(-part.start // row), part.stop // row
    if first_full > end_full:  # the part starts and ends inside the same row
        return _inside_row(shape, end_full, part)
    boxes = []
    if part.start < first_full * row:
        boxes += _inside_row(shape, first_full - 1, Interval(part.start, first_full * row))
    if first_full < end_full:
        offsets = (first_full, *(0,) * (len(shape) - 1))
        boxes.append(Box(offsets, (end_full - first_full, *shape[1:])))
    if end_full * row < part.stop:
        boxes += _inside_row(shape, end_full, Interval(end_full * row, part.stop))
    return boxes


def _inside_row(shape: tuple[int, ...], index: int, part: Interval) -> list[Box]:
    inner = cut_into_boxes(shape[1:], part.shifted(-index * math.prod(shape[1:])))
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in inner]


def coverage_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return what is wrong unless the boxes cover every element exactly once, or None."""
    filled = [box for box in boxes if box.numel]
    whole = Box.of_whole(shape)
    for box in filled:
        if len(box.sizes) != len(shape) or box.intersection(whole) != box:
            return f"{box} lies outside of shape {list(shape)}"
    if not shape:
        overlap = len(filled) > 1
        return "two pieces for one value" if overlap else None if filled else "its value is missing"
    # Along the dim with the most cuts, few boxes lie beside one another.
    dim = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in filled}))
    active: list[Box] = []
    for box in sorted(filled, key=lambda box: box.offsets[dim]):
        start = box.offsets[dim]
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > start]
        for other in active:
            if box.intersection(other) is not None:
                return f"{other} and {box} overlap"
        active.append(box)
    missing = whole.numel - sum(box.numel for box in filled)
    return f"{missing} of {whole.numel} elements are missing" if missing else None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a parameter, or the whole parameter, stored row-major by itself."""

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
class Share:
    """The elements of a parameter that one rank holds: of a piece, those that a layout gives it."""

    piece: Piece
    layout: FlatLayout
    index: int  # of the piece in the layout
    rank: int  # in the layout

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.piece.whole_shape

    @functools.cached_property
    def part(self) -> Interval:
        """The elements of the piece that the rank holds."""
        return self.layout.part(self.index, self.rank)

    def boxes_on(self, rank: int) -> list[Box]:
        """Return the share of ``rank`` as boxes of the whole parameter."""
        found = cut_into_boxes(self.piece.shape, self.layout.part(self.index, rank))
        return [box.moved(self.piece.offsets) for box in found]

    def is_alike(self, other: Share) -> bool:
        """True if every rank holds the same elements of the parameter as beside ``other``."""
        is_same = same_parts(self.layout, self.index, other.layout, other.index)
        return is_same and self.piece == other.piece


def require_grid(pieces: Collection[Piece]) -> None:
    """Raise ValueError unless the pieces are a grid, cut along every dim at the same positions,
    that holds each element of one parameter once. Takes linear time."""
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
