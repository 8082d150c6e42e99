"""How parameters lie on the device meshes of data parallelism and of tensor parallelism; and one
parameter of a store that cuts each by itself."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # public

from .. import _torch_private
from .._comm.host_memory import of_its_own_size
from .._comm.mesh import Axis, Mesh, axis_of
from .._engine.store import ParamKind
from .._engine.tensor_parallel import TensorParallel
from .._layout.rows import Cut
from .._torch_private import dtensor as torch_dtensor
from ..errors import StateError


@dataclasses.dataclass(frozen=True)
class SpmdMesh:
    """The mesh that all parameters lie on as DTensors, data parallelism included."""

    mesh: DeviceMesh
    data_dims: tuple[int, ...]  # of data parallelism, replicating and sharding
    shard_dims: tuple[int, ...]  # the sharding ones


@dataclasses.dataclass(frozen=True)
class DataMesh:
    """The dimensions of a mesh that data parallelism uses."""

    mesh: DeviceMesh
    shard_dim: int | None  # None: parameters are not cut
    replicate_dim: int | None
    spmd: SpmdMesh | None = None
    # By the id of another mesh: that mesh, and the joined one. DTensors compare their meshes.
    _joined: dict[int, tuple[DeviceMesh, DeviceMesh]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def engine_mesh(self) -> Mesh:
        """Return the axes that the engine communicates over."""
        return Mesh(
            self._axis(self.shard_dim),
            self._axis(self.replicate_dim),
            is_hybrid=self.replicate_dim is not None,
        )

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh of the ranks that parameters are cut over."""
        if self.mesh.ndim == 1 or self.shard_dim is None:
            return self.mesh
        return self.mesh[_names_of(self.mesh)[self.shard_dim]]

    def size(self, dim: int | None) -> int:
        """Return the number of ranks along a dimension; None: one."""
        return 1 if dim is None else self.mesh.size(dim)

    def _axis(self, dim: int | None) -> Axis:
        if dim is None:
            return Axis(None, 0, (dist.get_rank(),))
        return axis_of(self.mesh.get_group(dim))

    def joined_with(self, other: DeviceMesh) -> DeviceMesh:
        """Return the mesh of these dimensions, then those of ``other``: always the same object."""
        if id(other) not in self._joined:
            self._joined[id(other)] = other, torch_dtensor.joined_mesh([self.mesh, other])
        return self._joined[id(other)][1]

    def spmd_joined(self) -> DeviceMesh:
        """Return the mesh of SPMD parameters with several shard dimensions, flattened to one."""
        assert self.spmd is not None
        whole = self.spmd.mesh
        if id(whole) not in self._joined:
            meshes: list[DeviceMesh] = []
            for dim, name in enumerate(_names_of(whole)):
                if dim == self.spmd.shard_dims[0]:
                    meshes.append(self.mesh)
                elif dim not in self.spmd.data_dims:
                    meshes.append(whole[name])
            self._joined[id(whole)] = whole, torch_dtensor.joined_mesh(meshes)
        return self._joined[id(whole)][1]


@dataclasses.dataclass(frozen=True)
class RowPlacement:
    """How one parameter lies."""

    dim: int | None  # that a store cuts; None: the parameter is 0-d, and every rank holds it whole
    spec: Any = None  # of the sharded parameter as a DTensor; None: it is a plain tensor
    parallel: TensorParallel | None = None  # if the unsharded parameter is also a DTensor


@dataclasses.dataclass(frozen=True)
class _SpmdParallel(TensorParallel):
    """A parameter on the whole mesh. Gradient reduction sums its partial placements."""

    data_dims: tuple[int, ...]

    @property
    def tensor_parallel_dims(self) -> Sequence[int]:
        return [dim for dim in range(self.mesh.ndim) if dim not in self.data_dims]

    def local(self, value: Tensor) -> Tensor:
        """value: a DTensor of the parameter's shape. Return this process's part of it in the
        parameter's placements, except along data parallelism. Collective if they differ."""
        if _torch_private.is_plain(value):
            return value
        present: tuple[Any, ...] = value.placements  # type: ignore[attr-defined]
        wanted = tuple(
            present[dim] if dim in self.data_dims else placement
            for dim, placement in enumerate(self.placements)
        )
        if wanted != tuple(present):
            value = value.redistribute(placements=wanted)  # type: ignore[attr-defined]
        return _torch_private.local_part(value)


def placement_of(parameter: Tensor, data_mesh: DataMesh, dim: int) -> RowPlacement:
    """Return the placement of a parameter that is cut along ``dim`` on ``data_mesh``. A DTensor
    must lie on another part of the same mesh or, not cut along data parallelism, on all of it."""
    from torch.distributed.tensor import Replicate, Shard

    spmd, parallel = data_mesh.spmd, TensorParallel.of(parameter)
    own: list[Any] = [Replicate()] * data_mesh.mesh.ndim
    shard_dims: Sequence[int] = [] if data_mesh.shard_dim is None else [data_mesh.shard_dim]
    mesh, data_dims, placements = data_mesh.mesh, tuple(range(len(own))), list(own)
    if spmd is not None:
        assert parallel is not None, "all parameters are DTensors on the whole mesh"
        mesh, data_dims, shard_dims = spmd.mesh, spmd.data_dims, spmd.shard_dims
        parallel = _SpmdParallel(mesh, parallel.placements, parallel.shape, data_dims)
        placements = list(parallel.placements)
    elif parallel is not None:
        mesh = data_mesh.joined_with(parallel.mesh)
        placements += parallel.placements
    for at in shard_dims if parameter.dim() else ():
        later = [other for other in range(at + 1, mesh.ndim) if other not in data_dims]
        cut_there = [d for d in later if torch_dtensor.shards(placements[d], dim)]
        factor = math.prod(map(mesh.size, cut_there))
        placements[at] = torch_dtensor.strided_shard(dim, factor) if factor > 1 else Shard(dim)
    if len(shard_dims) > 1:  # they are one dimension of the data mesh
        first, *_ = shard_dims
        own[data_mesh.shard_dim or 0] = placements[first]
        joined = [
            own if at == first else [placement]
            for at, placement in enumerate(placements)
            if at == first or at not in data_dims
        ]
        mesh, placements = data_mesh.spmd_joined(), list(itertools.chain(*joined))
    spec = torch_dtensor.spec_for(mesh, placements, parameter.shape, parameter.dtype)
    return RowPlacement(dim if parameter.dim() else None, spec, parallel)


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    assert names is not None, "data-parallel dimensions are given by name"
    return names


@dataclasses.dataclass
class RowParam:
    """One parameter of a store that cuts each by itself."""

    cut: Cut
    kind: ParamKind  # of the unsharded parameter, whose attributes the sharded one shares
    spec: Any  # of the sharded parameter and its gradient; None: plain tensors
    sharded: nn.Parameter

    @staticmethod
    def of(original: nn.Parameter, local: Tensor, cut: Cut, placed: RowPlacement) -> RowParam:
        """Return the parameter that replaces ``original``. local: this rank's rows."""
        value = local if placed.spec is None else torch_dtensor.dtensors([local], [placed.spec])[0]
        sharded = nn.Parameter(value, requires_grad=original.requires_grad)
        if original.grad_dtype is not original.dtype:
            sharded.grad_dtype = original.grad_dtype
        # Attributes that every instance of a tensor subclass has are recreated by detach(); only
        # the user's own are copied.
        own = vars(original.detach())
        attributes = {name: value for name, value in vars(original).items() if name not in own}
        sharded.__dict__ = attributes = attributes | vars(sharded)
        hooks = getattr(original, _torch_private.GRADIENT_HOOKS)
        kind = ParamKind(type(original), attributes, placed.parallel, hooks)
        return RowParam(cut, kind, placed.spec, sharded)

    def kind_on(self, mesh: Any) -> ParamKind:
        """Return its kind when rows are cut along the last dimension of a 2-D ``mesh``."""
        from torch.distributed.tensor import Replicate, Shard

        shape = self.cut.shape
        placements = Replicate(), Shard(0) if shape else Replicate()
        return self.kind._replace(parallel=TensorParallel(mesh, placements, shape))

    def require_fit(self, parameter: Any, rank: int, name: str) -> None:
        """Raise StateError unless ``parameter`` can be the sharded parameter on ``rank``."""
        shape, spec, placements = self.cut.part_shape(rank), self.spec, None
        wanted, got = f"its part {shape}", "nothing"
        if spec is not None:
            wanted = f"a DTensor placed as {spec.placements}, with {wanted} on this rank"
        if parameter is not None:
            got = f"a {type(parameter).__name__} of shape {tuple(parameter.shape)}"
            if not _torch_private.is_plain(parameter):
                placements = tuple(parameter.placements)
                got += f", placed as {placements}"
            if placements == (None if spec is None else tuple(spec.placements)) and (
                tuple(_torch_private.local_part(parameter).shape) == shape
            ):
                return
        raise StateError.of(
            "A sharded parameter was replaced by one that does not fit.",
            expected=wanted,
            got=got,
            where=f"parameter {name!r}",
            fix="load into the sharded model without assign=True, or assign DTensors as "
            "state_dict() of the sharded model returns them",
        )


def require_one_kind(values: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise StateError unless all local tensors have one dtype and device. names: of these."""
    kinds = {(value.dtype, value.device): index for index, value in enumerate(values)}
    if len(kinds) > 1:
        (_, first), (_, other) = list(kinds.items())[:2]
        raise StateError.of(
            "Some parameters of a unit changed their dtype or device, and others did not.",
            expected="the same change of all parameters that fully_shard manages together",
            got=", ".join(f"{dtype} on {device}" for dtype, device in kinds),
            where=f"parameters {names[first]!r} and {names[other]!r}",
            fix="convert single parameters before fully_shard",
        )


def with_own_storage(part: Tensor) -> Tensor:
    """Return a tensor over the memory of a contiguous one, at the start of a storage of its size:
    torch's asynchronous checkpoints treat DTensors with a storage offset as plain tensors."""
    if part.is_meta or not part.numel():
        return torch.empty_like(part)
    if part.device.type == "cpu":
        return of_its_own_size(part)
    # It keeps the shard alive. Not through __dlpack_device__, which torch does not support for
    # devices that are registered under a name of their own.
    flat: Tensor = from_dlpack(to_dlpack(part.view(-1).view(torch.uint8)))
    return flat.view(part.dtype).view(part.shape)
