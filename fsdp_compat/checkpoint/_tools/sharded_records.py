"""Values that several ranks hold together, as one rank's file describes them: DTensors and
ShardedTensors, and which elements each rank has."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch

from ..._layout.box import Box, cut_into_boxes
from ..._layout.rows import CopiedLayout
from ..._layout.spec import FlatLayout, Interval, ParamSpec
from .archive import Piece, StoredTensor, row_major, whole
from .pickles import Record, Refused, shape_of, whole_numbers

_MAX_SPLITS = 4096  # of the rows of one tensor: as many as ranks that share it
_FREE_SPLITS, _MORE_SPLITS = 128, 1 << 18  # of each DTensor; of all in one checkpoint, beyond those
_MAX_MESH_PARTS = 256  # numbers and tuples in the sizes of one dim of a mesh


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a DTensor lies along one dim of its mesh."""

    kind: str  # "Shard", "_StridedShard", "Replicate", "Partial", ...
    dim: int = 0
    split_factor: int = 1

    def __str__(self) -> str:
        return f"{self.kind}({self.dim})" if "Shard" in self.kind else self.kind


@dataclasses.dataclass(frozen=True)
class DTensorRecord:
    """One rank's part of a DTensor."""

    local: StoredTensor
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]  # of the rank in the mesh
    placements: tuple[Placement, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def boxes(self, limit: SplitLimit | None = None) -> list[tuple[Box, Box]]:
        """Return the boxes of ``local`` with those of the whole that they are. Raises Refused if
        the sizes do not agree, and for placements that do not say where elements lie, or cut it
        into too many boxes."""
        limit = limit or SplitLimit()
        limit.left += _FREE_SPLITS
        rows = [[Interval(0, size)] for size in self.shape]
        for place, size, index in zip(
            self.placements, self.mesh_shape, self.coordinate, strict=True
        ):
            if place.kind == "Replicate":
                continue
            if place.kind not in ("Shard", "_StridedShard"):
                raise Refused(f"a DTensor with the placement {place}")
            dim = place.dim + len(self.shape) if place.dim < 0 else place.dim
            if not 0 <= dim < len(self.shape):
                raise Refused(f"a DTensor of shape {list(self.shape)} with the placement {place}")
            splits = place.split_factor if place.kind == "_StridedShard" else 1
            rows[dim] = _share(rows[dim], splits, size, index, limit)
        sizes = tuple(sum(part.numel for part in parts) for parts in rows)
        if sizes != self.local.shape:
            raise Refused(
                f"a local tensor of shape {list(self.local.shape)}, where rank "
                f"{list(self.coordinate)} of a mesh {list(self.mesh_shape)} holds {list(sizes)} of "
                f"{list(self.shape)}"
            )
        if not math.prod(sizes):
            return []
        found, joined = [], [_with_places(parts) for parts in rows]
        limit.spend(math.prod(map(len, joined)))
        for parts in itertools.product(*joined):
            sizes = tuple(part.numel for part, _ in parts)
            found.append(
                (
                    Box(tuple(place for _, place in parts), sizes),
                    Box(tuple(part.start for part, _ in parts), sizes),
                )
            )
        return found


@dataclasses.dataclass(frozen=True)
class ShardedTensorRecord:
    """One rank's part of a ShardedTensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[tuple[Box, StoredTensor], ...]  # of this rank
    boxes: tuple[tuple[Box, int | None], ...]  # of all ranks, each with its rank
    inside: FlatLayout | None = None  # of a flat tensor, if it says where its parameters lie


class SplitLimit:
    """Limits the work that placements of one checkpoint ask for: the few bytes of a strided one can
    cut a tensor into any number of boxes, those of several dims into their product."""

    def __init__(self) -> None:
        self.left = _MORE_SPLITS

    def spend(self, num: int) -> None:
        self.left -= num
        if num > _MAX_SPLITS or self.left < 0:
            raise Refused(f"a DTensor that is cut into {num} parts")


def _share(
    parts: list[Interval], splits: int, num: int, index: int, limit: SplitLimit
) -> list[Interval]:
    """Return the share ``index`` of ``num`` of each of ``splits`` shares of rows, which are given
    as intervals. Shares are those of torch.chunk: the last ones may be smaller, or empty."""
    if not 1 <= splits <= _MAX_SPLITS or not 0 <= index < num:
        raise Refused(f"share {index} of {num}, in {splits} splits")
    limit.spend(splits * len(parts))
    total = sum(part.numel for part in parts)
    found = []
    for split in range(min(splits, max(total, 1))):
        outer = _chunk(total, splits, split)
        inner = _chunk(outer.numel, num, index).shifted(outer.start)
        found += _cut(parts, inner)
    return found


def _chunk(total: int, num: int, index: int) -> Interval:
    size = -(-total // num)
    start = min(index * size, total)
    return Interval(start, min(start + size, total))


def _cut(parts: list[Interval], wanted: Interval) -> list[Interval]:
    """Return the rows ``wanted``, counted over the intervals one after the other."""
    found, place = [], 0
    for part in parts:
        common = Interval(place, place + part.numel).clipped(wanted)
        if common:
            found.append(common.shifted(part.start - place))
        place += part.numel
    return found


def _with_places(parts: list[Interval]) -> list[tuple[Interval, int]]:
    """Return the intervals, those that follow one another as one, with their places in the local
    tensor."""
    joined: list[Interval] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = Interval(joined[-1].start, part.stop)
        else:
            joined.append(part)
    ends = itertools.accumulate((part.numel for part in joined), initial=0)
    return list(zip(joined, ends))  # noqa: B905 (the last end is not needed)


# -- from pickled records


def d_tensor(local: Any, spec: Any) -> DTensorRecord:
    """Return the record of a pickled DTensor. Raises Refused."""
    if not isinstance(local, StoredTensor) or not isinstance(spec, Record):
        raise Refused("a DTensor without a local tensor, or without a layout")
    mesh, meta = spec.fields.get("mesh"), spec.fields.get("tensor_meta")
    if not isinstance(meta, Record) or not isinstance(mesh, Record):
        raise Refused("a DTensor without a shape, or without a mesh")
    # TensorMeta is a named tuple: (shape, stride, dtype)
    shape = shape_of(meta.args[0] if meta.args else meta.fields.get("shape"))
    mesh_shape, coordinate = _mesh_shape(mesh), mesh.fields.get("_coordinate_on_dim")
    placements = spec.fields.get("placements") or ()
    if coordinate is None:
        raise Refused("a DTensor of a rank that is not in its mesh")
    if not len(mesh_shape) == len(shape_of(coordinate)) == len(placements):
        raise Refused(f"{len(placements)} placements on a mesh of {len(mesh_shape)} dims")
    return DTensorRecord(
        local, shape, mesh_shape, tuple(coordinate), tuple(map(_placement, placements))
    )


def _mesh_shape(mesh: Record) -> tuple[int, ...]:
    """Return the sizes of a pickled mesh: of its tensor of ranks or, from torch 2.10 on, of its
    layout."""
    tensor = mesh.fields.get("mesh", mesh.fields.get("_mesh"))
    layout = mesh.fields.get("_layout")
    if isinstance(tensor, StoredTensor):
        return tensor.shape
    if not isinstance(layout, Record):
        raise Refused("a mesh without a layout")
    if "axes" in layout.fields:
        sizes = layout.fields["axes"]
    else:
        sizes = layout.args[0] if layout.args else layout.fields["shape"]
        sizes = (sizes,) if isinstance(sizes, int) else sizes
    if not isinstance(sizes, (tuple, list)) or len(sizes) > 64:
        raise Refused("a mesh without sizes, or of too many dims")
    return tuple(
        _product(size.fields["shape"] if isinstance(size, Record) else size) for size in sizes
    )


def _product(size: Any) -> int:
    """Return the product of the numbers in nested tuples, which may be shared many times."""
    found: list[Any] = []
    waiting: list[Any] = [size]
    for _ in range(_MAX_MESH_PARTS):
        if not waiting:
            numel: int = math.prod(shape_of(found))
            return numel
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting += item[:_MAX_MESH_PARTS]
        else:
            found.append(item)
    raise Refused(f"more than {_MAX_MESH_PARTS} numbers as the size of a dim of a mesh")


def _placement(value: Any) -> Placement:
    if not isinstance(value, Record):
        raise Refused("a placement that is none")
    kind = value.name.rpartition(".")[2]
    dim, splits = value.fields.get("dim", 0), value.fields.get("split_factor", 1)
    if type(dim) is not int or type(splits) is not int:
        raise Refused(f"a placement {kind} with a {type(dim).__name__}")
    return Placement(kind, dim, splits)


def sharded_tensor(shards: Any, metadata: Any) -> ShardedTensorRecord:
    """Return the record of a pickled ShardedTensor. Raises Refused."""
    if not isinstance(metadata, Record) or not isinstance(shards, (list, tuple)):
        raise Refused("a ShardedTensor without metadata")
    properties = metadata.fields["tensor_properties"]
    dtype = (properties.state or (properties.fields.get("dtype"),))[0]
    if not isinstance(dtype, torch.dtype):
        raise Refused("a ShardedTensor without a dtype")
    shape = shape_of(metadata.fields["size"])
    own = []
    for shard in shards:
        box, values = _box(shard.fields["metadata"])[0], shard.fields["tensor"]
        if not isinstance(values, StoredTensor) or values.dtype != dtype:
            raise Refused(f"a shard that is not a tensor of {dtype}")
        if values.shape != box.sizes:
            raise Refused(f"a shard of shape {list(values.shape)} for a part of {list(box.sizes)}")
        if len(box.sizes) == len(shape) or box.numel:  # ours mark empty parts of 0-d tensors
            own.append((box, values))
    return ShardedTensorRecord(
        shape,
        dtype,
        tuple(own),
        tuple(_box(item) for item in metadata.fields["shards_metadata"]),
    )


def _box(metadata: Record) -> tuple[Box, int | None]:
    offsets = shape_of(metadata.fields["shard_offsets"])
    sizes = shape_of(metadata.fields["shard_sizes"])
    if len(offsets) != len(sizes):
        raise Refused(f"a shard of {len(sizes)} dims with {len(offsets)} offsets")
    placement = metadata.fields.get("placement")
    rank = placement.fields.get("_rank") if isinstance(placement, Record) else None
    return Box(offsets, sizes), rank if isinstance(rank, int) else None


# -- the sharded values of our own state dicts


def boxed_tensor(
    layout: Any, index: Any, rank: Any, run: Any, members: Any, place: Any = None
) -> ShardedTensorRecord:
    """Return the record of a pickled BoxedTensor. Raises Refused."""
    known = _layout(layout)
    if not isinstance(run, StoredTensor) or len(run.shape) != 1:
        raise Refused("a sharded tensor without values")
    if not 0 <= index < len(known.params) or not 0 <= rank < known.ranks:
        raise Refused(f"parameter {index} of {len(known.params)}, on rank {rank}")
    shape = known.params[index].shape
    whole_shape, origin = shape, (0,) * len(shape)
    if isinstance(place, Record):
        whole_shape, origin = (
            shape_of(place.fields["whole_shape"]),
            shape_of(place.fields["origin"]),
        )
    everyone = []
    for other, member in enumerate(whole_numbers(members, known.ranks)):
        boxes = cut_into_boxes(shape, known.part(index, other))
        everyone.append((member, [_moved(box, origin) for box in boxes]))
    numel = known.part(index, rank).numel
    if len(everyone) != known.ranks or run.shape != (numel,):
        raise Refused(f"{run.shape[0]} elements of {numel}, of {len(everyone)} ranks")
    shards, start = [], 0
    for box in everyone[rank][1]:
        shards.append((box, run_part(run, Interval(start, start + box.numel), box.sizes)))
        start += box.numel
    inside = _layout(layout.fields["inside"]) if "inside" in layout.fields else None
    holders = tuple((box, member) for member, parts in everyone for box in parts)
    return ShardedTensorRecord(whole_shape, run.dtype, tuple(shards), holders, inside)


def run_part(run: StoredTensor, part: Interval, sizes: tuple[int, ...]) -> StoredTensor:
    """Return elements of a 1-D tensor as a tensor of ``sizes``."""
    (piece,) = run.pieces
    source = piece.source
    if isinstance(source, torch.Tensor):
        values = source[part.slice].reshape(sizes)
        return StoredTensor("", run.dtype, sizes, (Piece(whole(sizes), values),))
    if source.strides != (1,) and part.numel > 1:
        raise Refused("a run of elements with gaps")
    start = source.start + part.start * run.dtype.itemsize
    span = dataclasses.replace(source, start=start, strides=row_major(sizes))
    return StoredTensor("", run.dtype, sizes, (Piece(whole(sizes), span),))


def _moved(box: Box, origin: tuple[int, ...]) -> Box:
    return Box(tuple(map(sum, zip(box.offsets, origin, strict=True))), box.sizes)


def _layout(record: Any) -> FlatLayout:
    if not isinstance(record, Record):
        raise Refused("a sharded tensor without a layout")
    params = tuple(
        ParamSpec(str(each.fields["name"]), shape_of(each.fields["shape"]), each.fields["start"])
        for each in record.fields["params"]
    )
    kind = CopiedLayout if record.name.endswith("CopiedLayout") else FlatLayout
    return kind(params, record.fields["ranks"], record.fields["shard_numel"])
