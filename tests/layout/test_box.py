"""An interval of a row-major tensor is cut into a few contiguous boxes; pieces fill a parameter
once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.box import Box, Piece, cut_into_boxes, require_grid
from fsdp_compat._layout.spec import Interval


@st.composite
def shapes_and_parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Interval]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    numel = torch.Size(shape).numel()
    start = draw(st.integers(0, numel))
    return shape, Interval(start, draw(st.integers(start, numel)))


@pytest.mark.parametrize(
    ("shape", "part", "boxes"),
    [
        ((), Interval(0, 1), [Box((), ())]),
        ((3, 4), Interval(0, 12), [Box((0, 0), (3, 4))]),
        ((4, 4), Interval(2, 15), [Box((0, 2), (1, 2)), Box((1, 0), (2, 4)), Box((3, 0), (1, 3))]),
        ((3, 2, 2), Interval(1, 4), [Box((0, 0, 1), (1, 1, 1)), Box((0, 1, 0), (1, 1, 2))]),
        ((2, 0, 3), Interval(0, 0), []),
    ],
)
def test_cut_into_boxes_returns_expected_boxes(
    shape: tuple[int, ...], part: Interval, boxes: list[Box]
) -> None:
    assert cut_into_boxes(shape, part) == boxes


@given(made=shapes_and_parts())
def test_a_few_contiguous_boxes_cover_the_part_exactly_once_in_memory_order(
    made: tuple[tuple[int, ...], Interval],
) -> None:
    shape, part = made
    boxes = cut_into_boxes(shape, part)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert bool(boxes) == bool(part)
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    shard, position = values.reshape(-1)[part.slice].clone(), 0
    for box in boxes:
        assert box.numel
        run = shard[position : position + box.numel].view(box.sizes)
        assert torch.equal(run, values[box.index])
        position += box.numel
    assert position == part.numel


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.integers(0, 70))
def test_a_box_is_cut_into_contiguous_parts_of_limited_size(
    sizes: tuple[int, ...], most: int
) -> None:
    values, start = torch.arange(torch.Size(sizes).numel()).view(sizes), tuple(range(len(sizes)))
    parts = [part.in_part(start) for part in Box(start, sizes).cut(most)]
    assert all(0 < part.numel <= max(most, 1) for part in parts)
    found = [number for part in parts for number in values[part.index].flatten().tolist()]
    assert found == values.flatten().tolist()


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
