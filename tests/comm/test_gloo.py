"""The transports for gloo, by values and in place: the values that arrive, the memory that stays
allocated, and messages that cannot be read."""

from __future__ import annotations

import contextlib
import gc
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import UsageError
from tests.support.collectives import (
    Operations,
    all_reduced,
    assert_circle,
    connect,
    counting_sends,
    gathered,
    reduced,
)
from tests.support.errors import message_of
from tests.support.pairwise import each_value
from tests.support.ranks import on_ranks
from tests.support.same_host import COPIED, MESSAGES, copied_or_sent

NUMEL = 1_200_001  # of a message: more than one piece of a sum, and no multiple of anything
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def from_0_to_4(numel: int, first: int) -> torch.Tensor:
    """``(torch.arange(numel) + first) % 5``, in a tenth of the time."""
    return torch.arange(5).repeat(numel // 5 + 2)[first % 5 :][:numel]


def numbers(comm: Any, numel: int, first: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return comm.allocate(numel, dtype).copy_(from_0_to_4(numel, first))


# -- values


@each_value
@copied_or_sent
@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_exchanges_are_right_in_every_dtype_and_size_and_send_values_or_nothing(
    ranks: int, environment: dict[str, str]
) -> None:
    comm = connect()
    rank, divisor = comm.rank, torch.tensor(2.0, dtype=torch.float64)
    for numel in (1, 5, 1 << 10, (1 << 15) + 1, (1 << 17) + 1, 1 << 18, (1 << 18) + 1):
        total = all_reduced(comm, numbers(comm, numel, rank), comm.new_tag(""))
        assert torch.equal(total, sum(from_0_to_4(numel, r) for r in range(ranks)).float()), numel
    for dtype in DTYPES:
        tag, wide = comm.new_tag(""), torch.promote_types(dtype, torch.float32)
        with counting_sends() as sent:
            full = gathered(comm, numbers(comm, NUMEL, rank, dtype), tag)
            buffer = numbers(comm, ranks * NUMEL, rank, dtype)
            shard = reduced(comm, buffer, tag, divisor=divisor, dtype=wide)
            total = numbers(comm, ranks * NUMEL - 1, rank, dtype)
            outside = all_reduced(comm, total.clone(), tag, divisor=divisor)
            inside = all_reduced(comm, total, tag, divisor=divisor)
        wholes = [from_0_to_4(NUMEL, r).to(dtype) for r in range(ranks)]
        assert torch.equal(full, torch.cat(wholes)), dtype
        summed = sum(from_0_to_4(ranks * NUMEL, r) for r in range(ranks)) / 2
        assert torch.equal(shard, summed.chunk(ranks)[rank].to(wide)), dtype
        assert torch.equal(inside, summed[:-1].to(dtype)), dtype
        assert torch.equal(outside, inside)
        # a gather, a reduction, two totals of two steps
        values = NUMEL * (ranks - 1) * (2 + 2 * 2) if environment == MESSAGES else 0
        assert abs(sum(sent) - dtype.itemsize * values) < 100


@on_ranks(2)
def test_gather_copies_each_part_once_and_reduction_allocates_no_receive_buffer() -> None:
    comm = connect()
    own, buffer = numbers(comm, NUMEL, 0), numbers(comm, comm.ranks * NUMEL, 0)
    with Operations() as seen:
        gathered(comm, own, 4)
        reduced(comm, buffer, 4)
    assert seen.written["copy_"] == [NUMEL, NUMEL]
    assert not {"empty_like", "clone", "_to_copy"} & seen.names.keys()


# -- memory in flight


@on_ranks(2)
def test_block_is_reused_after_all_peers_have_read_it() -> None:
    """Rank 1 reads late."""
    comm = connect()
    buffer = numbers(comm, 2 * NUMEL, 0)
    address, segments = buffer.data_ptr(), list(buffer.chunk(2))
    handle = comm.begin_reduce(buffer, segments, 4)

    def end() -> torch.Tensor:
        return comm.end_reduce(handle, segments[comm.rank], torch.float32, "gradients", None)

    if comm.rank == 0:
        end()
        del buffer, handle, segments
        gc.collect()
        other = comm.allocate(2 * NUMEL, torch.float32).fill_(torch.nan)
        assert other.data_ptr() != address
    dist.barrier()
    if comm.rank == 1:
        assert torch.equal(end(), 2 * from_0_to_4(2 * NUMEL, 0)[NUMEL:].float())
        del buffer, handle, segments
    comm.settle("gradients", True)
    assert comm.allocate(2 * NUMEL, torch.float32).data_ptr() == address


@copied_or_sent
@on_ranks(2)
def test_a_message_does_not_replace_one_that_was_not_read(environment: dict[str, str]) -> None:
    """Rank 1 reads late."""
    comm, found = connect(), []
    store = dist.distributed_c10d._get_default_store()
    first, second = numbers(comm, NUMEL, 0), numbers(comm, NUMEL, 0) + 5
    for turn, own in enumerate((first, second)):
        full = torch.empty(2 * NUMEL)
        handle = comm.begin_gather(own, full, full.chunk(2), 4)
        if turn == 1 and comm.rank == 0:
            store.set("sent again", "1")
        if turn == 0 and comm.rank == 1:
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["sent again"], timedelta(seconds=0.3))
        comm.end_gather(handle, "parameters")
        found.append(full.max().item())
    comm.settle("what was sent")
    assert found == [4.0, 9.0]


def begun_gather(comm: Any, tag: int, own: torch.Tensor) -> tuple[Any, torch.Tensor]:
    full = torch.empty(2 * NUMEL)
    return comm.begin_gather(own, full, full.chunk(2), tag), full


# -- failures


@on_ranks(2)
def test_error_names_a_rank_that_never_reads_a_message() -> None:
    """Rank 0 waits until its gather was read; rank 1 waits for another gather before it reads."""
    comm = connect()
    own, tag = numbers(comm, NUMEL, comm.rank), comm.new_tag("'a'")

    def step() -> None:
        first, _full = begun_gather(comm, tag, own)
        if comm.rank == 0:
            comm.end_gather(first, "the parameters of 'a'")
            comm.settle("what was sent")
        second, _other = begun_gather(comm, 2 * tag, own)
        comm.end_gather(second, "the parameters of 'b'")

    assert_circle(
        message_of(step),
        "rank 0 waits for rank 1 to take part in the all-gather of 'a'",
        "rank 1 waits for the parameters of 'b' from rank 0",
    )


@on_ranks(2)
def test_memory_of_a_failed_rank_is_not_used() -> None:
    comm = connect()
    own = numbers(comm, NUMEL, comm.rank)
    handle, _full = begun_gather(comm, 4, own)
    dist.barrier()
    if comm.rank == 0:
        comm._table.close(has_failed=True)
        own.fill_(9.0)
    dist.barrier()
    if comm.rank == 0:
        message = message_of(lambda: comm.settle("what was sent"))
        assert message.startswith("Waiting for")
    else:
        message = message_of(lambda: comm.end_gather(handle, "the parameters of 'a'"))
        assert "the communication of rank 0 has failed" in message


@on_ranks(2, environment=COPIED)
def test_more_groups_than_counters_are_refused_with_the_limit() -> None:
    comm = connect()
    for _ in range(65534):
        comm.new_tag("")
    with pytest.raises(UsageError, match="at most 65534") as caught:
        comm.new_tag("")
    assert "FSDP_COMPAT_SAME_HOST=messages" in str(caught.value)
