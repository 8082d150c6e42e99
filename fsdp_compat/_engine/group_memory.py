"""The memory of unsharded parameters: the all-gather output, mapped shards, copies of either."""

from __future__ import annotations

import dataclasses
import operator
import typing
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .. import _torch_private
from .._comm.transport import ShardMapping
from .device import has_streams
from .storage import Segments, Storage
from .store import ParamStore

_version = operator.attrgetter("_version")

_Copy = tuple[list[Tensor], list[Tensor]]  # (to, from)


class _Split(typing.NamedTuple):
    """A copy of all columns of a matrix, by one kernel."""

    rows: Tensor
    sizes: list[int]
    targets: list[Tensor]


def _split_of(copy: _Copy) -> _Split | None:
    """Return the copy as a _Split if its sources are columns of one matrix, otherwise None: then
    the device launches a kernel per source."""
    pairs = sorted(zip(*copy, strict=True), key=lambda pair: pair[1].storage_offset())
    first = pairs[0][1] if pairs else torch.empty(0)
    if first.ndim != 2:
        return None
    (ranks, _), (width, _) = first.shape, first.stride()
    base = int(first.storage_offset()) // width * width
    at, sizes, targets = base, list[int](), list[Tensor]()
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


@dataclasses.dataclass
class MappedCopy:
    """How parameters are copied out of every rank's mapped shard."""

    mapping: ShardMapping
    copy: _Copy
    # That all ranks are in now: only then shards may be read. MappedShards adds and removes them.
    passes: Collection[object]
    num_holders: int  # of the parameters' memory, through ``copy``


class GroupMemory:
    """The all-gather output of one group in one dtype, and its unsharded parameters:

        parameters         where                                            decided
        -----------------  -----------------------------------------------  -------------------
        view the shard     ``aliased``: one rank and no cast, so nothing    at once
                           is allocated, copied or freed
        view the output    otherwise, if the store says that they can       at once
        are copied out of  otherwise (``copied_from_output``), after each   at once
        the output         all-gather
        view all shards    ``viewed_mapping``: there are no all-gathers     by ``use_mapping``
        are copied out of  ``mapped_copy``, in passes that all ranks are    by ``use_copies_of``
        all shards         in; otherwise they are all-gathered as above

    The last two are called by MappedShards, before the first pass and when shards have moved."""

    def __init__(
        self,
        store: ParamStore,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        is_offloaded: bool = False,
    ) -> None:
        """dtype: of the parameters. is_offloaded: the shard is not on ``device``."""
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
        self._output_copy: _Copy | _Split | None = None  # fills parameters that do not view it
        self._unpack = store.unpack if store.has_extension else None
        if not store.params_view_output:
            tensors = store.private_memory(self.unsharded_params)
            by_key = {_torch_private.storage_key(tensor): Storage(tensor) for tensor in tensors}
            self._own_storages = list(by_key.values())
            copy = store.copies(self.all_gather_output, self.unsharded_params)
            self._output_copy = (_split_of(copy) if has_streams(device) else None) or copy
        self.viewed_mapping: ShardMapping | None = None
        self._num_writes = 0  # to parameters that view it
        self.mapped_copy: MappedCopy | None = None
        self.keeps_storage = False  # `free` leaves the memory of the parameters
        self.free()
        self._views = [_torch_private.local_part(param) for param in self.unsharded_params]
        self.keys = frozenset(map(_torch_private.storage_key, self._views))
        # In an empty storage the address is the distance from its beginning.
        self._offsets = list(map(Tensor.data_ptr, self._views))
        self.segments = Segments(self.all_gather_output, ranks)  # [S] each

    @property
    def copied_from_output(self) -> bool:
        """True if an all-gather ends with a copy, as the parameters do not view its output."""
        return self._output_copy is not None

    @property
    def mapping(self) -> ShardMapping | None:
        """The shards of all ranks, if parameters view them or are copied out of them."""
        return self.viewed_mapping if self.mapped_copy is None else self.mapped_copy.mapping

    def use_copies_of(
        self, store: ParamStore, mapping: ShardMapping, passes: Collection[object]
    ) -> None:
        """From now on copy the parameters out of the mapped shards. passes: see MappedCopy."""
        empty = [storage for storage in self._param_storages if not storage.untyped.nbytes()]
        self.allocate_params()  # an empty storage cannot be viewed
        before = self.num_holders
        copy = [self.all_gather_output.data], [mapping.full]
        if self._output_copy is not None:
            copy = store.copies(mapping.full, self.unsharded_params)
        self.mapped_copy = MappedCopy(mapping, copy, passes, self.num_holders - before)
        for storage in empty:
            storage.free()

    def use_mapping(self, store: ParamStore, mapping: ShardMapping) -> None:
        """From now on view the mapped shards, without all-gathers. Only while sharded, unless the
        parameters view them already."""
        if mapping is self.viewed_mapping:
            return
        self.viewed_mapping = mapping
        output, self.all_gather_output = self.all_gather_output, mapping.full
        params = store.make_unsharded_params(self.all_gather_output)
        for view, param in zip(self._views, params, strict=True):
            view.data = _torch_private.local_part(param).data
        self.keys = frozenset(map(_torch_private.storage_key, self._views))
        self._buffer = Storage(output[:0].clone())
        self._num_writes = self._count_writes()

    def keep_values(self) -> None:
        """For create_graph: keep the parameters' values until ``free``, even if mapped."""
        if self.viewed_mapping is not None:
            self.viewed_mapping.keep()
            self._num_writes = -1

    def forget_writes(self) -> None:
        """Drop what this process has written, since the last use, to parameters that view all
        shards."""
        assert self.viewed_mapping is not None
        if self.viewed_mapping.has_writes():
            self.viewed_mapping.forget_writes()
        self._num_writes = self._count_writes()

    def _count_writes(self) -> int:
        return sum(map(_version, self.unsharded_params))

    def moved_params(self) -> list[int]:
        """Return the indices of parameters that should view the output, but were moved."""
        if self._output_copy is not None:
            return []
        start = 0 if self.aliased else self.all_gather_output.data_ptr()
        return [
            index
            for index, (view, offset) in enumerate(zip(self._views, self._offsets, strict=True))
            if view.numel() and view.data_ptr() != start + offset
        ]

    def restore_views(self, store: ParamStore, indices: Sequence[int]) -> None:
        """Make moved parameters view the buffer again; their values are lost."""
        was_free = self.viewed_mapping is None and not self._buffer.untyped.nbytes()
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
        """After an all-gather: copy its output into parameters that do not view it."""
        if self._output_copy is not None:
            self.copy_out(self._output_copy)
            if self._unpack is not None:
                self._unpack(self.unsharded_params)
            self._buffer.free()

    def copy_out(self, copy: _Copy | _Split) -> None:
        """Fill the parameters."""
        self.allocate_params()
        if isinstance(copy, _Split):
            _torch_private.split_together(*copy)
        elif copy[0]:  # all parameters may be empty
            _torch_private.copy_together(*copy)

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """Those that are filled by unsharding and emptied by resharding."""
        own = [] if self.aliased else [self._buffer, *self._own_storages]
        return [storage.untyped for storage in own]

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
        if self.viewed_mapping is not None:
            if self._count_writes() != self._num_writes:
                self.viewed_mapping.forget_writes()  # frees the copied pages
            return
        if self._output_copy is not None or not self.keeps_storage:
            self._buffer.free()
        if not self.keeps_storage:
            for storage in self._own_storages:
                storage.free()
