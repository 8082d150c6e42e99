"""Mappings of files one behind the other: what is read, what is written, and what is left."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fsdp_compat._comm.host_memory import is_in_pages
from fsdp_compat._comm.same_host import peers as mapped
from fsdp_compat._comm.same_host import shared_memory
from fsdp_compat._comm.same_host.memory_files import PAGE_NBYTES
from fsdp_compat._comm.same_host.peers import MappedFiles, map_shards

NUMEL = 3 * PAGE_NBYTES // 4


def shard(value: float) -> torch.Tensor:
    """In a block."""
    return shared_memory.allocate(NUMEL, torch.float32).fill_(value)


def mapping_of(shards: list[torch.Tensor], old: MappedFiles | None = None) -> MappedFiles:
    """As if all ranks were this process."""
    made = old or MappedFiles(len(shards), NUMEL, torch.float32)
    for rank, each in enumerate(shards):
        place = shared_memory.locate(each)
        assert place is not None
        made.put(rank, place.fd, place.offset)
    return made


def test_full_buffer_is_the_shards_and_follows_them() -> None:
    shards = [shard(1.0), shard(2.0), shard(3.0)]
    full = mapping_of(shards).full
    assert full.shape == (3 * NUMEL,)
    assert torch.equal(full, torch.cat(shards))
    shards[1].fill_(7.0)
    assert torch.equal(full, torch.cat(shards))


def test_writes_are_private_and_are_found_and_forgotten() -> None:
    shards = [shard(1.0), shard(2.0)]
    mapping = mapping_of(shards)
    assert mapping.full.sum() == 3 * NUMEL  # read: its pages are in memory
    assert not mapping.has_writes()
    mapping.full[NUMEL + 5] = 9.0
    assert mapping.has_writes()
    assert (shards[0] == 1.0).all() and (shards[1] == 2.0).all()
    mapping.forget_writes()
    assert not mapping.has_writes()
    assert torch.equal(mapping.full, torch.cat(shards))


def test_shards_that_have_moved_are_mapped_again_at_the_same_addresses() -> None:
    first, second = [shard(1.0), shard(2.0)], [shard(3.0), shard(4.0)]
    mapping = mapping_of(first)
    full = mapping.full
    full[0] = 9.0
    assert mapping_of(second, mapping).full is full
    assert torch.equal(full, torch.cat(second))


def test_what_cannot_be_mapped_is_refused() -> None:
    good = shard(1.0)
    place = shared_memory.locate(good)
    assert place is not None
    [found] = map_shards(0, {}, [good], [[place]], [None])
    assert torch.equal(found.full, good)
    with pytest.raises(OSError, match="begin at a page"):
        map_shards(0, {}, [good], [[place._replace(offset=place.offset + 4)]], [None])
    with (
        mock.patch.object(mapped, "MAX_MAPPED", mapped._num_mapped),
        pytest.raises(OSError, match="too many mappings"),
    ):
        map_shards(0, {}, [good], [[place]], [None])
    assert map_shards(0, {}, [good], [[place]], [found]) == [found]


def test_only_large_shards_of_whole_pages_can_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_COMPAT_MAP_FROM", raising=False)
    assert is_in_pages(1 << 17, torch.float32) and is_in_pages(1 << 18, torch.bfloat16)
    assert not is_in_pages((1 << 17) - 1024, torch.float32)
    assert not is_in_pages((1 << 17) + 4, torch.float32)
    monkeypatch.setenv("FSDP_COMPAT_MAP_FROM", "1")
    assert is_in_pages(1024, torch.float32) and not is_in_pages(512, torch.float32)
