"""How a unit behaves, and how its gradients are reduced: what users may change at any time, even
before the unit exists."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


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
