"""The only code that allocates or frees the memory of parameters and gradient buffers: it empties
and refills storages under tensors that stay."""

from __future__ import annotations

import operator
import typing
from collections.abc import Collection, Sequence

import torch

from .. import _torch_private
from .._comm.communicator import allocate_shard
from .._comm.host_memory import HUGE_NBYTES, prefer_huge_pages
from .._comm.transport import ShardMapping
from .device import has_streams
from .store import ParamStore

_version = operator.attrgetter("_version")


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, *, ranks: int, pin: bool
) -> torch.Tensor:
    """Return zeros [numel] for one of ``ranks`` shards. pin: a GPU reads it.

    On the CPU they lie in shared memory, where other ranks of the host can read them.
    """
    if device.type == "cpu" and ranks > 1 and not pin:
        return allocate_shard(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pin)


class Segments(Sequence[torch.Tensor]):
    """The views [S] of a buffer [ranks * S], by rank, made at the first access and kept.

    The gloo transports use all of them in every step; other backends use one or two, and with
    16,384 ranks the views of all ranks would take more memory than a shard.
    """

    __slots__ = ("_buffer", "_made", "_ranks", "_size")

    def __init__(self, buffer: torch.Tensor, ranks: int) -> None:
        self._buffer, self._ranks, self._size = buffer, ranks, buffer.numel() // ranks
        self._made: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._ranks

    @typing.overload
    def __getitem__(self, rank: int) -> torch.Tensor: ...

    @typing.overload
    def __getitem__(self, rank: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, rank: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(self._ranks))]
        found = self._made.get(rank)
        if found is None:
            if not 0 <= rank < self._ranks:  # ends the iteration of Sequence
                raise IndexError(f"rank {rank} of {self._ranks}")
            found = self._made[rank] = self._buffer.narrow(0, rank * self._size, self._size)
        return found


class Storage:
    """A storage that is freed and allocated again as one object: views of it, including those that
    autograd saved, stay valid."""

    __slots__ = ("_has_huge_pages", "nbytes", "untyped")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.untyped = tensor.untyped_storage()
        self.nbytes = self.untyped.nbytes()
        self._has_huge_pages = tensor.device.type == "cpu" and self.nbytes >= HUGE_NBYTES

    def allocate(self) -> None:
        if self.untyped.nbytes() != self.nbytes:
            self.untyped.resize_(self.nbytes)
            if self._has_huge_pages:
                prefer_huge_pages(self.untyped.data_ptr(), self.nbytes)

    def free(self) -> None:
        # A tensor that was passed to numpy keeps its memory, because an array may still view it.
        if self.untyped.nbytes() and self.untyped.resizable():
            self.untyped.resize_(0)

    @property
    def resident_nbytes(self) -> int:
        return self.untyped.nbytes()


_Copy = tuple[list[torch.Tensor], list[torch.Tensor]]  # (to, from)


class _Split(typing.NamedTuple):
    """A copy of all columns of a matrix, by one kernel."""

    rows: torch.Tensor
    sizes: list[int]
    targets: list[torch.Tensor]


def _split_of(copy: _Copy) -> _Split | None:
    """Return the copy as a _Split if its sources are columns of one matrix; otherwise None: then
    the device launches a kernel per source."""
    pairs = sorted(zip(*copy, strict=True), key=lambda pair: pair[1].storage_offset())
    first = pairs[0][1] if pairs else torch.empty(0)
    if first.ndim != 2:
        return None
    (ranks, _), (width, _) = first.shape, first.stride()
    base = int(first.storage_offset()) // width * width
    at, sizes, targets = base, list[int](), list[torch.Tensor]()
    for target, source in pairs:
        if (
            source.ndim != 2
            or source.stride() != (width, 1)
            or source.dtype is not first.dtype
            or not target.is_contiguous()
        ):
            return None
        if gap := int(source.storage_offset()) - at:  # padding
            sizes.append(gap)
            targets.append(target.new_empty(ranks, gap))
        sizes.append(source.shape[1])
        targets.append(target)
        at = int(source.storage_offset()) + source.shape[1]
    if gap := base + width - at:
        sizes.append(gap)
        targets.append(first.new_empty(ranks, gap))
    return _Split(first.as_strided((ranks, width), (width, 1), base), sizes, targets)


class MappedCopy:
    """How parameters are copied out of every rank's mapped shard."""

    __slots__ = ("copy", "is_due", "num_holders", "passes")

    def __init__(self, copy: _Copy, passes: Collection[object]) -> None:
        """passes: those that all ranks are in now; shards may be read while there are any."""
        self.copy, self.passes = copy, passes
        # ``wait_for_unshard`` is to copy: ``unshard`` has started no all-gather.
        self.is_due = False
        self.num_holders = 0  # of the parameters' memory, through ``copy``


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
    ) -> None:
        """dtype: of the all-gather, and so of the parameters. is_offloaded: the shard is not on
        ``device``."""
        self.aliased = (
            ranks == 1 and dtype == store.dtype and not is_offloaded and not store.has_extension
        )
        numel = ranks * store.numel
        self.all_gather_output = (  # [ranks * S]
            store.shard if self.aliased else torch.empty(numel, dtype=dtype, device=device)
        )
        self.unsharded_params = store.make_unsharded_params(self.all_gather_output)
        self._buffer = Storage(self.all_gather_output)
        self._own_storages: list[Storage] = []  # of parameters that do not view the output
        self._copy: _Copy | _Split | None = None
        self._unpack = store.unpack if store.has_extension else None
        if not store.params_view_output:
            self._own_storages = list(
                {
                    _torch_private.storage_key(tensor): Storage(tensor)
                    for tensor in store.private_memory(self.unsharded_params)
                }.values()
            )
            copy = store.copies(self.all_gather_output, self.unsharded_params)
            self._copy = (_split_of(copy) if has_streams(device) else None) or copy
        self.has_copies = self._copy is not None  # see `fill_unsharded_params`
        # All ranks' shards: the parameters view them instead of an all-gather output, or are copied
        # out of them.
        self.mapping: ShardMapping | None = None
        self._num_writes = 0  # to mapped parameters
        self.mapped_copy: MappedCopy | None = None
        self.keeps_storage = False  # `free` leaves the memory of the parameters
        self.free()
        self._views = [_torch_private.local_part(param) for param in self.unsharded_params]
        # In an empty storage the address is the distance from its beginning.
        self._offsets = list(map(torch.Tensor.data_ptr, self._views))
        self.segments = Segments(self.all_gather_output, ranks)  # [S] each

    @property
    def views_mapping(self) -> bool:
        """True if the parameters are mapped, and nothing is all-gathered."""
        return self.mapping is not None and self.mapped_copy is None

    def use_copies_of(
        self, store: ParamStore, mapping: ShardMapping, passes: Collection[object]
    ) -> None:
        """Let the parameters be copied out of every rank's shard, where it is mapped. passes: see
        MappedCopy."""
        self.mapping = mapping
        empty = [storage for storage in self._param_storages if not storage.resident_nbytes]
        self.allocate_params()  # nothing can view memory that is not there
        before = self.num_holders
        copy = [self.all_gather_output.data], [mapping.full]
        if self.has_copies:
            copy = store.copies(mapping.full, self.unsharded_params)
        self.mapped_copy = MappedCopy(copy, passes)
        self.mapped_copy.num_holders = self.num_holders - before
        for storage in empty:
            storage.free()

    def use_mapping(self, store: ParamStore, mapping: ShardMapping) -> None:
        """Let the parameters view every rank's shard in place, without any all-gather from now on.
        The first call must come while sharded."""
        if mapping is self.mapping:
            return
        self.mapping = mapping
        ranks, output = len(self.segments), self.all_gather_output
        self.all_gather_output = mapping.full
        params = store.make_unsharded_params(self.all_gather_output)
        for view, param in zip(self._views, params, strict=True):
            view.data = _torch_private.local_part(param).data
        self.segments = Segments(self.all_gather_output, ranks)
        self._buffer = Storage(output[:0].clone())
        self._num_writes = self._count_writes()

    def keep_values(self) -> None:
        """Keep the parameters' values until the next ``free``, even if shards are written to: a
        graph made by create_graph reads parameters after backward."""
        if self.mapping is not None and self.views_mapping:
            self.mapping.keep()
            self._num_writes = -1

    def forget_writes(self) -> None:
        """Before mapped parameters are used: drop what this process has written to them since
        their last use. Autograd does not see every write (``.data``, numpy)."""
        assert self.mapping is not None
        if self.mapping.has_writes():
            self.mapping.forget_writes()
        self._num_writes = self._count_writes()

    def _count_writes(self) -> int:
        return sum(map(_version, self.unsharded_params))

    def moved_params(self) -> list[int]:
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

    def restore_views(self, store: ParamStore, indices: Sequence[int]) -> None:
        """Make moved parameters view the buffer again; their values are lost."""
        was_free = not self.views_mapping and not self._buffer.resident_nbytes
        self._buffer.allocate()  # an empty storage cannot be viewed
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
            self._copy_out(self._copy)
            if self._unpack is not None:
                self._unpack(self.unsharded_params)
            self._buffer.free()

    def copy_mapped(self) -> None:
        """Copy every rank's mapped shard into the parameters."""
        assert self.mapped_copy is not None
        self._copy_out(self.mapped_copy.copy)

    def _copy_out(self, copy: _Copy | _Split) -> None:
        self.allocate_params()
        if isinstance(copy, _Split):
            _torch_private.split_together(*copy)
        elif copy[0]:  # all parameters may be empty
            _torch_private.copy_together(*copy)

    @property
    def num_holders(self) -> int:
        """How many tensors and other objects hold memory that ``free`` releases."""
        if self.aliased:
            return 0
        holders = sum(_torch_private.num_holders(each.untyped) for each in self._param_storages)
        return holders - (self.mapped_copy.num_holders if self.mapped_copy is not None else 0)

    def allocate_params(self) -> None:
        """Allocate the memory of the parameters, wherever it is."""
        for storage in self._param_storages:
            storage.allocate()

    @property
    def _param_storages(self) -> list[Storage]:
        return self._own_storages or [self._buffer]

    def free(self) -> None:
        if self.aliased:
            return
        if self.mapping is not None and self.views_mapping:
            if self._count_writes() != self._num_writes:
                self.mapping.forget_writes()  # frees the copied pages
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
