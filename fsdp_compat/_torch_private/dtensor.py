"""The private names of DTensor and DeviceMesh that the package uses, each with the reason why no
public name is enough. DTensor, which takes a second to import, is imported on use."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch


def dtensors(parts: Sequence[torch.Tensor], specs: Sequence[Any]) -> list[torch.Tensor]:
    """Return DTensors, without a graph. ``DTensor.from_local`` costs ten times as much."""
    from torch.distributed.tensor import DTensor

    new: Any = functools.partial(DTensor.__new__, DTensor, requires_grad=False)
    return list(map(new, parts, specs))


def spec_for(mesh: Any, placements: Sequence[Any], shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return the spec of row-major DTensors on a mesh, for ``dtensors``."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def spec_of(tensor: torch.Tensor) -> Any:
    """Return the spec of a DTensor: how it lies on its mesh."""
    return tensor._spec  # type: ignore[attr-defined]


def local_parts(dtensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local tensors of DTensors; ``to_local`` would make new tensors."""
    return list(map(_local_tensor, dtensors))


_local_tensor = operator.attrgetter("_local_tensor")

# local_version(dtensor): the version counter of its local tensor.
local_version: Callable[[torch.Tensor], int] = operator.attrgetter("_local_tensor._version")


def set_local_part(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor by one of the same shape and dtype."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def joined_mesh(meshes: Sequence[Any]) -> Any:
    """Concatenate submeshes. Public functions keep the order of the larger mesh's dims."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def mesh_of_dims(mesh: Any, names: Sequence[str]) -> Any:
    """Return the 1-D mesh of named dims. Several are flattened, which is collective."""
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))


def shards(placement: Any, dim: int) -> bool:
    """True if a placement cuts dim ``dim``. ``_StridedShard`` is not a subclass of ``Shard``."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return the placement of a dim that later mesh dims have cut into ``split_factor`` parts."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)
