"""Collectives of a communicator from their beginning to their end."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compat._comm.communicator import communicator
from fsdp_compat._comm.mesh import axis_of

CPU = torch.device("cpu")


def connect(group: dist.ProcessGroup | None = None) -> Any:
    """Return a communicator over the group, by default over all ranks. Collective."""
    return communicator(axis_of(group or dist.group.WORLD), CPU)


def gathered(
    comm: Any, own: Tensor, tag: int, *, dtype: torch.dtype | None = None, settle: bool = True
) -> Tensor:
    """Return the shards of all ranks, in ``dtype``."""
    full = torch.empty(comm.ranks * own.numel(), dtype=dtype or own.dtype)
    comm.end_gather(comm.begin_gather(own, full, full.chunk(comm.ranks), tag), f"tag {tag}")
    if settle:
        comm.settle("what was sent")
    return full


def reduced(
    comm: Any,
    buffer: Tensor,
    tag: int,
    *,
    divisor: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    settle: bool = True,
) -> Tensor:
    """Return this rank's segment of the sum over the ranks, in ``dtype``."""
    segments = list(buffer.chunk(comm.ranks))
    handle = comm.begin_reduce(buffer, segments, tag)
    for _ in range(comm.reduce_steps):
        handle = comm.continue_reduce(handle, dtype, tag, "gradients")
    total = comm.end_reduce(handle, segments[comm.rank], dtype, "gradients", divisor)
    if settle:
        comm.settle("gradients", True)
    return total


def all_reduced(
    comm: Any, total: Tensor, tag: int, *, divisor: Tensor | None = None, settle: bool = True
) -> Tensor:
    """Replace ``total`` by the sum over the ranks, and return it."""
    handle = comm.begin_all_reduce(total, tag, divisor)
    for _ in range(comm.all_reduce_steps):
        handle = comm.continue_all_reduce(handle, total, tag, "gradients")
    comm.end_all_reduce(handle, total, "gradients")
    if settle:
        comm.settle("gradients", True)
    return total
