"""Everything that fsdp_compat changes for the whole process.

When the first name of fsdp_compat is used, which loads the package:
    torch.load(weights_only=True) accepts the classes in sharded state dicts and in the state of
        ranks (torch.serialization.add_safe_globals; stays after ``uninstall()``)
    fork handlers of _comm/board/progress, _comm/board/board, _comm/gloo_connections and
        checkpoint/_background, and exit handlers of board and _background: they do nothing in a
        process without sharded models
    functions of PEFT and Accelerate, when these are imported (_install/client_fixes)

When the first model is wrapped in FullyShardedDataParallel, or sharded by ``fully_shard``:
    every optimizer: hooks of step() and methods around its state dict (optimizer_hooks)
    clip_grad_norm_, get_total_norm and clip_grads_with_norm_: functions (clip_grad)
    DistributedDataParallel: a method around ``__init__`` (data_parallel)
    torch.compile's modules and the names of parameters in torch.distributed.checkpoint: a method
        and a function, when these modules are imported (compiled)
    torch.distributed.checkpoint: the six functions of its module state_dict, when it is imported
        (dcp_adapter)
    a fork handler of _comm/board/ring, on one host one of _comm/same_host/shared_memory; with
        FSDP_COMPAT_BLACK_BOX an exit handler and sys.excepthook (ring)

When the first model is wrapped in FullyShardedDataParallel:
    assigning a Parameter to a module: a global hook; Module.requires_grad_: a method (assignments)
    torch.distributed.checkpoint: methods of HuggingFaceStorageWriter (hugging_face_storage),
        functions of its planner and of torch's helper that gathers sharded values (own_values),
        each when it is imported

While a plan is made: UntypedStorage.resize_ and scaled_dot_product_attention (_plan/memory,
    _plan/simulation).

``install()`` puts fsdp_compat in the place of torch.distributed.fsdp: _install/__init__.py.

Three techniques: hooks that torch offers; methods, which are replaced in their class; functions,
which are replaced in their module and wherever modules have imported them. A function that a
partial, a table, a class or a default argument has kept stays torch's. Changes of modules that may
be imported later are finders on sys.meta_path. ``uninstall()`` reverts all patches."""

from __future__ import annotations

from torch import nn

from .._state.units import model_units_in
from . import (
    assignments,
    clip_grad,
    compiled,
    data_parallel,
    dcp_adapter,
    hugging_face_storage,
    optimizer_hooks,
    own_values,
)
from .patches import Patch

_FOR_ALL: tuple[Patch, ...] = (
    optimizer_hooks.patches,
    clip_grad.patches,
    data_parallel.patches,
    *compiled.patches,
    dcp_adapter.patches,
)
_FOR_WRAPPERS: tuple[Patch, ...] = (
    assignments.patches,
    hugging_face_storage.patches,
    *own_values.patches,
)


def patch_for_fully_shard() -> None:
    """Make the changes that modules sharded in place need; a second call does nothing."""
    for each in _FOR_ALL:
        each.patch()


def patch_torch(model: nn.Module) -> None:
    """Make all changes, and watch assignments in the units of a model."""
    for each in (*_FOR_ALL, *_FOR_WRAPPERS):
        each.patch()
    for found in model_units_in(model):
        assignments.watch(found.unit)


def undo() -> None:
    """Undo all changes that were made; wrapping or sharding another model makes them again."""
    for each in (*_FOR_ALL, *_FOR_WRAPPERS):
        each.undo()
