"""Where the unsharded values of a group come from. Whenever a group is unsharded, it chooses a
source (``Group.choose_source``), which begins, and then ends or is dropped:

    source           chosen                                begin                end
    ---------------  ------------------------------------  -------------------  --------------------
    Source           parameters view the shard (aliased)   -                    -
    ViewOfShards     parameters view all ranks' shards     forgets own writes   -
    PartialShard     rows were kept after forward          gathers these        copies from these
    CustomAllGather  the user has set an all-gather        calls it             copies, if need be
    CopyOfShards     all ranks' shards may be read         -                    copies from these
    AllGather        otherwise                             sends the shard      copies, if need be

Parameters are copied where they do not view the output (``GroupMemory.copied_from_output``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.mesh import axis_of
from .._comm.transport import Handle, Transport
from .behavior import Behavior
from .device import ON_DEVICE, OffloadPolicy, side_stream
from .group_memory import GroupMemory
from .storage import Segments, Storage
from .store import ParamStore


class Source:
    """Base of all sources: the values are in the memory of the parameters."""

    def begin(self, memory: GroupMemory) -> None:
        """Start to bring the values of ``memory.unsharded_params``. Collective: the shard axis."""

    def end(self, memory: GroupMemory, what: str) -> None:
        """Make the parameters readable. what: for errors. Collective: the shard axis."""

    def drop(self, what: str) -> None:
        """Give up what has begun: memory that is received into cannot be freed. Collective: the
        shard axis, unless communication has failed."""


class ViewOfShards(Source):
    """Parameters view the mapped shards of all ranks (``GroupMemory.viewed_mapping``)."""

    def begin(self, memory: GroupMemory) -> None:
        memory.forget_writes()


class CopyOfShards(Source):
    """Parameters are copied from the mapped shards of all ranks (``GroupMemory.mapped_copy``)."""

    def end(self, memory: GroupMemory, what: str) -> None:
        assert memory.mapped_copy is not None
        memory.copy_out(memory.mapped_copy.copy)


class AllGather(Source):
    """An all-gather of one group's shards."""

    def __init__(
        self,
        store: ParamStore,
        axis: Transport,
        device: torch.device,
        offload: OffloadPolicy = ON_DEVICE,
        behavior: Behavior | None = None,
    ) -> None:
        """axis: the ranks that it is among. behavior: of the unit, if the user may change it."""
        self._store, self.axis, self._offload, self._behavior = store, axis, offload, behavior
        self.tag = 0  # on the axis, once ranks have agreed; stays 0 for the user's all-gather
        self._side = side_stream(device, "gather")
        self._in_flight: Handle | None = None
        # For the stream that issued the all-gather, or ran the user's
        self._wait_for_issuer: Callable[[], None] | None = None

    def begin(self, memory: GroupMemory) -> None:
        self._prepare(memory)
        if self._side is None:
            self._send(memory)
            return
        with self._side.work():
            self._send(memory)
        self._wait_for_issuer = self._side.mark()

    def _prepare(self, memory: GroupMemory) -> None:
        memory.allocate()
        if self._store.has_extension:
            self._store.pack()

    def _send(self, memory: GroupMemory) -> None:
        self._in_flight = self.axis.begin_gather(
            self._store.shard, memory.all_gather_output, memory.segments, self.tag
        )
        self._offload.was_read()

    def end(self, memory: GroupMemory, what: str) -> None:
        self._wait(what)
        memory.fill_unsharded_params()

    def drop(self, what: str) -> None:
        if self._in_flight is None:
            # An exception may have come before the handle was stored here.
            self._in_flight = self.axis.unfinished_gather(self.tag)
        if not self.axis.has_failed:
            self._wait(what)
        self._in_flight = None

    def _wait(self, what: str) -> None:
        if self._wait_for_issuer is not None:
            self._wait_for_issuer()
            self._wait_for_issuer = None
        if self._in_flight is not None:
            self.axis.end_gather(self._in_flight, what)
            self._in_flight = None  # only now: if the wait raises, memory is still received into

    @staticmethod
    def begin_together(gathers: Sequence[tuple[AllGather, GroupMemory]]) -> None:
        """Begin several all-gathers over one axis, which coalesces them. Collective: the axis."""
        for gather, memory in gathers:
            gather._prepare(memory)
        first = gathers[0][0]
        with contextlib.nullcontext() if first._side is None else first._side.work():
            first._in_flight = first.axis.begin_gathers(
                [(g._store.shard, m.all_gather_output, m.segments) for g, m in gathers], first.tag
            )
            for gather, _ in gathers:
                gather._offload.was_read()
        if first._side is not None:  # the first group waits for all, before the others do
            first._wait_for_issuer = first._side.mark()


class CustomAllGather(AllGather):
    """The user's all-gather (``Behavior.custom_all_gather``)."""

    def _send(self, memory: GroupMemory) -> None:
        behavior, own = self._behavior, self._store.shard
        assert behavior is not None
        custom = behavior.custom_all_gather
        full = memory.all_gather_output
        output = custom.allocate((full.numel(),), dtype=full.dtype, device=full.device)
        source = output.narrow(0, self.axis.rank * own.numel(), own.numel()).copy_(own)
        group = behavior.process_group
        work = custom(output_tensor=output, input_tensor=source, group=group, async_op=False)
        if work is not None:
            work.wait()
        full.data.copy_(output)


class PartialShard(AllGather):
    """The rows of one group's unsharded parameters that each of n ranks keeps after forward, so
    that only these n have to gather again."""

    def __init__(
        self, store: ParamStore, memory: GroupMemory, mesh: DeviceMesh, device: torch.device
    ) -> None:
        """mesh: 2-D, of which the n ranks are the last dimension. Collective: these ranks, once per
        process group."""
        axis = axis_of(mesh.get_group(1))
        super().__init__(store, communicator(axis, device), device)
        self.tag = self.axis.new_tag("parameters that are kept in part")
        memory.allocate_params()  # an empty storage cannot be viewed
        rows = self._rows = store.partial_rows(mesh, axis.rank, axis.ranks, memory.unsharded_params)
        memory.free()
        self._storage = Storage(rows.full)
        self._segments = Segments(rows.full, axis.ranks)
        self._storage.free()
        self._kept: Tensor | None = None  # [numel]

    @property
    def has_rows(self) -> bool:
        return self._kept is not None

    def keep_rows(self) -> list[nn.Parameter]:
        """Copy this rank's rows of the unsharded parameters. Return parameters to show."""
        full = self._rows.full
        kept = full.new_zeros(full.numel() // self.axis.ranks)
        params = self._rows.params(kept)
        # `.data`: the copy is not part of a graph.
        parts = [_torch_private.local_part(param).data for param in params]
        _torch_private.copy_together(parts, self._rows.own_rows)
        self._kept = kept
        return params

    def begin(self, memory: GroupMemory) -> None:
        assert self._kept is not None
        self._storage.allocate()
        full = self._rows.full
        self._in_flight = self.axis.begin_gather(self._kept, full, self._segments, self.tag)

    def end(self, memory: GroupMemory, what: str) -> None:
        self._wait(what)
        memory.allocate_params()
        if self._rows.copies[0]:
            _torch_private.copy_together(*self._rows.copies)
        self.drop(what)  # nothing is in flight any more: this only frees the rows

    def drop(self, what: str) -> None:
        super().drop(what)
        self._kept = None
        self._storage.free()


IN_PLACE, VIEW_OF_SHARDS, COPY_OF_SHARDS = Source(), ViewOfShards(), CopyOfShards()
