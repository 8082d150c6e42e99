"""Change a module as soon as it is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from .patches import Undo


class PatchOnImport(importlib.abc.MetaPathFinder):
    """A change of a module, made when it is imported or reloaded, through other finders."""

    def __init__(self, name: str, change: Callable[[types.ModuleType], Iterable[Undo]]) -> None:
        """change: changes the module, and returns what reverts it."""
        self.name, self._change = name, change
        self._undo: list[Undo] = []

    def patch(self) -> None:
        """Make the change, now or when the module is imported; a second call does nothing."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            if (module := sys.modules.get(self.name)) is not None:
                self._undo += self._change(module)

    def undo(self) -> None:
        """Restore what was there before."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._undo:
            self._undo.pop()()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # others may change it, too
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        """Make the change after ``loader`` has executed the module."""
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self._undo += self._change(module)

        loader.exec_module = exec_module
