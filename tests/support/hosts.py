"""Ranks of one machine that take each other for ranks of several hosts.

with hosts((0, 0, 1, 1)):  # in every rank: the host of each rank
    model = FullyShardedDataParallel(model)"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch.distributed as dist

from fsdp_compat._comm.board import processes

# 2 hosts of 2 ranks, host by host and in turns
BY_HOST, BY_PLACE = (0, 0, 1, 1), (0, 1, 0, 1)


@contextlib.contextmanager
def hosts(of_ranks: Sequence[int]) -> Iterator[None]:
    """Ranks of different hosts do not find each other's processes, nor their memory."""
    name = f"{processes.host()}-{of_ranks[dist.get_rank()]}"
    with mock.patch.object(processes, "host", lambda: name):
        yield
