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

from torch import nn

from .._engine.patches import Undo
from .refusals import EARLIER, too_late

_NOT_NAMED = ("torch.", "fsdp_compat.")
_ENDS = (types.FrameType, types.ModuleType)


def redirect_class(theirs: Any, own: Any) -> Undo:
    """Let torch's wrapper build ours. It becomes an empty base of ours, so that ``isinstance`` and
    ``issubclass`` hold, with those calls of ours that no module has, such as state_dict_type."""
    members, bases = dict(vars(theirs)), theirs.__bases__
    warn: Any = functools.cache(_warn)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is theirs:
            warn(theirs, stacklevel=3)
            object.__setattr__(self, "__class__", own)
            own.__init__(self, *args, **kwargs)
        elif not isinstance(self, own):
            name = f"{type(self).__module__}.{type(self).__qualname__}"
            raise too_late(f"a class derived from torch's {theirs.__name__}: {name}")
        else:
            super(theirs, self).__init__(*args, **kwargs)

    def undo() -> None:
        _remove_members(theirs)
        own.__bases__, theirs.__bases__ = theirs.__bases__, bases
        for name in members.keys() - vars(theirs).keys():
            setattr(theirs, name, members[name])

    calls = {name: getattr(own, name) for name in set(dir(own)) - set(dir(nn.Module))}
    _remove_members(theirs)
    theirs.__bases__, own.__bases__ = own.__bases__, (theirs,)
    theirs.__init__ = functools.wraps(own.__init__)(__init__)
    for name, call in calls.items():
        setattr(theirs, name, staticmethod(call) if callable(call) else call)
    return undo


def _remove_members(cls: type) -> None:
    for name, value in list(vars(cls).items()):
        if not name.startswith("__") or callable(value):
            delattr(cls, name)


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
