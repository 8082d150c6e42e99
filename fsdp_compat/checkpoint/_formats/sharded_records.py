"""One rank's part of a tensor, from pickled DTensors, ShardedTensors and our own sharded values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._archive.archive import StoredPiece, StoredTensor
from ..._layout.box import Box, cut_into_boxes
from ..._layout.rows import CopiedLayout
from ..._layout.spec import FlatLayout, Interval, ParamSpec, row_major_strides
from .pickles import Record, Refused, shape_of

# The few bytes of a placement can ask for any number of parts.
_MAX_SPLITS = 512  # of the rows of one dim: as many as ranks of tensor parallelism inside FSDP
_MAX_BOXES = 128  # of a rank's part


@dataclasses.dataclass(frozen=True)
class RankPart:
    """The part of a tensor that one rank holds."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]
    inside: FlatLayout | None = None  # of a flat tensor, if it says where its parameters lie


# -- DTensors


def d_tensor(local: Any, spec: Any) -> RankPart:
    """Return the part that a pickled DTensor describes. Raises Refused and other errors."""
    fields = spec.fields
    meta = fields["tensor_meta"]  # a named tuple: (shape, stride, dtype)
    shape = shape_of(meta.args[0] if meta.args else meta.fields["shape"])
    coordinate = fields["mesh"].fields["_coordinate_on_dim"]
    if coordinate is None:
        raise Refused("a DTensor of a rank that is not in its mesh")
    rows = [[Interval(0, size)] for size in shape]
    for placement, num, index in zip(
        fields["placements"], _mesh_shape(fields["mesh"]), shape_of(coordinate), strict=True
    ):
        if (cut := _cut(placement, len(shape))) is not None:
            rows[cut[0]] = _share(rows[cut[0]], cut[1], num, index)
    sizes = tuple(sum(part.numel for part in parts) for parts in rows)
    if sizes != local.shape:
        raise Refused(
            f"a local tensor of shape {list(local.shape)}, where rank {list(coordinate)} of the "
            f"mesh holds {list(sizes)} of {list(shape)}"
        )
    (values,) = local.pieces
    pieces = [(values.inside(its, local.dtype.itemsize), box) for its, box in _boxes(rows)]
    held = tuple(StoredPiece(box, piece.source) for piece, box in pieces if piece)
    return RankPart(shape, local.dtype, held)


def _mesh_shape(mesh: Record) -> list[int]:
    """Return the sizes of a pickled mesh: of its tensor or, since torch 2.10, its layout."""
    tensor = mesh.fields.get("mesh", mesh.fields.get("_mesh"))
    if isinstance(tensor, StoredTensor):
        return [*tensor.shape]
    layout = mesh.fields["_layout"]
    sizes = layout.fields.get("axes", layout.args[0] if layout.args else layout.fields.get("shape"))
    found = []
    for size in (sizes,) if isinstance(sizes, int) else sizes:
        parts = size.fields["shape"] if isinstance(size, Record) else size
        found.append(math.prod(shape_of((parts,) if isinstance(parts, int) else parts)))
    return found


def _cut(placement: Any, num_dims: int) -> tuple[int, int] | None:
    """Return the dim that a placement cuts, and in how many splits; None for replicas."""
    kind, dim = placement.name.rpartition(".")[2], placement.fields.get("dim", 0)
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard") or not -num_dims <= dim < num_dims:
        raise Refused(f"a DTensor of {num_dims} dims with the placement {kind}({dim!r:.20})")
    return dim % num_dims, placement.fields.get("split_factor", 1)


def _share(parts: list[Interval], splits: int, num: int, index: int) -> list[Interval]:
    """Return share ``index`` of ``num`` of each of ``splits`` shares, as torch.chunk cuts."""
    if not 0 <= index < num or splits < 1 or splits * len(parts) > _MAX_SPLITS:
        raise Refused(f"share {index} of {num}, in {splits} splits")
    total = sum(part.numel for part in parts)
    found = []
    for split in range(min(splits, max(total, 1))):
        outer = _chunk(total, splits, split)
        found += _rows_of(parts, _chunk(outer.numel, num, index).shifted(outer.start))
    return found


def _chunk(total: int, num: int, index: int) -> Interval:
    size = -(-total // num)
    start = min(index * size, total)
    return Interval(start, min(start + size, total))


def _rows_of(parts: list[Interval], wanted: Interval) -> list[Interval]:
    """Return the rows ``wanted``, counted over the intervals one after the other."""
    found, place = [], 0
    for part in parts:
        common = Interval(place, place + part.numel).clipped(wanted)
        if common:
            found.append(common.shifted(part.start - place))
        place += part.numel
    return found


def _boxes(rows: Sequence[list[Interval]]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of a local tensor with those of the whole one that they are."""
    if (num := math.prod(map(len, rows))) > _MAX_BOXES:
        raise Refused(f"a DTensor of which one rank holds {num} parts")
    places = [itertools.accumulate((part.numel for part in dim), initial=0) for dim in rows]
    placed = [list(zip(dim, starts)) for dim, starts in zip(rows, places, strict=True)]  # noqa: B905
    for parts in itertools.product(*placed):
        sizes = tuple(part.numel for part, _ in parts)
        starts = tuple(part.start for part, _ in parts)
        yield Box(tuple(place for _, place in parts), sizes), Box(starts, sizes)


# -- ShardedTensors


def sharded_tensor(shards: Any, metadata: Any) -> RankPart:
    """Return the part that a pickled ShardedTensor describes. Raises as ``d_tensor`` does."""
    properties = metadata.fields["tensor_properties"]
    dtype = (properties.state or (properties.fields.get("dtype"),))[0]
    pieces = []
    for shard in shards:
        values, place = shard.fields["tensor"], shard.fields["metadata"].fields
        box = Box(shape_of(place["shard_offsets"]), shape_of(place["shard_sizes"]))
        if (values.dtype, values.shape) != (dtype, box.sizes):
            raise Refused(
                f"{values.dtype} of shape {list(values.shape)} for a shard of {dtype} of shape "
                f"{list(box.sizes)}"
            )
        pieces += [StoredPiece(box, piece.source) for piece in values.pieces if box.numel]
    return RankPart(shape_of(metadata.fields["size"]), dtype, tuple(pieces))


def boxed_tensor(
    layout: Any, index: Any, rank: Any, run: Any, members: Any, place: Any = None
) -> RankPart:
    """Return the part that a pickled BoxedTensor describes. Raises as ``d_tensor`` does."""
    known = _layout(layout)
    if not 0 <= index < len(known.params) or not 0 <= rank < known.ranks:
        raise Refused(f"parameter {index} of {len(known.params)}, on rank {rank}")
    part, shape = known.part(index, rank), known.params[index].shape
    if run.shape != (part.numel,):
        raise Refused(f"values of shape {list(run.shape)} for {part.numel} elements")
    whole_shape, origin = shape, (0,) * len(shape)
    if place is not None:
        whole_shape = shape_of(place.fields["whole_shape"])
        origin = shape_of(place.fields["origin"])
    pieces = [
        StoredPiece(each.box.moved(origin), each.source)
        for piece in run.pieces
        for each in in_shape(piece, part.start, shape, run.dtype)
    ]
    inside = _layout(layout.fields["inside"]) if "inside" in layout.fields else None
    return RankPart(whole_shape, run.dtype, tuple(pieces), inside)


def in_shape(
    run: StoredPiece, first: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[StoredPiece]:
    """Yield a 1-D piece, whose first element is ``first`` in ``shape``, as boxes."""
    at = 0
    for box in cut_into_boxes(shape, Interval(first, first + run.box.numel)):
        source = run.source
        if isinstance(source, torch.Tensor):
            source = source[at : at + box.numel].reshape(box.sizes)
        elif source.strides == (1,) or run.box.numel == 1:
            start = source.start + at * dtype.itemsize
            source = dataclasses.replace(source, start=start, strides=row_major_strides(box.sizes))
        else:
            raise Refused("a run of elements with gaps")
        yield StoredPiece(box, source, run.holder)
        at += box.numel


def _layout(record: Any) -> FlatLayout:
    params = tuple(
        ParamSpec(str(each.fields["name"]), shape_of(each.fields["shape"]), each.fields["start"])
        for each in record.fields["params"]
    )
    kind = CopiedLayout if record.name.endswith("CopiedLayout") else FlatLayout
    return kind(params, record.fields["ranks"], record.fields["shard_numel"])
