"""Patch a module of torch as soon as it is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec

Undo = Callable[[], None]
Change = Callable[[types.ModuleType], Iterable[Undo] | None]  # returns how to revert what it did


def on_import(name: str, change: Change) -> None:
    """Call ``change(module)`` whenever the module of that name is imported or reloaded, and now if
    it is already imported. A second call for the same name does nothing."""
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    finder = _Finder(name, change)
    sys.meta_path.insert(0, finder)
    if (module := sys.modules.get(name)) is not None:
        finder.change(module)


def cancel(name: str) -> None:
    """Undo ``on_import``, and revert the changes that said how."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _Finder) and finder.name == name:
            sys.meta_path.remove(finder)
            while finder.undo:
                finder.undo.pop()()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module through the other finders and gives it a loader that changes it."""

    def __init__(self, name: str, change: Change) -> None:
        self.name, self._change = name, change
        self.undo: list[Undo] = []

    def change(self, module: types.ModuleType) -> None:
        self.undo += self._change(module) or ()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.change)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Runs another loader, then the change."""

    def __init__(
        self, inner: importlib.abc.Loader, change: Callable[[types.ModuleType], None]
    ) -> None:
        self._inner, self._change = inner, change

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:  # code that looks later finds the original loader
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._change(module)
