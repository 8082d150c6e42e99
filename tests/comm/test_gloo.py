"""The transports for gloo, by values and in place: the values that arrive, the memory that stays
allocated, and messages that cannot be read."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import ShardingStrategy
from fsdp_compat._comm.gloo import MessageTransport
from fsdp_compat._comm.same_host import peers, shared_memory
from fsdp_compat._comm.same_host.peers import PeerArena
from fsdp_compat._comm.same_host.transport import SameHostTransport
from tests.comm.test_deadlock import assert_circle
from tests.engine.test_counts import Operations, counting_sends
from tests.support.collectives import all_reduced, connect, gathered, reduced
from tests.support.errors import message_of
from tests.support.forks import forked
from tests.support.memory import group_nbytes
from tests.support.parity import make_pair
from tests.support.ranks import on_ranks
from tests.support.same_host import MESSAGES, copied_or_sent

NUMEL = 1_200_001  # of a message: more than one piece of a sum, and no multiple of anything
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def from_0_to_4(numel: int, first: int) -> torch.Tensor:
    """``(torch.arange(numel) + first) % 5``, in a tenth of the time."""
    return torch.arange(5).repeat(numel // 5 + 2)[first % 5 :][:numel]


def numbers(comm: Any, numel: int, first: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return comm.allocate(numel, dtype).copy_(from_0_to_4(numel, first))


def in_block(numel: int) -> torch.Tensor:
    return shared_memory.allocate(numel, torch.float32).copy_(from_0_to_4(numel, 0))


# -- values


def assert_exchanges(
    comm: Any, kind: type = MessageTransport, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> None:
    """Gather, reduce and all-reduce in each of the dtypes. kind: of the transport, which sends
    values by gloo, or nothing."""
    assert type(comm) is kind
    ranks, rank, divisor = comm.ranks, comm.rank, torch.tensor(2.0, dtype=torch.float64)
    for dtype in dtypes:
        sent: list[int] = []
        tag, wide = comm.new_tag(), torch.promote_types(dtype, torch.float32)
        with counting_sends(sent):
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
        values = NUMEL * (ranks - 1) * (2 + 2 * 2) if kind is MessageTransport else 0
        assert abs(sum(sent) - dtype.itemsize * values) < 100


@copied_or_sent
@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_exchanges_are_right_in_every_dtype_and_send_values_or_nothing(
    ranks: int, environment: dict[str, str]
) -> None:
    kind = MessageTransport if environment == MESSAGES else SameHostTransport
    assert_exchanges(connect(), kind)


@on_ranks(3)
def test_one_rank_without_readable_memory_lets_all_send_values() -> None:
    hidden = mock.patch.object(shared_memory, "first_location", return_value=None)
    with hidden if dist.get_rank() == 2 else contextlib.nullcontext():
        comm = connect()
    assert_exchanges(comm, dtypes=DTYPES[:2])


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,)])
@on_ranks(3)
def test_ranks_without_files_in_memory_let_all_send_values(ranks: tuple[int, ...]) -> None:
    with contextlib.ExitStack() as stack:
        if dist.get_rank() in ranks:
            make = os.memfd_create
            stack.callback(setattr, os, "memfd_create", make)
            del os.memfd_create
            stack.enter_context(mock.patch.object(shared_memory, "_arena", shared_memory.Arena()))
        assert_exchanges(connect(), dtypes=DTYPES[:1])


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_a_rank_without_more_shared_memory_names_the_limit_on_all_ranks(ranks: int) -> None:
    """After it has connected."""
    comm = connect()
    with contextlib.ExitStack() as stack:
        if comm.rank == ranks - 1:
            full = mock.patch.object(shared_memory.Chunk, "take", return_value=None)
            refused = OSError(24, "no descriptors")
            stack.enter_context(full)
            stack.enter_context(mock.patch.object(os, "memfd_create", side_effect=refused))
        message = message_of(lambda: gathered(comm, torch.ones(NUMEL), 4))
    assert f"rank {ranks - 1} can get no more shared memory: no more file descriptors" in message


@copied_or_sent
@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_sums_of_every_size_are_right_and_bit_equal_to_gloos_on_two_ranks(
    ranks: int, environment: dict[str, str]
) -> None:
    comm = connect()
    torch.manual_seed(comm.rank)
    for numel in (1, 5, 1 << 10, (1 << 15) + 1, (1 << 17) + 1, 1 << 18, (1 << 18) + 1):
        total = all_reduced(comm, numbers(comm, numel, comm.rank), comm.new_tag())
        expected = sum(from_0_to_4(numel, r) for r in range(ranks)).float()
        assert torch.equal(total, expected), numel
    for dtype in (torch.float32, torch.float64) if ranks == 2 else ():
        buffer = comm.allocate(2 * NUMEL, dtype).copy_(torch.randn(2 * NUMEL, dtype=dtype))
        theirs, whole = torch.empty(NUMEL, dtype=dtype), buffer.clone()
        dist.reduce_scatter_tensor(theirs, buffer)
        dist.all_reduce(whole)
        assert torch.equal(reduced(comm, buffer, comm.new_tag(), dtype=dtype), theirs)
        assert torch.equal(all_reduced(comm, buffer, comm.new_tag()), whole)


@on_ranks(2)
def test_gather_copies_each_part_once_and_reduction_allocates_no_receive_buffer() -> None:
    comm = connect()
    own, buffer = numbers(comm, NUMEL, 0), numbers(comm, comm.ranks * NUMEL, 0)
    with Operations() as seen:
        gathered(comm, own, 4)
        reduced(comm, buffer, 4)
    assert seen.written["copy_"] == [NUMEL, NUMEL]
    assert not {"empty_like", "clone", "_to_copy"} & seen.names.keys()


@pytest.mark.parametrize(
    ("word", "value", "expected"),
    [
        (
            shared_memory.Location._fields.index("offset"),
            1 << 40,
            "cannot read the memory of rank 1: 4800004 bytes at 1099511627776 do not lie in a",
        ),
        (-1, -1, "rank 1 has sent 1200001 elements of an unknown dtype for 1200001 of torch.float"),
        (-2, 1 << 40, "rank 1 has sent 1099511627776 elements of torch.float32 for 1200001 of"),
    ],
)
@on_ranks(2)
def test_message_described_wrongly_raises_an_error_with_its_rank(
    word: int, value: int, expected: str
) -> None:
    """Rank 1 replaces a word of its message."""
    comm, words = connect(), peers.Message.words

    def wrong_words(place: Any, message: torch.Tensor) -> list[int]:
        told = words(place, message)
        told[word] = value
        return told

    lies = mock.patch.object(peers.Message, "words", wrong_words)
    with lies if comm.rank == 1 else contextlib.nullcontext():
        message = message_of(lambda: gathered(comm, numbers(comm, NUMEL, comm.rank), 4))
    assert message.startswith("Waiting for")
    assert comm.rank == 1 or (expected in message and "Waiting for tag 4 failed" in message)


def test_peer_memory_checks_a_location_before_reading() -> None:
    own = in_block(NUMEL)
    mine, place = shared_memory._arena, shared_memory.locate(own)
    assert place is not None
    peer = PeerArena(os.getpid(), mine.token)
    assert torch.equal(peer.view(place, NUMEL, torch.float32), own)
    nbytes = mine.chunks[0].nbytes
    small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    device, (read, write) = os.open("/dev/zero", os.O_RDONLY), os.pipe()
    try:
        os.ftruncate(small, 1 << 20)
        for wrong in (
            {"offset": -64},
            {"offset": 0},
            {"offset": nbytes},
            {"offset": nbytes - 4 * NUMEL + 4},
            {"offset": place.offset + 1},
            {"offset": 1 << 62},
            {"number": 999},
            {"number": 999, "fd": 1 << 30},
            {"number": 999, "fd": -1},
            {"number": 999, "fd": device},
            {"number": 999, "fd": read},
            {"number": 999, "fd": small},
        ):
            with pytest.raises(OSError):
                peer.view(place._replace(**wrong), NUMEL, torch.float32)
        with pytest.raises(PermissionError):
            os.ftruncate(mine.chunks[0].fd, 1)
    finally:
        for fd in (small, device, read, write):
            os.close(fd)


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
        other = shared_memory.allocate(2 * NUMEL, torch.float32).fill_(torch.nan)
        assert other.data_ptr() != address
    dist.barrier()
    if comm.rank == 1:
        assert torch.equal(end(), 2 * from_0_to_4(2 * NUMEL, 0)[NUMEL:].float())
        del buffer, handle, segments
    comm.settle("gradients", True)
    assert shared_memory.allocate(2 * NUMEL, torch.float32).data_ptr() == address


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


@copied_or_sent
@on_ranks(2)
def test_settle_ends_unfinished_gathers(environment: dict[str, str]) -> None:
    """A prefetch that no rank has waited for yet."""
    comm = connect()
    own = numbers(comm, NUMEL, comm.rank)
    handle, full = begun_gather(comm, 4, own)
    comm.settle("what was sent")
    own.fill_(9.0)
    dist.barrier()
    comm.end_gather(handle, "parameters")
    assert full.max() == 4.0


# -- failures


@on_ranks(2)
def test_error_names_a_rank_that_never_reads_a_message() -> None:
    """Rank 0 waits until its gather was read; rank 1 waits for another gather before it reads."""
    comm = connect()
    own = numbers(comm, NUMEL, comm.rank)

    def step() -> None:
        first, _full = begun_gather(comm, 4, own)
        if comm.rank == 0:
            comm.end_gather(first, "the parameters of 'a'")
            comm.settle("what was sent")
        second, _other = begun_gather(comm, 8, own)
        comm.end_gather(second, "the parameters of 'b'")

    assert_circle(
        message_of(step),
        "rank 0 waits for rank 1 to take the parameters of 'a'",
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


# -- blocks


def test_block_has_the_size_of_its_tensor_and_is_aligned_to_64_bytes() -> None:
    for numel in (NUMEL, NUMEL + 1):
        tensor = shared_memory.allocate(numel, torch.float32, zero=True)
        assert shared_memory.locate(tensor) is not None
        assert tensor.untyped_storage().nbytes() == 4 * numel
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()


def test_freed_block_is_reused_and_zeros_are_zero() -> None:
    gc.collect()
    first = shared_memory.allocate(NUMEL, torch.float32).fill_(7.0)
    address, view = first.data_ptr(), first[5:]
    del first
    assert shared_memory.allocate(NUMEL, torch.float32).data_ptr() != address  # a view is left
    del view
    again = shared_memory.allocate(NUMEL, torch.float32, zero=True)
    assert again.data_ptr() == address
    assert not again.any()


def test_arena_returns_pages_beyond_its_limit_to_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = shared_memory.Arena()
    monkeypatch.setattr(shared_memory, "_arena", mine)
    monkeypatch.setattr(shared_memory, "KEPT_NBYTES", 8 << 20)
    blocks = [shared_memory.allocate(1 << 20, torch.float32).fill_(1.0) for _ in range(8)]
    held = [os.fstat(mine.chunks[0].fd).st_blocks * 512]
    blocks.clear()
    held.append(os.fstat(mine.chunks[0].fd).st_blocks * 512)
    assert 32 << 20 <= held[0] <= 33 << 20
    assert 8 << 20 <= held[1] <= 9 << 20
    assert not shared_memory.allocate(8 << 20, torch.float32, zero=True).any()


def test_arena_merges_adjacent_free_ranges() -> None:
    mine = shared_memory.Arena()
    blocks = [mine.take(1 << 20, False) for _ in range(4)]
    for index in (0, 2, 1, 3):
        blocks[index] = None
    assert mine.take(4 << 20, False) is not None
    assert len(mine.chunks) == 1
    assert len(mine.chunks[0].free) == 1


def test_copies_of_a_block_are_ordinary_tensors() -> None:
    shard = nn.Parameter(in_block(NUMEL))
    file = io.BytesIO()
    torch.save(shard, file)
    assert len(file.getvalue()) < 4 * NUMEL + 4096
    file.seek(0)
    for other in (torch.load(file), copy.deepcopy(shard)):
        assert torch.equal(other, shard)
        assert other.data_ptr() != shard.data_ptr()
        assert shared_memory.locate(other) is None


@on_ranks(1)
def test_writes_of_a_forked_process_stay_private() -> None:
    block = in_block(NUMEL).fill_(2.0)

    def write() -> None:
        assert (block == 2.0).all() and shared_memory.locate(block) is None
        block.fill_(5.0)
        new = shared_memory.allocate(NUMEL, torch.float32).fill_(1.0)
        assert (block == 5.0).all() and shared_memory.locate(new) is not None

    _, status = os.waitpid(forked(write), 0)
    assert (block.max().item(), status) == (2.0, 0)


# -- training


@on_ranks(2)
def test_shards_lie_in_blocks_and_a_replicas_reduce_buffer_becomes_its_gradient() -> None:
    shards, model = (
        make_pair(lambda: nn.Linear(1024, 1024, bias=False), (), sharding_strategy=strategy).model
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    )
    assert all(shared_memory.locate(p.detach()) is not None for p in shards.parameters())
    (parameter,) = model.parameters()
    addresses = set()
    for _ in range(4):
        with Operations() as seen:
            model(torch.ones(1, 1024)).sum().backward()
        addresses.add(parameter.grad.data_ptr())
        assert shared_memory.locate(parameter.grad) is not None
        parameter.grad = None
    copied = seen.written["copy_"] + seen.written["clone"] + seen.written["_to_copy"]
    assert [numel for numel in copied if numel > 1024] == [1 << 20, 1 << 19]
    assert len(addresses) == 1
    assert group_nbytes(model._runtime.groups[0]) == 0
