"""Pieces of a parameter: whether several fill it once."""

from __future__ import annotations

import math

import pytest

from fsdp_compat._layout.box import Piece, require_grid

GRID = [
    Piece((5, 4), (row, 2 * column), (3 if row == 0 else 2, 2))
    for row, column in [(0, 0), (0, 1), (3, 0), (3, 1)]
]


def test_pieces_that_fill_a_parameter_once_are_a_grid() -> None:
    require_grid(GRID)
    require_grid([*GRID, Piece((5, 4), (5, 0), (0, 4))])  # a rank without rows
    require_grid([Piece((), (), ())])
    require_grid([Piece((0, 3), (0, 0), (0, 3)), Piece((0, 3), (0, 3), (0, 0))])
    for wrong in (
        GRID[:-1],
        [*GRID, GRID[0]],
        [*GRID[:-1], GRID[0]],
        [*GRID[:-1], Piece((5, 4), (3, 2), (1, 2))],
        [*GRID[:-1], Piece((5, 4), (2, 2), (3, 2))],
        [Piece((5,), (0,), (4,))],
        [Piece((5,), (0,), (3,)), Piece((6,), (3,), (2,))],
        [Piece((), (), ()), Piece((), (), ())],
    ):
        with pytest.raises(ValueError, match="part"):
            require_grid(wrong)
    assert math.prod(GRID[0].whole_shape) == sum(piece.numel for piece in GRID)


@pytest.mark.parametrize(
    ("whole", "offsets", "shape"),
    [((4,), (3,), (2,)), ((4,), (-1,), (2,)), ((4,), (0, 0), (4, 1)), ((4, 2), (0, 0), (4,))],
)
def test_a_piece_lies_in_its_parameter(
    whole: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="a part"):
        Piece(whole, offsets, shape)
