"""The gloo transport between ranks that read each other's memory: the values that arrive, the
memory that stays allocated, and descriptors that cannot be read."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp_compat._comm import arena, same_host, shared_memory
from fsdp_compat._comm.communicator import communicator
from fsdp_compat._comm.mesh import mesh_from_group
from tests.comm.test_deadlock import assert_alike, message_of
from tests.engine.test_counts import Operations, counting_sends
from tests.support.models import DIM, Block
from tests.support.parity import backward, make_pair
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
NUMEL = 1_200_001  # of a message: more than one piece of a sum, and no multiple of anything
DESCRIPTOR_NBYTES = 56
CHANNELS = "counters", "messages"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def by(channel: str) -> dict[str, str]:
    """Return the environment in which same-host peers tell each other of messages in this way."""
    return {"FSDP_COMPAT_SAME_HOST": channel}


@contextlib.contextmanager
def sharing_from(nbytes: int) -> Iterator[None]:
    """Read messages of at least ``nbytes`` in place."""
    with (
        mock.patch.object(shared_memory, "MIN_NBYTES", nbytes),
        mock.patch.object(same_host, "min_factor", return_value=1),
    ):
        yield


def _messages_that_are_read() -> list[bool]:
    comm, nbytes = connect(), shared_memory.MIN_NBYTES
    return [
        bool(comm._readers_in_place(times * nbytes - 4 * less))
        for times in (1, 32, 128)
        for less in (1, 0)
    ]


@pytest.mark.parametrize(
    ("ranks", "channel", "number"),
    [(2, "counters", 5), (2, "messages", 1), (3, "counters", 5), (3, "messages", 3)],
)
def test_minimum_size_of_messages_read_in_place_depends_on_ranks_and_channel(
    ranks: int, channel: str, number: int
) -> None:
    expected = [False] * (6 - number) + [True] * number
    found = run_ranks(ranks, _messages_that_are_read, environment=by(channel))
    assert found == [expected] * ranks


def connect() -> Any:
    return communicator(mesh_from_group(None).shard, CPU)


def from_0_to_4(numel: int, first: int) -> torch.Tensor:
    """``(torch.arange(numel) + first) % 5``, in a tenth of the time."""
    return torch.arange(5).repeat(numel // 5 + 2)[first % 5 :][:numel]


def numbers(numel: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """In a block, if it is large enough."""
    return shared_memory.allocate(numel, dtype).copy_(from_0_to_4(numel, rank))


def gathered(comm: Any, own: torch.Tensor, tag: int) -> torch.Tensor:
    full = own.new_empty(comm.ranks * own.numel())
    comm.end_gather(comm.begin_gather(own, full, full.chunk(comm.ranks), tag), f"tag {tag}")
    comm.settle("what was sent")
    return full


def reduced(comm: Any, buffer: torch.Tensor, tag: int, **options: Any) -> torch.Tensor:
    segments = list(buffer.chunk(comm.ranks))
    wide = torch.promote_types(buffer.dtype, torch.float32)
    total = comm.end_reduce(
        comm.begin_reduce(buffer, segments, tag), segments[comm.rank], wide, "gradients", **options
    )
    comm.settle("what was sent")
    return total


def totalled(
    comm: Any, total: torch.Tensor, tag: int, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    handle = comm.continue_all_reduce(
        comm.begin_all_reduce(total, tag, divisor), total, tag, "gradients"
    )
    comm.end_all_reduce(handle, total, "gradients")
    comm.settle("gradients", True)
    return total


# -- values


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Shared memory is full, and the system gives no more."""
    with (
        mock.patch.object(arena.Chunk, "take", return_value=None),
        mock.patch.object(os, "memfd_create", side_effect=OSError(24, "no descriptors")),
    ):
        yield


def exchanges_everything(
    blind: tuple[int, ...] = (),
    full_up: tuple[int, ...] = (),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> tuple[int, int]:
    """Gather, reduce and all-reduce in each of the dtypes. Returns the number of same-host peers,
    and the bytes handed to gloo for the first dtype.

    blind: ranks whose memory cannot be read. full_up: ranks that can get no more shared memory
    after they have connected.
    """
    if dist.get_rank() in blind:
        shared_memory.identity, identity = (
            lambda: bytes(shared_memory.IDENTITY_NBYTES),
            shared_memory.identity,
        )
    try:
        comm = connect()
    finally:
        if dist.get_rank() in blind:
            shared_memory.identity = identity
    with no_room() if dist.get_rank() in full_up else contextlib.nullcontext():
        return _exchanges_everything(comm, dtypes)


def _exchanges_everything(comm: Any, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    ranks, rank, sent = comm.ranks, comm.rank, []
    divisor = torch.tensor(2.0, dtype=torch.float64)
    for number, dtype in enumerate(dtypes):
        found: list[int] = []
        tag = comm.new_tag()
        with counting_sends(found):
            full = gathered(comm, numbers(NUMEL, rank, dtype), tag)
            shard = reduced(comm, numbers(ranks * NUMEL, rank, dtype), tag, divisor=divisor)
            inside = totalled(comm, numbers(ranks * NUMEL - 1, rank, dtype), tag, divisor)
            outside = totalled(comm, numbers(ranks * NUMEL - 1, rank, dtype).clone(), tag, divisor)
        sent.append(sum(found))
        assert torch.equal(
            full, torch.cat([from_0_to_4(NUMEL, r).to(dtype) for r in range(ranks)])
        ), number
        summed = sum(from_0_to_4(ranks * NUMEL, r) for r in range(ranks)) / 2
        assert torch.equal(shard, summed.chunk(ranks)[rank].to(shard.dtype)), dtype
        assert torch.equal(inside, summed[:-1].to(dtype)), dtype
        assert torch.equal(outside, inside)
    return len(comm.connections.same_host.memories), sent[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("channel", CHANNELS)
def test_messages_read_in_place_are_right_in_every_dtype_and_send_only_descriptors(
    ranks: int, channel: str
) -> None:
    descriptors = (
        6 * DESCRIPTOR_NBYTES * (ranks - 1)
    )  # a gather, a reduction, two totals of two steps
    sent = descriptors if channel == "messages" else 0
    found = run_ranks(ranks, exchanges_everything, environment=by(channel))
    assert found == [(ranks - 1, sent)] * ranks


def test_rank_without_readable_memory_exchanges_by_sending() -> None:
    two, one, blind = run_ranks(3, exchanges_everything, (2,), (), DTYPES[:2])
    assert [two[0], one[0], blind[0]] == [1, 1, 0]
    assert blind[1] > 2 * 2 * 4 * NUMEL  # everything, to both others


def exchanges_without_memfd(ranks: tuple[int, ...]) -> int:
    """ranks: those whose Python cannot make files in memory. Returns the number of same-host
    peers."""
    with contextlib.ExitStack() as stack:
        if dist.get_rank() in ranks:
            make = os.memfd_create
            stack.callback(setattr, os, "memfd_create", make)
            del os.memfd_create
            stack.enter_context(mock.patch.object(shared_memory, "_arena", arena.Arena()))
        return exchanges_everything(dtypes=DTYPES[:1])[0]


@pytest.mark.parametrize(("ranks", "num_peers"), [((0, 1, 2), [0, 0, 0]), ((1,), [1, 0, 1])])
@pytest.mark.parametrize("channel", CHANNELS)
def test_ranks_without_files_in_memory_exchange_by_sending(
    channel: str, ranks: tuple[int, ...], num_peers: list[int]
) -> None:
    found = run_ranks(3, exchanges_without_memfd, ranks, environment=by(channel))
    assert found == num_peers


@pytest.mark.parametrize(("ranks", "full_up"), [(2, (0,)), (2, (0, 1)), (3, (0, 2))])
@pytest.mark.parametrize("channel", CHANNELS)
def test_rank_without_more_shared_memory_sends_its_values(
    ranks: int, full_up: tuple[int, ...], channel: str
) -> None:
    descriptors = 6 * DESCRIPTOR_NBYTES * (ranks - 1) * (channel == "messages")
    values = 4 * NUMEL * (ranks - 1) * (2 + 2 * 2)  # a gather, a reduction, two totals of two steps
    told = run_ranks(ranks, exchanges_everything, (), full_up, DTYPES[:2], environment=by(channel))
    for rank, (num_peers, sent) in enumerate(told):
        assert num_peers == ranks - 1
        assert (
            sent == descriptors if rank not in full_up else abs(sent - descriptors - values) < 100
        )


def equals_gloo() -> None:
    comm = connect()
    torch.manual_seed(comm.rank)
    for dtype in (torch.float32, torch.float64):
        buffer = shared_memory.copy_of(torch.randn(2 * NUMEL, dtype=dtype))
        theirs, whole = torch.empty(NUMEL, dtype=dtype), buffer.clone()
        dist.reduce_scatter_tensor(theirs, buffer)
        dist.all_reduce(whole)
        with sharing_from(1 << 62):
            sent = reduced(comm, buffer, comm.new_tag())
        assert torch.equal(sent, theirs)
        assert torch.equal(reduced(comm, buffer, comm.new_tag()), theirs)
        assert torch.equal(totalled(comm, buffer, comm.new_tag()), whole)


def test_sums_of_two_ranks_equal_those_of_gloo_bit_for_bit() -> None:
    run_ranks(2, equals_gloo)


def totals_of_all_sizes() -> None:
    comm = connect()
    for numel in (1, 5, 1 << 10, (1 << 15) + 1, (1 << 17) + 1, 1 << 18, (1 << 18) + 1):
        total = totalled(comm, numbers(numel, comm.rank), comm.new_tag())
        assert torch.equal(total, sum(from_0_to_4(numel, r) for r in range(comm.ranks)).float()), (
            numel
        )


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduce_is_right_whole_and_in_pieces(ranks: int) -> None:
    run_ranks(ranks, totals_of_all_sizes)


def copies_of_an_exchange() -> tuple[list[int], bool]:
    """Elements copied by a gather and a reduction, and whether either allocated a receive
    buffer."""
    comm = connect()
    own, buffer = numbers(NUMEL, 0), numbers(comm.ranks * NUMEL, 0)
    full = torch.empty(comm.ranks * NUMEL)
    segments = list(full.chunk(comm.ranks))
    with Operations() as seen:
        comm.end_gather(comm.begin_gather(own, full, segments, 4), "parameters")
        reduced(comm, buffer, 4)
    return seen.written["copy_"], bool({"empty_like", "clone", "_to_copy"} & seen.names.keys())


def test_gather_copies_each_part_once_and_reduction_allocates_no_receive_buffer() -> None:
    assert run_ranks(2, copies_of_an_exchange) == [([NUMEL, NUMEL], False)] * 2


def mixes_dtypes() -> str:
    comm = connect()
    return message_of(
        lambda: gathered(comm, numbers(NUMEL, 0, (torch.float32, torch.int32)[comm.rank]), 4)
    )


@pytest.mark.parametrize("channel", CHANNELS)
def test_message_of_another_dtype_raises(channel: str) -> None:
    first, second = run_ranks(2, mixes_dtypes, environment=by(channel))
    # the rank that notices first tells the other one
    texts = "int32 for 1200001 of torch.float32", "float32 for 1200001 of torch.int32"
    assert any(f"of torch.{text}" in first + second for text in texts)
    assert "Waiting for tag 4 failed" in first and "Waiting for tag 4 failed" in second


def tells_lies(lie: str) -> tuple[str, str]:
    """Rank 1 sends a wrong descriptor of its gather. Returns each rank's error."""
    comm = connect()
    own, full = numbers(NUMEL, comm.rank), torch.empty(2 * NUMEL)
    if comm.rank == 0:
        handle = comm.begin_gather(own, full, full.chunk(2), 4)
        return message_of(lambda: comm.end_gather(handle, "the parameters of 'a'"))
    describe, place = same_host.describe, shared_memory.locate(own)
    with contextlib.ExitStack() as opened:
        pipe = os.pipe()
        opened.callback(os.close, pipe[0])
        opened.callback(os.close, pipe[1])
        small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
        opened.callback(os.close, small)
        os.ftruncate(small, 1 << 12)
        false = {
            "offset": place._replace(offset=1 << 40),
            "pipe": place._replace(number=7, fd=pipe[0]),
            "small": place._replace(number=7, fd=small),
        }.get(lie, place)

        def wrong_descriptor(place: Any, message: torch.Tensor) -> list[int]:
            told = describe(false, message)
            if lie == "dtype":
                told[-1] = -1
            if lie == "numel":
                told[-2] = 1 << 40
            return told

        with mock.patch.object(same_host, "describe", wrong_descriptor):
            handle = comm.begin_gather(own, full, full.chunk(2), 4)
        return message_of(
            lambda: (
                comm.end_gather(handle, "the parameters of 'a'"),
                comm.settle("what was sent"),
            )
        )


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        (
            "offset",
            "the memory of rank 1 cannot be read: 4800004 bytes at 1099511627776 do not lie in a "
            "chunk",
        ),
        ("pipe", "the memory of rank 1 cannot be read: descriptor"),
        ("small", "is a file that may shrink"),
        (
            "dtype",
            "rank 1 has sent 1200001 elements of an unknown dtype (-1) for 1200001 of "
            "torch.float32",
        ),
        (
            "numel",
            "rank 1 has sent 1099511627776 elements of torch.float32 for 1200001 of torch.float32",
        ),
    ],
)
@pytest.mark.parametrize("channel", CHANNELS)
def test_wrong_descriptor_raises_an_error_with_its_rank(
    lie: str, expected: str, channel: str
) -> None:
    first, second = run_ranks(2, tells_lies, lie, group_timeout=20, environment=by(channel))
    assert expected in first
    assert "Waiting for the parameters of 'a' failed" in first and second.startswith("Waiting for")


def test_peer_memory_checks_a_location_before_reading() -> None:
    own = numbers(NUMEL, 0)
    mine, place = shared_memory._arena, shared_memory.locate(own)
    assert place is not None
    peer = shared_memory.PeerMemory(os.getpid(), mine.control.fd, mine.token)
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
            {"number": 9},
            {"number": 9, "fd": 1 << 30},
            {"number": 9, "fd": -1},
            {"number": 9, "fd": device},
            {"number": 9, "fd": read},
            {"number": 9, "fd": small},
        ):
            with pytest.raises(OSError):
                peer.view(place._replace(**wrong), NUMEL, torch.float32)
        with pytest.raises(PermissionError):
            os.ftruncate(mine.chunks[0].fd, 1)
    finally:
        for fd in (small, device, read, write):
            os.close(fd)


# -- memory in flight


def frees_too_early() -> tuple[bool, bool, bool]:
    """Rank 1 reads late. Returns whether rank 0 got the same block before that, and after, and
    whether rank 1 read the sum."""
    comm = connect()
    buffer = numbers(2 * NUMEL, 0)
    address, segments = buffer.data_ptr(), list(buffer.chunk(2))
    handle = comm.begin_reduce(buffer, segments, 4)
    early = False
    if comm.rank == 0:
        comm.end_reduce(handle, segments[0], torch.float32, "gradients")
        del buffer, handle, segments
        gc.collect()
        other = shared_memory.allocate(2 * NUMEL, torch.float32).fill_(torch.nan)
        early = other.data_ptr() == address
    dist.barrier()
    right = True
    if comm.rank == 1:
        total = comm.end_reduce(handle, segments[1], torch.float32, "gradients")
        right = torch.equal(total, 2 * ((torch.arange(2 * NUMEL) % 5).chunk(2)[1]).float())
        del buffer, handle, segments
    comm.settle("gradients", True)
    return early, shared_memory.allocate(2 * NUMEL, torch.float32).data_ptr() == address, right


@pytest.mark.parametrize("channel", CHANNELS)
def test_block_is_reused_after_all_peers_have_read_it(channel: str) -> None:
    assert run_ranks(2, frees_too_early, environment=by(channel)) == [(False, True, True)] * 2


def sends_again_before_the_peer_has_read() -> list[float]:
    """Rank 1 reads late. Returns the largest values of two gathers with one tag."""
    comm, found = connect(), []
    store = dist.distributed_c10d._get_default_store()
    first, second = numbers(NUMEL, 0), numbers(NUMEL, 0) + 5
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
    return found


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_message_does_not_replace_one_that_was_not_read(channel: str) -> None:
    found = run_ranks(2, sends_again_before_the_peer_has_read, environment=by(channel))
    assert found == [[4.0, 9.0]] * 2


def drains_what_is_under_way() -> bool:
    """A prefetch that no rank has waited for yet."""
    comm, own, full = connect(), numbers(NUMEL, dist.get_rank()), torch.empty(2 * NUMEL)
    handle = comm.begin_gather(own, full, full.chunk(2), 4)
    comm.settle("what was sent")
    own.fill_(9.0)
    dist.barrier()
    comm.end_gather(handle, "parameters")
    return bool((full.max() == 4.0).item())


@pytest.mark.parametrize("channel", CHANNELS)
def test_flush_sends_ends_unfinished_gathers(channel: str) -> None:
    assert run_ranks(2, drains_what_is_under_way, environment=by(channel)) == [True] * 2


# -- failures


def does_not_read() -> str:
    """Rank 0 waits until its gather was read; rank 1 waits for another gather before it reads."""
    comm = connect()
    own, full, other = numbers(NUMEL, comm.rank), torch.empty(2 * NUMEL), torch.empty(2 * NUMEL)

    def step() -> None:
        first = comm.begin_gather(own, full, full.chunk(2), 4)
        if comm.rank == 0:
            comm.end_gather(first, "the parameters of 'a'")
            comm.settle("what was sent")
        second = comm.begin_gather(own, other, other.chunk(2), 8)
        comm.end_gather(second, "the parameters of 'b'")

    return message_of(step)


@pytest.mark.parametrize("channel", CHANNELS)
def test_error_names_a_rank_that_never_reads_a_message(channel: str) -> None:
    assert_alike(
        run_ranks(2, does_not_read, environment=by(channel)),
        "rank 0 waits for rank 1 to take the parameters of 'a'",
        "rank 1 waits for the parameters of 'b' from rank 0",
    )


def reads_what_was_given_up() -> str:
    comm = connect()
    own, full = numbers(NUMEL, comm.rank), torch.empty(2 * NUMEL)
    handle = comm.begin_gather(own, full, full.chunk(2), 4)
    dist.barrier()
    if comm.rank == 0:
        shared_memory.bump_epoch()
        own.fill_(9.0)
    dist.barrier()
    if comm.rank == 0:
        return message_of(lambda: comm.settle("what was sent"))
    return message_of(lambda: comm.end_gather(handle, "the parameters of 'a'"))


@pytest.mark.parametrize("channel", CHANNELS)
def test_memory_of_a_failed_rank_is_not_used(channel: str) -> None:
    first, second = run_ranks(2, reads_what_was_given_up, group_timeout=20, environment=by(channel))
    assert "the communication of rank 0 has failed" in second
    assert first.startswith("Waiting for")


# -- blocks


def test_block_has_the_size_of_its_tensor_and_is_aligned_to_64_bytes() -> None:
    for numel in (NUMEL, NUMEL + 1):
        tensor = shared_memory.zeros(numel, torch.float32)
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
    again = shared_memory.zeros(NUMEL, torch.float32)
    assert again.data_ptr() == address
    assert not again.any()


def test_arena_returns_pages_beyond_its_limit_to_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = arena.Arena()
    monkeypatch.setattr(shared_memory, "_arena", mine)
    monkeypatch.setattr(arena, "KEPT_NBYTES", 8 << 20)
    blocks = [shared_memory.allocate(1 << 20, torch.float32).fill_(1.0) for _ in range(8)]
    held = [os.fstat(mine.chunks[0].fd).st_blocks * 512]
    blocks.clear()
    held.append(os.fstat(mine.chunks[0].fd).st_blocks * 512)
    assert 32 << 20 <= held[0] <= 33 << 20
    assert 8 << 20 <= held[1] <= 9 << 20
    assert not shared_memory.zeros(8 << 20, torch.float32).any()


def test_arena_merges_adjacent_free_ranges() -> None:
    mine = arena.Arena()
    blocks = [mine.take(1 << 20, False) for _ in range(4)]
    for index in (0, 2, 1, 3):
        blocks[index] = None
    assert mine.take(4 << 20, False) is not None
    assert len(mine.chunks) == 1
    assert len(mine.chunks[0].free) == 1


def test_tensors_are_ordinary_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = arena.Arena()
    monkeypatch.setattr(shared_memory, "_arena", mine)

    def refuse(*args: Any) -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr(arena, "Chunk", refuse)
    assert shared_memory.identity() == bytes(shared_memory.IDENTITY_NBYTES)
    tensor = shared_memory.zeros(NUMEL, torch.float32)
    assert shared_memory.locate(tensor) is None
    assert not tensor.any()
    copy_of_it = shared_memory.copy_of(torch.ones(NUMEL))
    assert shared_memory.locate(copy_of_it) is None
    assert torch.equal(copy_of_it, torch.ones(NUMEL))


def test_copies_of_a_block_are_ordinary_tensors() -> None:
    shard = nn.Parameter(numbers(NUMEL, 0))
    file = io.BytesIO()
    torch.save(shard, file)
    assert len(file.getvalue()) < 4 * NUMEL + 4096
    file.seek(0)
    for other in (torch.load(file), copy.deepcopy(shard)):
        assert torch.equal(other, shard)
        assert other.data_ptr() != shard.data_ptr()
        assert shared_memory.locate(other) is None


def writes_after_a_fork() -> tuple[float, int]:
    """The value in a parent's block after its child has written there, and the child's status."""
    block = numbers(NUMEL, 0).fill_(2.0)
    child = os.fork()
    if child == 0:
        try:
            right = bool((block == 2.0).all()) and shared_memory.locate(block) is None
            block.fill_(5.0)
            new = shared_memory.allocate(NUMEL, torch.float32).fill_(1.0)
            right = right and bool((block == 5.0).all()) and shared_memory.locate(new) is not None
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return block.max().item(), status


def test_writes_of_a_forked_process_stay_private() -> None:
    assert run_ranks(1, writes_after_a_fork) == [(2.0, 0)]


# -- training


TRAINED: list[dict[str, Any]] = [
    {},
    {"sharding_strategy": ShardingStrategy.NO_SHARD},
    {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True},
    {
        "mixed_precision": MixedPrecision(reduce_dtype=torch.float64),
        "sharding_strategy": ShardingStrategy.NO_SHARD,
    },
]


def trains_through_shared_memory(replicas: int) -> None:
    with sharing_from(1):
        for options in TRAINED if replicas == 1 else [{"replicas": replicas}]:
            pair = make_pair(lambda: nn.Sequential(Block(), Block(), nn.Linear(DIM, 3)), **options)
            for _ in range(2):
                pair.step(lambda m, x, turn: backward(m(x).pow(2).mean()))


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_training_matches_unsharded_when_all_messages_are_read_in_place(
    ranks: int, replicas: int
) -> None:
    run_ranks(ranks, trains_through_shared_memory, replicas)


def train(full_up: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
    """Parameters after each of four steps; in the last two, ``full_up`` get no more shared
    memory."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Sequential(Block(), Block(), nn.Linear(DIM, 3)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for number in range(4):
        with no_room() if number > 1 and dist.get_rank() in full_up else contextlib.nullcontext():
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, DIM) + dist.get_rank()).pow(2).mean().backward()
            optimizer.step()
        found += [parameter.detach().clone() for parameter in model.parameters()]
    return found


def trains_when_memory_runs_out(full_up: tuple[int, ...]) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in (
        {},
        {"mixed_precision": precision},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ):
        with sharing_from(1 << 62):
            sent = train((), **options)
        with sharing_from(1):
            found = train(full_up, **options)
        assert all(torch.equal(one, other) for one, other in zip(found, sent, strict=True)), options


@pytest.mark.parametrize(("ranks", "full_up"), [(2, (0, 1)), (3, (2,))])
def test_training_is_bit_equal_when_shared_memory_runs_out(
    ranks: int, full_up: tuple[int, ...]
) -> None:
    run_ranks(ranks, trains_when_memory_runs_out, full_up)


def where_things_lie() -> tuple[bool, bool, list[int], int]:
    """For a large replicated unit: whether its gradient lies in one block in all steps, whether its
    shard does, elements copied, and bytes left."""
    pair = make_pair(
        lambda: nn.Linear(1024, 1024, bias=False), (), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    model, shards = pair.model, make_pair(lambda: nn.Linear(1024, 1024, bias=False), ()).model
    addresses, copied = set(), []
    for _ in range(4):
        with Operations() as seen:
            model(torch.ones(1, 1024)).sum().backward()
        (parameter,) = model.parameters()
        addresses.add(parameter.grad.data_ptr())
        in_block = shared_memory.locate(parameter.grad) is not None
        copied = [
            numel
            for numel in seen.written["copy_"] + seen.written["clone"] + seen.written["_to_copy"]
            if numel > 1024
        ]
        parameter.grad = None
    (shard,) = shards.parameters()
    is_shared = shared_memory.locate(shard.detach()) is not None
    return (
        in_block and len(addresses) == 1,
        is_shared,
        copied,
        model._runtime.groups[0].resident_nbytes,
    )


def test_shards_lie_in_blocks_and_a_replicas_reduce_buffer_becomes_its_gradient() -> None:
    # Copied are the gradient into the buffer, and the other rank's half of the sum.
    assert run_ranks(2, where_things_lie) == [(True, True, [1 << 20, 1 << 19], 0)] * 2
