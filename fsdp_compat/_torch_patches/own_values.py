"""Make torch's functions for state dicts fit the values in ours.

torch.distributed.checkpoint assumes that tensors are equal on all ranks, so it would load one
rank's part of a parameter, from a local state dict, into every rank's shard. Such parts are left
out: the flat parameters beside them hold the same elements as sharded values. And the helpers that
gather a ShardedTensor read its first shard on each rank, where ours have several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .. import _torch_private
from .._state.sharded_values import BoxedTensor, LocalPart, gathered
from .patches import PatchOnImport, around_functions

_PLANS = ("create_default_local_load_plan", "create_default_local_save_plan")
_HELPERS, _GATHER = _torch_private.GATHERS_FIRST_SHARD


def _without_parts(
    original: Callable[..., Any], state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    kept = {key: value for key, value in state_dict.items() if not isinstance(value, LocalPart)}
    return original(kept, *args, **kwargs)


def _gather(original: Callable[..., Tensor], value: Any, pg: Any = None, device: Any = None) -> Any:
    """Collective: all ranks of ``pg``, or by default of the value's group."""
    if isinstance(value, BoxedTensor):
        return value.whole(pg)
    ranks = [shard.placement.rank() for shard in value.metadata().shards_metadata]
    has_several = len({*ranks}) < len(ranks)  # as what ``type_as`` makes of ours
    return gathered(value, pg) if has_several else original(value, pg, device)


patches = (
    PatchOnImport(
        "torch.distributed.checkpoint.default_planner",
        lambda module: around_functions(module, dict.fromkeys(_PLANS, _without_parts)),
    ),
    PatchOnImport(_HELPERS, lambda module: around_functions(module, {_GATHER: _gather})),
)
