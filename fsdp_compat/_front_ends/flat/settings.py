"""The constructor's arguments as given, and the unit settings that they resolve to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..._comm.mesh import Mesh, axis_by_name, axis_of, group_by_name
from ..._engine.dtypes import Precision
from ..._engine.runtime import RuntimeOptions
from ..._engine.unit import UnitOptions
from ...api import BackwardPrefetch, MixedPrecision, ShardingStrategy
from ...errors import UsageError


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The constructor's arguments except the module and the policy. A policy may change them for
    single units."""

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    device_id: Any = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    ignored_states: Any = None
    device_mesh: Any = None
    allow_unused_units: bool = False
    keep_units_below: int = 0

    def changed(self, **changes: Any) -> Arguments:
        """Return a copy with some arguments changed; raises UsageError for a name that the
        constructor does not have."""
        names = {field.name for field in dataclasses.fields(self)}
        unknown = sorted(changes.keys() - names)
        if unknown:
            raise UsageError.of(
                "A wrap policy returned an argument that FullyShardedDataParallel does not have.",
                expected=f"keyword arguments among {sorted(names)}",
                got=str(unknown),
                where="the dict returned by a CustomPolicy's function",
                fix="correct the names",
            )
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that the engine and the stores need to know about a unit."""

    strategy: ShardingStrategy  # only for clients that read it
    mesh: Mesh
    group: dist.ProcessGroup  # shards one copy of the parameters, also in sharded state dicts
    # The part of the argument in use; if given, sharded state dicts hold DTensors over it.
    device_mesh: DeviceMesh | None
    device: torch.device  # where the unit computes
    mixed_precision: MixedPrecision
    reshard_after_forward: bool
    use_orig_params: bool
    sync_module_states: bool
    param_init_fn: Callable[[nn.Module], None] | None
    ignored_modules: frozenset[nn.Module]  # descendants included
    ignored_parameters: frozenset[nn.Parameter]
    runtime: RuntimeOptions
    offload: bool  # keep shards, gradients and optimizer state on the CPU
    full_precision_in_eval: bool
    keep_units_below: int  # in elements; smaller units are not resharded after forward
    forward_prefetch: bool  # the argument, only for clients that read it
    limit_all_gathers: bool  # likewise

    def precision(self, dtype: torch.dtype) -> Precision:
        """Return the dtypes for gathering and reducing a group of ``dtype``. Packed formats
        (integers, 8-bit floats) are never cast."""
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return Precision(dtype, dtype)
        gather = self.mixed_precision.param_dtype or dtype
        reduce = self.mixed_precision.reduce_dtype or gather
        return Precision(
            gather,
            reduce,
            evaluate=dtype if self.full_precision_in_eval else None,
            grad=reduce if self.mixed_precision.keep_low_precision_grads else None,
        )

    def facts(self) -> list[str]:
        """Return what must be alike on all ranks of the mesh."""
        precision, runtime = self.mixed_precision, self.runtime
        return [
            f"sharding_strategy={self.strategy.name}",
            f"param_dtype={precision.param_dtype}, reduce_dtype={precision.reduce_dtype}",
            f"use_orig_params={self.use_orig_params}",
            f"sync_module_states={self.sync_module_states}",
            f"cpu_offload={self.offload}",
            f"keep_units_below={self.keep_units_below}",
            f"evaluation in full precision: {self.full_precision_in_eval}",
            f"forward_prefetch={runtime.forward_prefetch}",
            f"backward_prefetch={runtime.backward_prefetch.name}",
            f"allow_unused_units={runtime.allow_unused_units}",
        ]

    def portable(self) -> PortableSettings:
        """Return the settings in a form that another process can load: process groups by name, and
        without the fields that only construction uses."""
        changes: dict[str, Any] = {
            "param_init_fn": None,
            "ignored_modules": frozenset(),
            "ignored_parameters": frozenset(),
            "mesh": None,
            "group": None,
            "device_mesh": None,
        }
        # Replicas hold equal values, so any of them may load another one's pickle.
        shard, replica = (
            (_name_of(axis.group), axis.members, rank)
            for axis, rank in ((self.mesh.shard, self.mesh.shard.rank), (self.mesh.replica, None))
        )
        mesh = None if self.device_mesh is None else PortableMesh.of(self.device_mesh)
        group = self.group.group_name, axis_of(self.group).members
        return PortableSettings(dataclasses.replace(self, **changes), (shard, replica), group, mesh)

    @property
    def home(self) -> torch.device:
        """The device that holds the shards."""
        return torch.device("cpu") if self.offload else self.device

    @property
    def uncast_classes(self) -> tuple[type[nn.Module], ...]:
        """Classes of modules that keep computing in the dtype of their own parameters and buffers
        when the rest of the unit is cast."""
        casts = self.mixed_precision.param_dtype or self.mixed_precision.buffer_dtype
        return tuple(self.mixed_precision._module_classes_to_ignore or ()) if casts else ()

    def unit_options(self, numel: int) -> UnitOptions:
        """Return the options of a unit whose unsharded parameters have ``numel`` elements."""
        dtype = self.mixed_precision.param_dtype
        return UnitOptions(
            reshard_after_forward=self.reshard_after_forward and numel >= self.keep_units_below,
            cast_inputs=dtype is not None and bool(self.mixed_precision.cast_forward_inputs),
            cast_root_inputs=dtype is not None
            and bool(self.mixed_precision.cast_root_forward_inputs),
            compute_dtype=dtype or torch.get_default_dtype(),
            device=self.device,
            full_precision_in_eval=self.full_precision_in_eval,
        )


@dataclasses.dataclass(frozen=True)
class PortableMesh:
    """A device mesh without its process groups, so that it can be pickled."""

    device_type: str
    ranks: list[Any]  # global ranks, nested like the mesh
    names: tuple[str, ...] | None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> PortableMesh:
        return cls(mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names)

    def over(self, groups: list[dist.ProcessGroup | None]) -> DeviceMesh:
        """Return the mesh over ``groups``: (replica group, shard group). A 1-D mesh uses the last
        one."""
        if isinstance(self.ranks[0], int):
            group: Any = groups[-1]
            return DeviceMesh.from_group(
                group, self.device_type, self.ranks, mesh_dim_names=self.names
            )
        names = self.names or ("replica", "shard")  # torch requires names here
        return DeviceMesh.from_group(groups, self.device_type, self.ranks, mesh_dim_names=names)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class PortableSettings:
    """Settings that can be pickled."""

    rest: Settings
    # (name of the process group, its ranks, this rank on the axis or None if it does not matter) of
    # the shard axis and the replica axis.
    axes: tuple[tuple[str | None, tuple[int, ...], int | None], ...]
    group: tuple[str, tuple[int, ...]]  # its name, and its ranks
    device_mesh: PortableMesh | None = None

    def resolved(self) -> Settings:
        """Return the settings with this process's groups; raises UsageError if no group has the
        name and the ranks, or if the shards are another rank's."""
        group = group_by_name(*self.group)
        shard, replica = (axis_by_name(*axis) for axis in self.axes)
        assert group is not None
        device_mesh = (
            None if self.device_mesh is None else self.device_mesh.over([replica.group, group])
        )
        return dataclasses.replace(
            self.rest, mesh=Mesh(shard, replica), group=group, device_mesh=device_mesh
        )


def _name_of(group: dist.ProcessGroup | None) -> str | None:
    return None if group is None else group.group_name
