"""Parts of torch that compare classes of FSDP, or look into them: each works with ours, or says
that it does not.

- torch.distributed.pipelining sees ours and torch's ``replicate`` as sharded modules.
- torch's own package ``_fully_shard`` stays, as dynamo and ``replicate`` are built on it, but its
  public names are ours; where dynamo saves compiled code, it also finds our classes.
- torch.distributed._tools.fsdp2_mem_tracker looks into torch's modules: it refuses ours."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable

from .. import _torch_private
from .._front_ends.fully_shard import module as fully_shard_module
from .._torch_patches.patches import PatchOnImport, Undo, set_existing
from .contents import fully_shard_names
from .kept import redirect_function
from .modules import ROOT


def _pipelining(module: types.ModuleType) -> list[Undo]:
    classes = (fully_shard_module.FSDPModule, _torch_private.replicate_module())
    return set_existing(module, FSDPModule=classes)


def _memory_tracker(module: types.ModuleType) -> list[Undo]:
    own = sys.modules[f"{ROOT}._fully_shard._fully_shard"]
    return set_existing(module, FSDPModule=vars(own)["FSDPModule"])


def _package(module: types.ModuleType) -> list[Undo]:
    return set_existing(module, **fully_shard_names())


def _classes(module: types.ModuleType) -> list[Undo]:
    theirs = vars(module)["get_cls_to_fsdp_cls"]

    def get_cls_to_fsdp_cls() -> collections.ChainMap[type, type]:
        return collections.ChainMap(fully_shard_module.get_cls_to_fsdp_cls(), theirs())

    redirected = redirect_function(vars(module)["fully_shard"], fully_shard_names()["fully_shard"])
    return [redirected, *set_existing(module, get_cls_to_fsdp_cls=get_cls_to_fsdp_cls)]


_CHANGES: dict[str, Callable[[types.ModuleType], list[Undo]]] = {
    "torch.distributed.pipelining.schedules": _pipelining,
    "torch.distributed.pipelining.stage": _pipelining,
    "torch.distributed._tools.fsdp2_mem_tracker": _memory_tracker,
    f"{ROOT}._fully_shard": _package,
    f"{ROOT}._fully_shard._fully_shard": _classes,
}
PATCHES = [PatchOnImport(name, change) for name, change in _CHANGES.items()]
