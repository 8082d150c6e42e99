"""One rank's part of a tensor, from pickled DTensors, ShardedTensors and our own sharded values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._archive.archive import StoredPiece, StoredTensor, pieces_of_run
from ..._layout.box import Box
from ..._layout.rows import CopiedLayout, Cut
from ..._layout.spec import FlatLayout, Interval, ParamSpec
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
        kind, dim = placement.name.rpartition(".")[2], placement.fields.get("dim", 0)
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard") or not -len(shape) <= dim < len(shape):
            raise Refused(f"a DTensor of {len(shape)} dims with the placement {kind}({dim!r:.20})")
        rows[dim] = _share(rows[dim], placement.fields.get("split_factor", 1), num, index)
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


def _share(parts: list[Interval], splits: int, num: int, index: int) -> list[Interval]:
    """Return share ``index`` of ``num`` of each of ``splits`` shares of rows, as torch.chunk cuts
    them."""
    if not 0 <= index < num or splits < 1 or splits * len(parts) > _MAX_SPLITS:
        raise Refused(f"share {index} of {num}, in {splits} splits")
    total, found = sum(part.numel for part in parts), []
    for split in range(min(splits, max(total, 1))):
        outer = Cut((total,), 0, splits).rows(split)
        wanted = Cut((outer.numel,), 0, num).rows(index).shifted(outer.start)
        place = 0  # rows are counted over the intervals one after the other
        for part in parts:
            if common := Interval(place, place + part.numel).clipped(wanted):
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
        pieces += [StoredPiece(box, piece.source) for piece in values.pieces]
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
    origin = shape_of(place.fields["origin"]) if place is not None else None
    (values,) = run.pieces
    pieces = pieces_of_run(shape, part, values.source, run.dtype.itemsize, origin=origin)
    whole_shape = shape_of(place.fields["whole_shape"]) if place is not None else shape
    inside = _layout(layout.fields["inside"]) if "inside" in layout.fields else None
    return RankPart(whole_shape, run.dtype, tuple(pieces), inside)


def _layout(record: Any) -> FlatLayout:
    params = tuple(
        ParamSpec(str(each.fields["name"]), shape_of(each.fields["shape"]), each.fields["start"])
        for each in record.fields["params"]
    )
    kind = CopiedLayout if record.name.endswith("CopiedLayout") else FlatLayout
    return kind(params, record.fields["ranks"], record.fields["shard_numel"])
