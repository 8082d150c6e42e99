"""What a user may change about a unit at any time, also before the unit exists."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .dtypes import ComputeDtype
from .reduce_policy import ReducePolicy
from .user_changes import Freshness


class PrefetchedUnit(typing.Protocol):
    """A unit, as prefetch lists use it."""

    conduct: Conduct
    runtime: Any

    def unshard(self, dtype: ComputeDtype = ComputeDtype.TRAIN) -> None: ...


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
    unit: PrefetchedUnit | None = None  # once it exists
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
