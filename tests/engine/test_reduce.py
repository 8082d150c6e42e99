"""Where gradients collect, by the one rule of what is filled, and how they are summed: against an
axis that is only recorded."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat._comm.communicator import Communicator, Handle, Traffic, communicator
from fsdp_compat._comm.mesh import mesh_from_group
from fsdp_compat._engine.reduce import DirectGradBuffer, ReduceBuffer, ReducePlan, Reduction
from fsdp_compat._engine.store import ParamStore
from tests.support.engine_build import CPU, STORES, lone_mesh, make_store, members_of
from tests.support.ranks import run_ranks

RANKS = 2
SHAPES: list[tuple[int, ...]] = [(3, 2), (5,), ()]


class Holder(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))


class Recorded:
    """An axis whose other ranks send the same as this one: a sum is ``ranks`` times what was
    sent."""

    reads_in_place = False

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks, self.members, self.traffic = 0, ranks, tuple(range(ranks)), Traffic()
        self.sent: list[torch.Tensor] = []  # a copy of every buffer
        self.calls: list[str] = []

    def begin_reduce(
        self, buffer: torch.Tensor, segments: Sequence[torch.Tensor], tag: int
    ) -> Handle:
        assert [segment.numel() for segment in segments] == [
            buffer.numel() // self.ranks
        ] * self.ranks
        self.calls.append(f"begin_reduce {tag}")
        self.sent.append(buffer.clone())
        return Handle([])

    def end_reduce(
        self,
        pending: Handle,
        own: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append(f"end_reduce {what}")
        return own.to(dtype) * self.ranks / (1 if divisor is None else divisor)

    def begin_all_reduce(
        self, total: torch.Tensor, tag: int, divisor: torch.Tensor | None = None
    ) -> Handle:
        self.calls.append(f"begin_total {tag}")
        total.mul_(self.ranks).div_(1 if divisor is None else divisor)
        return Handle([])

    def continue_all_reduce(
        self, pending: Handle, total: torch.Tensor, tag: int, what: str
    ) -> Handle:
        self.calls.append("continue_all_reduce")
        return pending

    def end_all_reduce(self, pending: Handle, total: torch.Tensor, what: str) -> None:
        self.calls.append("end_all_reduce")


class Setup(typing.NamedTuple):
    store: ParamStore
    buffer: ReduceBuffer
    shard: Recorded
    replica: Recorded
    wire: ReducePlan

    def sent(self) -> list[torch.Tensor]:
        """The gradients of all leaves in the last buffer that was sent, in the shapes of the
        leaves."""
        found = [torch.full(shape, torch.nan) for shape in SHAPES]
        for index, (value, places) in enumerate(
            zip(found, self.store.places(self.shard.sent[-1])[:-1], strict=True)
        ):
            for part, place in zip(self.store.split(index, value), places, strict=True):
                part.copy_(place)
        return found

    def reduce(self) -> list[torch.Tensor]:
        return Reduction(self.buffer.reduce(self.wire, "the gradients of unit 'u'")).finish()


@pytest.fixture(params=STORES)
def setup(request: pytest.FixtureRequest) -> Setup:
    return make_setup(request.param)


def make_setup(kind: str, dtype: torch.dtype = torch.float32, replicas: int = 1) -> Setup:
    module = Holder(SHAPES)
    store = make_store(kind, members_of(module), rank=0, ranks=RANKS, home=(module, "_flat_param"))
    shard, replica = Recorded(RANKS), Recorded(replicas)
    wire = ReducePlan(typing.cast(Communicator, shard), typing.cast(Communicator, replica), 4, 8)
    buffer = ReduceBuffer(store, RANKS, dtype, CPU)
    return Setup(store, buffer, shard, replica, wire)


def ones(index: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(SHAPES[index], value)


# -- what is filled


def test_an_unused_buffer_holds_no_memory_and_nothing(setup: Setup) -> None:
    assert not setup.buffer.received
    assert setup.buffer.resident_nbytes == 0


def test_the_first_gradient_is_copied_and_makes_the_memory_come(setup: Setup) -> None:
    setup.buffer.put([1], [ones(1, 3.0)])
    assert setup.buffer.received
    assert setup.buffer.resident_nbytes == 4 * RANKS * setup.store.numel
    setup.reduce()
    assert setup.sent()[1].tolist() == [3.0] * 5


def test_a_later_gradient_of_the_same_leaf_is_added(setup: Setup) -> None:
    for value in (3.0, 4.0, 0.5):
        setup.buffer.put([1], [ones(1, value)])
    setup.reduce()
    assert setup.sent()[1].tolist() == [7.5] * 5


def test_gradients_of_several_leaves_are_put_together(setup: Setup) -> None:
    setup.buffer.put([2, 0], [ones(2, 2.0), ones(0, 1.0)])
    setup.buffer.put([0, 1], [ones(0, 1.0), ones(1, 5.0)])
    setup.reduce()
    assert [value.unique().tolist() for value in setup.sent()] == [[2.0], [5.0], [2.0]]


def test_what_was_put_is_not_kept_and_not_changed(setup: Setup) -> None:
    first, second = ones(0, 1.0), ones(0, 2.0)
    setup.buffer.put([0], [first])
    setup.buffer.put([0], [second])
    first.fill_(9.0)
    setup.reduce()
    assert setup.sent()[0].unique().tolist() == [3.0]
    assert second.unique().tolist() == [2.0]


@pytest.mark.parametrize("kind", STORES)
def test_a_first_gradient_is_cast_to_the_dtype_that_travels_and_a_later_one_too(kind: str) -> None:
    setup = make_setup(kind, torch.bfloat16)
    setup.buffer.put([1], [ones(1, 1.0 + 2**-12)])  # the small part is lost in bfloat16
    setup.buffer.put([1], [ones(1, 2.0)])
    assert setup.buffer.resident_nbytes == 2 * RANKS * setup.store.numel
    grads = setup.reduce()
    assert setup.shard.sent[0].dtype == torch.bfloat16
    assert setup.sent()[1].tolist() == [3.0] * 5
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_a_gradient_of_other_strides_is_put_by_its_shape(setup: Setup) -> None:
    value = torch.arange(6.0).view(2, 3).T
    setup.buffer.put([0], [value])
    setup.reduce()
    assert setup.sent()[0].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


# -- reducing


def test_reducing_sends_zeros_for_what_is_not_filled_and_for_padding(setup: Setup) -> None:
    setup.buffer.put([1], [ones(1, 3.0)])
    setup.buffer._buffer[setup.buffer._buffer != 3.0] = 5.0  # what an allocation happened to find
    setup.reduce()
    sent = setup.shard.sent[0]
    assert sorted(sent.unique().tolist()) == [0.0, 3.0]
    assert int((sent == 3.0).sum()) == 5
    assert [value.unique().tolist() for value in setup.sent()] == [[0.0], [3.0], [0.0]]


def test_reducing_empties_the_set_so_that_the_next_gradient_is_copied_again(setup: Setup) -> None:
    setup.buffer.put([1], [ones(1, 3.0)])
    setup.reduce()
    assert not setup.buffer.received
    assert setup.buffer.resident_nbytes == 0
    setup.buffer.put([0], [ones(0, 2.0)])
    setup.reduce()
    assert [value.unique().tolist() for value in setup.sent()] == [[2.0], [0.0], [0.0]]


def test_the_memory_is_there_until_the_shard_axis_has_taken_it(setup: Setup) -> None:
    setup.buffer.put([1], [ones(1)])
    stages = setup.buffer.reduce(setup.wire, "gradients")
    assert next(stages) is None
    assert setup.buffer.resident_nbytes == 4 * RANKS * setup.store.numel
    assert len(next(stages)) == len(setup.store.sharded_params)
    assert setup.buffer.resident_nbytes == 0


def test_a_reduction_without_any_gradient_sends_zeros(setup: Setup) -> None:
    grads = setup.reduce()
    assert not setup.shard.sent[0].any()
    assert len(grads) == len(setup.store.sharded_params)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_sum_over_all_ranks_is_divided_by_their_number(kind: str, replicas: int) -> None:
    setup = make_setup(kind, replicas=replicas)
    values = [torch.randn(shape) for shape in SHAPES]
    setup.buffer.put([*range(len(values))], values)
    grads = setup.reduce()
    total = torch.zeros(setup.store.numel)
    for grad, view in zip(grads, setup.store.grads(total), strict=True):
        view.copy_(grad)
    # every rank sends the same here, so the mean is what was put
    torch.testing.assert_close(total, setup.shard.sent[0].chunk(RANKS)[0])


@pytest.mark.parametrize("kind", STORES)
def test_the_stages_of_a_reduction_come_in_this_order_under_these_tags(kind: str) -> None:
    setup = make_setup(kind, replicas=3)
    setup.buffer.put([1], [ones(1)])
    stages = setup.buffer.reduce(setup.wire, "the gradients of unit 'u'")
    seen = [next(stages) for _ in range(4)]
    assert [stage is None for stage in seen] == [True, True, True, False]
    assert setup.shard.calls == ["begin_reduce 4", "end_reduce the gradients of unit 'u'"]
    assert setup.replica.calls == ["begin_total 8", "continue_all_reduce", "end_all_reduce"]


def test_without_replicas_a_reduction_ends_with_the_shard_axis(setup: Setup) -> None:
    setup.buffer.put([1], [ones(1)])
    stages = setup.buffer.reduce(setup.wire, "the gradients of unit 'u'")
    assert [next(stages) is None for _ in range(2)] == [True, False]
    assert not setup.replica.calls


def test_the_gradients_of_a_reduction_view_one_total(setup: Setup) -> None:
    setup.buffer.put([0, 1, 2], [ones(index) for index in range(3)])
    grads = setup.reduce()
    assert len({grad.untyped_storage().data_ptr() for grad in grads if grad.numel()}) == 1
    assert [grad.shape for grad in grads] == [
        target.shape for target, _ in setup.store.sharded_params
    ]


# -- forgetting


def test_a_dropped_leaf_is_sent_as_zero_and_its_next_gradient_is_copied(setup: Setup) -> None:
    setup.buffer.put([0, 1], [ones(0, 2.0), ones(1, 3.0)])
    setup.buffer.drop([0])
    assert setup.buffer.received
    setup.buffer.put([1], [ones(1, 1.0)])
    setup.reduce()
    assert [value.unique().tolist() for value in setup.sent()] == [[0.0], [4.0], [0.0]]
    setup.buffer.put([0], [ones(0, 2.0)])
    setup.buffer.drop([0, 1])
    setup.buffer.put([0], [ones(0, 8.0)])
    setup.reduce()
    assert setup.sent()[0].unique().tolist() == [8.0]


def test_dropping_the_last_leaf_frees_the_memory(setup: Setup) -> None:
    setup.buffer.put([0, 2], [ones(0), ones(2)])
    setup.buffer.drop([0])
    assert setup.buffer.resident_nbytes > 0
    setup.buffer.drop([1, 2])
    assert not setup.buffer.received
    assert setup.buffer.resident_nbytes == 0


def test_discarding_forgets_everything_and_frees_the_memory(setup: Setup) -> None:
    setup.buffer.put([0, 2], [ones(0), ones(2)])
    setup.buffer.discard()
    assert not setup.buffer.received
    assert setup.buffer.resident_nbytes == 0


# -- one rank: handed over as they are


def handed() -> tuple[DirectGradBuffer, ParamStore, ReducePlan]:
    module = Holder(SHAPES)
    store = make_store(
        "original", members_of(module), rank=0, ranks=1, home=(module, "_flat_param")
    )
    alone = communicator(lone_mesh().shard, CPU)
    return DirectGradBuffer(store), store, ReducePlan(alone, alone, 0, 0)


def test_a_handed_gradient_is_the_very_tensor_that_came() -> None:
    gradients, _, wire = handed()
    given = [ones(index, 2.0) for index in range(3)]
    gradients.put([*range(len(given))], given)
    found = Reduction(gradients.reduce(wire, "")).finish()
    assert all(one is other for one, other in zip(found, given, strict=True))


def test_a_later_gradient_is_added_to_the_one_that_is_handed_over() -> None:
    gradients, _, wire = handed()
    first = ones(1, 2.0)
    gradients.put([1], [first])
    gradients.put([1], [ones(1, 3.0)])
    found = Reduction(gradients.reduce(wire, "")).finish()
    assert found[1] is first
    assert first.tolist() == [5.0] * 5


def test_a_leaf_without_a_gradient_is_handed_zeros_and_the_set_is_emptied() -> None:
    gradients, _, wire = handed()
    gradients.put([1], [ones(1, 2.0)])
    found = Reduction(gradients.reduce(wire, "")).finish()
    assert [tuple(grad.shape) for grad in found] == SHAPES
    assert [grad.unique().tolist() for grad in found] == [[0.0], [2.0], [0.0]]
    assert not gradients.received
    assert gradients.resident_nbytes == 0


def test_handed_gradients_can_be_dropped_and_discarded() -> None:
    gradients, _, _ = handed()
    gradients.put([0, 1], [ones(0), ones(1)])
    assert gradients.resident_nbytes == 4 * 11
    gradients.drop([0, 2])
    assert gradients.received
    assert gradients.resident_nbytes == 4 * 5
    gradients.discard()
    assert not gradients.received
    assert gradients.resident_nbytes == 0


# -- a reduction, stage by stage


def test_a_reduction_starts_at_once_and_can_be_taken_further_after_its_end() -> None:
    seen: list[int] = []

    def stages() -> Iterator[list[torch.Tensor] | None]:
        seen.append(1)
        yield None
        seen.append(2)
        yield []

    reduction = Reduction(stages())
    assert (seen, reduction.grads) == ([1], None)
    reduction.advance()
    assert (seen, reduction.grads) == ([1, 2], [])
    reduction.advance()
    assert reduction.finish() == []


# -- sums over ranks


def sums_of(values: list[float], dtype: torch.dtype, total_dtype: torch.dtype) -> list[float]:
    """Rank r contributes values[r] everywhere. Return the sum as the shard axis makes it, and as
    replicas add it up."""
    wire = communicator(mesh_from_group(None).shard, CPU)
    tag = wire.new_tag()
    buffer = torch.full((4 * wire.ranks,), values[wire.rank], dtype=dtype)
    before = buffer.clone()
    segments = list(buffer.chunk(wire.ranks))
    total = wire.end_reduce(
        wire.begin_reduce(buffer, segments, tag), segments[wire.rank], total_dtype, "a sum"
    )
    assert total.dtype == total_dtype
    assert torch.equal(buffer[4 * wire.rank : 4 * wire.rank + 4], before[:4])
    copies = torch.full(
        (5,), values[wire.rank], dtype=total_dtype
    )  # 5: no number of ranks divides it
    wire.end_all_reduce(
        wire.continue_all_reduce(wire.begin_all_reduce(copies, tag), copies, tag, "a total"),
        copies,
        "a total",
    )
    found = {*total.tolist(), *copies.tolist()}
    return sorted(found)


@pytest.mark.parametrize(
    ("values", "dtype", "total_dtype", "expected"),
    [
        ([1e8, 1.0, -1e8], torch.float32, torch.float32, 0.0),  # (1e8 + 1) - 1e8: the 1 is lost
        ([1e8, -1e8, 1.0], torch.float32, torch.float32, 1.0),
        ([1.0, 1e8, -1e8], torch.float32, torch.float32, 0.0),
        ([1e8, 0.0, -1e8, 1.0], torch.float32, torch.float32, 1.0),
        ([1e8, 0.0, 1.0, -1e8], torch.float32, torch.float32, 0.0),
        (
            [256.0, 1.0, 1.0],
            torch.bfloat16,
            torch.bfloat16,
            258.0,
        ),  # added up in bfloat16, each 1 would be lost
        ([1.0, 1.0, 256.0], torch.bfloat16, torch.bfloat16, 258.0),
    ],
)
def test_sums_are_taken_in_rank_order_and_every_rank_gets_the_same(
    values: list[float], dtype: torch.dtype, total_dtype: torch.dtype, expected: float
) -> None:
    assert run_ranks(len(values), sums_of, values, dtype, total_dtype) == [[expected]] * len(values)


def shard_sums_in(total_dtype: torch.dtype) -> list[float]:
    wire = communicator(mesh_from_group(None).shard, CPU)
    buffer = torch.full(
        (4 * wire.ranks,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16
    )
    segments = list(buffer.chunk(wire.ranks))
    pending = wire.begin_reduce(buffer, segments, wire.new_tag())
    return wire.end_reduce(pending, segments[wire.rank], total_dtype, "a sum").unique().tolist()


def test_what_travels_in_bfloat16_is_summed_in_the_dtype_of_the_shard() -> None:
    assert run_ranks(3, shard_sums_in, torch.float32) == [[258.0]] * 3


def test_one_rank_gets_a_copy_of_its_own_segment() -> None:
    wire, buffer = communicator(lone_mesh().shard, CPU), torch.arange(4.0)
    total = wire.end_reduce(wire.begin_reduce(buffer, [buffer], 0), buffer, torch.float32, "a sum")
    assert total.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert total.data_ptr() != buffer.data_ptr()
