"""Parameter groups: the parameters of a unit that are all-gathered and reduced in one buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .._comm.communicator import communicator
from .._comm.mesh import Mesh
from .._comm.transport import Handle, Transport
from ..errors import AssertedStateError
from . import events
from .behavior import Behavior, ReduceAxes
from .device import ON_DEVICE, OffloadPolicy, OnHost, side_stream
from .dtypes import ComputeDtype, Precision
from .events import Event
from .gradients import Gradients, is_large
from .partial import PartialShard
from .storage import GroupMemory
from .store import ParamStore
from .user_changes import RequiresGrad


class Group:
    """Runtime state of one parameter group: its buffers, in-flight collectives and received
    gradients. It knows no layout."""

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
        """Collective over the mesh, once per process group (see ``communicator``).

        offload: the shard is on the CPU. reshard_after_forward: of the unit. behavior: of the unit,
        if the user may change it; sharded parameters are DTensors then.
        """
        self.store, self.device, self.behavior = store, device, behavior
        self.offload: OffloadPolicy = OnHost(device) if offload else ON_DEVICE
        # One per dtype computed in: see `use_dtype`.
        self.memories = [
            GroupMemory(store, mesh.shard.ranks, dtype, device, self.offload.is_offloaded)
            for dtype in dict.fromkeys((precision.gather, precision.evaluate or precision.gather))
        ]
        self.memory = self.memories[0]  # of the dtype computed in now
        self.shard: Transport = communicator(mesh.shard, device)
        self.replica: Transport = communicator(mesh.replica, device)
        assert all(each.ranks > 1 for each in self.tensor_parallel)  # connected once, here
        self._tag = self.shard.new_tag()
        self._all_gather: Handle | None = None  # in flight
        self._wait_for_custom: Callable[[], None] | None = None  # for the user's last all-gather
        axes = ReduceAxes(
            self.shard,
            self.replica,
            self._tag,
            self.replica.new_tag(),
            self.offload,
            one_group=mesh.one_group,
            is_hybrid=mesh.is_hybrid,
        )
        # Gradients of large parameters are moved to the reduce buffer as they come. But if backward
        # begins with all units unsharded, a buffer wider than the parameters is not allocated
        # before the first unit is resharded: post-backward moves them. A side stream moves all
        # gradients together.
        streamed = side_stream(device, "reduce") is None and (
            reshard_after_forward or precision.reduce.itemsize <= precision.gather.itemsize
        )
        large = {
            param
            for memory in self.memories
            for param in memory.unsharded_params
            if streamed and is_large(param)
        }
        self.gradients = Gradients(store, self.memories, axes, large, precision, device, behavior)
        self.partial: PartialShard | None = None  # the front end sets it
        self.requires_grad = RequiresGrad(store, self.memories, large)
        self.set_name("a unit")

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype of all-gathers, and of computation in training."""
        return self.memories[0].all_gather_output.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of reductions."""
        return self.gradients.reduce_dtype

    @property
    def tensor_parallel(self) -> list[Transport]:
        """The communicators of further mesh axes that the parameters are split over."""
        return [
            communicator(axis, self.device)
            for axis in self.store.tensor_parallel_axes
            if axis.ranks > 1
        ]

    def set_name(self, name: str) -> None:
        """Set the name of the unit, which errors of this group mention."""
        self.name = name
        self.gradients.what = f"the gradients of {name}"

    # -- parameters

    @property
    def unsharded_params(self) -> list[nn.Parameter]:
        """The unsharded parameters in the dtype computed in now."""
        return self.memory.unsharded_params

    def use_dtype(self, dtype: ComputeDtype) -> None:
        """Compute in this dtype from now on. Only while the group is sharded."""
        self.memory = self.memories[min(dtype, len(self.memories) - 1)]

    def unshard(self) -> None:
        """Collective. Start the all-gather."""
        memory, behavior = self.memory, self.behavior
        if memory.aliased:
            return
        if memory.views_mapping:
            memory.forget_writes()
            return
        if self.partial is not None and self.partial.is_held:
            self.partial.begin_gather()
            return
        mapped = memory.mapped_copy
        if mapped is not None:
            mapped.is_due = bool(mapped.passes) and (
                behavior is None or behavior.custom_all_gather is None
            )
            if mapped.is_due:
                return
        memory.allocate()
        if self.store.has_extension:
            self.store.pack()
        side = side_stream(self.device, "gather")
        if side is None:
            self._begin_all_gather()
            return
        with side.work():
            self._begin_all_gather()

    def _begin_all_gather(self) -> None:
        shard, memory, behavior = self.store.shard, self.memory, self.behavior
        if behavior is not None and behavior.custom_all_gather is not None:
            _gather_by_custom(behavior, shard, memory, self.shard.rank)
            side = side_stream(self.device, "gather")
            self._wait_for_custom = None if side is None else side.mark()
            return
        self._all_gather = self.shard.begin_gather(
            shard, memory.all_gather_output, memory.segments, self._tag
        )
        if self.offload.is_offloaded:
            self.offload.was_read()

    def wait_for_unshard(self) -> None:
        """Collective. Make the unsharded parameters readable."""
        if self.partial is not None and self.partial.is_held:
            self.partial.end_gather(self._what)
            return
        if self.memory.mapped_copy is not None and self.memory.mapped_copy.is_due:
            self.memory.copy_mapped()
            return
        self._end_all_gather()
        if self.memory.has_copies:
            self.memory.fill_unsharded_params()

    def reshard(self, is_in_flight: bool = False) -> None:
        """Free the unsharded parameters. is_in_flight: their all-gather may not have ended; then
        collective."""
        if self.partial is not None and self.partial.is_held:
            self.partial.drop(self._what)
        if self.behavior is not None:
            self.memory.keeps_storage = self.behavior.keeps_storage or self.behavior.has_views
        if is_in_flight:
            if self._all_gather is None:
                # An exception may have come before the handle was stored here.
                self._all_gather = self.shard.unfinished_gather(self._tag)
            if not self.shard.has_failed:
                self._end_all_gather()  # memory that is being received into cannot be freed
            self._all_gather = None
        self.memory.free()

    @property
    def _what(self) -> str:
        return f"the parameters of {self.name}"

    def hold_partial(self) -> list[nn.Parameter]:
        """Copy rows of the unsharded parameters for an all-gather among fewer ranks, free the
        parameters, and return those to show instead."""
        assert self.partial is not None
        params = self.partial.hold()
        self.memory.free()
        return params

    def _end_all_gather(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self._wait_for_custom is not None:
            self._wait_for_custom()
            self._wait_for_custom = None
        if self._all_gather is not None:
            self.shard.end_gather(self._all_gather, self._what)
            self._all_gather = None  # only now: if the wait raises, memory is still received into

    def gather_full(self, own: torch.Tensor | None = None) -> torch.Tensor:
        """Gather every rank's ``own`` [S], by default the shard; return [ranks * S], in new memory
        unless there is one rank. Collective. Does not touch buffers of forward and backward."""
        own = self.store.shard if own is None else own
        events.tell(Event.STATE, self.name)
        full = self.shard.gather_now(self.offload.to_compute(own), "a gather of state")
        self.offload.wait_readers()  # the caller may write to the shard as soon as this returns
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
                    "An unsharded parameter was given other memory, which the next all-gather "
                    "would ignore.",
                    expected="changes by `.data =` between steps only, not from forward until "
                    "backward has ended",
                    got=f"other memory for parameter {moved[0]} (shape {shape})",
                    where=self.name,
                    fix="change it between steps, in place inside summon_full_params; this "
                    "change was dropped",
                )

    # -- gradients

    @property
    def resident_nbytes(self) -> int:
        """Bytes held now, beyond shard, gradients and optimizer state."""
        return (
            sum(memory.resident_nbytes for memory in self.memories)
            + self.gradients.resident_nbytes
            + (0 if self.partial is None else self.partial.resident_nbytes)
        )


def _gather_by_custom(
    behavior: Behavior, own: torch.Tensor, memory: GroupMemory, rank: int
) -> None:
    """All-gather ``own`` [S], cast if need be, by the user's function. Collective."""
    custom, full = behavior.custom_all_gather, memory.all_gather_output
    output = custom.allocate((full.numel(),), dtype=full.dtype, device=full.device)
    source = output.narrow(0, rank * own.numel(), own.numel()).copy_(own)
    work = custom(
        output_tensor=output, input_tensor=source, group=behavior.process_group, async_op=False
    )
    if work is not None:
        work.wait()
    full.data.copy_(output)
