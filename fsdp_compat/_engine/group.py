"""Parameter groups: the parameters of a unit that are all-gathered and reduced in one buffer."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._comm.board import events
from .._comm.communicator import communicator
from .._comm.mesh import Mesh
from .._comm.transport import Transport
from ..errors import AssertedStateError
from .behavior import Behavior
from .communicators import ReduceAxes
from .device import ON_DEVICE, OffloadPolicy, on_host, side_stream
from .dtypes import ComputeDtype, Precision
from .gradients import Gradients, is_large
from .group_memory import GroupMemory
from .requires_grad import RequiresGrad
from .sources import (
    COPY_OF_SHARDS,
    IN_PLACE,
    VIEW_OF_SHARDS,
    AllGather,
    CustomAllGather,
    PartialShard,
    Source,
)
from .store import ParamStore

# The oldest first, with the numbers of the lines that made it.
all_groups: weakref.WeakKeyDictionary[Group, list[int]] = weakref.WeakKeyDictionary()


class Group:
    """One parameter group's buffers, in-flight collectives and received gradients."""

    def __init__(
        self,
        store: ParamStore,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        offload: bool = False,
        reshard_after_forward: bool = True,
        behavior: Behavior | None = None,
    ) -> None:
        """offload: the shard is on the CPU. behavior: of the unit, if the user may change it (see
        ``is_flat``). Collective: the mesh, once per process group."""
        self.store, self.device, self.behavior = store, device, behavior
        precision = precision.for_grads_of(store.sharded_params[0].parameter)
        self.offload: OffloadPolicy = on_host(device) if offload else ON_DEVICE
        # One per dtype computed in: see `use_dtype`.
        self.memories = [
            GroupMemory(store, mesh.shard.ranks, dtype, device, self.offload.is_offloaded)
            for dtype in dict.fromkeys((precision.gather, precision.evaluate or precision.gather))
        ]
        self.memory = self.memories[0]  # of the dtype computed in now
        self.shard: Transport = communicator(mesh.shard, device)
        self.replica: Transport = communicator(mesh.replica, device)
        _ = self.tensor_parallel  # connects along these axes
        self.tags: dict[Transport, int] = {}  # by axis of several ranks, once these agree
        all_groups[self] = [line for _, line in traceback.walk_stack(None)]
        self._all_gather = AllGather(store, self.shard, device, self.offload)
        self._custom = CustomAllGather(store, self.shard, device, self.offload, behavior)
        self._source: Source = IN_PLACE  # of unsharded values, until they are readable or given up
        tag = -id(self)  # of no other group, until ranks have agreed on one: see `use_tag`
        axes = ReduceAxes(
            self.shard, self.replica, tag, tag, self.offload, mesh.one_group, mesh.is_hybrid
        )
        # Gradients of large parameters are moved to the reduce buffer as they come, others in
        # post-backward. So are all on a side stream, and where backward begins with all units
        # unsharded: a buffer wider than the parameters must not be allocated before a reshard.
        # `Checks._check_units` registers their hooks, before the first forward that trains them.
        on_side = side_stream(device, "reduce") is not None
        takes_large = not on_side and (
            reshard_after_forward or precision.reduce.itemsize <= precision.gather.itemsize
        )
        params = [param for memory in self.memories for param in memory.unsharded_params]
        taken_at_once = {param for param in params if takes_large and is_large(param)}
        self.gradients = Gradients(
            store, self.memories, axes, taken_at_once, precision, device, behavior
        )
        self.partial: PartialShard | None = None  # the front end sets it
        hooked = taken_at_once
        if on_side:  # the first large gradient, of the last parameter, frees the previous unit's
            hooked = set([p for p in self.memory.unsharded_params if is_large(p)][-1:])
        self.requires_grad = RequiresGrad(store, self.memories, hooked)
        self.set_name("a unit")

    @property
    def is_flat(self) -> bool:
        """True for FullyShardedDataParallel. False for fully_shard, with all that follows: sharded
        parameters are DTensors that other code can use (so the store is not guarded), the user may
        change the unit's behavior, and it may stay unsharded over passes (Freshness), as flat units
        may only over forwards without a graph (``Unit.keep_unsharded``)."""
        return self.behavior is None

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype of all-gathers, and of computation in training."""
        return self.memories[0].all_gather_output.dtype

    @property
    def communicators(self) -> list[Transport]:
        """The communicators of all-gathers and reductions."""
        return [self.shard, self.replica, *(() if self.partial is None else (self.partial.axis,))]

    @property
    def tensor_parallel(self) -> list[Transport]:
        """The communicators of further mesh axes that the parameters are split over."""
        return [
            communicator(axis, self.device)
            for axis in self.store.tensor_parallel_axes
            if axis.ranks > 1
        ]

    def set_name(self, name: str) -> None:
        """Set the name of the unit, for errors."""
        self.name, self._what = name, f"the parameters of {name}"
        self.gradients.what = f"the gradients of {name}"

    def use_tag(self, axis: Transport, tag: int) -> None:
        """Mark messages along an axis with this tag from now on."""
        self.tags[axis], axes = tag, self.gradients.axes
        self._all_gather.tag = self.tags.get(self.shard, 0)
        axes.shard_tag = self.tags.get(self.shard, axes.shard_tag)
        axes.replica_tag = self.tags.get(self.replica, axes.replica_tag)

    # -- parameters

    def use_dtype(self, dtype: ComputeDtype) -> None:
        """Compute in this dtype from now on. Only while the group is sharded."""
        self.memory = self.memories[min(dtype, len(self.memories) - 1)]

    def choose_source(self) -> Source:
        """Return where the unsharded values come from this time."""
        memory, mapped = self.memory, self.memory.mapped_copy
        source: Source = self._all_gather
        if memory.aliased:
            source = IN_PLACE
        elif memory.viewed_mapping is not None:
            source = VIEW_OF_SHARDS
        elif self.partial is not None and self.partial.has_rows:
            source = self.partial
        elif self.behavior is not None and self.behavior.custom_all_gather is not None:
            source = self._custom
        elif mapped is not None and mapped.passes:
            source = COPY_OF_SHARDS
        self._source = source
        return source

    def finish_unshard(self) -> None:
        """Make the unsharded parameters readable. Collective: the shard axis."""
        self._source.end(self.memory, self._what)
        self._source = IN_PLACE

    def reshard(self, keeps_storage: bool = False) -> None:
        """Free the unsharded parameters, except with ``keeps_storage``. Collective: the shard axis,
        if their all-gather may be in flight."""
        self._source.drop(self._what)
        self._source = IN_PLACE
        self.memory.keeps_storage = keeps_storage
        self.memory.free()

    def keep_rows(self) -> list[nn.Parameter]:
        """Keep rows of the unsharded parameters for an all-gather among fewer ranks, free the
        parameters, and return those to show instead."""
        assert self.partial is not None
        params = self.partial.keep_rows()
        self._source = self.partial
        self.memory.free()
        return params

    def gather_full(self, own: Tensor | None = None) -> Tensor:
        """Gather every rank's ``own`` [S], by default the shard; return [ranks * S], in new memory
        unless there is one rank. Collective: the shard axis."""
        own = self.store.shard if own is None else own
        events.tell(events.GATHERING_STATE, self.name)
        full = self.shard.gather_now(self.offload.to_compute(own), "a gather of state")
        self.offload.wait_copies()  # the caller may write to the shard as soon as this returns
        return full

    def require_unsharded_params(self) -> None:
        """Raise AssertedStateError, and undo the change, if the user has given an unsharded
        parameter other memory."""
        for memory in self.memories:
            moved = memory.moved_params()
            if moved:
                memory.restore_views(self.store, moved)
                shape = tuple(memory.unsharded_params[moved[0]].shape)
                raise AssertedStateError.of(
                    "An unsharded parameter was given other memory, which all-gathers ignore.",
                    expected="changes by `.data =` between steps only",
                    got=f"other memory for parameter {moved[0]} (shape {shape})",
                    where=self.name,
                    fix="change it in place inside summon_full_params; this change was dropped",
                )


def start_groups(groups: Sequence[Group]) -> None:
    """Start to unshard a unit's groups, with one all-gather per axis where possible. Collective:
    the unit."""
    together: dict[Transport, list[tuple[AllGather, GroupMemory]]] = {}
    for group in groups:
        source, memory = group.choose_source(), group.memory
        if type(source) is AllGather and source.axis.coalesces and len(groups) > 1:
            together.setdefault(source.axis, []).append((source, memory))
        else:
            source.begin(memory)
    for gathers in together.values():
        AllGather.begin_together(gathers)
