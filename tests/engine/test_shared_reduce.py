"""Reduce buffers in shared memory send what an ordinary one sends, and copy less."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdp_compat._comm.communicator import Communicator, Handle
from fsdp_compat._engine.reduce import ReduceBuffer, Reduction
from fsdp_compat._engine.reduce_plan import ReducePlan
from fsdp_compat._engine.shared_reduce import SharedReduceBuffer
from tests.support.engine_build import CPU, make_store, members_of

Shape = tuple[int, ...]


class Recorded:
    """An axis that keeps copies of what it is given, and sums nothing."""

    reads_in_place = True

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.members = rank, ranks, tuple(range(ranks))
        self.segments: list[torch.Tensor] = []
        self.pieces: list[torch.Tensor] = []
        self.num_waits = 0

    def wait_readers(self, what: str) -> None:
        self.num_waits += 1

    def begin_reduce(
        self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        self.segments = [segment.clone() for segment in segments]
        return Handle([])

    def end_reduce(
        self,
        handle: Handle,
        own: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.end_reduce_with([own], handle, dtype, what, divisor)

    def end_reduce_with(
        self,
        pieces: Sequence[torch.Tensor],
        handle: Handle,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None,
    ) -> torch.Tensor:
        self.pieces = list(pieces)
        self.segments[self.rank] = torch.cat(self.pieces)
        return self.segments[self.rank].to(dtype) / (1 if divisor is None else divisor)


class Holder(nn.Module):
    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))


Buffers = tuple[SharedReduceBuffer, ReduceBuffer, list[Recorded], list[ReducePlan]]


def make_both(
    shapes: Sequence[Shape],
    rank: int,
    ranks: int,
    large: frozenset[int],
    dtype: torch.dtype = torch.float32,
) -> Buffers:
    """Return the buffer and an ordinary one for the same parameters, with what they send and
    sum."""
    module = Holder(shapes)
    store = make_store("flat", members_of(module), rank=rank, ranks=ranks, home=(module, "_flat"))
    axes = [Recorded(rank, ranks) for _ in range(2)]
    alone = typing.cast(Communicator, Recorded(0, 1))
    plans = [ReducePlan(typing.cast(Communicator, axis), alone, 4, 8) for axis in axes]
    shared = SharedReduceBuffer(store, dtype, plans[0], large)
    return shared, ReduceBuffer(store, ranks, dtype, CPU), axes, plans


def assert_same_sums(buffers: Buffers) -> None:
    *both, axes, plans = buffers
    one, other = (
        Reduction(buffer.reduce(plan, "gradients")).finish()
        for buffer, plan in zip(both, plans, strict=True)
    )
    assert all(map(torch.equal, axes[0].segments, axes[1].segments))
    assert all(map(torch.equal, one, other))
    assert not both[0].resident_nbytes


def gradient(shape: Shape, start: int, kind: str) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    values = torch.arange(start, start + numel, dtype=torch.float32)
    if kind == "view":
        return torch.cat([values, values])[numel:].view(shape)
    if kind == "transposed":
        return values.view(shape[::-1]).permute(tuple(range(len(shape)))[::-1])
    return values.view(shape).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)


@st.composite
def programs(draw: st.DrawFn) -> typing.Any:
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 9]), max_size=2).map(tuple)
    shapes = draw(st.lists(sizes, min_size=1, max_size=6))
    ranks = draw(st.integers(2, 4))
    index = st.integers(0, len(shapes) - 1)
    puts = st.lists(
        st.tuples(index, st.sampled_from(["plain", "view", "transposed", "bfloat16"])),
        min_size=1,
        max_size=2 * len(shapes),
    )
    steps = st.lists(st.one_of(puts, puts, st.sets(index), st.none()), min_size=2, max_size=6)
    large = st.one_of(st.just(frozenset(range(len(shapes)))), st.frozensets(index))
    return shapes, draw(st.integers(0, ranks - 1)), ranks, draw(large), draw(steps)


@given(programs(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_gradients_are_summed_as_in_an_ordinary_buffer(
    program: typing.Any, dtype: torch.dtype
) -> None:
    shapes, rank, ranks, large, steps = program
    buffers = make_both(shapes, rank, ranks, large, dtype)
    for number, step in enumerate([*steps, None]):
        if step is None:
            assert_same_sums(buffers)
            continue
        for buffer in buffers[:2]:
            if isinstance(step, set):
                buffer.drop(step)
            elif step:
                grads = [gradient(shapes[i], number, kind) for i, kind in step]
                buffer.put([i for i, _ in step], grads)


def test_a_large_gradient_of_the_own_segment_is_not_copied() -> None:
    shapes: list[Shape] = [(6,), (10,), (2, 3), (9,)]
    shared, _, axes, plans = make_both(shapes, 0, 2, frozenset({1, 3}))
    grads = [gradient(shape, 1, "plain") for shape in shapes]
    for index, grad in enumerate(grads):
        shared.put([index], [grad])
    # As much memory as an ordinary one: a copy of what others read, and of the own segment all but
    # the gradient, which is kept.
    assert shared.resident_nbytes == 4 * 2 * shared.form.numel
    Reduction(shared.reduce(plans[0], "gradients")).finish()
    _, kept, _ = axes[0].pieces
    assert kept.data_ptr() == grads[1].data_ptr()
    assert axes[0].num_waits == 1


def test_gradients_that_others_may_hold_are_not_written_to_nor_more_of_them_kept() -> None:
    shared, _, axes, plans = make_both([(4,), (4,), (8,)], 0, 2, frozenset({0, 1}))
    grads = [gradient((4,), 0, kind) for kind in ("plain", "view")]
    for index, grad in enumerate(grads):
        shared.put([index], [grad])
    shared.put([0], [grads[0]])
    Reduction(shared.reduce(plans[0], "gradients")).finish()
    assert [grad.tolist() for grad in grads] == [[0, 1, 2, 3]] * 2
    kept = axes[0].pieces
    assert [piece.tolist() for piece in kept] == [[0, 2, 4, 6], [0, 1, 2, 3]]
    assert [piece.untyped_storage().nbytes() for piece in kept] == [16, 16]
