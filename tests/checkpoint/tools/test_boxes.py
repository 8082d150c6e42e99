"""Whether boxes cover a tensor once: pure, and in time that does not depend on how it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.box import Box
from fsdp_compat.checkpoint._tools.archive import coverage_problem
from tests.checkpoint.tools.content import Grid, grids
from tests.support.bounded import bounded


@given(grids(), st.data())
def test_a_box_too_many_or_too_few_is_told(grid: Grid, data: st.DataObject) -> None:
    shape, boxes = grid[0], [Box(*each) for each in grid[1]]
    which = data.draw(st.integers(0, len(boxes) - 1))
    less = [box for number, box in enumerate(boxes) if number != which]
    assert coverage_problem(shape, boxes) is None
    assert "missing" in str(coverage_problem(shape, less))
    assert coverage_problem(shape, [*boxes, boxes[which]]) is not None
    moved = Box(tuple(at + 9 for at in boxes[which].offsets), boxes[which].sizes)
    if shape:
        assert "outside" in str(coverage_problem(shape, [*less, moved]))


def test_a_tensor_of_columns_is_checked_as_fast_as_one_of_rows() -> None:
    columns = [Box((0, at), (4, 1)) for at in range(20_000)]
    used = bounded(lambda: coverage_problem((4, 20_000), columns))
    assert (used.error, used.seconds < 5, used.nbytes < 256 << 20) == ("", True, True), used
    assert coverage_problem((4, 20_000), columns) is None
    columns[7] = Box((0, 6), (4, 2))
    assert "overlap" in str(coverage_problem((4, 20_000), columns))
