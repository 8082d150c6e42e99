"""``fully_shard``: shard a module in place, each parameter by itself."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ..._engine.runtime import run_as_forward
from ..._stores.flat_cuts import ShardBlocks
from ...errors import UsageError, with_arguments_checked
from . import state
from .module import FSDPModule, shard_class
from .policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from .shard_plan import plan

if typing.TYPE_CHECKING:
    from torch.distributed.tensor import Shard

_NO_CASTS, _NO_OFFLOADING = MixedPrecisionPolicy(), OffloadPolicy()


class _Options(typing.TypedDict, total=False):
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    allow_unused_units: bool
    shard_blocks: int | Callable[[str, nn.Parameter], int] | ShardBlocks | None


@typing.overload
def fully_shard(module: nn.Module, **options: Unpack[_Options]) -> FSDPModule: ...


@typing.overload
def fully_shard(module: Sequence[nn.Module], **options: Unpack[_Options]) -> list[FSDPModule]: ...


@with_arguments_checked
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = _NO_CASTS,
    offload_policy: OffloadPolicy | None = _NO_OFFLOADING,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    allow_unused_units: bool = False,
    shard_blocks: int | Callable[[str, nn.Parameter], int] | ShardBlocks | None = None,
) -> Any:
    """Shard the parameters of a module over ranks, in place, and return it.

    Parameters become DTensors, of which each rank holds a part. A forward of the module unshards
    them by one all-gather for each dtype and reshards them at its end; backward does the same, and
    reduces the gradients by reduce-scatters. The class of the module gets the base ``FSDPModule``.

    One call manages all parameters in the module that no earlier call manages, so call it for inner
    modules first, then for the root. Create the optimizer afterwards.

    Collective: all ranks of ``mesh``, only where process groups are made: for a number as
    ``reshard_after_forward``, and for several names for a dimension in ``dp_mesh_dims``.

    Args:
        module: a module, or a list of modules whose parameters are unsharded together: until each
            of them has been called, or the outermost forward has ended.
        mesh: 1-D: parameters are sharded over its ranks. 2-D with names: replicated over the first
            dimension, sharded over the second. None: all ranks. Parameters are computed with on its
            device type.
        reshard_after_forward: True: free unsharded parameters after forward, and all-gather them
            again in backward. False: keep them, which costs memory. None: True, except for the
            root. A number n: after forward each rank keeps 1/n of the parameters, and backward
            all-gathers among n ranks; n divides the number of ranks that parameters are sharded
            over.
        shard_placement_fn: returns for a parameter the ``Shard(dim)`` to cut it along, a
            ShardPlacementResult with another mesh, or None for ``Shard(0)`` on ``mesh``.
        mp_policy: the dtypes to compute and communicate in; None: those of the parameters.
        offload_policy: CPUOffloadPolicy() keeps shards, gradients and optimizer state on the CPU;
            None: no offloading.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: the data-parallel dimensions of ``mesh``, if parameters are DTensors on all of
            it.
        allow_unused_units: on the root, let ranks use different modules, or different parameters of
            a module, in a step. They vote once per backward, on the CPU if the process group has a
            backend for it; without one, the host waits for the device.
        shard_blocks: as that of FullyShardedDataParallel, with names that begin at ``module``. A
            DTensor has ceil(rows / ranks) rows on each rank, without padding, so blocks that this
            would cut are refused.

    Returns:
        ``module``, or the given list, whose modules are instances of FSDPModule now.

    Raises:
        UsageError: an argument or a module cannot be used. Nothing was changed."""
    planned = plan(
        module,
        state.owners,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
        allow_unused_units=allow_unused_units,
        shard_blocks=shard_blocks,
    )
    made = state.apply(planned)
    for each in made.modules:
        each.__class__ = shard_class(type(each))
    return module


# What a call keeps for a module; None without a call.
fully_shard.state = state.state_of  # type: ignore[attr-defined]


def register_forward_method(module: FSDPModule, name: str, synced: bool) -> None:
    """See ``register_fsdp_forward_method``."""
    method = getattr(module, name, None)
    if not callable(method):
        raise not_registrable(name, module)
    own = state.state_of(module)
    assert own is not None

    def locate() -> tuple[Any, Any]:
        return own.ready_runtime(), own.ready_unit()

    setattr(module, name, run_as_forward(locate, method, synced=synced))


def not_registrable(name: str, module: nn.Module) -> UsageError:
    return UsageError.of(
        f"{name!r} cannot be registered.",
        expected="a method of the module that FullyShardedDataParallel does not have itself",
        got=f"{name!r} of a {type(module).__name__}",
        where="register_fsdp_forward_method(module, method_name)",
        fix="check the name; forward needs no registration",
    )
