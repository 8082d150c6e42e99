"""Moves between any two layouts of the same parameters give the same result as laying out the
target directly."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat._layout.flat import flat_layout
from fsdp_compat._layout.spec import FlatLayout, Interval, ParamSpec
from fsdp_compat._layout.transfer import (
    Move,
    Piece,
    Run,
    pieces_of_rank,
    pieces_of_whole,
    plan_moves,
    runs_of_part,
    same_parts,
)

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """One way to shard: which parameters are in which group and in which order, and over how many
    ranks."""

    layouts: list[FlatLayout]
    ranks: int

    def pieces(self) -> list[Piece]:
        """The pieces of all ranks; a holder is (group, rank)."""
        return [piece for rank in range(self.ranks) for piece in pieces_of_rank(self.layouts, rank)]

    def shards(self, values: dict[str, torch.Tensor]) -> dict[tuple[int, ...], torch.Tensor]:
        """Lay out ``values`` directly, with padding -1: {(group, rank): [S]}."""
        found: dict[tuple[int, ...], torch.Tensor] = {}
        for group, layout in enumerate(self.layouts):
            full = torch.full((layout.full_numel,), -1)
            for param in layout.params:
                full[param.place.slice] = values[param.name]
            found.update(
                {(group, rank): shard.clone() for rank, shard in enumerate(full.chunk(self.ranks))}
            )
        return found

    def wholes(self, values: dict[str, torch.Tensor]) -> dict[tuple[int, ...], torch.Tensor]:
        """The values as full tensors: {(index,): [numel]}."""
        names = [name for layout in self.layouts for name in layout.names]
        return {(index,): values[name].clone() for index, name in enumerate(names)}


@st.composite
def wrappings(draw: st.DrawFn, shapes: Shapes) -> Wrapping:
    ranks, align, names = (
        draw(st.integers(1, 6)),
        draw(st.sampled_from([1, 4])),
        draw(st.permutations(list(shapes))),
    )
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(draw(st.integers(0, 2)), []).append(name)
    layouts = [
        flat_layout(group, [shapes[name] for name in group], ranks=ranks, align=align)
        for group in groups.values()
    ]
    return Wrapping(layouts, ranks)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Wrapping, Wrapping]:
    """Distinct values by name, and two wrappings of them."""
    sizes = draw(
        st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5)
    )
    shapes = {f"p{index}": shape for index, shape in enumerate(sizes)}
    values, end = {}, 0
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        values[name], end = torch.arange(end, end + numel), end + numel
    return values, draw(wrappings(shapes)), draw(wrappings(shapes))


def carried_out(
    moves: list[Move],
    sources: dict[tuple[int, ...], torch.Tensor],
    targets: dict[tuple[int, ...], torch.Tensor],
) -> dict[tuple[int, ...], torch.Tensor]:
    """Apply ``moves`` to empty targets. Asserts that every element is written at most once."""
    found = {holder: torch.full_like(tensor, -1) for holder, tensor in targets.items()}
    written: Counter[tuple[tuple[int, ...], int]] = Counter()
    for move in moves:
        assert (
            0 <= move.source_start <= move.source_start + move.numel <= sources[move.source].numel()
        )
        assert (
            0 <= move.target_start <= move.target_start + move.numel <= targets[move.target].numel()
        )
        run = sources[move.source][move.source_start : move.source_start + move.numel]
        found[move.target][move.target_start : move.target_start + move.numel] = run
        written.update((move.target, move.target_start + offset) for offset in range(move.numel))
    assert all(times == 1 for times in written.values())
    return found


def assert_same(
    found: dict[tuple[int, ...], torch.Tensor], wanted: dict[tuple[int, ...], torch.Tensor]
) -> None:
    assert {holder: tensor.tolist() for holder, tensor in found.items()} == {
        h: tensor.tolist() for h, tensor in wanted.items()
    }


def test_moves_from_two_ranks_to_three() -> None:
    two, three = (flat_layout(["w"], [(6,)], ranks=ranks, align=1) for ranks in (2, 3))
    sources = [piece for rank in range(2) for piece in pieces_of_rank([two], rank)]
    targets = [piece for rank in range(3) for piece in pieces_of_rank([three], rank)]
    assert plan_moves(sources, targets) == [
        Move("w", (0, 0), 0, (0, 0), 0, 2),
        Move("w", (0, 0), 2, (0, 1), 0, 1),
        Move("w", (0, 1), 0, (0, 1), 1, 1),
        Move("w", (0, 1), 1, (0, 2), 0, 2),
    ]


def test_rank_holds_at_most_one_piece_per_parameter() -> None:
    layouts = [
        flat_layout(["a", "b"], [(3,), (2, 2)], ranks=2, align=1),
        flat_layout(["c"], [()], ranks=2, align=1),
    ]
    assert pieces_of_rank(layouts, 0) == [
        Piece("a", Interval(0, 3), (0, 0), 0),
        Piece("b", Interval(0, 1), (0, 0), 3),
        Piece("c", Interval(0, 1), (1, 0), 0),
    ]
    assert pieces_of_rank(layouts, 1) == [Piece("b", Interval(1, 4), (0, 1), 0)]


def test_full_tensors_are_numbered_in_order_without_empty_ones() -> None:
    layouts = [
        flat_layout(["a", "b"], [(3,), (0, 2)], ranks=2, align=4),
        flat_layout(["c"], [()], ranks=2, align=4),
    ]
    assert pieces_of_whole(layouts) == [
        Piece("a", Interval(0, 3), (0,), 0),
        Piece("c", Interval(0, 1), (2,), 0),
    ]


@given(made=pairs())
def test_moves_convert_any_layout_to_any_other(
    made: tuple[dict[str, torch.Tensor], Wrapping, Wrapping],
) -> None:
    values, source, target = made
    sources, wanted = source.shards(values), target.shards(values)
    assert_same(carried_out(plan_moves(source.pieces(), target.pieces()), sources, wanted), wanted)


@given(made=pairs())
def test_moves_convert_full_tensors_to_any_layout(
    made: tuple[dict[str, torch.Tensor], Wrapping, Wrapping],
) -> None:
    values, source, target = made
    wanted = target.shards(values)
    moves = plan_moves(pieces_of_whole(source.layouts), target.pieces())
    assert_same(carried_out(moves, source.wholes(values), wanted), wanted)


@given(made=pairs())
def test_moves_convert_any_layout_to_full_tensors(
    made: tuple[dict[str, torch.Tensor], Wrapping, Wrapping],
) -> None:
    values, source, target = made
    wanted = target.wholes(values)
    moves = plan_moves(source.pieces(), pieces_of_whole(target.layouts))
    assert_same(carried_out(moves, source.shards(values), wanted), wanted)


@given(made=pairs())
def test_moves_between_equal_layouts_stay_in_place(
    made: tuple[dict[str, torch.Tensor], Wrapping, Wrapping],
) -> None:
    _, source, _ = made
    moves = plan_moves(source.pieces(), source.pieces())
    assert all(
        (move.source, move.source_start) == (move.target, move.target_start) for move in moves
    )
    assert len(moves) == len(source.pieces())


@given(made=pairs(), seed=st.randoms(use_true_random=False))
def test_plan_is_independent_of_source_order(made, seed) -> None:  # type: ignore[no-untyped-def]
    _, source, target = made
    pieces = source.pieces()
    plan = plan_moves(pieces, target.pieces())
    seed.shuffle(pieces)
    assert plan_moves(pieces, target.pieces()) == plan


@given(made=pairs())
def test_moves_are_ordered_by_target_and_element(
    made: tuple[dict[str, torch.Tensor], Wrapping, Wrapping],
) -> None:
    _, source, target = made
    moves, order = (
        plan_moves(source.pieces(), target.pieces()),
        [(piece.name, piece.holder) for piece in target.pieces()],
    )
    keys = [(order.index((move.name, move.target)), move.target_start) for move in moves]
    assert keys == sorted(keys)


def test_first_of_two_sources_provides_a_shared_element() -> None:
    sources = [
        Piece("w", Interval(2, 8), (0, 1), 0),
        Piece("w", Interval(0, 4), (0, 0), 0),
        Piece("w", Interval(0, 4), (0, 2), 0),
    ]
    assert plan_moves(sources, [Piece("w", Interval(0, 8), (9,), 100)]) == [
        Move("w", (0, 0), 0, (9,), 100, 4),
        Move("w", (0, 1), 2, (9,), 104, 4),
    ]


def test_only_one_replica_is_read() -> None:
    piece = Piece("w", Interval(0, 5), (0, 0), 7)
    replicas = [dataclasses.replace(piece, holder=(0, rank)) for rank in (3, 1, 2)]
    assert plan_moves(replicas, [Piece("w", Interval(1, 5), (8,), 0)]) == [
        Move("w", (0, 1), 8, (8,), 0, 4)
    ]


@pytest.mark.parametrize(
    ("held", "moved"),
    [
        ([], []),
        ([Interval(0, 3)], [(0, 3)]),
        ([Interval(0, 3), Interval(6, 10)], [(0, 3), (6, 4)]),
        ([Interval(4, 6)], [(4, 2)]),
    ],
)
def test_elements_without_a_source_are_not_moved(
    held: list[Interval], moved: list[tuple[int, int]]
) -> None:
    sources = [Piece("w", part, (0, rank), 0) for rank, part in enumerate(held)]
    moves = plan_moves(sources, [Piece("w", Interval(0, 10), (0,), 0)])
    assert [(move.target_start, move.numel) for move in moves] == moved
    assert sum(move.numel for move in moves) < 10


def test_parameter_with_another_name_is_not_a_source() -> None:
    assert (
        plan_moves([Piece("v", Interval(0, 4), (0, 0), 0)], [Piece("w", Interval(0, 4), (0, 0), 0)])
        == []
    )


@st.composite
def parts(draw: st.DrawFn) -> tuple[FlatLayout, int, Interval]:
    """A random layout, the index of one of its parameters, and a part of that parameter."""
    sizes = draw(
        st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=5)
    )
    ranks, align = draw(st.integers(1, 9)), draw(st.sampled_from([1, 4]))
    layout = flat_layout(
        [f"p{index}" for index in range(len(sizes))], sizes, ranks=ranks, align=align
    )
    index = draw(st.integers(0, len(sizes) - 1))
    ends = sorted(draw(st.tuples(*[st.integers(0, layout.params[index].numel)] * 2)))
    return layout, index, Interval(*ends)


@given(made=parts())
def test_runs_of_a_part_cover_its_elements_once_in_order(
    made: tuple[FlatLayout, int, Interval],
) -> None:
    layout, index, part = made
    full = torch.arange(layout.full_numel).view(layout.ranks, layout.shard_numel)
    position = 0
    for run in runs_of_part(layout, index, part):
        assert run.start == position
        assert run.in_shard, "a run has elements"
        start = layout.params[index].start + part.start + position
        assert full[run.rank, run.in_shard.slice].tolist() == list(
            range(start, start + run.in_shard.numel)
        )
        position += run.in_shard.numel
    assert position == part.numel


@given(made=parts())
def test_each_shard_that_holds_elements_yields_one_run(
    made: tuple[FlatLayout, int, Interval],
) -> None:
    layout, index, part = made
    holders = [rank for rank in range(layout.ranks) if layout.part(index, rank).clipped(part)]
    assert [run.rank for run in runs_of_part(layout, index, part)] == holders


def test_runs_of_a_part_that_starts_and_ends_inside_shards() -> None:
    layout = flat_layout(["a", "b"], [(3,), (10,)], ranks=4, align=1)
    assert list(runs_of_part(layout, 1, Interval(2, 10))) == [
        Run(1, Interval(1, 4), 0),
        Run(2, Interval(0, 4), 3),
        Run(3, Interval(0, 1), 7),
    ]
    assert list(runs_of_part(layout, 1, Interval(4, 4))) == []


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


@given(made=one_parameter_laid_out_twice())
def test_same_parts_compares_every_rank(made: tuple[FlatLayout, FlatLayout]) -> None:
    one, other = made
    parts = [[layout.part(0, rank) for rank in range(layout.ranks)] for layout in made]
    assert same_parts(one, 0, other, 0) is (parts[0] == parts[1])


def test_same_parts_is_false_for_different_sizes() -> None:
    one, other = (FlatLayout((ParamSpec("p", (numel,), 0),), 4, 5) for numel in (17, 18))
    assert not same_parts(one, 0, other, 0)


def test_same_parts_is_fast_with_a_billion_ranks() -> None:
    one, other = (
        FlatLayout((ParamSpec("p", (10**12,), start),), 10**9, 2000) for start in (8, 8 + 10**11)
    )
    assert same_parts(one, 0, one, 0)
    assert not same_parts(one, 0, other, 0)
