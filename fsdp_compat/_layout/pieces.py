"""Separately stored parts of a parameter, as the ranks of tensor parallelism hold them."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection


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


def require_grid(pieces: Collection[Piece]) -> None:
    """Raise ValueError unless the pieces are a grid that holds each element of one parameter
    exactly once: cut along every dim at the same positions. Takes time linear in their number."""
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
