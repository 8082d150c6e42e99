"""Changes of torch for the whole process, which can be undone."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

Undo = Callable[[], object]


class Patch:
    """A change that is made at most once at a time."""

    def __init__(self, make: Callable[[], Iterable[Undo]]) -> None:
        """make: makes the change, and returns what reverts it."""
        self._make = make
        self._undo: list[Undo] = []

    @property
    def is_made(self) -> bool:
        return bool(self._undo)

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


def around_function(module: types.ModuleType, name: str, ours: Callable[..., Any]) -> Undo:
    """Let ``module.name(...)`` call ``ours(original, ...)``. Return the undo."""
    original = vars(module)[name]

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(module, name, function)
    return functools.partial(setattr, module, name, original)
