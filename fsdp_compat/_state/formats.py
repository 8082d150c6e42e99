"""Values of state dicts: a rank's part of a parameter as boxes of its own shard, and any value read
back as a run of elements.

A shard is one interval of every parameter, an interval is a few boxes, and each box is a contiguous
run of the shard. So the boxes are views: nothing is copied or sent for a sharded state dict, and
torch.distributed.checkpoint loads straight into the shard."""

from __future__ import annotations

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
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as StoredProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _torch_private
from .._comm.communicator import gather_in_group
from .._comm.host_memory import of_its_own_size
from .._engine.tensor_parallel import TensorParallel
from .._layout.box import Box, cut_into_boxes
from .._layout.spec import FlatLayout, Interval, ParamSpec
from .._layout.transfer import same_parts
from ..errors import CheckpointError, explain
from .names import clean_name

__all__ = [
    "BoxedTensor",
    "is_readable",
    "is_sharded",
    "is_tensor",
    "local_value",
    "materialised",
    "misfit",
    "mesh_sharded_value",
    "read_local",
    "read_part",
    "shape_of",
    "sharded_value",
]


_FACTS = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "device",
        "dtype",
        "is_leaf",
        "is_meta",
        "layout",
        "ndim",
        "requires_grad",
        "shape",
        "grad",
        "grad_fn",
    )
} | {
    getattr(torch.Tensor, name)
    for name in (
        "dim",
        "element_size",
        "is_complex",
        "is_floating_point",
        "nelement",
        "numel",
        "size",
    )
}

_COPIES = {
    torch.clone,
    torch.detach,
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.to,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where what a unit shards lies in the parameter that its module had: a tensor-parallel one has
    more on other processes."""

    whole_shape: tuple[int, ...]
    origin: tuple[int, ...]  # offsets of the first element

    def boxes(self, shape: tuple[int, ...], part: Interval) -> list[Box]:
        """Return the elements ``part`` of what has ``shape`` here, as boxes of the whole."""
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
    """Return where a parameter lies, of which a unit shards ``shape``."""
    if parallel is None:
        return Place(shape, (0,) * len(shape))
    return Place(
        parallel.shape,
        _torch_private.offsets_on_mesh(parallel.shape, parallel.mesh, parallel.placements),
    )


class _Shared:
    """Something that copies share: a process group cannot be copied."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class BoxedTensor(ShardedTensor):
    """One parameter (or one optimizer state of its shape), sharded: this rank's boxes, which view
    its flat shard.

    ``local_shards()`` is all that it holds: a tensor that somebody puts there is saved, copied and
    loaded like the one before. A copy (deepcopy, ``clone()``, pickle) has memory of its own. A
    ShardedTensor for whoever asks for one; the metadata of all ranks, which costs time in
    proportion to their number, is made when somebody reads it. A rank without a part has one empty
    shard, as torch.distributed.checkpoint drops values without any.
    """

    part: Interval  # which elements of the parameter this rank holds
    place: Place  # `.shape` of a ShardedTensor is answered out of its metadata
    _layout: FlatLayout
    _index: int
    _members: tuple[int, ...]
    _rank: int
    _group: _Shared

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
        self._group, self._init_rrefs, self._sharded_tensor_id, self._remote_shards = (
            _Shared(group),
            False,
            None,
            {},
        )
        self._rank = rank
        self._local_shards = self._make_shards(self._views(run))
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
    def shape_here(self) -> tuple[int, ...]:
        """What the ranks of its process group have together; less than the whole of a
        tensor-parallel parameter."""
        return self._layout.params[self._index].shape

    def _views(self, run: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of the local shards as views of ``run``, this rank's elements one
        after the other."""
        views, start = [], 0
        for box in self._own_boxes():
            views.append(run[start : start + box.numel].view(box.sizes))
            start += box.numel
        return views

    def _own_boxes(self) -> list[Box]:
        """The boxes of this rank; one that is empty where it has no part."""
        sizes = (
            0,
            *self.whole_shape[1:],
        )  # a 0-d tensor has no empty part, so that is 1-D: nobody may read a value out of it
        return self.place.boxes(self.shape_here, self.part) or [Box((0,) * len(sizes), sizes)]

    def _make_shards(self, tensors: Iterable[torch.Tensor]) -> list[LocalShard]:
        return [
            LocalShard(
                t,
                ShardMetadata(
                    list(box.offsets),
                    list(box.sizes),
                    f"rank:{self._members[self._rank]}/{t.device}",
                ),
            )
            for box, t in zip(self._own_boxes(), tensors, strict=True)
        ]

    @functools.cached_property
    def _metadata(self) -> ShardedTensorMetadata:  # type: ignore[override]
        described = []
        for rank, global_rank in enumerate(self._members):
            for box in self.place.boxes(self.shape_here, self._layout.part(self._index, rank)):
                described.append(
                    ShardMetadata(
                        list(box.offsets), list(box.sizes), f"rank:{global_rank}/{self.device}"
                    )
                )
        return ShardedTensorMetadata(
            described, torch.Size(self.whole_shape), TensorProperties(dtype=self.dtype)
        )

    @functools.cached_property
    def _sharding_spec(self) -> EnumerableShardingSpec:
        return EnumerableShardingSpec(self._metadata.shards_metadata)

    def is_cut_as(
        self, layout: FlatLayout, index: int, members: tuple[int, ...], place: Place | None = None
    ) -> bool:
        """True if every rank holds the same elements as of parameter ``index`` of ``layout``, which
        is spread over the global ranks ``members`` and lies at ``place``. The same answer on all
        ranks of the value."""
        shape = layout.params[index].shape
        return (
            (self._layout.ranks, self._members) == (layout.ranks, members)
            and (self.shape_here, self.place) == (shape, place or place_of(shape, None))
            and same_parts(self._layout, self._index, layout, index)
        )

    def is_local_of(self, layout: FlatLayout, members: tuple[int, ...]) -> bool:
        """True if this is the flat tensor of ``layout`` itself, spread over the global ranks
        ``members``."""
        return (
            isinstance(self._layout, FlatOfParameters)
            and self._layout.fits(layout)
            and self._members == members
        )

    def elements(self) -> torch.Tensor:
        """Return this rank's elements out of the local shards, 1-D and in order: a view where they
        follow one another in memory.

        Raises CheckpointError if somebody has put something there that does not fit.
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
            raise CheckpointError(
                explain(
                    "A local shard of a sharded tensor does not fit.",
                    expected="tensors of the shapes that the metadata of local_shards() have",
                    got=wrong,
                    where=f"a sharded tensor of shape {self.whole_shape}, rank "
                    f"{self._members[self._rank]}",
                    fix="put tensors of the same shape as before into local_shards()",
                )
            )

    def wrong_shard(self) -> str | None:
        """Say what of the local shards cannot be what this rank holds; None if all is well."""
        boxes = self._own_boxes()
        if len(boxes) != len(self._local_shards):
            return f"{len(self._local_shards)} local shards instead of {len(boxes)}"
        for box, shard in zip(boxes, self._local_shards, strict=True):
            tensor: Any = shard.tensor
            if not isinstance(tensor, torch.Tensor) or not _torch_private.is_plain(tensor):
                return (
                    f"a {type(tensor).__name__} in the place of a local tensor of shape {box.sizes}"
                )
            if tuple(tensor.shape) != box.sizes:
                return f"a local tensor of shape {tuple(tensor.shape)} instead of {box.sizes}"
            if tensor.is_meta != self.is_meta or tensor.layout is not torch.strided:
                return (
                    "a local tensor without values, "
                    f"{'on the meta device' if tensor.is_meta else tensor.layout}"
                )
            if tensor.dtype.is_complex and not self.dtype.is_complex:
                return f"a local tensor of {tensor.dtype} instead of {self.dtype}"
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What it is made of, it says by itself, and copies it makes itself; anything else is a
        ShardedTensor's affair (which warns that it is deprecated)."""
        if func in _FACTS:
            return _torch_private.as_plain_tensor(func, args, kwargs or {})
        if func in _COPIES:
            return getattr(args[0], func.__name__)(*args[1:], **(kwargs or {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return super().__torch_function__(func, types, args, kwargs)

    # -- how torch.distributed.checkpoint asks a value for its parts

    def _filled_shards(self) -> list[LocalShard]:
        return [shard for shard in self._local_shards if math.prod(shard.metadata.shard_sizes)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        self._require_fitting_shards()  # before anything is written
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, StoredProperties(dtype=shard.tensor.dtype), torch.Size(self.whole_shape)
                ),
            )
            for shard, chunk in zip(
                self._filled_shards(), self.__create_chunk_list__(), strict=True
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes)
            )
            for shard in self._filled_shards()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for shard in self._local_shards:
            if torch.Size(shard.metadata.shard_offsets) == index.offset:
                own = shard.tensor.detach()
                return of_its_own_size(own) if own.is_contiguous() else own
        raise ValueError(f"this rank holds no box of {index.fqn} at offsets {index.offset}")

    # -- how it is copied

    def _with(self, tensors: Sequence[torch.Tensor], group: Any = None) -> BoxedTensor:
        """Return the same value with other tensors as local shards."""
        new = self._empty(tensors[0].dtype, tensors[0].device)
        attributes = {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("_metadata", "_sharding_spec")
        }
        new.__dict__.update(attributes, _local_shards=self._make_shards(tensors))
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

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> BoxedTensor:
        target = torch.device("cuda") if device is None else device
        return self.to(
            target,
            non_blocking=non_blocking,
            memory_format=memory_format,
            process_group=process_group,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> BoxedTensor:
        """Return a value with memory of its own: this rank's elements, and no more."""
        return self._with([shard.tensor.detach().clone() for shard in self._local_shards])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled without its process group, to be read where there is none; the default group
        takes its place if there is."""
        return _rebuilt, (
            self._layout,
            self._index,
            self._rank,
            self.elements().clone(),
            self._members,
            self.place,
        )

    def data_ptr(self) -> int:
        """0: the memory is that of the local shards."""
        return 0

    def new_empty(self, size: Any, **kwargs: Any) -> BoxedTensor:  # type: ignore[override]
        """Return a value of the same shape without any attributes yet, which is what copying begins
        with."""
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


def sharded_value(
    layout: FlatLayout,
    index: int,
    rank: int,
    run: torch.Tensor,
    members: tuple[int, ...],
    group: dist.ProcessGroup | None,
    parallel: TensorParallel | None = None,
) -> torch.Tensor:
    """Return what a sharded state dict holds for parameter ``index``, given this rank's elements of
    it.

    With one rank, and for parameters without elements, that is a plain tensor in the parameter's
    shape; a view in any case. parallel: how the parameter lies on a mesh of its own, if it does;
    then the boxes are those of the whole parameter.
    """
    shape = layout.params[index].shape
    place = place_of(shape, parallel)
    if not math.prod(place.whole_shape):
        return run.view(place.whole_shape)
    if layout.ranks == 1 and place.whole_shape == shape:
        return run.view(shape)
    return BoxedTensor(layout, index, rank, run, members, group, place)


def mesh_sharded_value(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return what a sharded state dict holds, where the model was given a mesh: a DTensor cut along
    ``whole``'s first dimension.

    The mesh's last dimension splits, the others repeat; a 0-d value is repeated along all. This
    rank's part is a copy, no larger than itself. Nothing is sent.
    """
    placements: list[Placement] = [Replicate()] * mesh.ndim
    own = whole.detach()
    if whole.dim():
        last = mesh.ndim - 1
        rows = -(
            -whole.shape[0] // mesh.size(last)
        )  # as torch.chunk cuts: the last ones have fewer, or none
        own = own[rows * mesh.get_local_rank(last) :][:rows]
        placements[-1] = Shard(0)
    own = own.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=whole.shape, stride=stride
    )


@dataclasses.dataclass(frozen=True)
class FlatOfParameters(FlatLayout):
    """The layout of a flat tensor as if it were one parameter of one dimension; it knows the
    parameters that are in it."""

    inside: FlatLayout

    def fits(self, layout: FlatLayout) -> bool:
        """True if the same parameters lie at the same places of as many shards."""
        return _places(self.inside) == _places(layout)


# torch.load(weights_only=True) reads files of sharded and local state dicts: plain descriptions,
# and what makes a value of them.
torch.serialization.add_safe_globals([FlatLayout, FlatOfParameters, ParamSpec, Place, _rebuilt])


def _places(layout: FlatLayout) -> tuple[Any, ...]:
    return (
        layout.ranks,
        layout.shard_numel,
        [(clean_name(param.name), param.shape, param.start) for param in layout.params],
    )


def flat_of_parameters(layout: FlatLayout) -> FlatOfParameters:
    """Return how the flat tensor of ``layout`` is described itself: without the padding at its end,
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
    """Return what a local state dict holds for a flat tensor of ``layout``: ``rank``'s ``shard``
    [S] of it, a view."""
    flat = flat_of_parameters(layout)
    return sharded_value(flat, 0, rank, shard[flat.part_in_shard(0, rank).slice], members, group)


def read_local(
    value: torch.Tensor, layout: FlatLayout, rank: int, members: tuple[int, ...]
) -> torch.Tensor | None:
    """Return ``rank``'s elements of the flat tensor of ``layout``, 1-D, of what a local state dict
    holds for it.

    None, on all ranks, if it was cut otherwise or is of other parameters. Nothing is sent.
    """
    flat = flat_of_parameters(layout)
    if isinstance(value, BoxedTensor):
        return value.elements() if value.is_local_of(layout, members) else None
    if isinstance(value, ShardedTensor):
        parts = [flat.part(0, each) for each in range(layout.ranks)]
        described = sorted(
            (*shard.shard_offsets, *shard.shard_sizes) for shard in value.metadata().shards_metadata
        )
        if tuple(value.metadata().size) != flat.params[0].shape or described != [
            (p.start, p.numel) for p in parts if p
        ]:
            return None
        own = value.local_shards()
        return own[0].tensor.detach() if own else torch.empty(0, dtype=value.dtype)
    fits = _torch_private.is_plain(value) and not value.numel() and flat.params[0].shape == (0,)
    return value.detach().reshape(-1) if fits else None


def is_sharded(value: object) -> bool:
    return isinstance(value, (ShardedTensor, DTensor))


def is_tensor(value: object) -> bool:
    """True for a tensor, and for what stands for one and knows its shape and dtype: a lazy value,
    which reads its file later."""
    if isinstance(value, torch.Tensor):
        return True
    has_dtype = isinstance(getattr(value, "dtype", None), torch.dtype)
    return torch.overrides.is_tensor_like(value) and has_dtype and hasattr(value, "shape")


def materialised(value: Any, name: str) -> torch.Tensor:
    """Return the tensor that a value stands for, itself if it is one. ``torch.detach`` makes a lazy
    value load.

    Raises CheckpointError if it cannot, or if what comes is not what the value has said of itself.
    """
    if isinstance(value, torch.Tensor):
        return value
    wanted = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    try:
        found: Any = torch.detach(value)
        if isinstance(found, torch.Tensor) and not is_sharded(found) and not found.is_meta:
            if (found.shape, found.dtype) == (tuple(value.shape), value.dtype):
                return found
            got, cause = f"one of shape {tuple(found.shape)} and {found.dtype}", None
        else:
            got, cause = (
                f"a {type(found).__name__}"
                + (" on the meta device" if isinstance(found, torch.Tensor) else ""),
                None,
            )
    except Exception as error:  # reading a file may fail in any way
        got, cause = f"{type(error).__name__}: {error}", error
    raise CheckpointError(
        explain(
            "A lazy value did not load.",
            expected=f"{wanted}, as it says of itself",
            got=got,
            where=f"load_state_dict, {name!r}, a {type(value).__name__}; parameters before it are "
            "loaded already",
            fix="load the file as a whole (torch.load), and see whether it is complete and has not "
            "changed",
        )
    ) from cause


def misfit(value: object) -> str | None:
    """Say why what somebody has put into ``value.local_shards()`` cannot be its part; None if
    nothing is wrong with it."""
    return value.wrong_shard() if isinstance(value, BoxedTensor) else None


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of the whole that a value stands for."""
    if isinstance(value, BoxedTensor):
        return value.whole_shape
    return tuple(value.metadata().size) if isinstance(value, ShardedTensor) else tuple(value.shape)


def read_part(
    value: Any,
    layout: FlatLayout,
    index: int,
    rank: int,
    members: tuple[int, ...],
    parallel: TensorParallel | None = None,
) -> torch.Tensor:
    """Return ``rank``'s elements of parameter ``index`` of ``layout``, out of any value that stands
    for the whole of it.

    members: the global ranks that the layout is spread over. parallel: how the parameter lies on a
    mesh of its own, if it does. 1-D, a view where it can be. A lazy value is materialised, if the
    rank has a part. Collective if ``value`` is sharded in another way than ``layout``: then all
    ranks see that it is, and all of them call, in one order.
    """
    part = layout.part(index, rank)
    place = place_of(layout.params[index].shape, parallel)
    if not isinstance(value, torch.Tensor):
        if not part:
            return torch.empty(0, dtype=value.dtype)
        value = materialised(value, layout.params[index].name)
    if isinstance(value, BoxedTensor) and value.is_cut_as(layout, index, members, place):
        return value.elements()
    if isinstance(value, DTensor):
        moved: Any = value.to(
            value.device_mesh.device_type
        )  # a state dict may have been put on the CPU
        value = moved.full_tensor() if parallel is None else parallel.local(moved)
    elif isinstance(value, ShardedTensor):
        is_part = isinstance(value, BoxedTensor) and value.shape_here != value.whole_shape
        value = _whole(value)
        value = value if parallel is None or is_part else parallel.part(value)
    elif parallel is not None:
        value = parallel.part(value)
    return value.detach().reshape(-1)[part.slice]


def is_readable(value: object, shape: tuple[int, ...], parallel: TensorParallel | None) -> bool:
    """False for boxes of what other processes of a mesh have more of, unless the parameter, of
    which a unit shards ``shape``, lies there in the same way."""
    if not isinstance(value, BoxedTensor) or value.shape_here == value.whole_shape:
        return True
    return (value.shape_here, value.place) == (shape, place_of(shape, parallel))


def _whole(value: ShardedTensor) -> torch.Tensor:
    """Put what a ShardedTensor's ranks hold together on every one of them. Collective over its
    process group; one all-gather."""
    metadata = value.metadata()
    size, origin = tuple(metadata.size), (0,) * len(metadata.size)
    if isinstance(value, BoxedTensor):
        size, origin = value.shape_here, value.place.origin
    group: Any = value._process_group
    ranks = dist.get_process_group_ranks(group)
    sizes = dict.fromkeys(ranks, 0)
    for shard in metadata.shards_metadata:
        sizes[_rank_of(shard)] += math.prod(shard.shard_sizes)
    longest = max(sizes.values())
    own_shards = (
        [value.elements()]
        if isinstance(value, BoxedTensor)
        else [shard.tensor for shard in value.local_shards()]
    )
    tensors = [tensor.detach().reshape(-1) for tensor in own_shards]
    own = torch.zeros(longest, dtype=value.dtype, device=tensors[0].device if tensors else None)
    start = 0
    for tensor in tensors:
        own[start : start + tensor.numel()] = tensor
        start += tensor.numel()
    gathered = gather_in_group(group, own)
    whole = torch.empty(size, dtype=value.dtype, device=own.device)
    starts = {rank: position * longest for position, rank in enumerate(ranks)}
    for shard in metadata.shards_metadata:
        rank, numel = _rank_of(shard), math.prod(shard.shard_sizes)
        place = whole
        for dim, (offset, length, first) in enumerate(
            zip(shard.shard_offsets, shard.shard_sizes, origin, strict=True)
        ):
            place = place.narrow(dim, offset - first, length)
        place.copy_(gathered[starts[rank] : starts[rank] + numel].view(tuple(shard.shard_sizes)))
        starts[rank] += numel
    return whole


def _rank_of(shard: ShardMetadata) -> int:
    rank = typing.cast(Any, shard.placement).rank()
    assert rank is not None
    return int(rank)
