"""torch.distributed.checkpoint.state_dict's functions, taught about our models.

They recognise torch's own wrappers by their classes. Ours they would take for plain modules, and
answer wrongly without an error: of a sharded value a full state dict would hold the first local box
only, and the ranks' parts of optimizer state would collide under one key. So a call with one of our
models goes to ``_state_dict_functions``; any other runs the function as torch wrote it.

That module imports torch's FSDP, which this package never does. So nothing happens before somebody
else imports it: the import system is asked to tell us. Functions that were imported from it earlier
are reached, too, as their code is replaced, not their names. Only public names of torch are relied
on, so none is renamed unnoticed; what a later torch adds is refused for our models."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .._state.model_units import model_units_in
from .dcp_options import mixed, unknown_argument
from .dcp_state_dict import FUNCTIONS
from .on_import import cancel, on_import

__all__ = ["patch", "undo"]

_MODULE = "torch.distributed.checkpoint.state_dict"
_ROUTE = (
    "_fsdp_compat_route"  # the keyword under which a function's replaced code finds where to go
)


_undo: list[Callable[[], None]] = []


def patch() -> None:
    """Route the functions by model, now or as soon as their module is imported."""
    on_import(_MODULE, _route_all)


def undo() -> None:
    """Give torch its functions back."""
    cancel(_MODULE)
    while _undo:
        _undo.pop()()


def _route_all(module: types.ModuleType) -> None:
    for name, ours in FUNCTIONS.items():
        function = getattr(module, name, None)  # a later torch may have dropped it
        if isinstance(function, types.FunctionType) and _ROUTE not in (
            function.__kwdefaults__ or {}
        ):
            _replace(module, function, ours)


def _replace(
    module: types.ModuleType, function: types.FunctionType, ours: Callable[..., Any]
) -> None:
    """Let ``function(...)`` call ``ours`` for our models, under whatever name it was imported."""
    original = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    original.__kwdefaults__ = function.__kwdefaults__
    signature = inspect.signature(function)
    route = functools.partial(_call, ours, original, signature)
    if function.__closure__:  # such code cannot be replaced, only its name in the module
        routed = types.FunctionType(_routed.__code__, globals())
        functools.update_wrapper(routed, function)
        routed.__kwdefaults__ = {_ROUTE: route}
        setattr(module, function.__name__, routed)
        _undo.append(functools.partial(setattr, module, function.__name__, function))
        return
    function.__signature__ = signature  # type: ignore[attr-defined]
    _undo.append(functools.partial(_restore, function, original))
    function.__code__, function.__defaults__, function.__kwdefaults__ = (
        _routed.__code__,
        None,
        {_ROUTE: route},
    )


def _restore(function: types.FunctionType, original: types.FunctionType) -> None:
    del function.__signature__  # type: ignore[attr-defined]
    function.__code__, function.__defaults__ = original.__code__, original.__defaults__
    function.__kwdefaults__ = original.__kwdefaults__


def _routed(*args: Any, _fsdp_compat_route: Callable[..., Any], **kwargs: Any) -> Any:
    """The code of a replaced function, which finds its route as the default of a keyword."""
    return _fsdp_compat_route(*args, **kwargs)


def _call(
    ours: Callable[..., Any],
    original: Callable[..., Any],
    signature: inspect.Signature,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``ours`` if the argument ``model`` contains one of our units, else ``original``."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return original(*args, **kwargs)  # which says what is wrong
    model = given.get("model")
    if not isinstance(model, nn.Module) or not model_units_in(model):
        return original(*args, **kwargs)
    if any(_is_of_torch(module) for module in model.modules()):
        raise mixed(original.__name__)
    for name in given.keys() - inspect.signature(ours).parameters.keys():
        raise unknown_argument(name, original.__name__)
    return ours(**given)


def _is_of_torch(module: nn.Module) -> bool:
    """True for an instance of torch's FSDP, without importing it."""
    return any(
        cls.__qualname__ == "FullyShardedDataParallel"
        and cls.__module__.startswith("torch.distributed.fsdp")
        for cls in type(module).__mro__
    )
