"""Parameter groups: the parameters of a unit that are all-gathered and reduced in one buffer;
backward's all-gathers of a group among fewer ranks; and the communicators of all groups."""

from __future__ import annotations

import contextlib
import traceback
import typing
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.mesh import Mesh, axis_of
from .._comm.transport import Handle, Transport
from ..errors import AssertedStateError
from . import events
from .behavior import Behavior, ReduceAxes
from .device import ON_DEVICE, OffloadPolicy, on_host, side_stream
from .dtypes import ComputeDtype, Precision
from .gradients import Gradients, is_large
from .storage import GroupMemory, Segments, Storage
from .store import ParamStore
from .user_changes import RequiresGrad

# The oldest first, with the numbers of the lines that made it.
all_groups: weakref.WeakKeyDictionary[Group, list[int]] = weakref.WeakKeyDictionary()


class PartialShard:
    """The rows of one group's unsharded parameters that each of n ranks keeps after forward, so
    that only these n have to gather again."""

    def __init__(
        self, store: ParamStore, memory: GroupMemory, mesh: typing.Any, device: torch.device
    ) -> None:
        """Collective over the last dimension of a 2-D ``mesh``, once per process group."""
        axis = axis_of(mesh.get_group(1))
        self.communicator: Transport = communicator(axis, device)
        self._tag = self.communicator.new_tag()
        self._memory = memory
        memory.allocate_params()  # an empty storage cannot be viewed
        rows = self._rows = store.partial_rows(mesh, axis.rank, axis.ranks, memory.unsharded_params)
        memory.free()
        self._storage = Storage(rows.full)
        self._segments = Segments(rows.full, axis.ranks)
        self._storage.free()
        self._held: Tensor | None = None  # [numel]
        self._all_gather: Handle | None = None

    @property
    def is_held(self) -> bool:
        return self._held is not None

    def hold(self) -> list[nn.Parameter]:
        """Copy this rank's rows of the unsharded parameters. Return parameters to show."""
        full, ranks = self._rows.full, self.communicator.ranks
        held = full.new_zeros(full.numel() // ranks)
        params = self._rows.params(held)
        # `.data`: the copy is not part of a graph.
        parts = [_torch_private.local_part(param).data for param in params]
        _torch_private.copy_together(parts, self._rows.own_rows)
        self._held = held
        return params

    def begin_gather(self) -> None:
        """Collective. Start the all-gather among the n ranks."""
        assert self._held is not None
        self._storage.allocate()
        self._all_gather = self.communicator.begin_gather(
            self._held, self._rows.full, self._segments, self._tag
        )

    def end_gather(self, what: str) -> None:
        """Collective. Fill the unsharded parameters, and drop the rows."""
        self._wait(what)
        self._memory.allocate_params()
        if self._rows.copies[0]:
            _torch_private.copy_together(*self._rows.copies)
        self.drop(what)

    def drop(self, what: str) -> None:
        """Forget the rows. Collective if an all-gather is in flight."""
        if self._all_gather is None:
            # An exception may have come before the handle was stored here.
            self._all_gather = self.communicator.unfinished_gather(self._tag)
        if not self.communicator.has_failed:
            self._wait(what)
        self._all_gather = self._held = None
        self._storage.free()

    def _wait(self, what: str) -> None:
        if self._all_gather is not None:
            self.communicator.end_gather(self._all_gather, what)
            self._all_gather = None


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
        """Collective over the mesh, once per process group. offload: the shard is on the CPU.
        behavior: of the unit, if the user may change it; sharded parameters are DTensors then."""
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
        assert all(each.ranks > 1 for each in self.tensor_parallel)  # connected once, here
        self.tags: dict[Transport, int] = {}  # by axis of several ranks, once these agree
        all_groups[self] = [line for _, line in traceback.walk_stack(None)]
        self._all_gather: Handle | None = None  # in flight
        # For the stream that issued the all-gather, or ran the user's
        self._wait_for_issuer: Callable[[], None] | None = None
        axes = ReduceAxes(
            self.shard,
            self.replica,
            -id(self),
            -id(self),
            self.offload,
            one_group=mesh.one_group,
            is_hybrid=mesh.is_hybrid,
        )
        # Gradients of large parameters are moved to the reduce buffer as they come; on a side
        # stream all together. If backward begins with all units unsharded, post-backward moves
        # them: a buffer wider than the parameters must not be allocated before the first reshard.
        streamed = side_stream(device, "reduce") is None and (
            reshard_after_forward or precision.reduce.itemsize <= precision.gather.itemsize
        )
        params = [param for memory in self.memories for param in memory.unsharded_params]
        large = {param for param in params if streamed and is_large(param)}
        self.gradients = Gradients(store, self.memories, axes, large, precision, device, behavior)
        self.partial: PartialShard | None = None  # the front end sets it
        # There, one such gradient lets go of the previous unit's gradients, which were copied.
        on_side = side_stream(device, "reduce") is not None
        first = [p for p in self.memory.unsharded_params if is_large(p)][-1:] if on_side else []
        self.requires_grad = RequiresGrad(store, self.memories, large or first)
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
        """Set the name of the unit, for errors."""
        self.name, self.gradients.what = name, f"the gradients of {name}"

    def use_tag(self, axis: Transport, tag: int) -> None:
        """Mark messages along an axis with this tag from now on."""
        self.tags[axis], axes = tag, self.gradients.axes
        if axis.has_tags:
            axes.shard_tag = self.tags.get(self.shard, axes.shard_tag)
            axes.replica_tag = self.tags.get(self.replica, axes.replica_tag)

    @property
    def _what(self) -> str:
        return f"the parameters of {self.name}"

    # -- parameters

    @property
    def unsharded_params(self) -> list[nn.Parameter]:
        """The unsharded parameters in the dtype computed in now."""
        return self.memory.unsharded_params

    def use_dtype(self, dtype: ComputeDtype) -> None:
        """Compute in this dtype from now on. Only while the group is sharded."""
        self.memory = self.memories[min(dtype, len(self.memories) - 1)]

    def unshard(self, together: dict[Transport, list[Group]] | None = None) -> None:
        """Collective. Start the all-gather, or add the group to ``together`` for the caller."""
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
        if together is not None and self.shard.coalesces:
            together.setdefault(self.shard, []).append(self)
            return
        side = side_stream(self.device, "gather")
        if side is None:
            self._begin_all_gather()
            return
        with side.work():
            self._begin_all_gather()
        self._wait_for_issuer = side.mark()

    def _begin_all_gather(self) -> None:
        shard, memory, behavior = self.store.shard, self.memory, self.behavior
        if behavior is not None and behavior.custom_all_gather is not None:
            _gather_by_custom(behavior, shard, memory, self.shard.rank)
            return
        self._all_gather = self.shard.begin_gather(
            shard, memory.all_gather_output, memory.segments, self.tags.get(self.shard, 0)
        )
        if self.offload.is_offloaded:
            self.offload.was_read()

    def wait_for_unshard(self) -> None:
        """Collective. Make the unsharded parameters readable."""
        if self.partial is not None and self.partial.is_held:
            self.partial.end_gather(self._what)
            return
        memory, mapped = self.memory, self.memory.mapped_copy
        if mapped is not None and mapped.is_due:
            memory.copy_out(mapped.copy)
            return
        self._end_all_gather()
        if memory.has_copies:
            memory.fill_unsharded_params()

    def reshard(self, is_in_flight: bool = False) -> None:
        """Free the unsharded parameters. Collective if their all-gather may be in flight."""
        if self.partial is not None and self.partial.is_held:
            self.partial.drop(self._what)
        if self.behavior is not None:
            self.memory.keeps_storage = self.behavior.keeps_storage or self.behavior.has_views
        if is_in_flight:
            if self._all_gather is None:
                # An exception may have come before the handle was stored here.
                self._all_gather = self.shard.unfinished_gather(self.tags.get(self.shard, 0))
            if not self.shard.has_failed:
                self._end_all_gather()  # memory that is being received into cannot be freed
            self._all_gather = None
        self.memory.free()

    def hold_partial(self) -> list[nn.Parameter]:
        """Keep rows of the unsharded parameters for an all-gather among fewer ranks, free the
        parameters, and return those to show instead."""
        assert self.partial is not None
        params = self.partial.hold()
        self.memory.free()
        return params

    def _end_all_gather(self) -> None:
        if self._wait_for_issuer is not None:
            self._wait_for_issuer()
            self._wait_for_issuer = None
        if self._all_gather is not None:
            self.shard.end_gather(self._all_gather, self._what)
            self._all_gather = None  # only now: if the wait raises, memory is still received into

    def gather_full(self, own: Tensor | None = None) -> Tensor:
        """Gather every rank's ``own`` [S], by default the shard; return [ranks * S], in new memory
        unless there is one rank. Collective."""
        own = self.store.shard if own is None else own
        events.tell(events.GATHERING_STATE, self.name)
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
                    "An unsharded parameter was given other memory, which all-gathers ignore.",
                    expected="changes by `.data =` between steps only",
                    got=f"other memory for parameter {moved[0]} (shape {shape})",
                    where=self.name,
                    fix="change it in place inside summon_full_params; this change was dropped",
                )


def unshard_together(groups: Sequence[Group]) -> None:
    """Collective. Start the all-gathers of a unit's groups, as one per axis where possible."""
    together: dict[Transport, list[Group]] = {}
    for group in groups:
        group.unshard(together)
    for axis, members in together.items():
        side = side_stream(members[0].device, "gather")
        with contextlib.nullcontext() if side is None else side.work():
            members[0]._all_gather = axis.begin_gathers(
                [(g.store.shard, g.memory.all_gather_output, g.memory.segments) for g in members]
            )
            for group in members:
                group.offload.was_read()
        if side is not None:  # the first group waits for all, before the others do
            members[0]._wait_for_issuer = side.mark()


def _gather_by_custom(behavior: Behavior, own: Tensor, memory: GroupMemory, rank: int) -> None:
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


class Communicators:
    """The communicators and offload policies of a runtime's groups, each once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communicators: list[Transport] = []
        self.have_tags = True  # False: ranks must make their collectives in the same order
        self._offloads: list[OffloadPolicy] = []

    def use_groups(self, groups: Iterable[Group]) -> None:
        """Use the communicators of ``groups`` from now on."""
        groups = list(groups)
        found = [each for group in groups for each in (group.shard, group.replica)]
        found += [group.partial.communicator for group in groups if group.partial is not None]
        self._communicators = list(dict.fromkeys(each for each in found if each.ranks > 1))
        self.have_tags = all(communicator.has_tags for communicator in self._communicators)
        offloads = [group.offload for group in groups if group.offload.is_offloaded]
        self._offloads = list(dict.fromkeys(offloads))

    def any_rank(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Collective. Return for each flag, one byte, whether it is set on any rank."""
        on_host = all(each.takes_host_values for each in self._communicators)
        device = torch.device("cpu") if on_host else self._device
        values = torch.tensor(flags, dtype=torch.uint8, device=device)
        for each in self._communicators:
            values = each.any_of(values, what)
        return [bool(value) for value in values.tolist()]

    def flush(self, what: str, in_graph: bool = False) -> None:
        """Wait until everything that this rank has sent, or copied to the host, has arrived.
        in_graph: leave copies of offloaded shards to the backward that follows, because a wait for
        them would stall the host until the device is done."""
        for each in self._communicators:
            each.settle(what)
        if not in_graph:
            self.wait_copies()

    def wait_copies(self) -> None:
        """Wait until offloaded shards may be overwritten and their gradients read."""
        for offload in self._offloads:
            offload.wait_readers()
