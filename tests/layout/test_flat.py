"""Concatenated parameters are split across ranks: every element is stored once, on one rank."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.spec import FlatLayout, Interval, flat_layout

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[FlatLayout, int]:
    """A layout and its alignment."""
    align = draw(st.sampled_from([1, 2, 4, 8]))
    return laid_out(draw(SHAPES), draw(st.integers(1, 9)), align), align


def laid_out(shapes: list[tuple[int, ...]], ranks: int, align: int) -> FlatLayout:
    return flat_layout([f"p{i}" for i in range(len(shapes))], shapes, ranks=ranks, align=align)


def test_parameters_start_at_aligned_offsets_in_order() -> None:
    layout = flat_layout(["a", "b", "c", "d"], [(3,), (), (2, 3), (0, 7)], ranks=2, align=4)
    assert layout.names == ("a", "b", "c", "d")
    places = [(param.in_full.start, param.in_full.stop) for param in layout.params]
    assert places == [(0, 3), (4, 5), (8, 14), (16, 16)]
    assert (layout.shard_numel, layout.full_numel) == (8, 16)
    assert layout.gaps() == [Interval(3, 4), Interval(5, 8), Interval(14, 16)]


@given(made=layouts())
def test_starts_and_shards_are_aligned_and_no_shard_is_longer_than_needed(
    made: tuple[FlatLayout, int],
) -> None:
    layout, align = made
    assert layout.shard_numel % align == 0
    assert layout.shard_numel > 0
    assert all(param.start % align == 0 for param in layout.params)
    used = sum(-(-math.prod(param.shape) // align) * align for param in layout.params)
    assert (layout.shard_numel - align) * layout.ranks < max(used, 1)


@given(made=layouts())
def test_parameters_and_gaps_cover_the_flat_tensor_and_parts_each_parameter_once(
    made: tuple[FlatLayout, int],
) -> None:
    layout, _ = made
    covered = [0] * layout.full_numel
    for interval in [*(param.in_full for param in layout.params), *layout.gaps()]:
        for element in range(interval.start, interval.stop):
            covered[element] += 1
    assert covered == [1] * layout.full_numel
    assert all(layout.gaps())
    for index, param in enumerate(layout.params):
        parts = [layout.part(index, rank) for rank in range(layout.ranks)]
        held = [e for part in parts for e in range(part.start, part.stop)]
        assert held == list(range(param.numel))


@given(made=layouts())
def test_part_and_part_in_shard_select_the_same_elements(made: tuple[FlatLayout, int]) -> None:
    layout, _ = made
    for rank in range(layout.ranks):
        own = layout.interval(rank)
        assert own.numel == layout.shard_numel
        for index, param in enumerate(layout.params):
            part, place = layout.part(index, rank), layout.part_in_shard(index, rank)
            assert part.numel == place.numel
            assert place.stop <= layout.shard_numel
            if part:
                assert param.start + part.start == own.start + place.start
