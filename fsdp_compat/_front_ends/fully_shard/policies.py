"""The policies and mesh descriptions that ``fully_shard`` takes, and the interfaces of user-defined
collectives."""

from __future__ import annotations

import abc
import dataclasses
import typing
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import AssertedUsageError, UsageError

if typing.TYPE_CHECKING:
    from torch.distributed.tensor import Shard


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes that a module computes and communicates in.

    Only floating-point parameters of 16 bits or more are cast. Sharded parameters and the optimizer
    keep the original dtype.

    Attributes:
        param_dtype: dtype of the unsharded parameters, and so of the all-gather and the
            computation. None: the parameters' own.
        reduce_dtype: dtype of the gradient reduction, and of gradients that are accumulated without
            one. None: ``param_dtype``; from torch 2.15 on the parameters' own.
        output_dtype: dtype to which floating-point outputs of forward are cast. None: not cast.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``.
            Default True.
        param_dtype_override_fn: called once for each parameter when ``fully_shard`` is applied.
            Returns the dtype that this parameter computes in: its original one, ``param_dtype``, or
            None for ``param_dtype``. Must answer alike on all ranks."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = (
        dataclasses.field(default=None, kw_only=True)
    )


@dataclasses.dataclass
class OffloadPolicy:
    """Keep everything on the device that computes."""


@dataclasses.dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, their gradients and optimizer state on the CPU.

    For writes to parameters, see ``CPUOffload``.

    Attributes:
        pin_memory: whether to pin this memory, so that copies to and from the device overlap with
            computation. Default True."""

    pin_memory: bool = True


@dataclasses.dataclass
class DataParallelMeshDims:
    """The data-parallel dimensions of a mesh, by name; several names are flattened into one.

    Attributes:
        shard: the dimensions over which parameters are sharded.
        replicate: the dimensions over which parameters are replicated.

    Raises:
        UsageError: neither is given."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise UsageError.of(
                "No dimension of the mesh was named.",
                expected="shard=, replicate=, or both",
                got="neither",
                where="DataParallelMeshDims(...)",
                fix="name the dimension to shard over: DataParallelMeshDims(shard='dp')",
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names in ``shard``, as a tuple."""
        return _as_tuple(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names in ``replicate``, as a tuple."""
        return _as_tuple(self.replicate)


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


@dataclasses.dataclass
class DataParallelMeshInfo:
    """A mesh, and which of its dimensions shard and replicate parameters.

    ``dp_mesh_dims`` names them if parameters are DTensors on ``spmd_mesh``, of which ``mesh`` is a
    part. Without any dimension it is a UsageError and an AssertionError."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise _no_dimension("shard_mesh_dim or replicate_mesh_dim", type(self).__name__)


@dataclasses.dataclass
class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh with a dimension that parameters are sharded over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise _no_dimension("shard_mesh_dim", type(self).__name__)


@dataclasses.dataclass
class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh with a dimension that parameters are replicated over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise _no_dimension("replicate_mesh_dim", type(self).__name__)


@dataclasses.dataclass
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A mesh with a dimension that parameters are sharded over, and one of replicas."""


def _no_dimension(names: str, where: str) -> AssertedUsageError:
    return AssertedUsageError.of(
        "No dimension of the mesh was given.",
        expected=names,
        got="None",
        where=f"{where}(...)",
        fix=f"pass {where}(mesh, {names.partition(' ')[0]}=0)",
    )


@dataclasses.dataclass
class ShardPlacementResult:
    """What ``shard_placement_fn`` may return: how to cut a parameter, and over which mesh.

    ``placement`` is ``Shard(dim)``, or None for ``Shard(0)``."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


_ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


class Comm(abc.ABC):
    """A user-defined collective that allocates its own buffers."""

    @abc.abstractmethod
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a contiguous buffer; its values do not matter. ``size`` is (numel,)."""


class AllGather(Comm):
    """A user-defined all-gather, see ``FSDPModule.set_custom_all_gather``."""

    @abc.abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill the output [ranks * S] with every rank's input [S], in rank order.

        Return the work to wait for, or None. ``async_op`` is always False when fsdp_compat calls.

        Collective: all ranks of ``group``."""


class ReduceScatter(Comm):
    """A user-defined reduce-scatter, see ``FSDPModule.set_custom_reduce_scatter``."""

    @abc.abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill the output [S] with this rank's part of the reduction of all inputs [ranks * S].

        Return the work to wait for, or None. fsdp_compat passes SUM as ``op``, and
        ``async_op=False``.

        Collective: all ranks of ``group``."""
