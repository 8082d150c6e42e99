"""Make the functions of torch.distributed.checkpoint.state_dict work with models of this package.

These functions recognize torch's own wrappers by class. They would treat flat units as plain
modules and silently return wrong results: a full state dict would contain only the first local
shard of each value, and optimizer state of different ranks would collide under one key. So calls
with one of our models go to ``dcp_state_dict``; all other calls run torch's code, also those with
parameters of ``fully_shard`` that we gather and load in no way: on the meta device, or with an
all-gather of their own.

The patched module imports torch's FSDP, which this package never does, so the patch waits until
other code imports the module. It uses only public names of torch. Arguments that a later torch adds
raise an error for our models."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .._state.units import is_lazy, is_registered
from .._stores.extension import has_extension
from .dcp_state_dict import FUNCTIONS, mixed, unknown_argument
from .patches import PatchOnImport, Undo, around_functions

_MODULE = "torch.distributed.checkpoint.state_dict"


def _route_all(module: types.ModuleType) -> list[Undo]:
    return around_functions(
        module, {name: functools.partial(_call, ours) for name, ours in FUNCTIONS.items()}
    )


def _call(
    ours: Callable[..., Any], original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call ``ours`` for a model with our units, else ``original``."""
    try:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
    except TypeError:
        return original(*args, **kwargs)  # raises torch's own error
    model = given.get("model")
    if not isinstance(model, nn.Module) or not any(map(is_registered, model.modules())):
        return original(*args, **kwargs)
    if any(map(is_lazy, model.modules())) and any(
        parameter.is_meta or has_extension(parameter) for parameter in model.parameters()
    ):
        return original(*args, **kwargs)
    if any(_is_of_torch(module) for module in model.modules()):
        raise mixed(original.__name__)
    for name in given.keys() - inspect.signature(ours).parameters.keys():
        raise unknown_argument(name, original.__name__)
    return ours(**given)


def _is_of_torch(module: nn.Module) -> bool:
    """True for an instance of torch's FSDP; checked by name, without importing it."""
    return any(
        cls.__qualname__ == "FullyShardedDataParallel"
        and cls.__module__.startswith("torch.distributed.fsdp")
        for cls in type(module).__mro__
    )


patches = PatchOnImport(_MODULE, _route_all)
