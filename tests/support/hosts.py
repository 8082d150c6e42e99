"""Ranks of one machine that take each other for ranks of several hosts.

with hosts((0, 0, 1, 1)):  # in every rank: the host of each rank
    model = FullyShardedDataParallel(model)"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch.distributed as dist

from fsdp_compat._comm import shared_memory
from fsdp_compat._comm.divergence import processes

# 2 hosts of 2 ranks, host by host and in turns
BY_HOST, BY_PLACE = (0, 0, 1, 1), (0, 1, 0, 1)


@contextlib.contextmanager
def hosts(of_ranks: Sequence[int]) -> Iterator[None]:
    """Ranks of different hosts do not find each other's memory, nor each other's processes."""
    host = of_ranks[dist.get_rank()]
    identity, name = shared_memory.identity, processes.host()

    def its_identity() -> bytes:
        found = identity()
        return bytes([host]) + found[1:] if any(found) else found

    with (
        mock.patch.object(shared_memory, "identity", its_identity),
        mock.patch.object(processes, "host", lambda: f"{name}-{host}"),
    ):
        yield
