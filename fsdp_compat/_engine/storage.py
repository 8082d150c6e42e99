"""The only code that allocates or frees the memory of parameters and gradient buffers: storages
that are emptied and refilled under tensors that stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch_private
from .._comm import shared_memory
from .._comm.segments import Segments
from .store import ParamStore

__all__ = ["GroupMemory", "Storage", "new_shard"]


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, *, ranks: int, pin: bool
) -> torch.Tensor:
    """Return memory [numel] of zeros for one of ``ranks`` shards; ``pin``: that a GPU can read.

    On the CPU it is where other ranks of the same host can read it, so that it need not be sent.
    """
    if device.type == "cpu" and ranks > 1 and not pin:
        return shared_memory.zeros(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pin)


class Storage:
    """A storage object that stays, and whose memory comes and goes. Views of it, saved by autograd
    too, stay valid."""

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
    """The full form of one group: the gathered buffer, the leaves that modules show while full, and
    what lies between them.

    With one rank and no cast the leaves view the shard itself (``aliased``), and nothing is ever
    allocated, copied or freed.
    """

    def __init__(
        self,
        store: ParamStore,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        is_offloaded: bool = False,
    ) -> None:
        """dtype: of what is gathered, and so of the leaves. apart: the shard lives elsewhere than
        on ``device``."""
        self.aliased = ranks == 1 and dtype == store.dtype and not is_offloaded
        numel = ranks * store.numel
        self.full = (
            store.shard if self.aliased else torch.empty(numel, dtype=dtype, device=device)
        )  # [ranks * S]
        self.segments = Segments(self.full, ranks)  # [S] each
        self.unsharded_params = store.make_unsharded_params(self.full)
        self._buffer = Storage(self.full)
        self._own_storages: list[Storage] = []  # of leaves that do not view `full`
        self._fill: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        if self.unsharded_params and not _torch_private.same_storage(
            self.unsharded_params[0], self.full
        ):
            self._own_storages = list(
                {
                    _torch_private.storage_key(unsharded_param): Storage(unsharded_param)
                    for unsharded_param in self.unsharded_params
                }.values()
            )
            # `.data`: neither a gather nor a fill may move the version counters that autograd has
            # noted.
            pieces = [
                piece
                for i, unsharded_param in enumerate(self.unsharded_params)
                for piece in store.split(i, unsharded_param.data)
            ]
            places = [place for of_leaf in store.places(self.full)[:-1] for place in of_leaf]
            self._fill = pieces, places
        self.has_copies = self._fill is not None  # leaves do not view the buffer: see `fill_leaves`
        self.free()
        self._views = [
            _torch_private.local_part(unsharded_param) for unsharded_param in self.unsharded_params
        ]
        self._offsets = list(
            map(torch.Tensor.data_ptr, self._views)
        )  # in an empty storage that is how far from its beginning

    def strayed(self) -> list[int]:
        """Return the leaves that somebody gave other memory, by ``.data =``. Not for leaves with
        storages of their own."""
        start = 0 if self.aliased or self.has_copies else self.full.data_ptr()
        return [
            index
            for index, (view, offset) in enumerate(zip(self._views, self._offsets, strict=True))
            if view.numel()
            and view.data_ptr() != start + offset
            and not (self.has_copies and view.data_ptr())
        ]

    def bring_back(self, store: ParamStore, indices: Sequence[int]) -> None:
        """Let strayed leaves view the buffer again; what they held is lost."""
        was_free = not self._buffer.resident_nbytes
        self._buffer.allocate()  # nothing can view memory that is not there
        unsharded_params = store.make_unsharded_params(self.full)
        for index in indices:
            self._views[index].data = _torch_private.local_part(unsharded_params[index]).data
        if was_free:
            self.free()

    def allocate(self) -> None:
        """Make room for a gather."""
        self._buffer.allocate()

    def fill_unsharded_params(self) -> None:
        """A gather has arrived: make the leaves readable. Leaves that view the buffer are so
        already."""
        if self._fill is not None:
            for storage in self._own_storages:
                storage.allocate()
            if self._fill[0]:  # all leaves may be empty
                _torch_private.copy_together(*self._fill)
            self._buffer.free()

    def free(self) -> None:
        if not self.aliased:
            self._buffer.free()
            for storage in self._own_storages:
                storage.free()

    @property
    def resident_nbytes(self) -> int:
        """Bytes beyond the shard that are held now."""
        return (
            0
            if self.aliased
            else sum(s.resident_nbytes for s in (self._buffer, *self._own_storages))
        )
