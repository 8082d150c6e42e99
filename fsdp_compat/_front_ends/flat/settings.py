"""The settings of a unit of FullyShardedDataParallel, checked and resolved from the constructor's
keyword arguments."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ... import _torch_private
from ..._comm.mesh import (
    Mesh,
    first_dimension,
    groups_node_by_node,
    mesh_from_device_mesh,
    mesh_from_group,
    mesh_from_groups,
    not_a_member,
    replicated,
    the_group,
)
from ..._engine.device import is_simulated
from ..._engine.dtypes import Precision, is_packed
from ..._engine.schedule import Prefetch, RuntimeOptions
from ..._engine.unit import UnitOptions
from ..._stores.flat_cuts import ShardBlocks, shard_blocks_of
from ...api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, as_ours
from ...errors import UsageError, function_or_none, require_float_dtype, truth, wrong_type

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_RESHARDS = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
_FLAGS = (
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "allow_unused_units",
)
_WHERE = "FullyShardedDataParallel"
_wrong_type = functools.partial(wrong_type, where=_WHERE)
PREFETCHES = {
    None: Prefetch.NONE,
    BackwardPrefetch.BACKWARD_POST: Prefetch.POST,
    BackwardPrefetch.BACKWARD_PRE: Prefetch.PRE,
}


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
    shard_blocks: ShardBlocks | None

    def precision(self, dtype: torch.dtype) -> Precision:
        """Return the dtypes of a group of ``dtype``."""
        if is_packed(dtype):
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

    @property
    def home(self) -> torch.device:
        """The device that holds the shards."""
        return torch.device("cpu") if self.offload else self.device

    @property
    def pins(self) -> bool:
        """Whether shards lie in memory of the host that a device reads."""
        return self.offload and self.device.type != "cpu"

    @property
    def uncast_classes(self) -> tuple[type[nn.Module], ...]:
        """Classes of modules that keep their own dtype when the rest of the unit is cast."""
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


def resolve(module: nn.Module, kwargs: Mapping[str, Any]) -> Settings:
    """Check keyword arguments of the constructor and return the settings they mean. Collective only
    if a hybrid strategy is given neither a mesh nor groups, and so makes its own groups."""
    strategy = (
        as_ours(kwargs["sharding_strategy"], ShardingStrategy, "sharding_strategy")
        or ShardingStrategy.FULL_SHARD
    )
    prefetch = as_ours(kwargs["backward_prefetch"], BackwardPrefetch, "backward_prefetch")
    precision = (
        as_ours(kwargs["mixed_precision"], MixedPrecision, "mixed_precision") or MixedPrecision()
    )
    offload = as_ours(kwargs["cpu_offload"], CPUOffload, "cpu_offload") or CPUOffload()
    _refuse_conflicts(kwargs)
    flags = {name: truth(name, kwargs[name], _WHERE) for name in _FLAGS}
    small = kwargs["keep_units_below"]
    if not isinstance(small, int) or isinstance(small, bool) or small < 0:
        raise _wrong_type("keep_units_below", "a number of elements, 0 or more", small)
    blocks = shard_blocks_of(kwargs["shard_blocks"], _WHERE)
    mesh, group, device_mesh = _mesh(strategy, kwargs["process_group"], kwargs["device_mesh"])
    device = _device(module, kwargs["device_id"], group)
    _check_fields(precision, offload)
    if device.type == "meta":
        _refuse_values(kwargs, offload)
    ignored_modules, ignored_parameters = _ignored(module, kwargs)
    ignored = {*ignored_parameters, *(p for each in ignored_modules for p in each.parameters())}
    _refuse_other_device(module, device, ignored)
    return Settings(
        strategy=strategy,
        mesh=mesh,
        group=group,
        device_mesh=device_mesh,
        device=device,
        mixed_precision=precision,
        reshard_after_forward=strategy in _RESHARDS and mesh.shard.ranks > 1,
        use_orig_params=flags["use_orig_params"],
        sync_module_states=flags["sync_module_states"],
        param_init_fn=function_or_none(
            "param_init_fn", kwargs["param_init_fn"], "one module", _WHERE
        ),
        ignored_modules=ignored_modules,
        ignored_parameters=ignored_parameters,
        runtime=RuntimeOptions(
            # Without prefetching, an all-gather waits for the preceding computation. So prefetching
            # is the default in both directions; backward_prefetch=None, which asks for the least
            # memory, turns off both.
            forward_prefetch=flags["forward_prefetch"] or prefetch is not None,
            backward_prefetch=PREFETCHES[prefetch],
            allow_unused_units=flags["allow_unused_units"],
            # A CPU does not send while it computes, so limiting the buffers costs no time there.
            max_inflight_reductions=(
                0 if flags["limit_all_gathers"] and device.type in ("cpu", "meta") else 1
            ),
        ),
        offload=bool(offload.offload_params),
        full_precision_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1",
        keep_units_below=small,
        forward_prefetch=bool(kwargs["forward_prefetch"]),
        limit_all_gathers=bool(kwargs["limit_all_gathers"]),
        shard_blocks=blocks,
    )


def _refuse_conflicts(kwargs: Mapping[str, Any]) -> None:
    for one, other in (("process_group", "device_mesh"), ("ignored_modules", "ignored_states")):
        if kwargs[one] is not None and kwargs[other] is not None:
            raise UsageError.of(
                f"{one} and {other} exclude each other.",
                expected=f"{one}= or {other}=, not both",
                got="both",
                where="FullyShardedDataParallel(...)",
                fix=f"leave out {one}=; {other}= alone is enough",
            )


def _mesh(
    strategy: ShardingStrategy, process_group: Any, device_mesh: Any
) -> tuple[Mesh, dist.ProcessGroup, DeviceMesh | None]:
    """Return the mesh, the group that shards one copy of the parameters, and the device mesh."""
    hybrid = strategy in _HYBRID
    the_group(None)
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    if any(group is dist.GroupMember.NON_GROUP_MEMBER for group in groups):
        raise not_a_member()
    if device_mesh is not None:
        importlib.import_module("torch.distributed.tensor")  # torch.load refuses DTensors before
        if not isinstance(device_mesh, DeviceMesh):
            expected = "a torch.distributed.device_mesh.DeviceMesh"
            raise _wrong_type("device_mesh", expected, device_mesh)
        if device_mesh.get_coordinate() is None:
            raise not_a_member()
        if not hybrid and device_mesh.size(0) == 1 < device_mesh.size():
            warnings.warn(
                f"{strategy.name} shards over the first dimension of a mesh, here 1 rank of "
                f"{device_mesh.size()}. Pass HYBRID_SHARD, or a mesh of the ranks to shard over.",
                stacklevel=6,
            )
        device_mesh = device_mesh if hybrid else first_dimension(device_mesh)
        mesh = mesh_from_device_mesh(device_mesh, strategy=strategy.name)
        group = device_mesh.get_group(device_mesh.ndim - 1)
    elif isinstance(process_group, tuple):
        if (
            not hybrid
            or len(process_group) != 2
            or not all(isinstance(g, dist.ProcessGroup) for g in process_group)
        ):
            raise UsageError.of(
                "A tuple of process groups works with hybrid strategies only.",
                expected="process_group=(shard group, replica group) with HYBRID_SHARD or "
                "_HYBRID_SHARD_ZERO2",
                got=f"a tuple of {len(process_group)} with {strategy.name}",
                where="process_group=",
                fix="pass one process group, or choose a hybrid strategy",
            )
        mesh, group = mesh_from_groups(*process_group), process_group[0]
    elif process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        expected = "a torch.distributed.ProcessGroup, a tuple of two, or None"
        raise _wrong_type("process_group", expected, process_group)
    elif hybrid:
        if process_group is not None:
            raise UsageError.of(
                "A hybrid strategy needs two process groups.",
                expected="process_group=(shard group, replica group), a 2-D device_mesh, or "
                "neither",
                got="one process group",
                where=f"process_group= with {strategy.name}",
                fix="pass device_mesh=init_device_mesh(device_type, (replicas, shard_ranks))",
            )
        groups = groups_node_by_node(_ranks_per_node())
        mesh, group = mesh_from_groups(*groups), groups[0]
    else:
        group = the_group(process_group)
        mesh = mesh_from_group(group)
    return (replicated(mesh) if strategy is ShardingStrategy.NO_SHARD else mesh), group, device_mesh


def _ranks_per_node() -> int:
    """Return torchrun's LOCAL_WORLD_SIZE, else the number of accelerators, or of all ranks."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    if local_world_size:
        if not local_world_size.isdecimal() or int(local_world_size) < 1:
            raise UsageError.of(
                "The environment variable LOCAL_WORLD_SIZE is not a number of ranks.",
                expected="a whole number of at least 1, as torchrun sets it",
                got=repr(local_world_size),
                where="a hybrid sharding strategy without device_mesh and process_group",
                fix="set it to the number of ranks per node, or pass "
                "device_mesh=init_device_mesh(device_type, (nodes, ranks_per_node))",
            )
        return int(local_world_size)
    accelerators = torch.accelerator.device_count()
    return min(accelerators, dist.get_world_size()) if accelerators else dist.get_world_size()


def _device(module: nn.Module, device_id: Any, group: dist.ProcessGroup) -> torch.device:
    """Return the device on which the unit computes."""
    if is_simulated():
        return torch.device("meta")
    used = [t.device for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    if isinstance(device_id, bool) or not (
        device_id is None or isinstance(device_id, (int, str, torch.device))
    ):
        raise _wrong_type("device_id", "an int, a torch.device or None", device_id)
    if device_id is None:
        backend = _torch_private.default_device_of_backend(group)
        device = used[0] if used and (used[0].type != "cpu" or backend.type == "cpu") else backend
        if device.type == "cpu" and torch.accelerator.device_count():
            warnings.warn(
                f"The {type(module).__name__} is on the CPU and will be trained there, although "
                "this process has an accelerator. Pass device_id= to train on that, or "
                "device_id=torch.device('cpu').",
                stacklevel=6,
            )
        return _indexed(device)
    accelerator, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    if isinstance(device_id, int):
        if accelerator is None or not 0 <= device_id < count:
            raise _no_such_device(device_id, count)
        return torch.device(accelerator.type, device_id)
    try:
        device = torch.device(device_id)
    except RuntimeError as error:
        expected = "an int, a torch.device or the name of one, or None"
        raise _wrong_type("device_id", expected, device_id) from error
    if device.type == "meta":
        # Only simulated ranks (backend "fake") work without values.
        if dist.get_backend(group) != "fake":
            raise _wrong_type("device_id", "a device that holds values", device)
        return device
    if device.type != "cpu" and (
        accelerator is None or device.type != accelerator.type or (device.index or 0) >= count
    ):
        raise _no_such_device(device_id, count)
    return _indexed(device)


def _refuse_other_device(
    module: nn.Module, device: torch.device, ignored: Collection[nn.Parameter]
) -> None:
    """Raise UsageError for parameters on another accelerator: the rank's module was put there."""
    for name, parameter in module.named_parameters():
        place = parameter.device
        if place.type == device.type and place != device and parameter not in ignored:
            raise UsageError.of(
                "Parameters are on another device than device_id.",
                expected=f"parameters on {str(device)!r}, the CPU or the meta device",
                got=f"{name!r} on {str(place)!r}",
                where="FullyShardedDataParallel(...)",
                fix="pass device_id=torch.device('cuda', local_rank), and use the same device "
                "for the module",
            )


def _refuse_values(kwargs: Mapping[str, Any], offload: CPUOffload) -> None:
    """Raise UsageError for arguments that need values, so do not work on the meta device."""
    for name, value in (
        ("cpu_offload", offload.offload_params),
        ("allow_unused_units", kwargs["allow_unused_units"]),
    ):
        if value:
            raise UsageError.of(
                f"{name} cannot be simulated on the meta device.",
                expected=f"device_id='meta' without {name}",
                got=f"both, with {name}={kwargs[name]!r}",
                where="FullyShardedDataParallel(...)",
                fix=f"leave out {name}, and simulate a run without it",
            )


def _no_such_device(device_id: Any, count: int) -> UsageError:
    return UsageError.of(
        f"Device {device_id} does not exist.",
        expected=f"device_id from 0 to {count - 1}"
        if count
        else "device_id=torch.device('cpu') or None, as there is no accelerator",
        got=f"device_id={device_id}",
        where="FullyShardedDataParallel(...)",
        fix="pass the local rank's device, or leave out device_id",
    )


def _indexed(device: torch.device) -> torch.device:
    """Return the device with its index, as tensors report it: 'cuda' means the current device."""
    if device.type == "cpu":
        return torch.device("cpu")  # 'cpu:0' is the same device, but compares unequal
    if device.type == "meta" or ":" in str(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _ignored(
    module: nn.Module, kwargs: Mapping[str, Any]
) -> tuple[frozenset[nn.Module], frozenset[nn.Parameter]]:
    modules, parameters = list[nn.Module](), list[nn.Parameter]()
    name = "ignored_modules" if kwargs["ignored_modules"] is not None else "ignored_states"
    given = kwargs[name]
    if given is not None and (
        isinstance(given, (nn.Module, torch.Tensor)) or not isinstance(given, Iterable)
    ):
        raise _wrong_type(name, "an iterable of modules (ignored_states: or of parameters)", given)
    for item in given or ():
        if isinstance(item, nn.Module):
            modules += item.modules()
        elif isinstance(item, nn.Parameter) and name == "ignored_states":
            parameters.append(item)
        else:
            expected = "modules" if name == "ignored_modules" else "modules or parameters"
            raise _wrong_type(name, expected, item)
    parameters += [
        parameter for ignored in modules for parameter in ignored.parameters(recurse=False)
    ]
    if module in modules:
        warnings.warn(
            f"{name} contains the {type(module).__name__} that is being wrapped, so none of its "
            "parameters is sharded and none of its gradients is averaged over the ranks. Leave it "
            f"out of {name}, or do not wrap it.",
            stacklevel=6,
        )
    return frozenset(modules), frozenset(parameters)


def _check_fields(precision: MixedPrecision, offload: CPUOffload) -> None:
    """Check the fields of configuration objects, which do not check themselves."""
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        require_float_dtype(f"MixedPrecision.{name}", getattr(precision, name), _WHERE)
    for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
        truth(f"MixedPrecision.{name}", getattr(precision, name), _WHERE)
    classes = precision._module_classes_to_ignore
    if not isinstance(classes, Iterable) or not all(isinstance(cls, type) for cls in classes):
        name = "MixedPrecision._module_classes_to_ignore"
        raise _wrong_type(name, "a sequence of module classes", classes)
    truth("CPUOffload.offload_params", offload.offload_params, _WHERE)
