"""Runs cover a part once; layouts agree only if every rank holds the same elements."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_compat._layout.spec import (
    FlatLayout,
    Interval,
    ParamSpec,
    Run,
    runs_of_part,
    same_parts,
)
from tests.layout.test_flat import layouts


@st.composite
def parts(draw: st.DrawFn) -> tuple[FlatLayout, int, Interval]:
    """A random layout, the index of one of its parameters, and a part of that parameter."""
    layout, _ = draw(layouts().filter(lambda made: bool(made[0].params)))
    index = draw(st.integers(0, len(layout.params) - 1))
    ends = sorted(draw(st.tuples(*[st.integers(0, layout.params[index].numel)] * 2)))
    return layout, index, Interval(*ends)


@given(made=parts())
def test_one_run_for_each_holder_covers_the_elements_of_a_part_in_order(
    made: tuple[FlatLayout, int, Interval],
) -> None:
    layout, index, part = made
    full = torch.arange(layout.full_numel).view(layout.ranks, layout.shard_numel)
    runs, position = list(runs_of_part(layout, index, part)), 0
    for run in runs:
        assert run.start == position
        assert run.in_shard, "a run has elements"
        start = layout.params[index].start + part.start + position
        expected = list(range(start, start + run.in_shard.numel))
        assert full[run.rank, run.in_shard.slice].tolist() == expected
        position += run.in_shard.numel
    assert position == part.numel
    holders = [rank for rank in range(layout.ranks) if layout.part(index, rank).clipped(part)]
    assert [run.rank for run in runs] == holders


def test_runs_of_part_is_fast_with_a_billion_ranks() -> None:
    layout = FlatLayout((ParamSpec("w", (8_000_000_000,), 0),), 1_000_000_000, 8)
    assert list(runs_of_part(layout, 0, Interval(7_999_999_990, 7_999_999_999))) == [
        Run(999_999_998, Interval(6, 8), 0),
        Run(999_999_999, Interval(0, 7), 2),
    ]


@st.composite
def one_parameter_laid_out_twice(draw: st.DrawFn) -> tuple[FlatLayout, FlatLayout]:
    """The same parameter in two similar layouts; small numbers, so that many pairs have equal
    parts."""
    numel, ranks = draw(st.integers(0, 12)), draw(st.integers(1, 5))

    def layout() -> FlatLayout:
        start, size = draw(st.integers(0, 4)), draw(st.integers(1, 6))
        its_ranks = draw(st.sampled_from([ranks, ranks, ranks, ranks + 1]))
        size = max(size, -(-(start + numel) // its_ranks))
        return FlatLayout((ParamSpec("p", (numel,), start),), its_ranks, size)

    return layout(), layout()


OF_TWO_SIZES = [FlatLayout((ParamSpec("p", (numel,), 0),), 4, 5) for numel in (17, 18)]


@example(made=(OF_TWO_SIZES[0], OF_TWO_SIZES[1]))
@given(made=one_parameter_laid_out_twice())
def test_same_parts_compares_every_rank(made: tuple[FlatLayout, FlatLayout]) -> None:
    one, other = made
    parts = [[layout.part(0, rank) for rank in range(layout.ranks)] for layout in made]
    assert same_parts(one, 0, other, 0) is (parts[0] == parts[1])


def test_same_parts_is_fast_with_a_billion_ranks() -> None:
    one, other = (
        FlatLayout((ParamSpec("p", (10**12,), start),), 10**9, 2000) for start in (8, 8 + 10**11)
    )
    assert same_parts(one, 0, one, 0)
    assert not same_parts(one, 0, other, 0)
