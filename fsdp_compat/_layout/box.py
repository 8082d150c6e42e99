"""Boxes: an interval of a row-major tensor as rectangular pieces, each of them a contiguous run of
the interval."""

from __future__ import annotations

import dataclasses
import math

from .spec import Interval

__all__ = ["Box", "cut_into_boxes"]


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: where it starts in every dimension, and how far it goes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def cut_into_boxes(shape: tuple[int, ...], part: Interval) -> list[Box]:
    """Cut the row-major elements ``part`` of a tensor of ``shape`` into boxes, in memory order.

    There are at most ``2 * len(shape) - 1`` of them (1 for a 0-d tensor, 0 for an empty part), and
    each one's elements follow one another in memory: box k of a part held in a 1-D tensor is the
    run that starts where box k - 1 ended.
    """
    if not part:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((part.start,), (part.numel,))]
    row = math.prod(shape[1:])
    first_whole, end_whole = -(-part.start // row), part.stop // row
    if first_whole > end_whole:  # begins and ends inside one and the same row
        return _inside_row(shape, end_whole, part)
    boxes = []
    if part.start < first_whole * row:
        boxes += _inside_row(shape, first_whole - 1, Interval(part.start, first_whole * row))
    if first_whole < end_whole:
        boxes.append(
            Box((first_whole, *(0,) * (len(shape) - 1)), (end_whole - first_whole, *shape[1:]))
        )
    if end_whole * row < part.stop:
        boxes += _inside_row(shape, end_whole, Interval(end_whole * row, part.stop))
    return boxes


def _inside_row(shape: tuple[int, ...], index: int, part: Interval) -> list[Box]:
    """Boxes of a part that lies within row ``index``."""
    inner = cut_into_boxes(shape[1:], part.shifted(-index * math.prod(shape[1:])))
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in inner]
