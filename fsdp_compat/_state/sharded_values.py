"""The sharded values of state dicts: a rank's part of a parameter as boxes.

A shard is one interval of every parameter, an interval is a few boxes, and each box is a contiguous
run of the shard. So the boxes are views of the shard, or of one copy of it, and nothing is sent for
a sharded state dict."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import typing
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from .._comm.host_memory import of_its_own_size
from .._engine.tensor_parallel import TensorParallel
from .._layout.box import Box, cut_into_boxes
from .._layout.rows import CopiedLayout
from .._layout.spec import FlatLayout, Interval, ParamSpec
from .._layout.transfer import same_parts
from ..errors import CheckpointError
from .units import clean_name

if typing.TYPE_CHECKING:  # imported where they are used: that takes a second
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor


_PROPERTIES = (
    *("device", "dtype", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape"),
    *("grad", "grad_fn"),
)
_METHODS = ("dim", "element_size", "is_complex", "is_floating_point", "nelement", "numel", "size")
_FACTS = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES} | {
    getattr(torch.Tensor, name) for name in _METHODS
}
_COPIES = {torch.clone, torch.detach} | {
    getattr(torch.Tensor, name) for name in ("clone", "detach", "cpu", "cuda", "to")
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the part of a parameter that a unit shards lies in the whole. They differ for
    tensor-parallel parameters, of which a unit shards this process's part."""

    whole_shape: tuple[int, ...]
    origin: tuple[int, ...]  # offsets of the first element

    def boxes(self, shape: tuple[int, ...], part: Interval) -> list[Box]:
        """Return the elements ``part`` of the sharded part, which has ``shape``, as boxes of the
        whole."""
        return [
            Box(
                tuple(
                    offset + start for offset, start in zip(box.offsets, self.origin, strict=True)
                ),
                box.sizes,
            )
            for box in cut_into_boxes(shape, part)
        ]


def place_of(shape: tuple[int, ...], parallel: TensorParallel | None) -> Place:
    """Return the placement of a parameter of which a unit shards ``shape``."""
    if parallel is None:
        return Place(shape, (0,) * len(shape))
    return Place(
        parallel.shape,
        _torch_private.offsets_on_mesh(parallel.shape, parallel.mesh, parallel.placements),
    )


@dataclasses.dataclass(frozen=True)
class FlatOfParameters(FlatLayout):
    """The layout of a flat tensor as one 1-D parameter; ``inside`` is the layout of the parameters
    in it."""

    inside: FlatLayout


def _places(layout: FlatLayout) -> tuple[Any, ...]:
    return (
        layout.ranks,
        [(clean_name(param.name), param.shape, param.start) for param in layout.params],
    )


class _Shared:
    """A value that copies share, as a process group cannot be copied."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class BoxedTensor(ShardedTensor):
    """One parameter (or one optimizer state of its shape), sharded: this rank's boxes.

    It is a ShardedTensor whose contents are its ``local_shards()``: a tensor that the user puts
    there is saved, copied and loaded like the previous one. Copies (deepcopy, ``clone()``, pickle)
    have memory of their own. The metadata of all ranks takes time proportional to their number, so
    it is computed on first use. A rank without a part has one empty shard, because
    torch.distributed.checkpoint drops values without shards.
    """

    part: Interval  # the elements of the parameter that this rank holds
    place: Place  # `.shape` of a ShardedTensor is answered out of its metadata
    _layout: FlatLayout
    _index: int
    _members: tuple[int, ...]
    _rank: int  # in `_layout`
    _group: _Shared
    is_view = False  # of memory that the process goes on using

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> BoxedTensor:
        layout, index, rank, run, members, group, *rest = args
        shape = layout.params[index].shape
        place = (rest[0] if rest else None) or place_of(shape, None)
        self: Any = _torch_private.tensor_without_storage(
            cls, place.whole_shape, run.dtype, run.device
        )
        self._layout, self._index, self._members, self.place = layout, index, members, place
        self.part = layout.part(index, rank)
        self._group, self._rank = _Shared(group), rank
        self._init_rrefs, self._sharded_tensor_id, self._remote_shards = False, None, {}
        boxes = self._own_boxes()
        runs = zip(boxes, run.split([box.numel for box in boxes]), strict=True)
        self._local_shards = self._make_shards([each.view(box.sizes) for box, each in runs])
        return self

    def __init__(
        self,
        layout: FlatLayout,
        index: int,
        rank: int,
        run: torch.Tensor,
        members: tuple[int, ...],
        group: Any,
        place: Place | None = None,
    ) -> None:
        """run: 1-D, what ``rank`` of the layout holds of parameter ``index``. members: the global
        rank of each rank. place: of what the layout knows as that parameter, where it is a part."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.place.whole_shape

    @property
    def rank(self) -> int:
        """The rank, among those that the value is spread over, whose elements are here."""
        return self._rank

    @property
    def shape_here(self) -> tuple[int, ...]:
        """The shape of what its process group holds: of a tensor-parallel parameter, a part."""
        return self._layout.params[self._index].shape

    def _own_boxes(self) -> list[Box]:
        """Return the boxes of this rank; one empty box if it has no part."""
        # Of a 0-d tensor the empty box is 1-D, so that no value can be read from it.
        sizes = (0, *self.whole_shape[1:])
        return self.place.boxes(self.shape_here, self.part) or [Box((0,) * len(sizes), sizes)]

    def _described(self, box: Box, rank: int, device: torch.device) -> ShardMetadata:
        place = f"rank:{self._members[rank]}/{device}"
        return ShardMetadata(list(box.offsets), list(box.sizes), place)

    def _make_shards(self, tensors: Iterable[torch.Tensor]) -> list[LocalShard]:
        return [
            LocalShard(tensor, self._described(box, self._rank, tensor.device))
            for box, tensor in zip(self._own_boxes(), tensors, strict=True)
        ]

    @functools.cached_property
    def _metadata(self) -> ShardedTensorMetadata:  # type: ignore[override]
        described = [
            self._described(box, rank, self.device)
            for rank in range(len(self._members))
            for box in self.place.boxes(self.shape_here, self._layout.part(self._index, rank))
        ]
        properties = TensorProperties(dtype=self.dtype)
        return ShardedTensorMetadata(described, torch.Size(self.whole_shape), properties)

    @functools.cached_property
    def _sharding_spec(self) -> EnumerableShardingSpec:
        return EnumerableShardingSpec(self._metadata.shards_metadata)

    def is_cut_as(
        self, layout: FlatLayout, index: int, members: tuple[int, ...], place: Place | None = None
    ) -> bool:
        """True if every rank holds the same elements as of parameter ``index`` of ``layout``, which
        is spread over the global ranks ``members`` and lies at ``place``. The same answer on all
        ranks of the value."""
        shape, last = layout.params[index].shape, layout.ranks - 1
        return (
            (self._layout.ranks, self._members) == (layout.ranks, members)
            # of a scalar: either the first rank holds it, or every rank does
            and self._layout.part(self._index, last) == layout.part(index, last)
            and (self.shape_here, self.place) == (shape, place or place_of(shape, None))
            and same_parts(self._layout, self._index, layout, index)
        )

    def is_flat_of(self, layout: FlatLayout) -> bool:
        """True if this is the flat tensor of ``layout``, whose shards may be padded otherwise."""
        flat = self._layout
        return isinstance(flat, FlatOfParameters) and _places(flat.inside) == _places(layout)

    @property
    def _is_flat(self) -> bool:
        return isinstance(self._layout, FlatOfParameters)

    def elements(self) -> torch.Tensor:
        """Return this rank's elements out of the local shards, 1-D and in order: a view where they
        follow one another in memory.

        Raises CheckpointError if the user has put a tensor there that does not fit.
        """
        self._require_fitting_shards()
        tensors = [shard.tensor.detach() for shard in self._local_shards]
        first, end = tensors[0], tensors[0].data_ptr()
        for tensor in tensors:
            follows = (
                tensor.data_ptr() == end
                and _torch_private.same_storage(tensor, first)
                and tensor.dtype == first.dtype
            )
            if not follows or not tensor.is_contiguous():
                return torch.cat([each.reshape(-1) for each in tensors])
            end += tensor.nbytes
        return first.as_strided((self.part.numel,), (1,))

    def _require_fitting_shards(self) -> None:
        if (wrong := self.wrong_shard()) is not None:
            raise CheckpointError.of(
                "A local shard of a sharded tensor does not fit.",
                expected="tensors of the shapes that the metadata of local_shards() have",
                got=wrong,
                where=f"a sharded tensor of shape {self.whole_shape}, rank "
                f"{self._members[self._rank]}",
                fix="put tensors of the same shape as before into local_shards()",
            )

    def wrong_shard(self) -> str | None:
        """Describe a local shard that does not fit this rank's part; None if all fit."""
        boxes = self._own_boxes()
        if len(boxes) != len(self._local_shards):
            return f"{len(self._local_shards)} local shards instead of {len(boxes)}"
        for box, shard in zip(boxes, self._local_shards, strict=True):
            tensor: Any = shard.tensor
            if not isinstance(tensor, torch.Tensor) or not _torch_private.is_plain(tensor):
                return f"a {type(tensor).__name__} in the place of a tensor of shape {box.sizes}"
            found = (tuple(tensor.shape), tensor.is_meta, tensor.layout)
            if found != (box.sizes, self.is_meta, torch.strided):
                return (
                    f"a local tensor of shape {tuple(tensor.shape)} on {tensor.device}, "
                    f"{tensor.layout}, instead of one of shape {box.sizes} on {self.device}"
                )
            if tensor.dtype.is_complex and not self.dtype.is_complex:
                return f"a local tensor of {tensor.dtype} instead of {self.dtype}"
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about dtype, shape etc. and make copies here; leave the rest to
        ShardedTensor, which warns that it is deprecated."""
        if func in _FACTS:
            return _torch_private.as_plain_tensor(func, args, kwargs or {})
        if func in _COPIES:
            return getattr(args[0], func.__name__)(*args[1:], **(kwargs or {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return super().__torch_function__(func, types, args, kwargs)

    # -- the protocol by which torch.distributed.checkpoint asks a value for its parts

    def _filled_shards(self) -> list[LocalShard]:
        return [shard for shard in self._local_shards if math.prod(shard.metadata.shard_sizes)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._require_fitting_shards()  # before anything is written
        items, size = [], torch.Size(self.whole_shape)
        for shard, chunk in zip(self._filled_shards(), self.__create_chunk_list__(), strict=True):
            data = TensorWriteData(chunk, TensorProperties(dtype=shard.tensor.dtype), size)
            index = MetadataIndex(fqn, chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        found = (shard.metadata for shard in self._filled_shards())
        return [
            ChunkStorageMetadata(torch.Size(each.shard_offsets), torch.Size(each.shard_sizes))
            for each in found
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for shard in self._local_shards:
            if torch.Size(shard.metadata.shard_offsets) == index.offset:
                own = shard.tensor.detach()
                return of_its_own_size(own) if own.is_contiguous() else own
        raise ValueError(f"this rank holds no box of {index.fqn} at offsets {index.offset}")

    # -- copies

    def _with(self, tensors: Sequence[torch.Tensor], group: Any = None) -> BoxedTensor:
        """Return the same value with other local tensors."""
        new = self._empty(tensors[0].dtype, tensors[0].device)
        new.__dict__.update(self.__dict__, _local_shards=self._make_shards(tensors))
        for cached in ("_metadata", "_sharding_spec"):
            new.__dict__.pop(cached, None)
        if group is not None:
            new._process_group = group
        return new

    def _empty(self, dtype: torch.dtype, device: torch.device) -> BoxedTensor:
        empty: Any = _torch_private.tensor_without_storage(
            type(self), self.whole_shape, dtype, device
        )
        return empty

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> BoxedTensor:  # type: ignore[override]
        """Return a value with memory of its own. Nothing is sent."""
        return self._with(
            [shard.tensor.clone(memory_format=memory_format) for shard in self._local_shards]
        )

    def detach(self) -> BoxedTensor:
        """Return a value that views the same memory. Nothing is sent."""
        return self._with([shard.tensor.detach() for shard in self._local_shards])

    def to(self, *args: Any, process_group: Any = None, **kwargs: Any) -> BoxedTensor:
        """Return a value of another dtype or on another device, itself if it is there: as
        ``torch.Tensor.to``. Nothing is sent."""
        moved = [shard.tensor.to(*args, **kwargs) for shard in self._local_shards]
        if all(
            tensor is shard.tensor for tensor, shard in zip(moved, self._local_shards, strict=True)
        ):
            return self
        return self._with(moved, process_group)

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None
    ) -> BoxedTensor:
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(  # type: ignore[override]
        self, device: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> BoxedTensor:
        target = torch.device("cuda") if device is None else device
        return self.to(target, non_blocking=non_blocking, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoxedTensor:
        """Return a value with memory of its own: this rank's elements, and no more."""
        if self._is_flat:  # the parts of parameters go on sharing its memory
            return self._with([copy.deepcopy(s.tensor.detach(), memo) for s in self._local_shards])
        return self._with([shard.tensor.detach().clone() for shard in self._local_shards])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle without the process group, so that it can be read without one. Unpickled values
        use the default group, if there is one.

        Elements are copied first if pickle would write more than them, or may move them to shared
        memory under a shard that is in use.
        """
        run = self.elements()
        is_alone = run.untyped_storage().nbytes() == run.nbytes and not self.is_view
        return _rebuilt, (
            self._layout,
            self._index,
            self._rank,
            run if self._is_flat or is_alone else run.clone(),
            self._members,
            self.place,
        )

    def data_ptr(self) -> int:
        """Return 0: the memory belongs to the local shards."""
        return 0

    def new_empty(self, size: Any, **kwargs: Any) -> BoxedTensor:  # type: ignore[override]
        """Return a value of the same shape without attributes: copying begins with one."""
        if tuple(size) != self.whole_shape:
            raise ValueError(
                f"a sharded tensor of shape {self.whole_shape} can only be copied as a whole, not "
                f"as {tuple(size)}"
            )
        return self._empty(self.dtype, torch.device(kwargs.get("device") or self.device))

    @property
    def _process_group(self) -> Any:
        return self._group.value

    @_process_group.setter
    def _process_group(self, group: Any) -> None:
        self._group = _Shared(group)


class LocalPart(torch.Tensor):
    """This rank's elements of one parameter in a local state dict: a 1-D view of its shard.

    A plain tensor, except that torch.distributed.checkpoint must know it: it takes tensors for the
    same on all ranks (see ``_torch_patches/local_parts.py``). Results and pickles are plain."""

    __torch_function__ = _torch_private.no_torch_function

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalPart:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo).as_subclass(LocalPart)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _rebuilt(
    layout: FlatLayout,
    index: int,
    rank: int,
    run: torch.Tensor,
    members: tuple[int, ...],
    place: Place | None = None,
) -> BoxedTensor:
    return BoxedTensor(
        layout,
        index,
        rank,
        run,
        members,
        dist.group.WORLD if dist.is_initialized() else None,
        place,
    )


for _named in (FlatOfParameters, Place, _rebuilt):
    _named.__module__ = f"{__package__}.formats"  # as saved files name them

# torch.load(weights_only=True) reads files of sharded and local state dicts: they hold plain
# descriptions, and a function that makes a value of them.
torch.serialization.add_safe_globals(
    [CopiedLayout, FlatLayout, FlatOfParameters, ParamSpec, Place, _rebuilt]
)


def sharded_value(
    layout: FlatLayout,
    index: int,
    rank: int,
    run: torch.Tensor,
    members: tuple[int, ...],
    group: dist.ProcessGroup | None,
    parallel: TensorParallel | None = None,
) -> torch.Tensor:
    """Return the value of parameter ``index`` for a sharded state dict, given this rank's elements
    of it.

    A view of ``run``: with one rank, and for parameters without elements, a plain tensor in the
    parameter's shape. parallel: the placement of a tensor-parallel parameter on its own mesh; the
    boxes are boxes of the whole parameter.
    """
    shape = layout.params[index].shape
    place = place_of(shape, parallel)
    if not math.prod(place.whole_shape):
        return run.view(place.whole_shape)
    if layout.ranks == 1 and place.whole_shape == shape:
        return run.view(shape)
    return BoxedTensor(layout, index, rank, run, members, group, place)


def mesh_sharded_value(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the value for a sharded state dict of a model with a device mesh: a DTensor sharded
    along dimension 0.

    The mesh's last dimension splits, the others repeat; a 0-d value is repeated along all. This
    rank's part is a copy, no larger than itself. Nothing is sent.
    """
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    placements: list[Placement] = [Replicate()] * mesh.ndim
    own = whole.detach()
    if whole.dim():
        last = mesh.ndim - 1
        # As torch.chunk cuts: the last ones have fewer rows, or none.
        rows = -(-whole.shape[0] // mesh.size(last))
        own = own[rows * mesh.get_local_rank(last) :][:rows]
        placements[-1] = Shard(0)
    own = own.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    options: Any = {"run_check": False, "shape": whole.shape, "stride": stride}
    return DTensor.from_local(own, mesh, placements, **options)


def flat_of_parameters(layout: FlatLayout) -> FlatOfParameters:
    """Return the layout of the flat tensor of ``layout`` itself, without the padding at its end,
    which is not saved."""
    numel = max((param.place.stop for param in layout.params), default=0)
    return FlatOfParameters(
        (ParamSpec("flat", (numel,), 0),), layout.ranks, layout.shard_numel, layout
    )


def local_value(
    layout: FlatLayout,
    rank: int,
    shard: torch.Tensor,
    members: tuple[int, ...],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the value for a local state dict: a view of ``rank``'s ``shard`` [S] of the flat
    tensor of ``layout``."""
    flat = flat_of_parameters(layout)
    return sharded_value(flat, 0, rank, shard[flat.part_in_shard(0, rank).slice], members, group)


def copied(value: Any, to_cpu: bool = False) -> Any:
    """Return a copy of a tensor that keeps no other memory alive; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if to_cpu else value.detach().clone()
    return value
