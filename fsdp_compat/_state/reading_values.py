"""Values of state dicts: sharded and local values of parameters, and reading any value as a run of
elements."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from .. import _torch_private
from .._comm.backend import gather_in_group
from .._engine.tensor_parallel import TensorParallel
from .._layout.spec import FlatLayout
from ..errors import CheckpointError
from .sharded_values import BoxedTensor, flat_of_parameters, place_of


def is_local(value: torch.Tensor, layout: FlatLayout) -> bool:
    """True if ``value`` is the flat tensor of ``layout`` in a local state dict: of the same
    parameters, over as many ranks. Its shards may be padded otherwise. Alike on all ranks."""
    flat = flat_of_parameters(layout)
    if isinstance(value, BoxedTensor):
        return value.is_flat_of(layout)
    if not isinstance(value, ShardedTensor):
        return bool(
            _torch_private.is_plain(value) and not value.numel() and flat.params[0].shape == (0,)
        )
    if tuple(value.metadata().size) != flat.params[0].shape:
        return False
    found = _described(value)
    [numel] = flat.params[0].shape
    size = found[0][1] if found else 0
    return found == _parts(flat) or (
        -(-numel // flat.ranks) <= size < flat.shard_numel
        and found == _parts(dataclasses.replace(flat, shard_numel=size))
    )


def read_local(value: Any, layout: FlatLayout, rank: int, members: tuple[int, ...]) -> torch.Tensor:
    """Return ``rank``'s elements, 1-D, of a value that ``is_local``.

    Collective if its shards are padded otherwise than those of ``layout``, which all ranks see.
    """
    flat = flat_of_parameters(layout)
    is_torchs = isinstance(value, ShardedTensor) and not isinstance(value, BoxedTensor)
    if is_torchs and _described(value) == _parts(flat):
        own = value.local_shards()
        return own[0].tensor.detach() if own else torch.empty(0, dtype=dtype_of(value))
    return read_part(value, flat, 0, rank, members)


def _described(value: ShardedTensor) -> list[tuple[int, int]]:
    """Return the (offset, numel) of the shards of a 1-D value, in order."""
    shards = value.metadata().shards_metadata
    return sorted((shard.shard_offsets[0], shard.shard_sizes[0]) for shard in shards)


def _parts(flat: FlatLayout) -> list[tuple[int, int]]:
    """Return the same for the parts that a layout gives to the ranks, without empty ones."""
    parts = [flat.part(0, each) for each in range(flat.ranks)]
    return [(part.start, part.numel) for part in parts if part]


def is_sharded(value: object) -> bool:
    return isinstance(value, ShardedTensor) or _torch_private.is_dtensor(value)


def is_tensor(value: object) -> bool:
    """True for a tensor, and for a lazy value: an object with a shape and a dtype that reads its
    file later."""
    if isinstance(value, torch.Tensor):
        return True
    has_dtype = isinstance(getattr(value, "dtype", None), torch.dtype)
    return torch.overrides.is_tensor_like(value) and has_dtype and hasattr(value, "shape")


def materialised(value: Any, name: str) -> torch.Tensor:
    """Return a tensor as it is, and load a lazy value, by ``torch.detach``.

    Raises CheckpointError if loading fails or gives another shape or dtype than announced.
    """
    if isinstance(value, torch.Tensor):
        return value
    cause: Exception | None = None
    try:
        found: Any = torch.detach(value)
        got = f"a {type(found).__name__}"
        if isinstance(found, torch.Tensor):
            got += f" of shape {tuple(found.shape)} and {found.dtype} on {found.device}"
            is_alike = (found.shape, found.dtype) == (tuple(value.shape), value.dtype)
            if is_alike and not is_sharded(found) and not found.is_meta:
                return found
    except Exception as error:  # reading a file may fail in any way
        got, cause = f"{type(error).__name__}: {error}", error
    raise CheckpointError.of(
        "A lazy value did not load.",
        expected=f"a tensor of shape {tuple(value.shape)} and {value.dtype}, as it says of itself",
        got=got,
        where=f"load_state_dict, {name!r}, a {type(value).__name__}; parameters before it are "
        "loaded already",
        fix="load the file as a whole (torch.load), and see whether it is complete and has not "
        "changed",
    ) from cause


def unfit(value: Any, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> str | None:
    """Describe a value that cannot be loaded into a tensor of this shape and dtype (None: any);
    None if it can. A lazy value stays lazy."""
    if not is_tensor(value):
        return f"a {type(value).__name__}"
    if (wrong := misfit(value)) is not None:
        return wrong
    if shape is not None and shape_of(value) != tuple(shape):
        return f"shape {shape_of(value)}"
    is_plain = isinstance(value, torch.Tensor) and not is_sharded(value)
    if is_plain and (value.is_meta or value.layout is not torch.strided):
        return f"a tensor on the {value.device.type} device, {value.layout}, without values"
    if dtype is not None and dtype_of(value).is_complex and not dtype.is_complex:
        return f"{dtype_of(value)}, whose imaginary part would be lost"
    return None


def misfit(value: object) -> str | None:
    """Describe a local shard that does not fit ``value``, or that is another rank's; None if all
    fit."""
    if isinstance(value, BoxedTensor):
        return value.wrong_shard()
    if _torch_private.is_dtensor(value) and dist.is_initialized():
        return _other_rank(value)
    return None


def _other_rank(value: Any) -> str | None:
    """Describe a DTensor that another rank has pickled: its mesh still has that rank's
    coordinates."""
    mesh, rank = value.device_mesh, dist.get_rank()
    pickled, own = mesh.get_coordinate(), (mesh.mesh == rank).nonzero().tolist()
    if pickled is None or not own or list(pickled) == own[0]:
        return None
    if all(
        placement.is_replicate() or pickled[dim] == own[0][dim]
        for dim, placement in enumerate(value.placements)
    ):
        return None
    other = int(mesh.mesh[tuple(pickled)])
    return (
        f"a DTensor with the part of global rank {other}, on global rank {rank}: load the file "
        "that this rank saved, or save whole values, or use torch.distributed.checkpoint"
    )


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    if isinstance(value, BoxedTensor):
        return value.whole_shape
    return tuple(value.metadata().size) if isinstance(value, ShardedTensor) else tuple(value.shape)


def dtype_of(value: Any) -> torch.dtype:
    """Return its dtype. Torch's ShardedTensor warns, at this package's lines, when it is asked."""
    if isinstance(value, ShardedTensor) and not isinstance(value, BoxedTensor):
        return value.metadata().tensor_properties.dtype
    dtype: torch.dtype = value.dtype
    return dtype


def read_part(
    value: Any,
    layout: FlatLayout,
    index: int,
    rank: int,
    members: tuple[int, ...],
    parallel: TensorParallel | None = None,
) -> torch.Tensor:
    """Return ``rank``'s elements of parameter ``index`` of ``layout``, 1-D, out of a value of the
    whole parameter: plain, sharded in any way, or lazy. A view where possible.

    members: the global ranks of the layout. parallel: the placement of a tensor-parallel parameter
    on its own mesh. A lazy value is loaded if the rank has a part.

    Collective: if ``value`` is sharded in another way than ``layout``, which all ranks see; they
    all call, in one order.
    """
    part = layout.part(index, rank)
    place = place_of(layout.params[index].shape, parallel)
    if not isinstance(value, torch.Tensor):
        if not part:
            return torch.empty(0, dtype=value.dtype)
        value = materialised(value, layout.params[index].name)
    if isinstance(value, BoxedTensor) and value.is_cut_as(layout, index, members, place):
        return value.elements()
    if _torch_private.is_dtensor(value):
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
    """False for the shards of a tensor-parallel parameter, unless this parameter, of which a unit
    shards ``shape``, has the same placement."""
    if not isinstance(value, BoxedTensor) or value.shape_here == value.whole_shape:
        return True
    return (value.shape_here, value.place) == (shape, place_of(shape, parallel))


def _whole(value: ShardedTensor) -> torch.Tensor:
    """Return a whole ShardedTensor. Collective over its process group: one all-gather."""
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
    dtype = dtype_of(value)
    own = torch.zeros(longest, dtype=dtype, device=tensors[0].device if tensors else None)
    start = 0
    for tensor in tensors:
        own[start : start + tensor.numel()] = tensor
        start += tensor.numel()
    gathered = gather_in_group(group, own)
    whole = torch.empty(size, dtype=dtype, device=own.device)
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
