"""The arguments of ``fully_shard``, checked and resolved before anything changes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..._engine.dtypes import Precision, is_packed
from ..._stores.placement import DataMesh
from ...errors import (
    AssertedUsageError,
    NotImplementedUsageError,
    TypeUsageError,
    UsageError,
    takes,
    truth,
    unusable,
    wrong_type,
)
from .api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .meshes import WHERE, data_mesh_of, require_members, shard_ranks


@dataclasses.dataclass(frozen=True)
class Offload:
    """Where shards live."""

    to_cpu: bool = False
    pin: bool = False


def _as_ours(given: Any, cls: type, name: str) -> Any:
    """Return a record of ours or of torch as one of ``cls``, which has the fields of torch's."""
    if isinstance(given, cls):
        return given
    if not any(base.__name__ == cls.__name__ for base in type(given).__mro__):
        raise wrong_type(name, f"a {cls.__name__}", given, WHERE)
    fields = [field.name for field in dataclasses.fields(cls) if hasattr(given, field.name)]
    return cls(**{field: getattr(given, field) for field in fields})


def policy_of(given: Any) -> MixedPrecisionPolicy:
    """Return a mixed-precision policy, of ours or of torch, with its fields checked."""
    policy: MixedPrecisionPolicy = _as_ours(given, MixedPrecisionPolicy, "mp_policy")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and (not isinstance(dtype, torch.dtype) or is_packed(dtype)):
            raise wrong_type(
                f"MixedPrecisionPolicy.{name}",
                "a floating-point torch.dtype of 16 bits or more, or None",
                dtype,
                WHERE,
            )
    truth("MixedPrecisionPolicy.cast_forward_inputs", policy.cast_forward_inputs, WHERE)
    override = policy.param_dtype_override_fn
    if override is not None and not (callable(override) and takes(override, 1)):
        raise wrong_type(
            "MixedPrecisionPolicy.param_dtype_override_fn",
            "a function that takes one parameter, or None",
            override,
            WHERE,
        )
    return policy


def offload_of(given: Any) -> Offload:
    """Return what an offload policy, of ours or of torch, says."""
    bases = {base.__name__ for base in type(given).__mro__}
    if CPUOffloadPolicy.__name__ in bases:
        return Offload(True, truth("CPUOffloadPolicy.pin_memory", given.pin_memory, WHERE))
    if OffloadPolicy.__name__ not in bases:
        raise wrong_type(
            "offload_policy", "an OffloadPolicy() or a CPUOffloadPolicy()", given, WHERE
        )
    return Offload()


def ignored_of(given: Any) -> frozenset[nn.Parameter]:
    """Return the parameters to leave alone."""
    if given is None:
        return frozenset()
    listed = list(given) if isinstance(given, Iterable) and not _is_one(given) else None
    if listed is None or not all(isinstance(item, nn.Parameter) for item in listed):
        raise wrong_type("ignored_params", "a set of parameters, or None", given, WHERE)
    return frozenset(listed)


def _is_one(given: Any) -> bool:
    return isinstance(given, (nn.Module, torch.Tensor, str))


def reshard_of(given: Any, mesh: DataMesh) -> tuple[bool | None, int]:
    """Return whether to reshard after forward (None: all but the root), and the number of ranks
    that all-gathers of backward are among (0: all)."""
    if given is None or isinstance(given, bool):
        return given, 0
    if not isinstance(given, int):
        raise wrong_type("reshard_after_forward", "True, False, None or a number", given, WHERE)
    ranks = shard_ranks(mesh)
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
            "The ranks cannot be divided like this.",
            expected=f"a factor of {ranks}, the number of ranks that parameters are sharded over",
            got=repr(given),
            where="argument 'reshard_after_forward' of fully_shard",
            fix="pass the number of ranks per node, or True or False",
        )
    if given == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps whole parameters after forward, as "
            "reshard_after_forward=False does; pass True to reshard them over all ranks.",
            stacklevel=4,
        )
        return False, 0
    return True, 0 if given == ranks else given


def require_placement_fn(given: Any) -> Callable[[nn.Parameter], Any] | None:
    """Raise UsageError unless ``given`` can be a ``shard_placement_fn``."""
    if given is None or (callable(given) and takes(given, 1)):
        return given
    raise wrong_type(
        "shard_placement_fn", "a function that takes one parameter, or None", given, WHERE
    )


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where one parameter is to be sharded."""

    dim: int  # of the parameter
    info: Any  # the mesh information, of ours or of torch: the default's, or that of the answer
    mesh: DataMesh


def placed(
    parameter: nn.Parameter,
    name: str,
    function: Callable[[nn.Parameter], Any] | None,
    default: Placed,
) -> Placed:
    """Return where ``function`` (shard_placement_fn) puts a parameter.

    default: where it goes without an answer.
    """
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
        raise unusable(
            "An answer of shard_placement_fn",
            "None, a Shard or a ShardPlacementResult",
            answer,
            where,
        )
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
                raise unusable(
                    "An answer of param_dtype_override_fn",
                    f"None, param_dtype ({wanted}) or the parameter's dtype ({parameter.dtype})",
                    answer,
                    f"param_dtype_override_fn, for parameter {name!r}",
                )
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
