"""Cuts along one dim, and slots in segments: integers against torch.chunk's rule written out."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.rows import Cut, RowLayout
from fsdp_compat._layout.spec import FlatLayout, Interval

sizes = st.integers(min_value=0, max_value=7)
shapes = st.lists(sizes, max_size=3).map(tuple)
num_ranks = st.integers(min_value=1, max_value=5)
itemsizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def cuts_over(draw: st.DrawFn, ranks: int) -> Cut:
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    return Cut(shape, dim, ranks)


@st.composite
def some_cuts(draw: st.DrawFn) -> list[Cut]:
    ranks = draw(num_ranks)
    cuts = draw(st.lists(cuts_over(ranks), min_size=1, max_size=5))
    scale = draw(st.sampled_from([1, 40]))  # some of them large enough to be aligned
    return [
        Cut((cut.shape[0] * scale, *cut.shape[1:]), cut.dim, ranks) if cut.shape else cut
        for cut in cuts
    ]


@given(num_rows=st.integers(0, 40), ranks=num_ranks)
def test_rows_are_cut_as_torch_chunk_cuts(num_rows: int, ranks: int) -> None:
    cut = Cut((num_rows, 2), 0, ranks)
    step = max(math.ceil(num_rows / ranks), 1)
    expected = [list(range(num_rows))[start : start + step] for start in range(0, num_rows, step)]
    expected += [[]] * (ranks - len(expected))
    found = [list(range(num_rows))[rows.start : rows.stop] for rows in map(cut.rows, range(ranks))]
    assert found == expected
    assert cut.chunk == len(expected[0])


@given(st.data(), num_ranks)
def test_parts_hold_every_element_once_on_full_ranks_then_the_rest(
    data: st.DataObject, ranks: int
) -> None:
    cut = data.draw(cuts_over(ranks))
    copies = ranks if cut.dim is None else 1
    parts = [cut.part_numel(rank) for rank in range(ranks)]
    assert sum(parts) == copies * cut.full_numel == copies * math.prod(cut.shape)
    assert max(parts) <= cut.numel
    assert [math.prod(cut.part_shape(rank)) for rank in range(ranks)] == parts
    assert cut.is_even == (set(parts) == {cut.numel}) or not cut.row_numel
    rest = [cut.rest, *[0] * ranks][: ranks - cut.full_ranks]
    assert [cut.rows(rank).numel for rank in range(ranks)] == [cut.chunk] * cut.full_ranks + rest


@given(some_cuts(), itemsizes, st.booleans())
def test_slots_do_not_overlap_and_leave_only_gaps(
    cuts: list[Cut], itemsize: int, packed: bool
) -> None:
    make = RowLayout.packed if packed else RowLayout.in_order
    layout = make(cuts, cuts[0].ranks, itemsize)
    covered = [0] * layout.numel
    for interval in [*(layout.slot(index) for index in range(len(cuts))), *layout.gaps()]:
        for position in range(interval.start, interval.stop):
            covered[position] += 1
    assert covered == [1] * layout.numel
    for index, rank in itertools.product(range(len(cuts)), range(layout.ranks)):
        part, slot = layout.part(index, rank), layout.slot(index)
        assert part.start == slot.start
        assert part.stop <= slot.stop
        assert part.numel == cuts[index].part_numel(rank)


@given(some_cuts(), itemsizes)
def test_a_packed_layout_has_no_gaps_and_aligns_what_it_can(cuts: list[Cut], itemsize: int) -> None:
    layout = RowLayout.packed(cuts, cuts[0].ranks, itemsize)
    assert layout.numel == max(sum(cut.numel for cut in cuts), 1)
    assert sorted(layout.order) == [index for index, cut in enumerate(cuts) if cut.numel]
    for index in layout.order:
        if cuts[index].numel * itemsize % 16 == 0:
            assert layout.starts[index] * itemsize % 16 == 0


@given(some_cuts(), itemsizes)
def test_a_layout_in_order_wastes_little_and_nothing_of_a_lone_parameter(
    cuts: list[Cut], itemsize: int
) -> None:
    layout = RowLayout.in_order(cuts, cuts[0].ranks, itemsize)
    assert list(layout.starts) == sorted(layout.starts)
    used = sum(max(cut.numel, 1) for cut in cuts)
    waste = (layout.numel - used) * itemsize
    large = [index for index, cut in enumerate(cuts) if cut.numel * itemsize >= 4096]
    assert waste <= 0.02 * used * itemsize
    assert all(layout.starts[index] * itemsize % 16 == 0 for index in large if len(cuts) > 1)
    for cut in cuts:
        assert RowLayout.in_order([cut], cut.ranks, itemsize).numel == max(cut.numel, 1)


@given(st.data(), num_ranks)
def test_a_section_says_which_elements_each_rank_holds(data: st.DataObject, ranks: int) -> None:
    other = data.draw(cuts_over(ranks))
    shape = data.draw(shapes)
    cut = Cut(shape, 0 if shape else None, ranks)
    layout = RowLayout.in_order([other, cut], ranks, 4)
    section = layout.section(1, "p", 0)
    assert (section.first_param, section.start) == (1, layout.starts[1])
    assert section.in_shard.stop <= layout.numel
    assert section.layout.params[0].shape == shape
    for rank in range(ranks):
        rows = cut.rows(rank)
        elements = Interval(rows.start * cut.row_numel, rows.stop * cut.row_numel)
        found = section.layout.part(0, rank)
        assert (found.numel, found.start if found else 0) == (
            elements.numel,
            elements.start if elements else 0,
        )
        place = section.layout.part_in_shard(0, rank)
        assert not place or place.shifted(section.start) == layout.part(1, rank)


def test_a_parameter_that_every_rank_holds_is_saved_as_the_first_ranks() -> None:
    cut = Cut((), None, 3)
    layout = RowLayout.in_order([cut], 3, 4).section(0, "scale", 0).layout
    plain = FlatLayout(layout.params, 3, 1)
    assert [layout.part(0, rank) for rank in range(3)] == [Interval(0, 1)] * 3
    assert [plain.part(0, rank).numel for rank in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(("shape", "dim", "ranks"), [((2,), 1, 2), ((2,), -1, 2), ((2,), 0, 0)])
def test_impossible_cuts_are_refused(shape: tuple[int, ...], dim: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"dim|rank"):
        Cut(shape, dim, ranks)
