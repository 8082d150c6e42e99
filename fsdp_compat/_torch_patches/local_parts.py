"""Let torch.distributed.checkpoint leave out the parts of parameters in local state dicts.

It takes tensors for the same on all ranks: it would save one rank's part, and load that into every
rank's shard. The flat parameters beside them hold the same elements, and are sharded values."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from .._state.sharded_values import LocalPart
from .on_import import cancel, on_import

_MODULE = "torch.distributed.checkpoint.default_planner"
_PLANS = ("create_default_local_load_plan", "create_default_local_save_plan")
_before: dict[str, tuple[types.ModuleType, Callable[..., Any]]] = {}


def patch() -> None:
    """Replace two functions of the planner, now or as soon as its module is imported."""
    on_import(_MODULE, _replace)


def undo() -> None:
    """Restore the functions."""
    cancel(_MODULE)
    while _before:
        name, (module, theirs) = _before.popitem()
        setattr(module, name, theirs)


def _replace(module: types.ModuleType) -> None:
    for name in _PLANS:
        _before[name] = module, vars(module)[name]
        setattr(module, name, _without_parts(vars(module)[name]))


def _without_parts(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def plan(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        kept = {key: value for key, value in state_dict.items() if not isinstance(value, LocalPart)}
        return theirs(kept, *args, **kwargs)

    return plan
