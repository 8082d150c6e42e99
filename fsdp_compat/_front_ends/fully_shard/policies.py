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
    """The data-parallel dimensions of a mesh, by name.

    Several names for one of them are flattened into one dimension.

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

    Attributes:
        mesh: the mesh.
        shard_mesh_dim: the index of the dimension that parameters are sharded over, if any.
        replicate_mesh_dim: the index of the dimension of replicas, if any.
        dp_mesh_dims: the names of these dimensions, if parameters are DTensors on ``spmd_mesh``.
        spmd_mesh: the mesh that ``mesh`` is a part of.

    Raises:
        UsageError: neither dimension is given; also an AssertionError."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise _no_dimension("shard_mesh_dim or replicate_mesh_dim", type(self).__name__)

    @property
    def is_spmd_mesh(self) -> bool:
        """True if parameters are DTensors on ``spmd_mesh``, of which ``mesh`` is a part."""
        return self.dp_mesh_dims is not None


@dataclasses.dataclass
class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh with a dimension that parameters are sharded over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise _no_dimension("shard_mesh_dim", type(self).__name__)

    @property
    def shard_mesh_size(self) -> int:
        """The number of ranks that parameters are sharded over."""
        return self.mesh.size(self.shard_mesh_dim)

    @property
    def shard_process_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that parameters are sharded over."""
        return self.mesh.get_group(self.shard_mesh_dim)

    @property
    def shard_mesh_rank(self) -> int:
        """This rank's position among the ranks that parameters are sharded over."""
        return self.mesh.get_local_rank(self.shard_mesh_dim)


@dataclasses.dataclass
class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh with a dimension that parameters are replicated over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise _no_dimension("replicate_mesh_dim", type(self).__name__)

    @property
    def replicate_mesh_size(self) -> int:
        """The number of ranks that hold copies of a shard."""
        return self.mesh.size(self.replicate_mesh_dim)

    @property
    def replicate_process_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that hold copies of a shard."""
        return self.mesh.get_group(self.replicate_mesh_dim)

    @property
    def replicate_mesh_rank(self) -> int:
        """This rank's position among the ranks that hold copies of a shard."""
        return self.mesh.get_local_rank(self.replicate_mesh_dim)


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

    Attributes:
        placement: ``Shard(dim)``; None: ``Shard(0)``.
        mesh_info: the mesh to shard the parameter over."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


_ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


class Comm(abc.ABC):
    """A user-defined collective that allocates its own buffers."""

    @abc.abstractmethod
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer; its values do not matter.

        Args:
            size: the shape of the buffer; fsdp_compat passes (numel,).
            dtype: its dtype.
            device: its device.

        Returns:
            A contiguous tensor."""


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
        """Fill the output with every rank's input.

        Collective: all ranks of ``group``.

        Args:
            output_tensor: [ranks * S], the inputs in rank order.
            input_tensor: [S], this rank's part.
            group: the ranks that take part.
            async_op: always False when fsdp_compat calls.

        Returns:
            The work to wait for, or None."""


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
        """Fill the output with this rank's part of the reduction of all inputs.

        Collective: all ranks of ``group``.

        Args:
            output_tensor: [S], this rank's part.
            input_tensor: [ranks * S], a part for every rank.
            group: the ranks that take part.
            op: the reduction; fsdp_compat passes SUM.
            async_op: always False when fsdp_compat calls.

        Returns:
            The work to wait for, or None."""
