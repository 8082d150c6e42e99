"""Parameters that are already DTensors along other mesh dimensions than data parallelism's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from .._comm.mesh import Axis, axis_of
from .._torch_private import dtensor as torch_dtensor


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How a DTensor parameter lies on its own mesh. The unit shards its local tensor."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]  # of the whole parameter

    @staticmethod
    def of(parameter: Tensor) -> TensorParallel | None:
        """Return how a parameter lies on its mesh, or None for a plain one."""
        if _torch_private.is_plain(parameter):
            return None
        return TensorParallel(
            parameter.device_mesh,  # type: ignore[attr-defined]
            tuple(parameter.placements),  # type: ignore[attr-defined]
            tuple(parameter.shape),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # a mesh is shared, not copied

    def wrap(self, local: Tensor) -> Tensor:
        """Return the DTensor whose part on this process is ``local``."""
        spec = torch_dtensor.spec_for(self.mesh, self.placements, self.shape, local.dtype)
        return torch_dtensor.dtensors([local], [spec])[0]

    def local(self, value: Tensor) -> Tensor:
        """value: a DTensor of the parameter's shape. Return this process's part of it in the
        parameter's placements. Collective: the mesh, if placements or meshes differ."""
        if _torch_private.is_plain(value):
            return value
        if value.device_mesh != self.mesh:  # type: ignore[attr-defined]
            return self.part(value.full_tensor())  # type: ignore[attr-defined]
        result: Tensor = value.redistribute(self.mesh, self.placements).to_local()  # type: ignore[attr-defined]
        return result

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole parameter. Collective: the mesh."""
        result: Tensor = self.wrap(local).full_tensor()  # type: ignore[attr-defined]
        return result

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's part of a whole value. Nothing is sent."""
        from torch.distributed.tensor import distribute_tensor

        if whole.device.type != self.mesh.device_type:
            whole = whole.to(self.mesh.device_type)
        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()

    @property
    def tensor_parallel_dims(self) -> Sequence[int]:
        """The dimensions of the mesh that data parallelism does not use."""
        return range(self.mesh.ndim)

    def tensor_parallel_axes(self) -> tuple[Axis, ...]:
        """The axes along which the parameter is sharded, not replicated."""
        return tuple(
            axis_of(self.mesh.get_group(dim))
            for dim in self.tensor_parallel_dims
            if not self.placements[dim].is_replicate()
        )
