"""Intervals, parameters and flat layouts, and the invalid ones that raise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.spec import FlatLayout, Interval, ParamSpec, aligned


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (-2, -1)])
def test_invalid_interval_raises(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"0 <= start <= stop"):
        Interval(start, stop)


INTERVALS = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(
    lambda ends: Interval(min(ends), max(ends))
)


@given(one=INTERVALS, other=INTERVALS)
def test_clipped_is_the_intersection_and_lies_inside_the_other_interval(
    one: Interval, other: Interval
) -> None:
    both = one.clipped(other)
    expected = {*range(one.start, one.stop)} & {*range(other.start, other.stop)}
    assert {*range(both.start, both.stop)} == {*range(101)[both.slice]} == expected
    assert bool(both) == bool(expected)
    assert both.numel == len(expected)
    assert other.start <= both.start <= both.stop <= other.stop


def spec(name: str, numel: int, start: int) -> ParamSpec:
    return ParamSpec(name, (numel,), start)


@pytest.mark.parametrize(
    ("params", "ranks", "shard_numel", "message"),
    [
        ((), 0, 4, "0 and 4"),
        ((), 2, 0, "2 and 0"),
        ((spec("first", 3, 0), spec("second", 1, 2)), 1, 8, "second starts at 2"),
        ((spec("first", 3, 4), spec("second", 1, 0)), 1, 8, "second starts at 0"),
        ((spec("w", 9, 0),), 2, 4, "end at 9, the flat tensor at 8"),
    ],
)
def test_layouts_that_are_empty_overlap_or_do_not_fit_raise(
    params: tuple[ParamSpec, ...], ranks: int, shard_numel: int, message: str
) -> None:
    FlatLayout((spec("w", 8, 0),), 2, 4)
    with pytest.raises(ValueError, match=message):
        FlatLayout(params, ranks, shard_numel)


@pytest.mark.parametrize(("position", "found"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_the_next_multiple_is_aligned(position: int, found: int) -> None:
    assert aligned(position, 4) == found
