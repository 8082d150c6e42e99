"""Pieces of a parameter: what two of them have in common, and whether several fill it once."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.pieces import Piece, common_rows, require_grid
from fsdp_compat._layout.spec import Interval


@st.composite
def pieces(draw: st.DrawFn, whole: tuple[int, ...]) -> Piece:
    offsets, shape = [], []
    for size in whole:
        start = draw(st.integers(0, size))
        stop = draw(st.just(size) | st.integers(start, size))
        offsets.append(start)
        shape.append(stop - start)
    return Piece(whole, tuple(offsets), tuple(shape))


def numbers_in(piece: Piece) -> list[int]:
    """The row-major numbers, in the whole parameter, of the elements of a piece, in its order."""
    found = []
    for index in itertools.product(*map(range, piece.shape)):
        number = 0
        for at, offset, size in zip(index, piece.offsets, piece.whole_shape, strict=True):
            number = number * size + offset + at
        found.append(number)
    return found


@given(data=st.data())
def test_common_rows_are_the_common_elements_wherever_the_source_is_cut(
    data: st.DataObject,
) -> None:
    whole = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    own, other = data.draw(pieces(whole)), data.draw(pieces(whole))
    start = data.draw(st.integers(0, own.numel))
    part = Interval(start, data.draw(st.integers(start, own.numel)))
    source, target = numbers_in(other), numbers_in(own)[part.slice]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(source)), max_size=3)))
    found: list[int | None] = [None] * len(target)
    for low, high in itertools.pairwise([0, *cuts, len(source)]):
        for rows in common_rows(own, part, other):
            for within in rows.within(Interval(low, high)) if low < high else ():
                assert low <= within.start
                assert within.start + within.span <= high
                for number in range(within.count):
                    to = within.to + number * within.to_stride
                    at = within.start + number * within.stride
                    assert found[to : to + within.numel] == [None] * within.numel
                    found[to : to + within.numel] = source[at : at + within.numel]
    present = set(source)
    assert found == [number if number in present else None for number in target]


def test_a_part_of_columns_is_one_set_of_rows() -> None:
    own, whole = Piece((4, 6), (0, 2), (4, 2)), Piece.of_whole((4, 6))
    (rows,) = common_rows(own, Interval(0, 8), whole)
    assert (rows.numel, rows.count, rows.start, rows.stride, rows.to, rows.to_stride) == (
        *(2, 4, 2, 6),
        *(0, 2),
    )
    (rows,) = common_rows(Piece((4, 6), (2, 0), (2, 6)), Interval(0, 12), whole)
    assert (rows.numel, rows.count, rows.start) == (12, 1, 12)


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
