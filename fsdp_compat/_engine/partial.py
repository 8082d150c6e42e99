"""Backward's all-gathers among fewer ranks: after forward, each of n ranks keeps its rows of the
unsharded parameters, so that only these n ranks have to gather again."""

from __future__ import annotations

import typing

import torch
from torch import nn

from .. import _torch_private
from .._comm.communicator import communicator
from .._comm.mesh import axis_of
from .._comm.transport import Handle, Transport
from .storage import GroupMemory, Segments, Storage
from .store import ParamStore


class PartialShard:
    """The rows of one group's unsharded parameters that this rank keeps after forward."""

    def __init__(
        self,
        store: ParamStore,
        memory: GroupMemory,
        mesh: typing.Any,
        device: torch.device,
    ) -> None:
        """Collective over the last dimension of ``mesh``, a 2-D DeviceMesh, once per process
        group."""
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
        self._held: torch.Tensor | None = None  # [numel]
        self._all_gather: Handle | None = None

    @property
    def is_held(self) -> bool:
        return self._held is not None

    @property
    def resident_nbytes(self) -> int:
        return (0 if self._held is None else self._held.nbytes) + self._storage.resident_nbytes

    def hold(self) -> list[nn.Parameter]:
        """Copy this rank's rows of the unsharded parameters, which are readable. Return the
        parameters that modules show meanwhile."""
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
