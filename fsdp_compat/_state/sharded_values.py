"""The sharded values of state dicts: a rank's part of a parameter as boxes.

A shard is one interval of every parameter: a few boxes, each a contiguous run. They are views of
the shard, or of one copy, and nothing is sent."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import operator
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
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
from .._comm.communicator import communicator
from .._comm.host_memory import of_its_own_size
from .._comm.mesh import axis_of
from .._engine.group import Group
from .._engine.state_store import store_of
from .._engine.tensor_parallel import TensorParallel
from .._layout.box import Box, Piece, Share
from .._layout.rows import CopiedLayout
from .._layout.spec import FlatLayout, ParamSpec, Section
from ..errors import CheckpointError
from .held import share_of
from .units import clean_name

if typing.TYPE_CHECKING:  # imported where they are used: that takes a second
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor


# What tensors have by these names is asked of the value itself, or done to each of its shards.
_FACTS = {
    function
    for name in (
        *("device", "dtype", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape"),
        *("grad", "grad_fn", "dim", "element_size", "is_complex", "is_floating_point"),
        *("nelement", "numel", "size"),
    )
    for function in (getattr(torch.Tensor, name), getattr(torch.Tensor, name).__get__)
}
_COPIES = {torch.clone, torch.detach} | {
    getattr(torch.Tensor, name) for name in ("clone", "detach", "cpu", "cuda", "to")
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the part of a parameter that a unit shards lies in the whole, in pickled values."""

    whole_shape: tuple[int, ...]
    origin: tuple[int, ...]  # offsets of the first element


@dataclasses.dataclass(frozen=True)
class FlatOfParameters(FlatLayout):
    """The layout of a flat tensor as one 1-D parameter. inside: of its parameters."""

    inside: FlatLayout

    @staticmethod
    def of(layout: FlatLayout) -> FlatOfParameters:
        """Return the layout of the flat tensor of ``layout``, without the padding at its end."""
        numel = max((param.in_full.stop for param in layout.params), default=0)
        flat = ParamSpec("flat", (numel,), 0)
        return FlatOfParameters((flat,), layout.ranks, layout.shard_numel, layout)

    def is_alike(self, other: FlatOfParameters) -> bool:
        """True for the same parameters over as many ranks; shards may be padded otherwise."""
        one, its = (
            (each.ranks, [(clean_name(p.name), p.shape, p.start) for p in each.inside.params])
            for each in (self, other)
        )
        return one == its


@dataclasses.dataclass(frozen=True)
class Cut(Share):
    """This rank's share of a parameter, and the ranks that have the others. Copies share it."""

    members: tuple[int, ...]  # the global rank of each rank
    parallel: TensorParallel | None = None  # how the parameter lies on a mesh of its own
    group: Any = None  # the process group of the ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> Cut:
        return self  # process groups cannot be copied

    @functools.cached_property
    def own_boxes(self) -> list[Box]:
        """The boxes of the rank; one empty box if it has no part."""
        # Of a 0-d tensor the empty box is 1-D, so that no value can be read from it.
        sizes = (0, *self.whole_shape[1:])
        return self.boxes_on(self.rank) or [Box((0,) * len(sizes), sizes)]

    def is_as(self, other: Cut) -> bool:
        """True if every rank holds the same elements of the parameter. Alike on all ranks."""
        last = self.layout.ranks - 1
        return (
            (self.layout.ranks, self.members) == (other.layout.ranks, other.members)
            # of a scalar: either the first rank holds it, or every rank does
            and self.layout.part(self.index, last) == other.layout.part(other.index, last)
            and self.is_alike(other)
        )


def cut_of(group: Group, index: int, process_group: Any = None, share: Share | None = None) -> Cut:
    """Return how a parameter of a unit is cut. process_group: for values to be saved. share: of
    this rank, if it is known."""
    store, members = store_of(group), group.shard.members
    share, parallel = share or share_of(group, index), store.parallel[index]
    return Cut(
        *(share.piece, share.layout, share.index, store.rank, members, parallel, process_group)
    )


def flat_cut(group: Group, section: Section, process_group: Any = None) -> Cut:
    """Return how the flat tensor of a section is cut."""
    flat = FlatOfParameters.of(section.layout)
    piece = Piece.of_whole(flat.params[0].shape)
    rank, members = store_of(group).rank, group.shard.members
    return Cut(piece, flat, 0, rank, members, group=process_group)


def _of_each_shard(name: str) -> Any:
    """Return a method that applies that of tensors to every local shard. Nothing is sent."""

    def method(self: BoxedTensor, *args: Any, process_group: Any = None, **kwargs: Any) -> Any:
        before = [shard.tensor for shard in self._local_shards]
        after = [getattr(tensor, name)(*args, **kwargs) for tensor in before]
        if all(map(operator.is_, before, after)):
            return self
        return self._with(after, process_group)

    return method


class BoxedTensor(ShardedTensor):
    """One parameter (or one optimizer state of its shape), sharded: this rank's boxes.

    Its content is ``local_shards()``: a tensor that the user puts there is saved, copied and
    loaded. Copies (deepcopy, ``clone()``, pickle) have memory of their own. The metadata of all
    ranks is computed on first use. A rank without a part has one empty shard:
    torch.distributed.checkpoint drops values without any."""

    cut: Cut
    is_view = False  # of memory that the process goes on using
    _init_rrefs, _sharded_tensor_id = False, None
    _remote_shards: Any = None

    @staticmethod
    def of(cut: Cut, run: torch.Tensor) -> BoxedTensor:
        """run: 1-D, the elements of the part."""
        self = _empty(cut.whole_shape, run.dtype, run.device)
        self.cut, boxes = cut, cut.own_boxes
        runs = zip(boxes, run.split([box.numel for box in boxes]), strict=True)
        self._local_shards = self._make_shards([each.view(box.sizes) for box, each in runs])
        return self

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape; `.shape` of a ShardedTensor is answered out of its metadata."""
        return self.cut.whole_shape

    @property
    def _process_group(self) -> Any:
        return self.cut.group

    @_process_group.setter
    def _process_group(self, group: Any) -> None:
        self.cut = dataclasses.replace(self.cut, group=group)

    def _described(self, box: Box, rank: int, device: torch.device) -> ShardMetadata:
        place = f"rank:{self.cut.members[rank]}/{device}"
        return ShardMetadata(list(box.offsets), list(box.sizes), place)

    def _make_shards(self, tensors: Iterable[torch.Tensor]) -> list[LocalShard]:
        return [
            LocalShard(tensor, self._described(box, self.cut.rank, tensor.device))
            for box, tensor in zip(self.cut.own_boxes, tensors, strict=True)
        ]

    @functools.cached_property
    def _metadata(self) -> ShardedTensorMetadata:  # type: ignore[override]
        described = [
            self._described(box, rank, self.device)
            for rank in range(len(self.cut.members))
            for box in self.cut.boxes_on(rank)
        ]
        properties = TensorProperties(dtype=self.dtype)
        return ShardedTensorMetadata(described, torch.Size(self.whole_shape), properties)

    @property
    def _sharding_spec(self) -> EnumerableShardingSpec:
        return EnumerableShardingSpec(self._metadata.shards_metadata)

    def elements(self) -> torch.Tensor:
        """Return this rank's elements, 1-D, if possible a view. Raises CheckpointError."""
        self._require_fitting_shards()
        tensors = [shard.tensor.detach() for shard in self._local_shards]
        first = tensors[0]
        starts = itertools.accumulate((each.nbytes for each in tensors), initial=first.data_ptr())
        follow = all(
            tensor.data_ptr() == start
            and tensor.is_contiguous()
            and tensor.dtype == first.dtype
            and _torch_private.same_storage(tensor, first)
            for tensor, start in zip(tensors, starts, strict=False)
        )
        if follow:
            return first.as_strided((self.cut.part.numel,), (1,))
        return torch.cat([each.reshape(-1) for each in tensors])

    def _require_fitting_shards(self) -> None:
        if (wrong := self.wrong_shard()) is not None:
            raise CheckpointError.of(
                "A local shard of a sharded tensor does not fit.",
                expected="tensors of the shapes that the metadata of local_shards() have",
                got=wrong,
                where=f"a sharded tensor of shape {self.whole_shape}, rank "
                f"{self.cut.members[self.cut.rank]}",
                fix="put tensors of the same shape as before into local_shards()",
            )

    def wrong_shard(self) -> str | None:
        """Describe a local shard that does not fit this rank's part; None if all fit."""
        boxes, shards = self.cut.own_boxes, self._local_shards
        if len(boxes) != len(shards):
            return f"{len(shards)} local shards instead of {len(boxes)}"
        for box, shard in zip(boxes, shards, strict=True):
            tensor: Any = shard.tensor
            if not isinstance(tensor, torch.Tensor) or not _torch_private.is_plain(tensor):
                return f"a {type(tensor).__name__} in place of a tensor of shape {box.sizes}"
            is_lossy = tensor.dtype.is_complex and not self.dtype.is_complex
            found = (tuple(tensor.shape), tensor.is_meta, tensor.layout)
            if is_lossy or found != (box.sizes, self.is_meta, torch.strided):
                return (
                    f"a local tensor of shape {tuple(tensor.shape)} and {tensor.dtype} on "
                    f"{tensor.device}, {tensor.layout}, instead of one of shape {box.sizes} and "
                    f"{self.dtype} on {self.device}"
                )
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about metadata and make copies; leave the rest to ShardedTensor."""
        if func in _FACTS:
            return _torch_private.as_plain_tensor(func, args, kwargs or {})
        if func in _COPIES:
            return getattr(args[0], func.__name__)(*args[1:], **(kwargs or {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

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

    # -- the whole

    def whole(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Return the whole parameter, on the device of its shards. group: instead of its own.
        Collective: all ranks of the group, then of a tensor-parallel parameter's mesh. Raises
        CheckpointError, before that, for a value that these ranks cannot put together."""
        self._require_fitting_shards()
        group, parallel = group or self._process_group, self.cut.parallel
        ranks, members = dist.get_process_group_ranks(group), self.cut.members
        own, rank = members[self.cut.rank], dist.get_rank()
        is_complete = self.cut.piece.is_whole or parallel is not None
        if not {*members} <= {*ranks} or (rank in members and rank != own) or not is_complete:
            raise CheckpointError.of(
                "The shards of a value cannot be gathered.",
                expected=f"a whole parameter, and its own shards on each of global ranks {members}",
                got=f"the shards of rank {own}, of {self.cut.piece}, in a group of {ranks}",
                where=f"a sharded tensor of shape {self.whole_shape}, global rank {rank}",
                fix="load the file that this rank saved, or use fsdp_compat.checkpoint",
            )
        value = gathered(self, group)
        return value if parallel is None else parallel.whole(value)

    def gather(  # type: ignore[override]
        self, dst: int = 0, out: torch.Tensor | None = None, *_: Any, **kwargs: Any
    ) -> None:
        """Copy the whole parameter into ``out``, which rank ``dst`` of the group has. It is sent in
        its own dtype. Collective: see ``whole``."""
        value = self.whole()
        if out is not None:
            out.copy_(value.view(out.shape))

    # -- copies

    def _with(self, tensors: Sequence[torch.Tensor], group: Any = None) -> BoxedTensor:
        """Return the same value with other local tensors."""
        new = _empty(self.whole_shape, tensors[0].dtype, tensors[0].device)
        new.__dict__.update(self.__dict__, _local_shards=self._make_shards(tensors))
        new.__dict__.pop("_metadata", None)
        if group is not None:
            new._process_group = group
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> BoxedTensor:
        """Return a value with memory of its own: this rank's elements, and no more."""
        if self._is_flat:  # the parts of parameters go on sharing its memory
            return self._with([copy.deepcopy(s.tensor.detach(), memo) for s in self._local_shards])
        return self._with([shard.tensor.detach().clone() for shard in self._local_shards])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle without the process group. Elements are copied first if pickle would write more,
        or move a shard in use to shared memory."""
        run, cut = self.elements(), self.cut
        is_alone = run.untyped_storage().nbytes() == run.nbytes and not self.is_view
        run = run if self._is_flat or is_alone else run.clone()
        place = Place(cut.whole_shape, cut.piece.offsets)
        return _rebuilt, (cut.layout, cut.index, cut.rank, run, cut.members, place)

    @property
    def _is_flat(self) -> bool:
        return isinstance(self.cut.layout, FlatOfParameters)

    def data_ptr(self) -> int:
        """Return 0: the memory belongs to the local shards."""
        return 0

    def new_empty(self, size: Any, **kwargs: Any) -> BoxedTensor:  # type: ignore[override]
        """Return a value of the same shape without attributes: copying begins with one."""
        if tuple(size) != self.whole_shape:
            shapes = f"of shape {self.whole_shape} can only be copied as a whole, not as"
            raise ValueError(f"a sharded tensor {shapes} {tuple(size)}")
        device = torch.device(kwargs.get("device") or self.device)
        return _empty(self.whole_shape, self.dtype, device)


for _name in ("bfloat16", "clone", "cpu", "cuda", "detach", "double", "float", "half", "to"):
    setattr(BoxedTensor, _name, _of_each_shard(_name))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> BoxedTensor:
    """Return a BoxedTensor without attributes."""
    return _torch_private.tensor_without_storage(BoxedTensor, shape, dtype, device)


def gathered(value: ShardedTensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return a whole ShardedTensor, or its tensor-parallel part. Collective in ``group``."""
    metadata, group = value.metadata(), group or value._process_group
    dtype = metadata.tensor_properties.dtype
    if isinstance(value, BoxedTensor):
        part, own_shards = value.cut.piece, [value.elements()]
    else:
        part = Piece.of_whole(tuple(metadata.size))
        own_shards = [shard.tensor for shard in value.local_shards()]
    ranks = dist.get_process_group_ranks(group)
    by_rank: Mapping[int, list[ShardMetadata]] = {rank: [] for rank in ranks}
    for shard in metadata.shards_metadata:
        placement: Any = shard.placement
        by_rank[placement.rank()].append(shard)
    numels = [[math.prod(shard.shard_sizes) for shard in shards] for shards in by_rank.values()]
    longest = max(1, *map(sum, numels))
    device = own_shards[0].device if own_shards else None
    tensors = [tensor.detach().reshape(-1).to(dtype) for tensor in own_shards]
    padding = longest - sum(tensor.numel() for tensor in tensors)
    own = torch.cat((*tensors, torch.zeros(padding, dtype=dtype, device=device)))
    whole = own.new_empty(part.shape)
    if own.is_cpu:  # an offloaded value, whose group may be of a device
        own = own.to(_torch_private.default_device_of_backend(group))
    everything = communicator(axis_of(group), own.device).gather_now(own, "sharded values")
    pieces = everything.split(longest)
    for piece, shards, its_numels in zip(pieces, by_rank.values(), numels, strict=True):
        for shard, run in zip(shards, piece[: sum(its_numels)].split(its_numels), strict=True):
            box = Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))
            starts = box.moved([-at for at in part.offsets]).offsets
            place = tuple(map(slice, starts, map(operator.add, starts, box.sizes)))
            whole[place] = run.view(box.sizes)
    return whole


class LocalPart(torch.Tensor):
    """This rank's elements of a parameter in a local state dict: a 1-D view of its shard, marked
    for ``_torch_patches/own_values.py``. Results and pickles are plain tensors."""

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
    shape = layout.params[index].shape
    place = place or Place(shape, (0,) * len(shape))
    piece = Piece(place.whole_shape, place.origin, shape)
    group = dist.group.WORLD if dist.is_initialized() else None
    return BoxedTensor.of(Cut(piece, layout, index, rank, members, group=group), run)


for _named in (FlatOfParameters, Place, _rebuilt):
    _named.__module__ = f"{__package__}.formats"  # as saved files name them

# So that torch.load(weights_only=True) reads sharded and local state dicts.
torch.serialization.add_safe_globals(
    [CopiedLayout, FlatLayout, FlatOfParameters, ParamSpec, Place, _rebuilt]
)


def sharded_value(cut: Cut, run: torch.Tensor, is_view: bool = False) -> torch.Tensor:
    """Return the value of a parameter for a sharded state dict, a view of this rank's elements
    ``run``: boxes, or a plain tensor if one rank has all or there are no elements. is_view: as of
    ``BoxedTensor``."""
    shape = cut.whole_shape
    if not math.prod(shape) or (cut.layout.ranks == 1 and cut.piece.is_whole):
        return run.view(shape)
    value = BoxedTensor.of(cut, run)
    value.is_view = is_view
    return value


def mesh_sharded_value(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the value with a device mesh: a DTensor with dimension 0 split over the mesh's last, a
    compact copy; 0-d values are replicated. Nothing is sent."""
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


def copied(value: Any, to_cpu: bool = False) -> Any:
    """Return a copy of a tensor that keeps no other memory alive; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if to_cpu else value.detach().clone()
    return value
