"""Values of state dicts: a rank's part of a parameter as boxes of its own shard, and any value read back as a run of elements.

A shard is one interval of every parameter, an interval is a few boxes, and each box is a contiguous run of the shard. So the boxes
are views: nothing is copied or sent for a sharded state dict, and torch.distributed.checkpoint loads straight into the shard.
"""

from __future__ import annotations

import functools
import math
import typing
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as StoredProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .._engine import torch_private
from .._engine.collectives import gather_in_group
from .._layout.box import Box, cut_into_boxes
from .._layout.spec import FlatLayout, Interval

__all__ = ["BoxedTensor", "is_sharded", "read_part", "sharded_value", "shape_of"]


_FACTS = {
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape", "grad", "grad_fn")
} | {
    getattr(torch.Tensor, name) for name in ("dim", "element_size", "is_complex", "is_floating_point", "nelement", "numel", "size")
}


class _Shared:
    """Something that copies share: a process group cannot be copied."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class BoxedTensor(ShardedTensor):
    """One parameter (or one optimizer state of its shape), sharded: this rank's boxes are views of its flat shard.

    A ShardedTensor for whoever asks for one; the metadata of all ranks, which costs time in proportion to their number, is made
    when somebody reads it. A rank without a part has one empty shard, as torch.distributed.checkpoint drops values without any.
    """

    run: torch.Tensor  # 1-D: this rank's elements of the parameter, in order
    part: Interval  # which elements those are
    whole_shape: tuple[int, ...]  # `.shape` of a ShardedTensor is answered out of its metadata
    _layout: FlatLayout
    _index: int
    _members: tuple[int, ...]
    _rank: int
    _group: _Shared

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> BoxedTensor:
        layout, index, rank, run, members, group = args
        shape = layout.params[index].shape
        self: Any = torch_private.tensor_without_storage(cls, shape, run.dtype, run.device)
        self._layout, self._index, self._members, self.whole_shape = layout, index, members, shape
        self.run, self.part = run, layout.part(index, rank)
        self._group, self._init_rrefs, self._sharded_tensor_id, self._remote_shards = _Shared(group), False, None, {}
        self._rank, self._local_shards = rank, self._make_shards(cut_into_boxes(shape, self.part), members[rank])
        return self

    def __init__(self, layout: FlatLayout, index: int, rank: int, run: torch.Tensor, members: tuple[int, ...], group: Any) -> None:
        """run: 1-D, what ``rank`` of the layout holds of parameter ``index``. members: the global rank of each rank."""

    def _make_shards(self, boxes: list[Box], global_rank: int) -> list[Shard]:
        shards, start, place = [], 0, f"rank:{global_rank}/{self.run.device}"
        for box in boxes:
            view = self.run[start : start + box.numel].view(box.sizes)
            shards.append(Shard(view, ShardMetadata(list(box.offsets), list(box.sizes), place)))
            start += box.numel
        if not shards:
            sizes = [0, *self.whole_shape[1:]]  # a 0-d tensor has no empty part, so that is 1-D: nobody may read a value out of it
            shards.append(Shard(self.run.new_zeros(sizes), ShardMetadata([0] * len(sizes), sizes, place)))
        return shards

    @functools.cached_property
    def _metadata(self) -> ShardedTensorMetadata:  # type: ignore[override]
        described = []
        for rank, global_rank in enumerate(self._members):
            for box in cut_into_boxes(self.whole_shape, self._layout.part(self._index, rank)):
                described.append(ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{global_rank}/{self.run.device}"))
        return ShardedTensorMetadata(described, torch.Size(self.whole_shape), TensorProperties(dtype=self.run.dtype))

    @functools.cached_property
    def _sharding_spec(self) -> EnumerableShardingSpec:
        return EnumerableShardingSpec(self._metadata.shards_metadata)

    def is_cut_as(self, layout: FlatLayout, index: int, members: tuple[int, ...]) -> bool:
        """True if every rank holds the same elements as of parameter ``index`` of ``layout``, which is spread over the global ranks
        ``members``. The same answer on all ranks of the value."""
        return (self._layout.ranks, self._members) == (layout.ranks, members) and all(
            self._layout.part(self._index, rank) == layout.part(index, rank) for rank in range(layout.ranks)
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What it is made of, it says by itself; anything else is a ShardedTensor's affair (which warns that it is deprecated)."""
        if func in _FACTS:
            return torch_private.as_plain_tensor(func, args, kwargs or {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return super().__torch_function__(func, types, args, kwargs)

    # -- how torch.distributed.checkpoint asks a value for its parts

    def _boxes(self) -> list[Box]:
        return cut_into_boxes(self.whole_shape, self.part)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = StoredProperties(dtype=self.run.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), properties, torch.Size(self.whole_shape)
                ),
            )
            for box in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for shard in self._local_shards:
            if torch.Size(shard.metadata.shard_offsets) == index.offset:
                return shard.tensor
        raise ValueError(f"this rank holds no box of {index.fqn} at offsets {index.offset}")

    # -- how it is copied

    def __deepcopy__(self, memo: dict[int, Any]) -> BoxedTensor:
        """Return a value with memory of its own: this rank's elements, and no more."""
        return BoxedTensor(self._layout, self._index, self._rank, self.run.detach().clone(), self._members, self._process_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled without its process group, to be read where there is none; the default group takes its place if there is."""
        return _rebuilt, (self._layout, self._index, self._rank, self.run.detach().clone(), self._members)

    def data_ptr(self) -> int:
        """0: the memory is that of the local shards."""
        return 0

    def new_empty(self, size: Any, **kwargs: Any) -> BoxedTensor:  # type: ignore[override]
        """Return a value of the same shape without any attributes yet, which is what copying begins with."""
        if tuple(size) != self.whole_shape:
            raise ValueError(f"a sharded tensor of shape {self.whole_shape} can only be copied as a whole, not as {tuple(size)}")
        device = torch.device(kwargs.get("device") or self.run.device)
        empty: Any = torch_private.tensor_without_storage(type(self), self.whole_shape, self.run.dtype, device)
        return empty

    @property
    def _process_group(self) -> Any:
        return self._group.value

    @_process_group.setter
    def _process_group(self, group: Any) -> None:
        self._group = _Shared(group)


def _rebuilt(layout: FlatLayout, index: int, rank: int, run: torch.Tensor, members: tuple[int, ...]) -> BoxedTensor:
    return BoxedTensor(layout, index, rank, run, members, dist.group.WORLD if dist.is_initialized() else None)


def sharded_value(
    layout: FlatLayout, index: int, rank: int, run: torch.Tensor, members: tuple[int, ...], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return what a sharded state dict holds for parameter ``index``, given this rank's elements of it.

    With one rank, and for parameters without elements, that is a plain tensor in the parameter's shape; a view in any case.
    """
    shape = layout.params[index].shape
    if layout.ranks == 1 or not math.prod(shape):
        return run.view(shape)
    return BoxedTensor(layout, index, rank, run, members, group)


def is_sharded(value: object) -> bool:
    return isinstance(value, (ShardedTensor, DTensor))


def shape_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole that a value stands for."""
    if isinstance(value, BoxedTensor):
        return value.whole_shape
    return tuple(value.metadata().size) if isinstance(value, ShardedTensor) else tuple(value.shape)


def read_part(value: torch.Tensor, layout: FlatLayout, index: int, rank: int, members: tuple[int, ...]) -> torch.Tensor:
    """Return ``rank``'s elements of parameter ``index`` of ``layout``, out of any value that stands for the whole of it.

    members: the global ranks that the layout is spread over.
    1-D, a view where it can be. Collective if ``value`` is sharded in another way than ``layout``: then all ranks see that it is,
    and all of them call, in one order.
    """
    part = layout.part(index, rank)
    if isinstance(value, BoxedTensor) and value.is_cut_as(layout, index, members):
        return value.run
    if isinstance(value, DTensor):
        value = value.full_tensor()
    elif isinstance(value, ShardedTensor):
        value = _whole(value)
    return value.detach().reshape(-1)[part.slice]


def _whole(value: ShardedTensor) -> torch.Tensor:
    """Put a ShardedTensor together on every rank. Collective over its process group; one all-gather."""
    metadata = value.metadata()
    group: Any = value._process_group
    ranks = dist.get_process_group_ranks(group)
    sizes = dict.fromkeys(ranks, 0)
    for shard in metadata.shards_metadata:
        sizes[_rank_of(shard)] += math.prod(shard.shard_sizes)
    longest = max(sizes.values())
    tensors = [shard.tensor.detach().reshape(-1) for shard in value.local_shards()]
    own = torch.zeros(longest, dtype=value.dtype, device=tensors[0].device if tensors else None)
    start = 0
    for tensor in tensors:
        own[start : start + tensor.numel()] = tensor
        start += tensor.numel()
    gathered = gather_in_group(group, own)
    whole = torch.empty(metadata.size, dtype=value.dtype, device=own.device)
    starts = {rank: position * longest for position, rank in enumerate(ranks)}
    for shard in metadata.shards_metadata:
        rank, numel = _rank_of(shard), math.prod(shard.shard_sizes)
        place = whole
        for dim, (offset, size) in enumerate(zip(shard.shard_offsets, shard.shard_sizes, strict=True)):
            place = place.narrow(dim, offset, size)
        place.copy_(gathered[starts[rank] : starts[rank] + numel].view(tuple(shard.shard_sizes)))
        starts[rank] += numel
    return whole


def _rank_of(shard: ShardMetadata) -> int:
    rank = typing.cast(Any, shard.placement).rank()
    assert rank is not None
    return int(rank)
