"""Let torch.distributed.checkpoint leave out the parts of parameters in local state dicts.

It takes tensors for the same on all ranks: it would save one rank's part, and load that into every
rank's shard. The flat parameters beside them hold the same elements, and are sharded values."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from .._state.sharded_values import LocalPart
from .on_import import Undo, cancel, on_import

_MODULE = "torch.distributed.checkpoint.default_planner"
_PLANS = ("create_default_local_load_plan", "create_default_local_save_plan")


def patch() -> None:
    """Replace two functions of the planner, now or as soon as its module is imported."""
    on_import(_MODULE, _replace)


def undo() -> None:
    """Restore the functions."""
    cancel(_MODULE)


def _replace(module: types.ModuleType) -> list[Undo]:
    undo = [functools.partial(setattr, module, name, vars(module)[name]) for name in _PLANS]
    for name in _PLANS:
        setattr(module, name, _without_parts(vars(module)[name]))
    return [*undo]


def _without_parts(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def plan(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        kept = {key: value for key, value in state_dict.items() if not isinstance(value, LocalPart)}
        return theirs(kept, *args, **kwargs)

    return plan
