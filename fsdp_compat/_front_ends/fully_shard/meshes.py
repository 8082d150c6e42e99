"""The meshes of ``fully_shard``: from a DeviceMesh, or dimensions of one, to a ``DataMesh``."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..._comm.mesh import the_group
from ..._stores.placement import DataMesh, SpmdMesh
from ..._torch_private import dtensor as torch_dtensor
from ...errors import AssertedUsageError, UsageError, wrong_type
from .api import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)

WHERE = "fully_shard"


def default_mesh() -> DeviceMesh:
    """Return the 1-D mesh of all ranks, on the accelerator if there is one, else on the CPU.

    Without a default process group, makes the one that torchrun's environment describes.
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group()
    world = the_group(None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (world.size(),))


def require_mesh(mesh: Any, dims: Any) -> DataParallelMeshDims | None:
    """Raise UsageError unless ``mesh`` can be used, with ``dims`` (dp_mesh_dims) if given. Return
    ``dims`` as our own record."""
    if not isinstance(mesh, DeviceMesh):
        raise wrong_type("mesh", "a torch.distributed.device_mesh.DeviceMesh, or None", mesh, WHERE)
    if dims is not None:
        return _checked_dims(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise UsageError.of(
            "The mesh has the wrong number of dimensions.",
            expected="a 1-D mesh (shard), or a 2-D one (replicate, shard)",
            got=f"{mesh.ndim} dimensions: {_described(mesh)}",
            where="argument 'mesh' of fully_shard",
            fix="pass the data-parallel part of the mesh, such as mesh['dp'], or name its "
            "dimensions with dp_mesh_dims=",
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertedUsageError.of(
            "The dimensions of the 2-D mesh have no names.",
            expected="a mesh with mesh_dim_names",
            got=_described(mesh),
            where="argument 'mesh' of fully_shard",
            fix="init_device_mesh(device_type, shape, mesh_dim_names=('replicate', 'shard'))",
        )
    require_members(mesh)
    return None


def require_members(mesh: DeviceMesh) -> None:
    """Raise UsageError unless this process is in the mesh, and the mesh's device type exists."""
    if mesh.get_coordinate() is None:
        raise UsageError.of(
            "This process is not in the mesh.",
            expected="a mesh with this rank",
            got=f"{_described(mesh)} on global rank {dist.get_rank()}",
            where="argument 'mesh' of fully_shard",
            fix="call fully_shard on the ranks of the mesh only",
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if mesh.device_type != "cpu" and (accelerator is None or accelerator.type != mesh.device_type):
        raise UsageError.of(
            "The device type of the mesh does not exist here.",
            expected="'cpu'" + ("" if accelerator is None else f" or {accelerator.type!r}"),
            got=repr(mesh.device_type),
            where="argument 'mesh' of fully_shard",
            fix="pass init_device_mesh('cpu', ...), or run on a machine with the device",
        )


def _checked_dims(mesh: DeviceMesh, dims: Any) -> DataParallelMeshDims:
    if type(dims).__name__ != "DataParallelMeshDims":
        raise wrong_type("dp_mesh_dims", "a DataParallelMeshDims, or None", dims, WHERE)
    ours = DataParallelMeshDims(dims.shard, dims.replicate)
    names = (*ours.shard_names, *ours.replicate_names)
    known = mesh.mesh_dim_names
    if known is None:
        raise UsageError.of(
            "The dimensions of the mesh have no names.",
            expected="a mesh with mesh_dim_names, as dp_mesh_dims names some of them",
            got=_described(mesh),
            where="argument 'mesh' of fully_shard",
            fix="init_device_mesh(device_type, shape, mesh_dim_names=...)",
        )
    wrong = [name for name in names if name not in known]
    if wrong or len(set(names)) < len(names):
        raise UsageError.of(
            f"The mesh has no dimension {wrong[0]!r}."
            if wrong
            else "A dimension of the mesh was named twice.",
            expected=f"names from {known}, each once",
            got=f"shard={dims.shard!r}, replicate={dims.replicate!r}",
            where="argument 'dp_mesh_dims' of fully_shard",
            fix="name dimensions of the mesh that parameters are replicated over",
        )
    require_members(mesh)
    return ours


def _described(mesh: DeviceMesh) -> str:
    return f"a mesh of shape {tuple(mesh.shape)} with the names {mesh.mesh_dim_names}"


def mesh_info_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataParallelMeshInfo:
    """Return which dimensions of ``mesh`` shard and replicate parameters, see ``fully_shard``.

    Collective if ``dims`` has several names for one of them: these are flattened.
    """
    if dims is None:
        if mesh.ndim == 1:
            return FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    if not dims.shard_names:
        part = torch_dtensor.mesh_of_dims(mesh, dims.replicate_names)
        return DDPMeshInfo(part, replicate_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    shard = torch_dtensor.mesh_of_dims(mesh, dims.shard_names)
    if not dims.replicate_names:
        return FSDPMeshInfo(shard, shard_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    replicate = torch_dtensor.mesh_of_dims(mesh, dims.replicate_names)
    joined = torch_dtensor.joined_mesh([replicate, shard])
    return HSDPMeshInfo(joined, 1, 0, dp_mesh_dims=dims, spmd_mesh=mesh)


def data_mesh_of(info: Any) -> DataMesh:
    """Return the mesh that ``info``, a mesh information of ours or of torch, describes."""
    spmd = None
    if info.dp_mesh_dims is not None:
        names = info.spmd_mesh.mesh_dim_names
        shard = tuple(names.index(name) for name in info.dp_mesh_dims.shard_names)
        replicate = tuple(names.index(name) for name in info.dp_mesh_dims.replicate_names)
        spmd = SpmdMesh(info.spmd_mesh, (*shard, *replicate), shard)
    return DataMesh(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim, spmd)


def shard_ranks(mesh: DataMesh) -> int:
    """Return the number of ranks that parameters on ``mesh`` are sharded over."""
    return 1 if mesh.shard_dim is None else mesh.mesh.size(mesh.shard_dim)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this process computes on."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


# By the shard group of a mesh: {(ranks, members of the mesh, device type): its partial mesh}.
_partial_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


def partial_mesh_of(mesh: DataMesh, ranks: int) -> DeviceMesh:
    """Return the 2-D mesh (outer, ``ranks``) of the ranks of ``mesh``, for all-gathers among
    ``ranks`` neighbours on the shard dimension.

    Collective: the ranks of the mesh, the first time; later calls return the same mesh.
    """
    assert mesh.shard_dim is not None
    rows = mesh.mesh.mesh.reshape(-1, ranks)
    key = ranks, tuple(rows.flatten().tolist()), mesh.mesh.device_type
    known = _partial_meshes.setdefault(mesh.mesh.get_group(mesh.shard_dim), {})
    if key not in known:
        groups = []
        for lines in (rows.t(), rows):  # the groups of the outer dimension, and of the inner one
            own = next(line for line in lines.tolist() if dist.get_rank() in line)
            # Only the members take part: other ranks may not be in the mesh at all.
            groups.append(dist.new_group(own, use_local_synchronization=True))
        known[key] = DeviceMesh.from_group(
            groups, mesh.mesh.device_type, rows, mesh_dim_names=("outer", "inner")
        )
    return known[key]


def data_group_of(mesh: DataMesh) -> dist.ProcessGroup:
    """Return the group of the ranks that share one copy of the parameters on ``mesh``; without a
    dimension to shard over, that of the copies."""
    dim = mesh.replicate_dim if mesh.shard_dim is None else mesh.shard_dim
    return mesh.mesh.get_group(dim)
