"""How a group's gradients are reduced: over which ranks, divided by what, by whose function."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Any

import torch

from .._comm.communicator import Transport
from .device import ON_DEVICE, OffloadPolicy

__all__ = ["CommHook", "ReducePlan", "predivisor"]


class CommHook(typing.NamedTuple):
    """A user's function that sums and averages gradients.

    Where gradients are scattered it is called with (state, flat gradient [ranks * S], empty output
    [S]), otherwise with (state, flat gradient [S]), which it changes in place. It also divides.
    """

    state: Any
    function: Callable[..., Any]


def predivisor(ranks: int, dtype: torch.dtype) -> float:
    """Return the divisor of gradients before their reduction, about the square root of ``ranks``:
    otherwise sums of fp16 numbers overflow."""
    factor = 1
    while dtype == torch.float16 and ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """How a group's gradients are reduced: over the shard axis, then over the replica axis, under
    one tag each; then offloaded, if they are."""

    shard: Transport
    replica: Transport
    shard_tag: int
    replica_tag: int
    offload: OffloadPolicy = ON_DEVICE
    predivisor: float = 1.0  # of gradients before the reduction
    hook: CommHook | None = None  # replaces the sum over the shard axis; with one_group over both
    one_group: bool = False  # see Mesh
    grad_dtype: torch.dtype | None = None  # of the result; None: the shard's
    is_hybrid: bool = False  # see Mesh
    ranks: int = dataclasses.field(init=False)
    # Of the sum; None: 1. A 0-d tensor on the CPU, which torch would make of a number in each call.
    # In fp32 if that is exact: most sums have this dtype, and converting it costs as much again.
    divisor: torch.Tensor | None = dataclasses.field(init=False)
    is_exact: bool = dataclasses.field(init=False)  # the division rounds nothing

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.shard.ranks * self.replica.ranks)
        divisor = self.ranks / self.predivisor
        if self.hook is not None:  # it divides by the ranks that it sums over
            divisor = 1.0 if self.one_group else float(self.replica.ranks)
        tensor = torch.tensor(divisor, dtype=torch.float32, device="cpu")
        if tensor.item() != divisor:
            tensor = torch.tensor(divisor, dtype=torch.float64, device="cpu")
        object.__setattr__(self, "divisor", None if divisor == 1 else tensor)
        object.__setattr__(self, "is_exact", math.frexp(divisor)[0] == 0.5)
