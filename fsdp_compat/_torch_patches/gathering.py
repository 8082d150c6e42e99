"""Make torch's gather of a ShardedTensor in a state dict read all shards of a rank.

It reads the first one. Of our values a rank has several, so the result would be wrong, without an
error if the first ones have equal sizes on all ranks."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import _torch_private
from .._engine.on_import import PatchOnImport
from .._engine.patches import Undo, around_function
from .._state.sharded_values import BoxedTensor, gathered

_MODULE, _NAME = _torch_private.GATHERS_FIRST_SHARD


def _gather(original: Callable[..., Tensor], value: Any, pg: Any = None, device: Any = None) -> Any:
    """Collective: all ranks of ``pg``, or by default of the value's group."""
    if isinstance(value, BoxedTensor):
        return value.whole(pg)
    ranks = [shard.placement.rank() for shard in value.metadata().shards_metadata]
    has_several = len({*ranks}) < len(ranks)  # as what ``type_as`` makes of ours
    return gathered(value, pg) if has_several else original(value, pg, device)


def _replace(module: types.ModuleType) -> list[Undo]:
    return [around_function(module, _NAME, _gather)] if _NAME in vars(module) else []


patches = PatchOnImport(_MODULE, _replace)
