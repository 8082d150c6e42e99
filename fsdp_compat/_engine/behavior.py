"""How a unit behaves, which users may change at any time, even before the unit exists; and how its
gradients are reduced."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._comm.transport import Transport
from .device import ON_DEVICE, OffloadPolicy


class CommHook(typing.NamedTuple):
    """A user's function that averages gradients: called with (state, flat gradient [ranks * S],
    empty output [S]) or, if they are not scattered, with (state, flat gradient [S]), in place."""

    state: Any
    function: Callable[..., Any]


class CustomReduceScatter(typing.NamedTuple):
    """A user's reduce-scatter: ``comm`` has allocate(size, dtype=, device=), and is called with
    (output_tensor=, input_tensor=, group=, op=)."""

    comm: Any
    group: dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class ReducePolicy:
    """How the gradients of a unit are reduced. The user may replace it, for later reductions."""

    sync: bool = True  # backward reduces gradients
    over_replicas: bool = True  # False: sums over the shard axis are kept for a later backward
    divide_by: float | None = None  # None: the number of ranks
    rounds_first: bool = False  # rounds sums to the dtype of the reduction before dividing them
    # False: no gradient for parameters that no rank has used, by marks (ReduceForm.marks).
    keeps_unused: bool = True
    reduces_unused: bool = False  # zeros, also where a unit has no gradients at all
    hook: CommHook | None = None  # replaces the sum over the shard axis; with one_group, over both
    custom: CustomReduceScatter | None = None
    # Gets the reduced gradient shard [S] in the dtype of the reduction, and may change it.
    all_reduce_hook: Callable[[Tensor], None] | None = None
    all_reduce_stream: torch.Stream | None = None  # of the hook; None: that of reductions

    @functools.cached_property
    def finds_unused(self) -> bool:
        """True if unused parameters are found by marks. A user's hook may sum over further ranks:
        it sees no marks, and all parameters get gradients."""
        return not (self.keeps_unused or self.reduces_unused or self.all_reduce_hook is not None)


@dataclasses.dataclass(eq=False)
class Behavior:
    """What the user may change about one unit."""

    reshard_after_forward: bool = True
    # With reshard_after_forward: ranks that each keep rows of the unsharded parameters after
    # forward, and all-gather only among them in backward; 0: all ranks gather again.
    partial_ranks: int = 0
    partial_mesh: DeviceMesh | None = None  # 2-D: (outer, partial_ranks)
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduction: ReducePolicy = dataclasses.field(default_factory=ReducePolicy)
    allow_unused_units: bool = False  # ranks may use different units, and so parameters
    keeps_storage: bool = False  # unsharded parameters keep their memory while the unit is sharded
    output_dtype: torch.dtype | None = None  # of forward's outputs; None: as they are
    forward_prefetch: Sequence[Behavior] = ()  # unsharded with this unit; (): a guess is
    backward_prefetch: Sequence[Behavior] = ()
    # The user's: has allocate(size, dtype=, device=), and is called with (output_tensor=,
    # input_tensor=, group=, async_op=).
    custom_all_gather: Any = None
    process_group: dist.ProcessGroup | None = None  # of the shard axis, for the user's collectives


@dataclasses.dataclass(eq=False)
class ReduceAxes:
    """The axes that a group's gradients are reduced over, in this order, with a tag each."""

    shard: Transport
    replica: Transport
    shard_tag: int
    replica_tag: int
    offload: OffloadPolicy = ON_DEVICE
    one_group: bool = False  # see Mesh
    is_hybrid: bool = False  # see Mesh

    @property
    def ranks(self) -> int:
        return self.shard.ranks * self.replica.ranks

    @functools.cached_property
    def have_replicas(self) -> bool:
        return self.is_hybrid or self.replica.ranks > 1

    @functools.cached_property
    def keep_buffers(self) -> bool:
        """True if one buffer can be used for every reduction."""
        return self.shard.ranks > 1 and not self.shard.reads_later

    def settle(self, what: str) -> None:
        """Wait until the gradients of finished reductions may be overwritten."""
        self.offload.wait_copies()
        self.replica.settle(what, only_reductions=True)  # peers may read them


class Divisor:
    """The divisor of sums."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.is_exact = math.frexp(value)[0] == 0.5  # a power of two: division does not round
        # None: 1. A 0-d CPU tensor, because torch would build one from a number in every call; in
        # fp32 if that is exact, as are most sums, because a cast would cost as much again.
        self.tensor: Tensor | None = None
        if value != 1:
            self.tensor = torch.tensor(value, dtype=torch.float32, device="cpu")
            if self.tensor.item() != value:
                self.tensor = torch.tensor(value, dtype=torch.float64, device="cpu")


def predivisor(ranks: int, dtype: torch.dtype) -> float:
    """Return the divisor of gradients before their reduction: about the square root of ``ranks`` in
    fp16, where sums could overflow; otherwise 1."""
    factor = 1
    while dtype == torch.float16 and ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)
