"""The constructor's arguments, checked and resolved once into values without names of
strategies."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from .._comm.mesh import (
    Mesh,
    axis_by_name,
    first_dimension,
    group_by_name,
    groups_node_by_node,
    mesh_from_device_mesh,
    mesh_from_group,
    mesh_from_groups,
    not_a_member,
    replicated,
    the_group,
)
from .._engine.dtypes import Precision
from .._engine.runtime import RuntimeOptions
from .._engine.schedule import Prefetch
from .._engine.unit import UnitOptions
from ..api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, as_ours
from ..errors import UsageError, explain, takes, truth, wrong_type

__all__ = ["Arguments", "Settings", "resolve"]

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


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the constructor was given, beside the module and the policy; a policy may change some of
    it for single units."""

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
        """Return the same arguments with some changed; raises UsageError for a name that the
        constructor does not have."""
        names = {field.name for field in dataclasses.fields(self)}
        unknown = sorted(changes.keys() - names)
        if unknown:
            raise UsageError(
                explain(
                    "A wrap policy returned an argument that FullyShardedDataParallel does not "
                    "have.",
                    expected=f"keyword arguments among {sorted(names)}",
                    got=str(unknown),
                    where="the dict returned by a CustomPolicy's function",
                    fix="correct the names",
                )
            )
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one unit is: everything below the front end is told in these terms."""

    strategy: ShardingStrategy  # for clients that ask; nothing is decided by it
    mesh: Mesh
    group: dist.ProcessGroup  # over which sharded values of state dicts are spread
    device_mesh: (
        DeviceMesh | None
    )  # what is used of the one that was given: then those values are DTensors over it
    device: torch.device
    mixed_precision: MixedPrecision
    reshard_after_forward: bool
    use_orig_params: bool
    sync_module_states: bool
    param_init_fn: Callable[[nn.Module], None] | None
    ignored_modules: frozenset[nn.Module]  # descendants included
    ignored_parameters: frozenset[nn.Parameter]
    runtime: RuntimeOptions
    offload: bool  # shards, gradients and the optimizer on the CPU
    full_precision_in_eval: bool
    keep_units_below: int  # elements: smaller units are not resharded after forward
    forward_prefetch: bool  # the argument, for clients that ask
    limit_all_gathers: bool  # likewise

    def precision(self, dtype: torch.dtype) -> Precision:
        """The dtypes in which a group of ``dtype`` travels. Packed formats, integers and 8-bit
        floats, are never cast."""
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

    def portable(self) -> PortableSettings:
        """The same for another process, or a later one: process groups by name, and nothing of the
        construction."""
        changes: dict[str, Any] = {
            "param_init_fn": None,
            "ignored_modules": frozenset(),
            "ignored_parameters": frozenset(),
            "mesh": None,
            "group": None,
            "device_mesh": None,
        }
        axes = tuple(
            (_name_of(axis.group), axis.members) for axis in (self.mesh.shard, self.mesh.replica)
        )
        mesh = None if self.device_mesh is None else PortableMesh.of(self.device_mesh)
        return PortableSettings(
            dataclasses.replace(self, **changes), axes, _name_of(self.group), mesh
        )

    @property
    def home(self) -> torch.device:
        """Where the shards live."""
        return torch.device("cpu") if self.offload else self.device

    @property
    def uncast_classes(self) -> tuple[type[nn.Module], ...]:
        """Modules that compute in the dtype of their own parameters and buffers while the unit
        around them computes in another."""
        casts = self.mixed_precision.param_dtype or self.mixed_precision.buffer_dtype
        return tuple(self.mixed_precision._module_classes_to_ignore or ()) if casts else ()

    def unit_options(self, numel: int) -> UnitOptions:
        """numel: elements of the unit's whole parameters."""
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
    """A device mesh that can be pickled: without its process groups."""

    device_type: str
    ranks: list[Any]  # global ones, nested as the mesh is
    names: tuple[str, ...] | None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> PortableMesh:
        return cls(mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names)

    def over(self, groups: list[dist.ProcessGroup | None]) -> DeviceMesh:
        """Return the mesh over its groups: the last one splits, the one before repeats, if it has
        two dimensions."""
        if isinstance(self.ranks[0], int):
            group: Any = groups[-1]
            return DeviceMesh.from_group(
                group, self.device_type, self.ranks, mesh_dim_names=self.names
            )
        names = self.names or ("replica", "shard")  # torch wants some here
        return DeviceMesh.from_group(groups, self.device_type, self.ranks, mesh_dim_names=names)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class PortableSettings:
    """Settings that can be pickled."""

    rest: Settings
    axes: tuple[
        tuple[str | None, tuple[int, ...]], ...
    ]  # (name of the process group, members), of shard and replica axis
    group: str | None
    device_mesh: PortableMesh | None = None

    def resolved(self) -> Settings:
        """Find the process groups again; raises UsageError if there are none of these names and
        members."""
        shard, replica = (axis_by_name(name, members) for name, members in self.axes)
        group = group_by_name(self.group, None)
        assert group is not None
        device_mesh = (
            None if self.device_mesh is None else self.device_mesh.over([replica.group, group])
        )
        return dataclasses.replace(
            self.rest, mesh=Mesh(shard, replica), group=group, device_mesh=device_mesh
        )


def _name_of(group: dist.ProcessGroup | None) -> str | None:
    return None if group is None else group.group_name


def resolve(module: nn.Module, arguments: Arguments) -> Settings:
    """Check the arguments against each other and against the process group.

    Collective only where a hybrid strategy is given neither a mesh nor groups: it makes groups of
    its own then.
    """
    strategy = (
        as_ours(arguments.sharding_strategy, ShardingStrategy, "sharding_strategy")
        or ShardingStrategy.FULL_SHARD
    )
    prefetch = as_ours(arguments.backward_prefetch, BackwardPrefetch, "backward_prefetch")
    precision = (
        as_ours(arguments.mixed_precision, MixedPrecision, "mixed_precision") or MixedPrecision()
    )
    offload = as_ours(arguments.cpu_offload, CPUOffload, "cpu_offload") or CPUOffload()
    _refuse_conflicts(arguments)
    flags = {name: truth(name, getattr(arguments, name), _WHERE) for name in _FLAGS}
    small = arguments.keep_units_below
    if not isinstance(small, int) or isinstance(small, bool) or small < 0:
        raise _wrong_type("keep_units_below", "a number of elements, 0 or more", small)
    mesh, group, device_mesh = _mesh(strategy, arguments.process_group, arguments.device_mesh)
    device = _device(module, arguments.device_id, group)
    _check_fields(precision, offload)
    if device.type == "meta":
        _refuse_values(arguments, offload)
    ignored_modules, ignored_parameters = _ignored(module, arguments)
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
        param_init_fn=_callable_or_none(arguments.param_init_fn),
        ignored_modules=ignored_modules,
        ignored_parameters=ignored_parameters,
        runtime=RuntimeOptions(
            # Without it, a gather would wait for the computation before it: overlap is the default
            # in both directions, and backward_prefetch=None, which asks for the least memory, turns
            # both off.
            forward_prefetch=flags["forward_prefetch"] or prefetch is not None,
            backward_prefetch={
                None: Prefetch.NONE,
                BackwardPrefetch.BACKWARD_POST: Prefetch.POST,
                BackwardPrefetch.BACKWARD_PRE: Prefetch.PRE,
            }[prefetch],
            allow_unused_units=flags["allow_unused_units"],
            # Processors that compute do not send meanwhile, so one buffer costs no time there.
            max_inflight_reductions=0
            if flags["limit_all_gathers"] and device.type in ("cpu", "meta")
            else 1,
        ),
        offload=bool(offload.offload_params),
        full_precision_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1",
        keep_units_below=small,
        forward_prefetch=bool(arguments.forward_prefetch),
        limit_all_gathers=bool(arguments.limit_all_gathers),
    )


def _refuse_conflicts(arguments: Arguments) -> None:
    for one, other in (("process_group", "device_mesh"), ("ignored_modules", "ignored_states")):
        if getattr(arguments, one) is not None and getattr(arguments, other) is not None:
            raise UsageError(
                explain(
                    f"{one} and {other} cannot be given together.",
                    expected=f"{one}= or {other}=, not both",
                    got="both",
                    where="FullyShardedDataParallel(...)",
                    fix=f"leave out {one}=: {other}= says all of it",
                )
            )


def _mesh(
    strategy: ShardingStrategy, process_group: Any, device_mesh: Any
) -> tuple[Mesh, dist.ProcessGroup, DeviceMesh | None]:
    """Return the mesh, the group over which one copy of the parameters is spread, and what is used
    of ``device_mesh``."""
    hybrid = strategy in _HYBRID
    the_group(None)
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    if any(
        group is dist.GroupMember.NON_GROUP_MEMBER for group in groups
    ):  # new_group gives that to ranks that are not in it
        raise not_a_member()
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh):
            raise _wrong_type(
                "device_mesh", "a torch.distributed.device_mesh.DeviceMesh", device_mesh
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
            raise UsageError(
                explain(
                    "A tuple of process groups is for the hybrid strategies.",
                    expected="process_group=(shard group, replica group) with HYBRID_SHARD or "
                    "_HYBRID_SHARD_ZERO2",
                    got=f"a tuple of {len(process_group)} with {strategy.name}",
                    where="process_group=",
                    fix="pass one process group, or choose a hybrid strategy",
                )
            )
        mesh, group = mesh_from_groups(*process_group), process_group[0]
    elif process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise _wrong_type(
            "process_group",
            "a torch.distributed.ProcessGroup, a tuple of two, or None",
            process_group,
        )
    elif hybrid:
        if process_group is not None:
            raise UsageError(
                explain(
                    "A hybrid strategy needs two process groups.",
                    expected="process_group=(shard group, replica group), a 2-D device_mesh, or "
                    "neither",
                    got="one process group",
                    where=f"process_group= with {strategy.name}",
                    fix="pass device_mesh=init_device_mesh(device_type, (replicas, shard_ranks))",
                )
            )
        groups = groups_node_by_node(_ranks_per_node())
        mesh, group = mesh_from_groups(*groups), groups[0]
    else:
        group = the_group(process_group)
        mesh = mesh_from_group(group)
    return (replicated(mesh) if strategy is ShardingStrategy.NO_SHARD else mesh), group, device_mesh


def _ranks_per_node() -> int:
    """torchrun says it; without it, the number of accelerators, or all ranks on one node."""
    told = os.environ.get("LOCAL_WORLD_SIZE")
    if told:
        if not told.isdecimal() or int(told) < 1:
            raise UsageError(
                explain(
                    "The environment variable LOCAL_WORLD_SIZE is not a number of ranks.",
                    expected="a whole number of at least 1, as torchrun sets it",
                    got=repr(told),
                    where="a hybrid sharding strategy without device_mesh and process_group",
                    fix="set it to the ranks of a node, or pass "
                    "device_mesh=init_device_mesh(device_type, (nodes, ranks))",
                )
            )
        return int(told)
    accelerators = torch.accelerator.device_count()
    return min(accelerators, dist.get_world_size()) if accelerators else dist.get_world_size()


def _device(module: nn.Module, device_id: Any, group: dist.ProcessGroup) -> torch.device:
    """Return the device on which the unit computes and keeps its shard."""
    found = [t.device for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    if isinstance(device_id, bool) or not (
        device_id is None or isinstance(device_id, (int, str, torch.device))
    ):
        raise _wrong_type("device_id", "an int, a torch.device or None", device_id)
    if device_id is None:
        backend = _torch_private.default_device_of_backend(group)
        return _indexed(
            found[0] if found and (found[0].type != "cpu" or backend.type == "cpu") else backend
        )
    accelerator, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    if isinstance(device_id, int):
        if accelerator is None or not 0 <= device_id < count:
            raise _no_such_device(device_id, count)
        return torch.device(accelerator.type, device_id)
    try:
        device = torch.device(device_id)
    except RuntimeError as error:
        raise _wrong_type(
            "device_id", "an int, a torch.device or the name of one, or None", device_id
        ) from error
    if device.type == "meta":
        if (
            dist.get_backend(group) != "fake"
        ):  # whose ranks do not exist: layouts, plans and shapes are all there is to ask for
            raise _wrong_type("device_id", "a device that holds values", device)
        return device
    if device.type != "cpu" and (
        accelerator is None or device.type != accelerator.type or (device.index or 0) >= count
    ):
        raise _no_such_device(device_id, count)
    return _indexed(device)


def _refuse_values(arguments: Arguments, offload: CPUOffload) -> None:
    """On meta, what needs values or memory elsewhere cannot be simulated."""
    for name, value in (
        ("cpu_offload", offload.offload_params),
        ("allow_unused_units", arguments.allow_unused_units),
    ):
        if value:
            raise UsageError(
                explain(
                    f"{name} cannot be simulated on the meta device.",
                    expected=f"device_id='meta' without {name}",
                    got=f"both, with {name}={getattr(arguments, name)!r}",
                    where="FullyShardedDataParallel(...)",
                    fix=f"leave out {name}: layouts, plans and collectives are those of a run "
                    "without it",
                )
            )


def _no_such_device(device_id: Any, count: int) -> UsageError:
    return UsageError(
        explain(
            "There is no such device.",
            expected=f"device_id from 0 to {count - 1}"
            if count
            else "device_id=torch.device('cpu') or None: no accelerator here",
            got=f"device_id={device_id}",
            where="FullyShardedDataParallel(...)",
            fix="pass the local rank's device, or leave device_id out",
        )
    )


def _indexed(device: torch.device) -> torch.device:
    """'cuda' means the current one; tensors say its number, so we do."""
    if device.type == "cpu":
        return torch.device("cpu")  # 'cpu:0' is the same, but compares unequal
    if device.type == "meta" or ":" in str(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _ignored(
    module: nn.Module, arguments: Arguments
) -> tuple[frozenset[nn.Module], frozenset[nn.Parameter]]:
    modules, parameters = list[nn.Module](), list[nn.Parameter]()
    name = "ignored_modules" if arguments.ignored_modules is not None else "ignored_states"
    given = getattr(arguments, name)
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
            raise _wrong_type(
                name, "modules" if name == "ignored_modules" else "modules or parameters", item
            )
    parameters += [
        parameter for ignored in modules for parameter in ignored.parameters(recurse=False)
    ]
    if module in modules:
        warnings.warn(
            f"{name} contains the {type(module).__name__} that is wrapped, so all of its "
            "parameters are ignored: none is sharded, "
            f"and no gradient is averaged over the ranks. Leave it out of {name}, or do not wrap "
            "it.",
            stacklevel=4,
        )
    return frozenset(modules), frozenset(parameters)


def _check_fields(precision: MixedPrecision, offload: CPUOffload) -> None:
    """The fields of configuration objects, which check nothing themselves."""
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(precision, name)
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            raise _wrong_type(
                f"MixedPrecision.{name}",
                "a floating-point torch.dtype of 16 bits or more, or None",
                dtype,
            )
    for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
        truth(f"MixedPrecision.{name}", getattr(precision, name), _WHERE)
    classes = precision._module_classes_to_ignore
    if not isinstance(classes, Iterable) or not all(isinstance(cls, type) for cls in classes):
        raise _wrong_type(
            "MixedPrecision._module_classes_to_ignore", "a sequence of module classes", classes
        )
    truth("CPUOffload.offload_params", offload.offload_params, _WHERE)


def _callable_or_none(value: Any) -> Callable[[nn.Module], None] | None:
    if value is None or (callable(value) and takes(value, 1)):
        return value
    raise _wrong_type("param_init_fn", "a function of one module, or None", value)


def _wrong_type(name: str, expected: str, got: object) -> UsageError:
    return wrong_type(name, expected, got, _WHERE)
