"""The arguments of ``fully_shard``, checked and resolved before anything changes."""

from __future__ import annotations

import dataclasses
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..._comm.mesh import the_group
from ..._engine.device import is_simulated
from ..._engine.dtypes import Precision, is_packed
from ..._stores.placement import DataMesh, SpmdMesh
from ..._torch_private import dtensor as torch_dtensor
from ...api import as_ours
from ...errors import (
    AssertedUsageError,
    NotImplementedUsageError,
    TypeUsageError,
    UsageError,
    function_or_none,
    require_float_dtype,
    truth,
    unusable,
    wrong_type,
)
from .policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

WHERE = "fully_shard"


@dataclasses.dataclass(frozen=True)
class Offload:
    """Where shards live."""

    to_cpu: bool = False
    pin: bool = False


def policy_of(given: Any) -> MixedPrecisionPolicy:
    """Return a mixed-precision policy as ours, with its fields checked. None: the default."""
    policy = as_ours(given, MixedPrecisionPolicy, "mp_policy") or MixedPrecisionPolicy()
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        require_float_dtype(f"MixedPrecisionPolicy.{name}", getattr(policy, name), WHERE)
    truth("MixedPrecisionPolicy.cast_forward_inputs", policy.cast_forward_inputs, WHERE)
    name = "MixedPrecisionPolicy.param_dtype_override_fn"
    function_or_none(name, policy.param_dtype_override_fn, "one parameter", WHERE)
    return policy


def offload_of(given: Any) -> Offload:
    """Resolve an offload policy, ours or torch's. None, as torch takes it: no offloading."""
    bases = {base.__name__ for base in type(given).__mro__}
    if CPUOffloadPolicy.__name__ in bases:
        if is_simulated():
            raise UsageError.of(
                "CPU offload cannot be planned.",
                expected="offload_policy=OffloadPolicy() inside plan(...)",
                got=repr(given),
                where=WHERE,
                fix="leave it out, and subtract parameters, gradients and optimizer from the plan",
            )
        return Offload(True, truth("CPUOffloadPolicy.pin_memory", given.pin_memory, WHERE))
    if given is not None and OffloadPolicy.__name__ not in bases:
        expected = "an OffloadPolicy(), a CPUOffloadPolicy() or None"
        raise wrong_type("offload_policy", expected, given, WHERE)
    return Offload()


def ignored_of(given: Any) -> frozenset[nn.Parameter]:
    """Return the parameters to leave alone."""
    if given is None:
        return frozenset()
    is_one = isinstance(given, (nn.Module, torch.Tensor, str))
    listed = list(given) if isinstance(given, Iterable) and not is_one else None
    if listed is None or not all(isinstance(item, nn.Parameter) for item in listed):
        raise wrong_type("ignored_params", "a set of parameters, or None", given, WHERE)
    return frozenset(listed)


def reshard_of(given: Any, mesh: DataMesh) -> tuple[bool | None, int]:
    """Return whether to reshard after forward, and how many ranks backward gathers among."""
    if given is None or isinstance(given, bool):
        return given, 0
    if not isinstance(given, int):
        raise wrong_type("reshard_after_forward", "True, False, None or a number", given, WHERE)
    ranks = mesh.size(mesh.shard_dim)
    if mesh.spmd is not None:
        raise NotImplementedUsageError.of(
            "reshard_after_forward as a number does not work with dp_mesh_dims.",
            expected="True, False or None",
            got=repr(given),
            where="argument 'reshard_after_forward' of fully_shard",
            fix="pass True or False, or pass the data-parallel mesh without dp_mesh_dims",
        )
    if not 1 <= given <= ranks or ranks % given:
        raise UsageError.of(
            "reshard_after_forward does not divide the number of ranks.",
            expected=f"a factor of {ranks}, the number of ranks that parameters are sharded over",
            got=repr(given),
            where="argument 'reshard_after_forward' of fully_shard",
            fix="pass the number of ranks per node, or True or False",
        )
    if given == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps whole parameters after forward, as "
            "reshard_after_forward=False does; pass True to reshard them over all ranks.",
            stacklevel=5,
        )
        return False, 0
    return True, 0 if given == ranks else given


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where one parameter is to be sharded."""

    dim: int  # of the parameter
    info: Any  # FSDPMeshInfo, ours or torch's: the default, or that of the answer
    mesh: DataMesh


def placed(
    parameter: nn.Parameter,
    name: str,
    function: Callable[[nn.Parameter], Any] | None,
    default: Placed,
) -> Placed:
    """Return where ``function`` (shard_placement_fn) puts a parameter; ``default`` for None."""
    answer = None if function is None else function(parameter)
    if answer is None:
        return default
    where = f"shard_placement_fn, for parameter {name!r} of shape {tuple(parameter.shape)}"
    if default.mesh.shard_dim is None:
        raise UsageError.of(
            "The mesh has no dimension to shard over.",
            expected="shard_placement_fn=None with dp_mesh_dims that only replicate",
            got=f"the answer {answer!r}",
            where=where,
            fix="name a dimension with DataParallelMeshDims(shard=...)",
        )
    info, mesh = default.info, default.mesh
    if type(answer).__name__ == "ShardPlacementResult":
        info, answer = answer.mesh_info, answer.placement
        if info is not default.info:
            _require_info(info, where)
            mesh = data_mesh_of(info)
    if answer is None:
        return Placed(0, info, mesh)
    if type(answer).__name__ != "Shard":
        expected = "None, a Shard or a ShardPlacementResult"
        raise unusable("An answer of shard_placement_fn", expected, answer, where)
    ndim = max(parameter.dim(), 1)
    if not -ndim <= answer.dim < ndim:
        raise AssertedUsageError.of(
            "The parameter does not have this dimension.",
            expected=f"a dimension from {-ndim} to {ndim - 1}",
            got=f"{answer.dim}",
            where=where,
            fix="return Shard(dim) with a dimension of the parameter, or None for Shard(0)",
        )
    return Placed(answer.dim % ndim, info, mesh)


def _require_info(info: Any, where: str) -> None:
    if not any(base.__name__ == "FSDPMeshInfo" for base in type(info).__mro__):
        raise unusable("ShardPlacementResult.mesh_info", "an FSDPMeshInfo", info, where)
    for name in ("shard_mesh_dim", "replicate_mesh_dim"):
        dim = getattr(info, name)
        if dim is not None and not (isinstance(dim, int) and 0 <= dim < info.mesh.ndim):
            raise TypeUsageError.of(
                f"The mesh of an FSDPMeshInfo has no dimension {dim!r}.",
                expected=f"{name} from 0 to {info.mesh.ndim - 1}",
                got=repr(dim),
                where=where,
                fix=f"pass the number of a dimension of the mesh as {name}=",
            )
    require_members(info.mesh)


def gather_dtype(
    parameter: nn.Parameter, name: str, policy: MixedPrecisionPolicy
) -> torch.dtype | None:
    """Return the dtype that a parameter is all-gathered and computed in; None: its own."""
    wanted = policy.param_dtype
    if policy.param_dtype_override_fn is not None:
        answer = policy.param_dtype_override_fn(parameter)
        if answer is not None:
            if not isinstance(answer, torch.dtype) or answer not in (wanted, parameter.dtype):
                what = "An answer of param_dtype_override_fn"
                expected = f"None, param_dtype ({wanted}) or its own dtype ({parameter.dtype})"
                where = f"param_dtype_override_fn, for parameter {name!r}"
                raise unusable(what, expected, answer, where)
            wanted = None if answer is not policy.param_dtype else answer
    return None if is_packed(parameter.dtype) else wanted


# as torch's fully_shard of the same version
_REDUCES_IN_OWN_DTYPE = torch.__version__ >= "2.15"


def precision_of(
    dtype: torch.dtype, gather: torch.dtype | None, policy: MixedPrecisionPolicy
) -> Precision:
    """Return the dtypes of a group whose shard has ``dtype``. gather: see ``gather_dtype``."""
    if is_packed(dtype):
        return Precision(dtype, dtype)
    gather = gather or dtype
    default = dtype if _REDUCES_IN_OWN_DTYPE else gather
    return Precision(gather, policy.reduce_dtype or default)


# -- meshes: from a DeviceMesh, or dimensions of one, to a DataMesh


def default_mesh() -> DeviceMesh:
    """Return the 1-D mesh of all ranks, on the accelerator if there is one, else on the CPU.
    Without a default process group, makes the one that torchrun's environment describes."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group()
    world = the_group(None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None or is_simulated() else accelerator.type
    return init_device_mesh(device_type, (world.size(),))


def require_mesh(mesh: Any, dims: Any) -> DataParallelMeshDims | None:
    """Raise UsageError for an unusable mesh. Return ``dims`` (dp_mesh_dims) as our own record."""
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
    """Return what each dimension of ``mesh`` is for. Collective if several are flattened."""
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
    """Return the mesh that an FSDPMeshInfo, ours or torch's, describes."""
    spmd = None
    if info.dp_mesh_dims is not None:
        names = info.spmd_mesh.mesh_dim_names
        shard = tuple(names.index(name) for name in info.dp_mesh_dims.shard_names)
        replicate = tuple(names.index(name) for name in info.dp_mesh_dims.replicate_names)
        spmd = SpmdMesh(info.spmd_mesh, (*shard, *replicate), shard)
    return DataMesh(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim, spmd)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this process computes on."""
    if is_simulated():  # the mesh is one of the CPU: DTensors know none of meta
        return torch.device("meta")
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


# By the shard group of a mesh: {(ranks, members of the mesh, device type): its partial mesh}.
_partial_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


def partial_mesh_of(mesh: DataMesh, ranks: int) -> DeviceMesh:
    """Return the 2-D mesh (outer, ``ranks``) for all-gathers among neighbours on the shard
    dimension; always the same one. Collective the first time."""
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
    """Return the group that shards one copy of the parameters, or else the replicas'."""
    dim = mesh.replicate_dim if mesh.shard_dim is None else mesh.shard_dim
    return mesh.mesh.get_group(dim)
