"""Concatenated parameters are split across ranks: every element is stored once, on one rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.spec import FlatLayout, Interval, flat_layout

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6)
RANKS = st.integers(1, 6)
ALIGNS = st.sampled_from([1, 2, 4, 8])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[FlatLayout, int]:
    """A layout and its alignment."""
    shapes, align = draw(SHAPES), draw(ALIGNS)
    return flat_layout(
        [f"p{i}" for i in range(len(shapes))], shapes, ranks=draw(RANKS), align=align
    ), align


def test_parameters_start_at_aligned_offsets_in_order() -> None:
    layout = flat_layout(["a", "b", "c", "d"], [(3,), (), (2, 3), (0, 7)], ranks=2, align=4)
    assert layout.names == ("a", "b", "c", "d")
    assert [param.place for param in layout.params] == [
        Interval(0, 3),
        Interval(4, 5),
        Interval(8, 14),
        Interval(16, 16),
    ]
    assert layout.shard_numel == 8
    assert layout.full_numel == 16
    assert layout.gaps() == [Interval(3, 4), Interval(5, 8), Interval(14, 16)]


def test_shard_size_is_rounded_up_to_the_alignment() -> None:
    layout = flat_layout(["w"], [(10,)], ranks=3, align=4)
    assert layout.shard_numel == 4
    assert [layout.part(0, rank) for rank in range(3)] == [
        Interval(0, 4),
        Interval(4, 8),
        Interval(8, 10),
    ]
    assert [layout.part_in_shard(0, rank) for rank in range(3)] == [
        Interval(0, 4),
        Interval(0, 4),
        Interval(0, 2),
    ]
    assert layout.gaps() == [Interval(10, 12)]


def test_small_parameter_is_held_by_the_first_ranks_only() -> None:
    layout = flat_layout(["w"], [(2,)], ranks=4, align=1)
    assert layout.shard_numel == 1
    assert [layout.part(0, rank) for rank in range(4)] == [
        Interval(0, 1),
        Interval(1, 2),
        Interval(0, 0),
        Interval(0, 0),
    ]


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 3), (2, 0)]])
def test_empty_group_still_has_an_aligned_shard_per_rank(
    shapes: list[tuple[int, ...]],
) -> None:
    layout = flat_layout([f"p{i}" for i in range(len(shapes))], shapes, ranks=3, align=4)
    assert layout.shard_numel == 4
    assert layout.gaps() == [Interval(0, 12)]


def test_scalar_is_held_by_one_rank() -> None:
    layout = flat_layout(["s"], [()], ranks=2, align=4)
    assert [layout.part(0, rank) for rank in range(2)] == [Interval(0, 1), Interval(0, 0)]


def test_mismatched_names_and_shapes_raise() -> None:
    with pytest.raises(ValueError):
        flat_layout(["a"], [(1,), (2,)], ranks=1, align=1)


@given(made=layouts())
def test_starts_and_shard_size_are_multiples_of_the_alignment(
    made: tuple[FlatLayout, int],
) -> None:
    layout, align = made
    assert layout.shard_numel % align == 0
    assert layout.shard_numel > 0
    assert all(param.start % align == 0 for param in layout.params)


@given(made=layouts())
def test_no_shard_is_longer_than_needed(made: tuple[FlatLayout, int]) -> None:
    layout, align = made
    used = sum(-(-math.prod(param.shape) // align) * align for param in layout.params)
    assert (layout.shard_numel - align) * layout.ranks < max(used, 1)


@given(made=layouts())
def test_parameters_and_gaps_cover_the_flat_tensor_once(
    made: tuple[FlatLayout, int],
) -> None:
    layout, _ = made
    covered = [0] * layout.full_numel
    for interval in [*(param.place for param in layout.params), *layout.gaps()]:
        for element in range(interval.start, interval.stop):
            covered[element] += 1
    assert covered == [1] * layout.full_numel
    assert all(layout.gaps())


@given(made=layouts())
def test_ranks_hold_every_parameter_element_once_in_order(
    made: tuple[FlatLayout, int],
) -> None:
    layout, _ = made
    for index, param in enumerate(layout.params):
        parts = [layout.part(index, rank) for rank in range(layout.ranks)]
        assert [e for part in parts for e in range(part.start, part.stop)] == list(
            range(param.numel)
        )


@given(made=layouts())
def test_part_and_part_in_shard_select_the_same_elements(
    made: tuple[FlatLayout, int],
) -> None:
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
