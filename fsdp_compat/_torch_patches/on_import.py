"""Changing a module of torch as soon as it is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec

__all__ = ["cancel", "on_import"]

Change = Callable[[types.ModuleType], None]


def on_import(name: str, change: Change) -> None:
    """Call ``change(module)`` for the module of that name: now if it is imported already, and
    whenever it is imported or reloaded. Does nothing when called again for the same name."""
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(name, change))
    if (module := sys.modules.get(name)) is not None:
        change(module)


def cancel(name: str) -> None:
    """Undo ``on_import``; what was changed stays changed."""
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not (isinstance(finder, _Finder) and finder.name == name)
    ]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and gives it a loader that changes it."""

    def __init__(self, name: str, change: Change) -> None:
        self.name, self._change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._change)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Another loader, with a change after it."""

    def __init__(self, inner: importlib.abc.Loader, change: Change) -> None:
        self._inner, self._change = inner, change

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:  # code that asks later sees the module's own loader
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._change(module)
