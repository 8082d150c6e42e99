"""Reading any value of a state dict as a run of elements: plain, sharded or lazy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from .. import _torch_private
from .._layout.spec import FlatLayout
from ..errors import CheckpointError
from .sharded_values import BoxedTensor, Cut, FlatOfParameters, gathered


def is_local(value: torch.Tensor, layout: FlatLayout) -> bool:
    """True if it is the flat tensor of ``layout``, maybe padded otherwise. Alike on all ranks."""
    flat = FlatOfParameters.of(layout)
    [numel] = flat.params[0].shape
    if isinstance(value, BoxedTensor):
        found = value.cut.layout
        return isinstance(found, FlatOfParameters) and found.is_alike(flat)
    if not isinstance(value, ShardedTensor):
        return bool(_torch_private.is_plain(value) and not value.numel() and not numel)
    shards = _described(value)
    size = shards[0][1] if shards else 1
    if -(-numel // flat.ranks) <= size < flat.shard_numel:  # padded less
        flat = dataclasses.replace(flat, shard_numel=size)
    return tuple(value.metadata().size) == (numel,) and shards == _parts(flat)


def read_local(value: Any, cut: Cut) -> torch.Tensor:
    """Return this rank's elements, 1-D, of a value that ``is_local``. cut: of the flat tensor.
    Collective if its shards are padded otherwise, which all ranks see."""
    is_torchs = isinstance(value, ShardedTensor) and not isinstance(value, BoxedTensor)
    if is_torchs and _described(value) == _parts(cut.layout):
        own = value.local_shards()
        return own[0].tensor.detach() if own else torch.empty(0, dtype=dtype_of(value))
    return read_part(value, cut)


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
    """True for a tensor, or a lazy value with a shape and a dtype, which reads its file later."""
    if isinstance(value, torch.Tensor):
        return True
    has_dtype = isinstance(getattr(value, "dtype", None), torch.dtype)
    return torch.overrides.is_tensor_like(value) and has_dtype and hasattr(value, "shape")


def materialised(value: Any, name: str) -> torch.Tensor:
    """Return a tensor, read if it is lazy. Raises CheckpointError if that fails or differs."""
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
        "A lazy tensor could not be read.",
        expected=f"a tensor of shape {tuple(value.shape)} and {value.dtype}, as it announced",
        got=got,
        where=f"load_state_dict, {name!r}, a {type(value).__name__}; earlier parameters are loaded",
        fix="check that the file is complete and unchanged, or load it whole with torch.load",
    ) from cause


def unfit(value: Any, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> str | None:
    """Say why a value does not fit a tensor of this shape and dtype (None: any), or None."""
    if not is_tensor(value):
        return f"a {type(value).__name__}"
    sharded = is_sharded(value)
    if sharded and (wrong := misfit(value)) is not None:
        return wrong
    if shape is not None and shape_of(value) != tuple(shape):
        return f"shape {shape_of(value)}"
    is_plain = isinstance(value, torch.Tensor) and not sharded
    if is_plain and (value.is_meta or value.layout is not torch.strided):
        return f"a tensor on the {value.device.type} device, {value.layout}, without values"
    if dtype is not None and dtype_of(value).is_complex and not dtype.is_complex:
        return f"{dtype_of(value)}, whose imaginary part would be lost"
    return None


def misfit(value: Any) -> str | None:
    """Describe a local shard that does not fit, or that is another rank's; None if all fit."""
    if not is_sharded(value):
        return None
    if isinstance(value, BoxedTensor) and (wrong := value.wrong_shard()) is not None:
        return wrong
    world = dist.group.WORLD  # quicker to ask than dist.get_rank, for thousands of values
    rank = 0 if world is None else world.rank()
    other = _rank_of_part(value, rank)
    if other == rank:
        return None
    kind = "DTensor" if _torch_private.is_dtensor(value) else "ShardedTensor"
    return (
        f"a {kind} with the part of global rank {other}, on global rank {rank}: load the file "
        "that this rank saved, or save whole values, or use torch.distributed.checkpoint"
    )


def _rank_of_part(value: Any, rank: int) -> int:
    """Return ``rank``, or the rank that saved the value if its part is another one."""
    if isinstance(value, BoxedTensor):
        return value.cut.members[value.cut.rank] if rank in value.cut.members else rank
    if not _torch_private.is_dtensor(value) or not dist.is_initialized():
        return rank
    mesh = value.device_mesh  # one that was pickled still has the other rank's coordinates
    pickled, own = mesh.get_coordinate(), (mesh.mesh == rank).nonzero().tolist()
    if pickled is None or not own:
        return rank
    sharded = [dim for dim, each in enumerate(value.placements) if not each.is_replicate()]
    is_same = all(pickled[dim] == own[0][dim] for dim in sharded)
    return rank if is_same else int(mesh.mesh[tuple(pickled)])


def dtype_of(value: Any) -> torch.dtype:
    """Return its dtype, without torch's warning for a ShardedTensor."""
    if isinstance(value, ShardedTensor) and not isinstance(value, BoxedTensor):
        return value.metadata().tensor_properties.dtype
    dtype: torch.dtype = value.dtype
    return dtype


def same_shape(saved: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if values of one shape load into a tensor of the other; old files have (1,) for 0-d."""
    return saved == shape or (saved, shape) == ((1,), ())


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    if isinstance(value, BoxedTensor):
        return value.whole_shape
    return tuple(value.metadata().size) if isinstance(value, ShardedTensor) else tuple(value.shape)


def read_part(value: Any, cut: Cut) -> torch.Tensor:
    """Return this rank's elements, 1-D, of a parameter's value: plain, sharded or lazy (loaded if
    there are any). A view if possible. Collective if it is sharded in another way than ``cut``."""
    part, parallel = cut.part, cut.parallel
    if not (part or isinstance(value, torch.Tensor)):
        return torch.empty(0, dtype=value.dtype)
    if isinstance(value, BoxedTensor) and value.cut.is_as(cut):
        return value.elements()
    is_part = isinstance(value, BoxedTensor) and not value.cut.piece.is_whole
    if parallel is not None and _torch_private.is_dtensor(value):
        value, is_part = parallel.local(value.to(value.device_mesh.device_type)), True
    else:
        value = whole_value(value, cut.layout.params[cut.index].name)
    if parallel is not None and not is_part:
        value = parallel.part(value)
    result: torch.Tensor = value.detach().reshape(-1)[part.slice]
    return result


def whole_value(value: Any, name: str) -> Any:
    """Return a tensor of a state dict whole; anything else as it is. Collective if sharded."""
    if _torch_private.is_dtensor(value):  # which may have been put on the CPU
        return value.to(value.device_mesh.device_type).full_tensor()
    if isinstance(value, ShardedTensor):
        return gathered(value)
    return materialised(value, name) if is_tensor(value) else value
