"""What a user may change about a unit at any time, also before the unit exists; and how gradients
are reduced: what is decided for a unit, and which ranks a group's go to."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._comm.transport import Transport
from .device import ON_DEVICE, OffloadPolicy
from .user_changes import Freshness


class CommHook(typing.NamedTuple):
    """A user's function that sums and averages gradients.

    Where gradients are scattered it is called with (state, flat gradient [ranks * S], empty output
    [S]), otherwise with (state, flat gradient [S]), which it changes in place. It also divides.
    """

    state: Any
    function: Callable[..., Any]


class CustomReduceScatter(typing.NamedTuple):
    """A user's reduce-scatter: ``comm`` has allocate(size, dtype=, device=), and is called with
    (output_tensor=, input_tensor=, group=, op=)."""

    comm: Any
    group: dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class ReducePolicy:
    """How the gradients of a unit are reduced. The user may exchange it at any time; a reduction
    goes by the one that it finds when it starts."""

    sync: bool = True  # backward reduces gradients
    over_replicas: bool = True  # if there are some; False: sums over the shard axis are kept
    divide_by: float | None = None  # None: the number of ranks
    rounds_first: bool = False  # sums, to the dtype of the reduction, before they are divided
    # False: no gradient for parameters that no rank has used. Marks that travel with the gradients
    # tell which these are, so that all ranks know the same (ReduceForm.marks).
    keeps_unused: bool = True
    reduces_unused: bool = False  # zeros, also where a unit has no gradients at all
    hook: CommHook | None = None  # replaces the sum over the shard axis; with one_group over both
    custom: CustomReduceScatter | None = None
    # Gets the reduced gradient shard [S] in the dtype of the reduction, and may change it.
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_stream: torch.Stream | None = None  # that the hook runs on; None: as reductions

    @functools.cached_property
    def finds_unused(self) -> bool:
        """True if parameters that no rank has used are found by their marks. A user's hook may sum
        over further ranks: it sees no marks, and all parameters get gradients."""
        return not (self.keeps_unused or self.reduces_unused or self.all_reduce_hook is not None)


@dataclasses.dataclass(eq=False)
class Conduct:
    """How one unit behaves."""

    reshard_after_forward: bool = True
    # With reshard_after_forward: backward all-gathers among so many ranks, each of which keeps its
    # rows of the unsharded parameters after forward; 0: among all.
    partial_ranks: int = 0
    partial_mesh: Any = None  # a 2-D DeviceMesh (outer, partial_ranks)
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduction: ReducePolicy = dataclasses.field(default_factory=ReducePolicy)
    allow_unused_units: bool = False  # ranks may use different units, and so parameters
    keeps_storage: bool = False  # unsharded parameters keep their memory while sharded
    output_dtype: torch.dtype | None = None  # of forward's outputs; None: as they are
    # The user has called unshard(): until the next forward has ended, or until reshard().
    pinned: bool = False
    forward_prefetch: Sequence[Conduct] = ()  # unsharded with this unit, instead of guesses
    backward_prefetch: Sequence[Conduct] = ()
    # The user's: allocate(size, dtype=, device=) and (output_tensor=, input_tensor=, group=,
    # async_op=).
    custom_all_gather: Any = None
    process_group: dist.ProcessGroup | None = None  # of the shard axis, for the user's collectives
    unit: Any = None  # a Unit, once it exists
    num_holders: int = -1  # of the unsharded parameters' memory, see Unit.watch_holders
    fewest_holders: int = 0  # that were ever seen; 0: not yet
    has_views: bool = False  # the user's, of unsharded parameters: their memory is not freed
    # Without one the unit is unsharded only inside forward and backward, and between them if it is
    # kept; modules show sharded parameters in between.
    freshness: Freshness | None = None
    # Without tags: weak references to the calls of which graphs exist. All of them pass before the
    # unit is reduced.
    calls_in_graphs: list[Any] = dataclasses.field(default_factory=list)
    # Of a unit of several modules: those that were not called yet in this pass.
    to_run: set[nn.Module] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class ReduceAxes:
    """Where a group's gradients go: over the shard axis, then over the replica axis, under one tag
    each; then they are offloaded, if they are."""

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
        """Wait until the gradients of finished reductions may be written to."""
        self.offload.wait_readers()
        self.replica.settle(what, only_reductions=True)  # peers may read them


class Divisor:
    """What sums are divided by."""

    __slots__ = ("is_exact", "tensor", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.is_exact = math.frexp(value)[0] == 0.5  # the division rounds nothing
        # None: 1. A 0-d tensor on the CPU, which torch would make of a number in each call. In fp32
        # if that is exact: most sums have this dtype, and converting it costs as much again.
        self.tensor: torch.Tensor | None = None
        if value != 1:
            self.tensor = torch.tensor(value, dtype=torch.float32, device="cpu")
            if self.tensor.item() != value:
                self.tensor = torch.tensor(value, dtype=torch.float64, device="cpu")


def predivisor(ranks: int, dtype: torch.dtype) -> float:
    """Return the divisor of gradients before their reduction, about the square root of ``ranks``:
    otherwise sums of fp16 numbers overflow."""
    factor = 1
    while dtype == torch.float16 and ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)
