"""What clients read and set of the parameter group of torch's FSDP2.

dinov3 keeps inference-only roots resharding after forward by setting ``post_forward_mesh_info``;
other clients read ``mesh_info`` and ``is_unsharded``."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from ..._engine.conduct import Conduct
from ..._engine.unit import Residency, Unit
from ...errors import UsageError, explain
from .api import DataParallelMeshInfo, HSDPMeshInfo
from .plan import Plan


class _State(typing.Protocol):
    """What one call of ``fully_shard`` keeps."""

    plan: Plan
    conduct: Conduct
    unit: Unit | None
    is_auto: bool


@dataclasses.dataclass(unsafe_hash=True)
class ParamGroup:
    """The parameters of one call of ``fully_shard``. (An FSDPParamGroup of torch.)"""

    _state: _State

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """The mesh that parameters are sharded over."""
        return self._state.plan.info

    @property
    def is_unsharded(self) -> bool:
        unit = self._state.unit
        return unit is not None and unit.residency is Residency.UNSHARDED

    @property
    def post_forward_mesh_info(self) -> DataParallelMeshInfo | None:
        """The mesh that parameters are sharded over between forward and backward: that of
        ``mesh_info``, or a smaller one. None: they stay unsharded.

        May be set to one of these.
        """
        conduct = self._state.conduct
        if not conduct.reshard_after_forward:
            return None
        if conduct.partial_ranks:
            return HSDPMeshInfo(conduct.partial_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        return self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        conduct, mesh = self._state.conduct, getattr(info, "mesh", None)
        if info is not None and (
            mesh is None or mesh not in (self.mesh_info.mesh, conduct.partial_mesh)
        ):
            raise UsageError.of(
                "Parameters cannot be resharded to this mesh after forward.",
                expected="None, mesh_info, or what post_forward_mesh_info was before",
                got=repr(info),
                where="post_forward_mesh_info",
                fix="pass the number of ranks as reshard_after_forward to fully_shard",
            )
        self._state.is_auto = False
        conduct.reshard_after_forward = info is not None
        if info is not None and mesh != conduct.partial_mesh:
            conduct.partial_ranks, conduct.partial_mesh = 0, None

    def __getattr__(self, name: str) -> typing.NoReturn:
        raise AttributeError(
            explain(
                f"A parameter group of fsdp_compat has no {name!r}.",
                expected="mesh_info, post_forward_mesh_info or is_unsharded",
                got=f"the attribute {name!r} of torch's FSDPParamGroup",
                where="module._get_fsdp_state()._fsdp_param_group",
                fix="read module.parameters(), which are DTensors while the module is sharded, and "
                "use the methods of FSDPModule: unshard(), reshard(), finalize_backward()",
            )
        )
