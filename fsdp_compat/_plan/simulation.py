"""A process that stands for one rank of many, and a meta device that answers as a GPU would."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .._comm.board import progress
from .._engine import device
from .._torch_private import simulation
from ..errors import UsageError


@contextlib.contextmanager
def one_of(world_size: int) -> Iterator[None]:
    """A context for rank 0, whose shards are the largest, of a fake process group, in which both
    front ends compute on meta."""
    if dist.is_initialized():
        raise UsageError.of(
            "A plan needs a process without a process group.",
            expected="plan(...) before init_process_group, or in a process of its own",
            got="an initialised default process group",
            where="plan(...)",
            fix="call plan() first, or run fsdp-compat plan",
        )
    simulation.join_fake_group(world_size)
    try:
        with device.simulated():
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    # Not by a TorchFunctionMode: it is off in Tensor.backward, where checkpoints recompute.
    original = torch.nn.functional.scaled_dot_product_attention
    fused = simulation.fused_attention(original)
    torch.nn.functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = original


class Assumptions:
    """Values that code asks for, and that tensors on meta do not have."""

    def __init__(self) -> None:
        self.made = dict[str, bool | float | int]()  # by line

    def answer(self, operation: Any, args: Any) -> Any:
        """Return 1 or True if the operation asks for a value, else None."""
        if not simulation.asks_for_value(operation) or not args[0].is_meta:
            return None
        dtype = args[0].dtype
        value = True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        self.made[progress.location_of(sys._getframe(2))] = value
        return value
