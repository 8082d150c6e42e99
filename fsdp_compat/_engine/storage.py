"""The only code that allocates or frees the memory of parameters and gradient buffers: it empties
and refills storages under tensors that stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch_private
from .._comm import shared_memory
from .segments import Segments
from .store import ParamStore

__all__ = ["GroupMemory", "Storage", "new_shard"]


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, *, ranks: int, pin: bool
) -> torch.Tensor:
    """Return a tensor [numel] of zeros for one of ``ranks`` shards. pin: a GPU reads it.

    On the CPU it lies in shared memory, from where other ranks of the host read it without sending.
    """
    if device.type == "cpu" and ranks > 1 and not pin:
        return shared_memory.zeros(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pin)


class Storage:
    """A storage object that stays while its memory comes and goes. Views of it, also those that
    autograd saved, stay valid."""

    __slots__ = ("nbytes", "untyped")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.untyped = tensor.untyped_storage()
        self.nbytes = self.untyped.nbytes()

    def allocate(self) -> None:
        if self.untyped.nbytes() != self.nbytes:
            self.untyped.resize_(self.nbytes)

    def free(self) -> None:
        if self.untyped.nbytes():
            self.untyped.resize_(0)

    @property
    def resident_nbytes(self) -> int:
        return self.untyped.nbytes()


class GroupMemory:
    """The unsharded form of one group in one dtype: the all-gather output, and the parameters that
    view it or are copied out of it.

    With one rank and no cast the parameters view the shard itself (``aliased``), and nothing is
    ever allocated, copied or freed.
    """

    def __init__(
        self,
        store: ParamStore,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        is_offloaded: bool = False,
        output: torch.Tensor | None = None,
    ) -> None:
        """dtype: of the all-gather, and so of the parameters. is_offloaded: the shard is not on
        ``device``. output: [ranks, S], a view of memory that others allocate and free, out of which
        the parameters are copied."""
        self.aliased = (
            ranks == 1 and dtype == store.dtype and not is_offloaded and store.extension is None
        )
        numel = ranks * store.numel
        if output is not None:
            self.all_gather_output = output
        else:
            self.all_gather_output = (  # [ranks * S]
                store.shard if self.aliased else torch.empty(numel, dtype=dtype, device=device)
            )
        self.unsharded_params = store.make_unsharded_params(self.all_gather_output)
        self._buffer = Storage(
            self.all_gather_output if output is None else torch.empty(0, device=device)
        )
        self._own_storages: list[Storage] = []  # of parameters that do not view the output
        self._copy: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # (to, from)
        self._extension = store.extension
        if not store.params_view_output:
            self._own_storages = list(
                {
                    _torch_private.storage_key(tensor): Storage(tensor)
                    for tensor in store.private_memory(self.unsharded_params)
                }.values()
            )
            self._copy = store.copies(self.all_gather_output, self.unsharded_params)
        self.has_copies = self._copy is not None  # see `fill_unsharded_params`
        self.keeps_storage = False  # `free` leaves the memory of the parameters
        self.free()
        self._views = [_torch_private.local_part(param) for param in self.unsharded_params]
        # In an empty storage the address is the distance from its beginning.
        self._offsets = list(map(torch.Tensor.data_ptr, self._views))
        self.segments = Segments(self.all_gather_output, ranks)  # [S] each

    def strayed(self) -> list[int]:
        """Return the indices of parameters whose memory the user has replaced by ``.data =``.
        Those with storages of their own are not checked."""
        if self.has_copies:
            return []
        start = 0 if self.aliased else self.all_gather_output.data_ptr()
        return [
            index
            for index, (view, offset) in enumerate(zip(self._views, self._offsets, strict=True))
            if view.numel() and view.data_ptr() != start + offset
        ]

    def bring_back(self, store: ParamStore, indices: Sequence[int]) -> None:
        """Make strayed parameters view the buffer again; the values they had are lost."""
        was_free = not self._buffer.resident_nbytes
        self._buffer.allocate()  # nothing can view memory that is not there
        params = store.make_unsharded_params(self.all_gather_output)
        for index in indices:
            self._views[index].data = _torch_private.local_part(params[index]).data
        if was_free:
            self.free()

    def allocate(self) -> None:
        """Allocate the all-gather output."""
        self._buffer.allocate()

    def fill_unsharded_params(self) -> None:
        """After an all-gather: copy its output into the parameters, unless they view it."""
        if self._copy is not None:
            for storage in self._own_storages:
                storage.allocate()
            if self._copy[0]:  # all parameters may be empty
                _torch_private.copy_together(*self._copy)
            if self._extension is not None:
                self._extension.unpack(self.unsharded_params)
            self._buffer.free()

    def allocate_params(self) -> None:
        """Allocate the memory of the parameters, wherever it is."""
        for storage in self._own_storages or [self._buffer]:
            storage.allocate()

    def free(self) -> None:
        if self.aliased:
            return
        if self.has_copies or not self.keeps_storage:
            self._buffer.free()
        if not self.keeps_storage:
            for storage in self._own_storages:
                storage.free()

    @property
    def resident_nbytes(self) -> int:
        """Bytes held now, beyond the shard."""
        return (
            0
            if self.aliased
            else sum(s.resident_nbytes for s in (self._buffer, *self._own_storages))
        )
