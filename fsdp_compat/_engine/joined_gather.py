"""One all-gather for several groups of a unit, whose shards have different dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch_private
from .._comm import shared_memory
from .._comm.communicator import Communicator, Handle, communicator
from .._comm.mesh import Axis
from .conduct import Conduct
from .segments import Segments
from .storage import Storage
from .store import ParamStore

__all__ = ["JoinedGather", "JoinedPart", "gather_by_custom"]

ALIGN_NBYTES = 16  # of the groups' parts of a message


class JoinedGather:
    """The all-gather of groups that are sharded over the same ranks: a rank sends the bytes of all
    its shards, one after the other."""

    def __init__(
        self,
        stores: Sequence[ParamStore],
        dtypes: Sequence[torch.dtype],
        axis: Axis,
        device: torch.device,
        conduct: Conduct,
    ) -> None:
        """dtypes: that the stores' shards are sent in. Collective over the axis, once per process
        group.

        The output has memory until it is copied out of for the first time: views in other dtypes
        cannot be made without.
        """
        self.communicator: Communicator = communicator(axis, device)
        self._tag, self._conduct = self.communicator.new_tag(), conduct
        self._stores = list(stores)
        self._slots: list[tuple[slice, torch.dtype]] = []
        end = 0
        for store, dtype in zip(stores, dtypes, strict=True):
            nbytes = store.numel * dtype.itemsize
            self._slots.append((slice(end, end + nbytes), dtype))
            end += -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        self._full = torch.empty(axis.ranks * end, dtype=torch.uint8, device=device)
        self._segments = Segments(self._full, axis.ranks)
        rows = self._full.view(axis.ranks, end)
        # [ranks, S] of each store: where its parameters are copied from
        self.parts = [
            JoinedPart(self, rows[:, place].view(dtype), index)
            for index, (place, dtype) in enumerate(self._slots)
        ]
        # It has memory until all groups are made: nothing can view memory that is not there.
        self._storage = Storage(self._full)
        self._handle: Handle | None = None

    @property
    def resident_nbytes(self) -> int:
        return self._storage.resident_nbytes

    def begin(self) -> None:
        """Collective. Start the all-gather."""
        nbytes = self._full.numel() // self.communicator.ranks
        self._storage.allocate()
        device = self._full.device
        # In other memory each time: peers may still read what was sent last.
        own = (
            shared_memory.allocate(nbytes, torch.uint8)
            if device.type == "cpu"
            else torch.empty(nbytes, dtype=torch.uint8, device=device)
        )
        for store in self._stores:
            if store.extension is not None:
                store.extension.pack()
        _torch_private.copy_together(
            [own[place].view(dtype) for place, dtype in self._slots],
            [store.shard.detach() for store in self._stores],
        )
        if self._conduct.custom_all_gather is not None:
            gather_by_custom(self._conduct, own, self._full, self.communicator.rank)
            return
        self._handle = self.communicator.begin_gather(own, self._full, self._segments, self._tag)

    def wait(self, what: str) -> None:
        """Collective."""
        if self._handle is None:
            # An exception may have come before the handle was stored here.
            self._handle = self.communicator.unfinished_gather(self._tag)
        if self._handle is not None:
            self.communicator.end_gather(self._handle, what)
            self._handle = None

    def free(self) -> None:
        self._handle = None
        self._storage.free()


class JoinedPart:
    """One group's part of a joined all-gather. The first group's starts and ends it for all, the
    last one frees its memory: a unit goes through its groups in order."""

    def __init__(self, gather: JoinedGather, output: torch.Tensor, index: int) -> None:
        """output: [ranks, S], typed, a view of the joined output."""
        self._gather, self.output, self._index = gather, output, index

    @property
    def communicator(self) -> Communicator:
        return self._gather.communicator

    @property
    def resident_nbytes(self) -> int:
        return self._gather.resident_nbytes if self._index == 0 else 0

    def begin(self) -> None:
        if self._index == 0:
            self._gather.begin()

    def wait(self, what: str) -> None:
        if self._index == 0:
            self._gather.wait(what)

    def copied(self) -> None:
        """The group's parameters were copied out, or the group was made."""
        if self._index == len(self._gather.parts) - 1:
            self._gather.free()

    def drop(self, what: str) -> None:
        """Free the memory. Collective if the all-gather is in flight."""
        if self._index == 0:
            if not self.communicator.has_failed:
                self._gather.wait(what)
            self._gather.free()


def gather_by_custom(conduct: Conduct, own: torch.Tensor, full: torch.Tensor, rank: int) -> None:
    """All-gather ``own`` [S], cast if need be, into ``full`` [ranks * S] by the user's function.
    Collective."""
    custom = conduct.custom_all_gather
    output = custom.allocate((full.numel(),), dtype=full.dtype, device=full.device)
    source = output.narrow(0, rank * own.numel(), own.numel()).copy_(own)
    work = custom(
        output_tensor=output, input_tensor=source, group=conduct.process_group, async_op=False
    )
    if work is not None:
        work.wait()
    full.data.copy_(output)
