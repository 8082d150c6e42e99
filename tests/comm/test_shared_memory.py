"""Blocks of shared memory, how other ranks find and check them, and ranks that have none."""

from __future__ import annotations

import contextlib
import copy
import io
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import ShardingStrategy
from fsdp_compat._comm.same_host import shared_memory
from fsdp_compat._comm.same_host.peers import PeerArena
from tests.support.collectives import Operations, connect, counting_sends, gathered
from tests.support.errors import message_of
from tests.support.forks import forked
from tests.support.parity import make_pair
from tests.support.ranks import on_ranks

NUMEL = 1_200_001  # more than one piece of a sum, and no multiple of anything


def in_block(numel: int) -> torch.Tensor:
    return shared_memory.allocate(numel, torch.float32).copy_(torch.arange(numel) % 5)


# -- ranks that have none


def assert_sends(comm: Any) -> None:
    with counting_sends() as sent:
        full = gathered(comm, torch.full((NUMEL,), float(comm.rank)), comm.new_tag(""))
    assert full[::NUMEL].tolist() == [*range(comm.ranks)]
    assert sum(sent) >= 4 * NUMEL


@on_ranks(3)
def test_one_rank_without_readable_memory_lets_all_send_values() -> None:
    hidden = mock.patch.object(shared_memory, "first_location", return_value=None)
    with hidden if dist.get_rank() == 2 else contextlib.nullcontext():
        assert_sends(connect())


@on_ranks(3)
def test_ranks_without_files_in_memory_let_all_send_values() -> None:
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            make = os.memfd_create
            stack.callback(setattr, os, "memfd_create", make)
            del os.memfd_create
            stack.enter_context(mock.patch.object(shared_memory, "arena", shared_memory.Arena()))
        assert_sends(connect())


@on_ranks(3)
def test_a_rank_without_more_shared_memory_names_the_limit_on_all_ranks() -> None:
    """After it has connected."""
    comm = connect()
    with contextlib.ExitStack() as stack:
        if comm.rank == 2:
            full = mock.patch.object(shared_memory.Chunk, "take", return_value=None)
            refused = OSError(24, "no descriptors")
            stack.enter_context(full)
            stack.enter_context(mock.patch.object(os, "memfd_create", side_effect=refused))
        message = message_of(lambda: gathered(comm, torch.ones(NUMEL), 4))
    assert "rank 2 can get no more shared memory: no more file descriptors" in message


# -- what a rank tells of its memory


def test_peer_memory_checks_a_location_before_reading() -> None:
    own = in_block(NUMEL)
    mine, place = shared_memory.arena, shared_memory.locate(own)
    assert place is not None
    peer = PeerArena(os.getpid())
    assert torch.equal(peer.view(place, NUMEL, torch.float32), own)
    nbytes = mine.chunks[0].nbytes
    small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    device, (read, write) = os.open("/dev/zero", os.O_RDONLY), os.pipe()
    try:
        os.ftruncate(small, 1 << 20)
        for wrong in (
            {"offset": -64},
            {"offset": nbytes - 4 * NUMEL + 4},
            {"offset": place.offset + 1},
            {"offset": 1 << 62},
            {"number": 999, "fd": -1},
            {"number": 999, "fd": device},
            {"number": 999, "fd": read},
            {"number": 999, "fd": small},
        ):
            with pytest.raises(OSError):
                peer.view(place._replace(**wrong), NUMEL, torch.float32)
        with pytest.raises(PermissionError):
            os.ftruncate(mine.chunks[0].file.fd, 1)
    finally:
        for fd in (small, device, read, write):
            os.close(fd)


# -- blocks


def test_arena_returns_pages_beyond_its_limit_to_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = shared_memory.Arena()
    monkeypatch.setattr(shared_memory, "arena", mine)
    monkeypatch.setattr(shared_memory, "KEPT_NBYTES", 8 << 20)
    blocks = [shared_memory.allocate(1 << 20, torch.float32).fill_(1.0) for _ in range(8)]
    held = [os.fstat(mine.chunks[0].file.fd).st_blocks * 512]
    blocks.clear()
    held.append(os.fstat(mine.chunks[0].file.fd).st_blocks * 512)
    assert 32 << 20 <= held[0] <= 33 << 20
    assert 8 << 20 <= held[1] <= 9 << 20
    assert not shared_memory.allocate(8 << 20, torch.float32, zero=True).any()


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
