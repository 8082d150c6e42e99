"""Refuse DistributedDataParallel around sharded parameters: it would overwrite the other ranks'
shards with rank 0's, and wait in backward for gradients that it never gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _torch_private
from .._state import optimizer_checks
from .._state.units import is_lazy
from ..errors import UsageError
from .patches import Patch, around_method


def _init(
    original: Callable[..., None],
    ddp: DistributedDataParallel,
    module: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    if isinstance(module, nn.Module):
        _refuse_sharded(module)
    original(module, *args, **kwargs)


def _refuse_sharded(module: nn.Module) -> None:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    in_place = {
        parameter
        for child in module.modules()
        if is_lazy(child)
        for parameter in child.parameters()
        if _torch_private.is_dtensor(parameter)
    }
    for name, parameter in module.named_parameters():
        if name not in ignored and (optimizer_checks.is_held(parameter) or parameter in in_place):
            raise UsageError.of(
                "DistributedDataParallel cannot synchronize sharded parameters.",
                expected="a module without FullyShardedDataParallel and fully_shard, or with "
                "their parameters in _ddp_params_and_buffers_to_ignore",
                got=f"the sharded parameter {name!r}",
                where=f"DistributedDataParallel({type(module).__name__})",
                fix="leave out DistributedDataParallel: sharding already averages gradients; "
                "to replicate shards over groups of ranks, use HYBRID_SHARD or a 2-D mesh",
            )


patches = Patch(lambda: [around_method(DistributedDataParallel, "__init__", _init)])
