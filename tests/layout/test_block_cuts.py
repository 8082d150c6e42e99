"""Shards are cut between blocks of parameters, and are as small as such cuts allow."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compat._layout.block_cuts import Blocks, smallest

# decoder layers of Llama 8B and 70B: shapes of their weights
LLAMA_8B = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2
LLAMA_8B += [(4096, 14336), (4096,), (4096,)]
LLAMA_70B = [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2
LLAMA_70B += [(8192, 28672), (8192,), (8192,)]


@st.composite
def blocks(draw: st.DrawFn) -> Blocks:
    numel = draw(st.integers(0, 24))
    return Blocks(numel, draw(st.integers(1, max(numel, 1))), draw(st.integers(1, 6)))


def is_legal(param: Blocks, start: int, shard: int) -> bool:
    cuts = [k - start for k in range(0, start + param.numel, shard) if start < k]
    parts = [stop - first for first, stop in itertools.pairwise([0, *cuts, param.numel])]
    is_cut_between = all(cut % param.size == 0 for cut in cuts)
    return not cuts or (is_cut_between and min(parts) >= param.least)


def fits(params: list[Blocks], shard: int, ranks: int, align: int) -> bool:
    """Whether any starts at all work, in this order: all ends of each parameter are kept."""
    ends = {0}
    for param in params:
        starts = {s for e in ends for s in range(-(-e // align) * align, ranks * shard + 1, align)}
        ends = {s + param.numel for s in starts if is_legal(param, s, shard)}
    return any(end <= ranks * shard for end in ends)


@given(
    params=st.lists(blocks(), max_size=4).map(tuple),
    ranks=st.integers(1, 5),
    align=st.sampled_from([1, 2, 4]),
    factor=st.integers(1, 2),
)
@settings(deadline=None)
def test_cuts_are_legal_and_no_smaller_shard_works(
    params: tuple[Blocks, ...], ranks: int, align: int, factor: int
) -> None:
    unit, high = align * factor, 120
    found = smallest(params, ranks, align, unit, high)
    whole = -(-sum(-(-param.numel // align) * align for param in params) // unit) * unit
    assert found is not None, "one shard has room for all parameters"
    assert 0 < found.shard_numel <= max(whole, unit)
    assert found.shard_numel % unit == 0
    assert sorted(found.order) == list(range(len(params)))
    end = 0
    for number, start in zip(found.order, found.starts, strict=True):
        assert start % align == 0 and start >= end
        assert is_legal(params[number], start, found.shard_numel)
        end = start + params[number].numel
    assert end <= ranks * found.shard_numel
    orders = {tuple(range(len(params))), found.order}
    for order, shard in itertools.product(orders, range(unit, found.shard_numel, unit)):
        assert not fits([params[number] for number in order], shard, ranks, align)


def test_the_order_is_kept_unless_another_one_saves_memory() -> None:
    small, large = Blocks(4, 4), Blocks(8, 8)
    kept = smallest((small, large), 2, 1, 1, 100)
    assert kept is not None and (kept.shard_numel, kept.order) == (8, (0, 1))
    moved = smallest((small, large, small), 2, 1, 1, 100)
    assert moved is not None and (moved.shard_numel, moved.order) == (8, (1, 0, 2))


@pytest.mark.parametrize(
    ("shapes", "rows", "expected"),
    [
        (LLAMA_8B, None, {2: 0.0, 8: 0.0, 64: 0.06, 256: 0.24, 1024: 0.96}),
        (LLAMA_8B, 1, {2: 0.0, 8: 0.01, 64: 0.12, 256: 0.96, 1024: 7.69}),
        (LLAMA_8B, 32, {8: 0.96, 64: 7.69, 256: 7.69, 1024: 330.75}),
        (LLAMA_8B, 10**9, {2: 7.69, 8: 115.38}),
        (LLAMA_70B, None, {2: 0.0, 8: 0.0, 64: 0.01, 256: 0.06, 1024: 0.24}),
        (LLAMA_70B, 1, {2: 0.0, 8: 0.04, 64: 0.37, 256: 1.22, 1024: 2.94}),
        (LLAMA_70B, 32, {8: 1.22, 64: 9.8, 256: 9.8, 1024: 119.6}),
    ],
)
def test_padding_of_decoder_layers_in_percent(
    shapes: list[tuple[int, ...]], rows: int | None, expected: dict[int, float]
) -> None:
    """rows: in a block of a matrix; None: blocks of 2,048 elements."""
    params = []
    for shape in shapes:
        numel = math.prod(shape)
        row = shape[1] if len(shape) > 1 else 1
        params.append(Blocks(numel, min(2048 if rows is None else rows * row, numel)))
    total = sum(param.numel for param in params)
    for ranks, percent in expected.items():
        found = smallest(tuple(params), ranks, 8, 8, 5 * total // ranks)
        assert found is not None
        assert round(100 * (found.shard_numel * ranks / total - 1), 2) <= percent
