"""Make the functions of torch.distributed.checkpoint.state_dict work with models of this package.

These functions recognize torch's own wrappers by class. They would treat our models as plain
modules and silently return wrong results: a full state dict would contain only the first local
shard of each value, and optimizer state of different ranks would collide under one key. So calls
with one of our models go to ``dcp_state_dict``; all other calls run torch's code.

The patched module imports torch's FSDP, which this package never does, so the patch waits until
other code imports the module. It replaces the code of the functions, not their names, which also
covers functions that were imported from the module earlier. It uses only public names of torch, so
a rename cannot go unnoticed. Arguments that a later torch adds raise an error for our models."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .._engine.on_import import PatchOnImport
from .._engine.patches import Undo
from .._front_ends.flat.flat_unit import is_wrapper
from .dcp_state_dict import FUNCTIONS, mixed, unknown_argument

_MODULE = "torch.distributed.checkpoint.state_dict"
_ROUTE = "_fsdp_compat_route"  # the keyword whose default tells replaced code what to call


def _route_all(module: types.ModuleType) -> list[Undo]:
    undo = []
    for name, ours in FUNCTIONS.items():
        function = getattr(module, name, None)  # None if a later torch removes it
        if isinstance(function, types.FunctionType) and _ROUTE not in (
            function.__kwdefaults__ or {}
        ):
            undo.append(_replace(module, function, ours))
    return undo


def _replace(
    module: types.ModuleType, function: types.FunctionType, ours: Callable[..., Any]
) -> Undo:
    """Make ``function(...)`` call ``ours`` for our models, under any name it was imported as."""
    rest = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    original = types.FunctionType(function.__code__, *rest)
    original.__kwdefaults__ = function.__kwdefaults__
    signature = inspect.signature(function)
    route = functools.partial(_call, ours, original, signature)
    if function.__closure__:  # the code of a closure cannot be replaced, only its name
        routed = types.FunctionType(_routed.__code__, globals())
        functools.update_wrapper(routed, function)
        routed.__kwdefaults__ = {_ROUTE: route}
        setattr(module, function.__name__, routed)
        return functools.partial(setattr, module, function.__name__, function)
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__code__, function.__defaults__ = _routed.__code__, None
    function.__kwdefaults__ = {_ROUTE: route}
    return functools.partial(_restore, function, original)


def _restore(function: types.FunctionType, original: types.FunctionType) -> None:
    del function.__signature__  # type: ignore[attr-defined]
    function.__code__, function.__defaults__ = original.__code__, original.__defaults__
    function.__kwdefaults__ = original.__kwdefaults__


def _routed(*args: Any, _fsdp_compat_route: Callable[..., Any], **kwargs: Any) -> Any:
    """The replacement code; the default of its keyword argument is the function to call."""
    return _fsdp_compat_route(*args, **kwargs)


def _call(
    ours: Callable[..., Any],
    original: Callable[..., Any],
    signature: inspect.Signature,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``ours`` for a model with our wrappers, else ``original``, which handles DTensors."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return original(*args, **kwargs)  # raises torch's own error
    model = given.get("model")
    if not isinstance(model, nn.Module) or not any(map(is_wrapper, model.modules())):
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
