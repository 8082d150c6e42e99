"""Make torch.distributed.checkpoint leave out the parts of parameters in local state dicts.

It assumes that tensors are equal on all ranks, so it would load one rank's part into every rank's
shard. The flat parameters in these state dicts hold the same elements as sharded values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._engine.on_import import PatchOnImport
from .._engine.patches import around_function
from .._state.sharded_values import LocalPart

_PLANS = ("create_default_local_load_plan", "create_default_local_save_plan")


def _without_parts(
    original: Callable[..., Any], state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    kept = {key: value for key, value in state_dict.items() if not isinstance(value, LocalPart)}
    return original(kept, *args, **kwargs)


patches = PatchOnImport(
    "torch.distributed.checkpoint.default_planner",
    lambda module: [around_function(module, name, _without_parts) for name in _PLANS],
)
