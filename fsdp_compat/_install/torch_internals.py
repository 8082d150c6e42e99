"""Parts of torch that compare classes of FSDP, or look into them: each works with ours, or says
that it does not.

- torch.distributed.pipelining sees ours and torch's ``replicate`` as sharded modules.
- torch's own package ``_fully_shard`` stays, as dynamo and ``replicate`` are built on it, but its
  public names are ours; where dynamo saves compiled code, it finds the classes of ours, too.
- torch.distributed._tools.fsdp2_mem_tracker looks into torch's modules: it refuses ours.
"""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable
from typing import Any

from .. import _torch_private
from .._front_ends.fully_shard import module as fully_shard_module
from .._torch_patches.on_import import cancel, on_import
from .contents import fully_shard_names
from .modules import ROOT

_MISSING = object()
_changed: list[tuple[types.ModuleType, str, Any]] = []  # module, name, what it was


def _set(module: types.ModuleType, name: str, value: Any) -> None:
    _changed.append((module, name, vars(module).get(name, _MISSING)))
    setattr(module, name, value)


def _pipelining(module: types.ModuleType) -> None:
    classes = (fully_shard_module.FSDPModule, _torch_private.replicate_module())
    _set(module, "FSDPModule", classes)


def _memory_tracker(module: types.ModuleType) -> None:
    own = sys.modules[f"{ROOT}._fully_shard._fully_shard"]
    _set(module, "FSDPModule", vars(own)["FSDPModule"])


def _package(module: types.ModuleType) -> None:
    for name, value in fully_shard_names().items():
        if name in vars(module):
            _set(module, name, value)


def _classes(module: types.ModuleType) -> None:
    theirs = vars(module)["get_cls_to_fsdp_cls"]

    def get_cls_to_fsdp_cls() -> collections.ChainMap[type, type]:
        return collections.ChainMap(fully_shard_module.get_cls_to_fsdp_cls(), theirs())

    _set(module, "get_cls_to_fsdp_cls", get_cls_to_fsdp_cls)


_CHANGES: dict[str, Callable[[types.ModuleType], None]] = {
    "torch.distributed.pipelining.schedules": _pipelining,
    "torch.distributed.pipelining.stage": _pipelining,
    "torch.distributed._tools.fsdp2_mem_tracker": _memory_tracker,
    f"{ROOT}._fully_shard": _package,
    f"{ROOT}._fully_shard._fully_shard": _classes,
}


def patch() -> None:
    for name, change in _CHANGES.items():
        on_import(name, change)


def undo() -> None:
    for name in _CHANGES:
        cancel(name)
    while _changed:
        module, name, before = _changed.pop()
        if before is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, before)
