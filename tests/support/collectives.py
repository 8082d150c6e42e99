"""Collectives of a communicator from their beginning to their end, the bytes that they send, and
the operations that they take."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compat._comm.board.store_rendezvous import StoreRendezvous
from fsdp_compat._comm.communicator import communicator
from fsdp_compat._comm.mesh import axis_of
from fsdp_compat._comm.transport import VALUES

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


@contextlib.contextmanager
def counting_sends() -> Iterator[list[int]]:
    """Yield the bytes of each message that gloo gets, below every counter of the package. What
    ranks compare does not count."""
    found: list[int] = []
    send = dist.ProcessGroup.send

    def counted(self: Any, tensors: list[Tensor], *args: Any) -> Any:
        if args[1] != VALUES:
            found.extend(tensor.nbytes for tensor in tensors)
        return send(self, tensors, *args)

    with mock.patch.object(dist.ProcessGroup, "send", counted):
        yield found


@contextlib.contextmanager
def checked_calls() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Yield the calls that this rank checks with others, each with the ranks that make it."""
    found: list[tuple[str, tuple[int, ...]]] = []
    meet = StoreRendezvous.meet

    def noted(self: Any, call: str, *args: Any) -> None:
        found.append((call, self.activity.members))
        meet(self, call, *args)

    with mock.patch.object(StoreRendezvous, "meet", noted):
        yield found


class Operations(TorchDispatchMode):
    """Counts operations, and the sizes that copies and divisions write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()
        self.written: dict[str, list[int]] = collections.defaultdict(list)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        self.names[name] += 1
        if name in ("copy_", "div_", "mul_", "zero_", "add_", "clone", "_to_copy", "add", "div"):
            self.written[name].append(args[0].numel())
        elif name in ("_foreach_copy_", "_foreach_zero_"):
            self.written[name].append(sum(tensor.numel() for tensor in args[0]))
        return function(*args, **(kwargs or {}))


def assert_circle(message: str, *facts: str) -> None:
    """Assert that it is the error of ranks that wait for each other, with these facts."""
    beginning = r"Waiting for .* can never end: ranks wait for each other\."
    assert re.match(beginning, message), message or "nothing was noticed"
    assert "allow_unused_units=True" in message
    for fact in facts:
        assert fact in message, f"{fact!r} is not in\n{message}"
