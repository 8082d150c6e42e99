"""torch's own class and function, for references that ``install()`` cannot replace: in a partial,
a table, a class, a closure, a default argument. They build what ours build, and warn once."""

from __future__ import annotations

import functools
import gc
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from .._torch_patches.patches import Undo, set_existing
from .install_checks import EARLIER, too_late

_NOT_NAMED = ("torch.", "fsdp_compat.")
_ENDS = (types.FrameType, types.ModuleType)


def redirect_class(theirs: Any, own: Any) -> list[Undo]:
    """Let torch's wrapper build ours, and its static methods be ours. It becomes the last base of
    ours, so that ``isinstance`` and ``issubclass`` hold; what modules have comes before."""
    warn: Any = functools.cache(_warn)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not theirs:
            name = f"{type(self).__module__}.{type(self).__qualname__}"
            raise too_late(f"a class derived from torch's {theirs.__name__}: {name}")
        warn(theirs, stacklevel=3)
        object.__setattr__(self, "__class__", own)
        own.__init__(self, *args, **kwargs)

    calls: dict[str, Any] = {
        name: call for name, call in vars(own).items() if isinstance(call, staticmethod)
    }
    calls["__init__"] = functools.wraps(own.__init__)(__init__)
    undo = set_existing(theirs, **calls)
    undo += [functools.partial(setattr, cls, "__bases__", cls.__bases__) for cls in (theirs, own)]
    theirs.__bases__ = (_NoModule,)
    own.__bases__ = (*own.__bases__, theirs)
    return undo


class _NoModule:
    """The base of torch's wrapper while it is a base of ours."""


def redirect_function(theirs: Any, own: Callable[..., Any]) -> Undo:
    """Let torch's function call ours: its code is replaced, as the object is kept."""
    warn, before = functools.cache(_warn), theirs.__code__

    def call(*args: Any, **kwargs: Any) -> Any:
        warn(theirs, stacklevel=4)
        return own(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        function: Any = "call, as a constant: this code has the variables of torch's module"
        return function(*args, **kwargs)

    consts = (call if isinstance(each, str) else each for each in forward.__code__.co_consts)
    made = forward.__code__.replace(co_consts=tuple(consts), co_freevars=before.co_freevars)
    theirs.__code__ = made
    return functools.partial(setattr, theirs, "__code__", before)


def _warn(kept: Any, stacklevel: int) -> None:
    warnings.warn(
        f"torch's {kept.__name__}, kept by {_holders(kept) or 'a variable'} before "
        f"fsdp_compat.install(), builds fsdp_compat's. To avoid this, {EARLIER}.",
        stacklevel=stacklevel,
    )


def _holders(kept: Any) -> str:
    """Return the names of what holds an object: variables, functions and classes."""
    named = [(name, getattr(each, "__dict__", {})) for name, each in list(sys.modules.items())]
    scopes = {id(variables): (name, variables) for name, variables in reversed(named)}
    names: set[str] = set()
    level = [kept]
    for _ in range(4):
        held, found, level = {id(each) for each in level}, gc.get_referrers(*level), []
        for name, variables in scopes.values():
            names |= {f"{name}.{key}" for key, each in list(variables.items()) if id(each) in held}
        for each in found:
            if isinstance(each, (type, types.FunctionType)):
                names.add(f"{each.__module__}.{each.__qualname__}")
            elif not isinstance(each, _ENDS) and id(each) not in scopes:
                level.append(each)
    return ", ".join(sorted(each for each in names if not each.startswith(_NOT_NAMED)))
