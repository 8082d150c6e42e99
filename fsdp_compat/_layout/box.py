"""Split an interval of a row-major tensor into boxes, each of which is contiguous in memory."""

from __future__ import annotations

import dataclasses
import math

from .spec import Interval


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]  # where it starts in each dimension
    sizes: tuple[int, ...]  # its extent in each dimension

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def cut_into_boxes(shape: tuple[int, ...], part: Interval) -> list[Box]:
    """Cut the row-major elements ``part`` of a tensor of ``shape`` into boxes, in memory order.

    Returns at most ``2 * len(shape) - 1`` boxes (1 for a 0-d tensor, 0 for an empty part). The
    elements of a box are contiguous: in a 1-D tensor that holds the part, box k starts where box
    k - 1 ends.
    """
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
    """Return the boxes of a part inside row ``index``."""
    inner = cut_into_boxes(shape[1:], part.shifted(-index * math.prod(shape[1:])))
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in inner]
