"""How ranks of one host exchange data, for the environment of ``run_ranks``, also in a run that
forces another way on all other tests:

    FSDP_COMPAT_SAME_HOST=messages pytest ...    # or counters
    FSDP_COMPAT_MAP_FROM=1 pytest ...            # pads shards to pages: tests that count elements
                                                 # of small models fail"""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp_compat._comm.same_host import peers, shared_memory

COPIED = {"FSDP_COMPAT_SAME_HOST": "counters"}
MESSAGES = {"FSDP_COMPAT_SAME_HOST": "messages"}
# Shards of any size are mapped.
MAPPED = {"FSDP_COMPAT_SAME_HOST": "mapped", "FSDP_COMPAT_MAP_FROM": "1"}
# No shards are: a rank waits where it gathers parameters, and each rank has parts of small ones.
NOT_MAPPED = {"FSDP_COMPAT_MAP_FROM": str(1 << 62)}

mapped_or_sent = pytest.mark.parametrize(
    "environment", [MAPPED, MESSAGES], ids=["mapped", "messages"]
)
copied_or_sent = pytest.mark.parametrize(
    "environment", [COPIED, MESSAGES], ids=["copied", "messages"]
)


def num_mapped() -> int:
    """Return how many shards of any rank this process has mapped into all-gather outputs."""
    gc.collect()
    return peers._num_mapped


# -- what keeps rank 1 from mapping shards


@contextlib.contextmanager
def no_more(limit: int) -> Iterator[None]:
    """The system gives rank 1 no more descriptors, or too little address space for a chunk of
    another rank's memory."""
    gc.collect()  # of earlier tests: mappings of other ranks' memory
    before = resource.getrlimit(limit)
    allowed = 3  # descriptors: these are open, and new ones would be higher
    if limit == resource.RLIMIT_AS:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        allowed = pages * resource.getpagesize() + shared_memory.CHUNK_NBYTES // 2
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(limit, (allowed, before[1]))
        yield
    finally:
        resource.setrlimit(limit, before)


@contextlib.contextmanager
def low_address_space() -> Iterator[None]:
    """Rank 1 cannot map memory of rank 0 that it has not mapped in an earlier test."""
    arena = shared_memory.Arena() if dist.get_rank() == 0 else shared_memory._arena
    with mock.patch.object(shared_memory, "_arena", arena), no_more(resource.RLIMIT_AS):
        yield


def few_mappings() -> contextlib.AbstractContextManager[None]:
    return mock.patch.object(peers, "MAX_MAPPED", 5 if dist.get_rank() == 1 else 100)


def no_list_of_pages() -> contextlib.AbstractContextManager[None]:
    """Writes cannot be found, on any rank."""
    return mock.patch.object(peers, "PAGEMAP", "/proc/self/no such file")
