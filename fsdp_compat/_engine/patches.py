"""Changes of torch for the whole process, which can be undone."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Undo = Callable[[], object]


class Patch:
    """A change that is made at most once at a time."""

    def __init__(self, make: Callable[[], Iterable[Undo]]) -> None:
        """make: makes the change, and returns what reverts it."""
        self._make = make
        self._undo: list[Undo] = []

    def patch(self) -> None:
        """Make the change; a second call does nothing."""
        if not self._undo:
            self._undo += self._make()

    def undo(self) -> None:
        """Restore what was there before."""
        while self._undo:
            self._undo.pop()()


def set_existing(owner: Any, **values: Any) -> list[Undo]:
    """Replace attributes that a module or class has itself. Return the undo."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name in own:
        setattr(owner, name, values[name])
    return [functools.partial(setattr, owner, name, value) for name, value in own.items()]


def around_method(cls: type, name: str, ours: Callable[..., Any]) -> Undo:
    """Let ``cls.name(self, ...)`` call ``ours(original, self, ...)`` in the whole process, where
    ``original`` needs no ``self``. Return the undo."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(functools.partial(original, self), self, *args, **kwargs)

    setattr(cls, name, method)
    return functools.partial(setattr, cls, name, original)


def around_functions(
    module: types.ModuleType, calls: Mapping[str, Callable[..., Any]]
) -> list[Undo]:
    """Let ``module.name(...)`` call ``ours(original, ...)``, for each name and ``ours`` in
    ``calls`` that the module has, also where other modules have imported the function."""
    pairs = [
        (original, _around(original, ours))
        for name, ours in calls.items()
        if callable(original := vars(module).get(name))
    ]
    swap(pairs, module)
    return [functools.partial(swap, [(function, original) for original, function in pairs], module)]


def _around(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return function


class Swapped(NamedTuple):
    """A variable of a module that has another value now."""

    module: str
    namespace: dict[str, Any]
    name: str
    old: Any
    new: Any


def swap(
    pairs: Iterable[tuple[Any, Any]],
    module: types.ModuleType | None = None,
    skipped: tuple[str, ...] = (),
) -> list[Swapped]:
    """Replace objects by others, as (old, new), in all modules that have them under any name, and
    in ``module``. skipped: how the names of modules begin that keep the old ones. What a partial, a
    table, a class, a closure or a default argument holds stays as it is."""
    new_of = {id(old): (old, new) for old, new in pairs}
    found = []
    for name, namespace in _namespaces(module):
        for key, value in list(namespace.items()) if not name.startswith(skipped) else ():
            old, new = new_of.get(id(value), (None, None))
            if old is not None and old is value:
                namespace[key] = new
                found.append(Swapped(name, namespace, key, old, new))
    return found


def _namespaces(also: types.ModuleType | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the namespace of each module, but for those of this package."""
    package = __name__.partition(".")[0]
    for name, module in [*sys.modules.items(), *([] if also is None else [("", also)])]:
        if issubclass(type(module), types.ModuleType) and name.partition(".")[0] != package:
            # vars() would load the modules of importlib.util.LazyLoader
            yield name, object.__getattribute__(module, "__dict__")
