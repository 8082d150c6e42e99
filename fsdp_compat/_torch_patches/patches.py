"""Changes of torch for the whole process, which can be undone, made now or when a module is
imported."""

from __future__ import annotations

import functools
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
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


class PatchOnImport(Patch, importlib.abc.MetaPathFinder):
    """A change of a module, made when it is imported or reloaded, through other finders."""

    def __init__(self, name: str, change: Callable[[types.ModuleType], Iterable[Undo]]) -> None:
        """change: changes the module, and returns what reverts it."""
        self.name, self._change, self._undo = name, change, []

    def patch(self) -> None:
        """Make the change, now or when the module is imported; a second call does nothing."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            if (module := sys.modules.get(self.name)) is not None:
                self._undo += self._change(module)

    def undo(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        super().undo()

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

    is_own = name in vars(cls)
    setattr(cls, name, method)
    return functools.partial(setattr, cls, name, original) if is_own else lambda: delattr(cls, name)


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
    back = [(function, original) for original, function in pairs]
    swap(pairs, also=module)
    return [functools.partial(swap, back, also=module)]


def _around(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return function


class Variable(NamedTuple):
    """A variable of a module."""

    module: str
    namespace: dict[str, Any]
    name: str
    value: Any


def swap(
    pairs: Iterable[tuple[Any, Any]],
    also: types.ModuleType | None = None,
    where: Callable[[str], bool] = lambda module: True,
) -> list[Variable]:
    """Replace objects by others, as (old, new), in all modules that have them under any name. What
    a partial, a table, a class, a closure or a default argument holds stays as it is. Return the
    variables as they were. also: a module that need not be in sys.modules."""
    new_of = {id(old): (old, new) for old, new in pairs}
    found = variables_of([old for old, _ in new_of.values()], also, where)
    for each in found:
        each.namespace[each.name] = new_of[id(each.value)][1]
    return found


def variables_of(
    objects: Iterable[Any],
    also: types.ModuleType | None = None,
    where: Callable[[str], bool] = lambda module: True,
) -> list[Variable]:
    """Return the variables of modules that are one of ``objects``, except for this package's."""
    package, wanted = __name__.partition(".")[0], {id(each): each for each in objects}
    found = []
    for module, its in [*sys.modules.items(), *([] if also is None else [("", also)])]:
        is_own = module.partition(".")[0] == package
        if issubclass(type(its), types.ModuleType) and not is_own and where(module):
            for namespace in _namespaces(module, its):
                if wanted.keys().isdisjoint(map(id, [*namespace.values()])):
                    continue  # quick, as there are thousands of modules
                for name, value in list(namespace.items()):
                    if id(value) in wanted:
                        found.append(Variable(module, namespace, name, value))
    return found


def _namespaces(name: str, module: types.ModuleType) -> list[dict[str, Any]]:
    """Return the namespace of a module. multiprocessing runs the main module again in new processes
    and keeps a copy of its variables: its functions see the original ones."""
    # vars() would load the modules of importlib.util.LazyLoader
    own: dict[str, Any] = object.__getattribute__(module, "__dict__")
    seen: dict[int, dict[str, Any]] = {id(own): own}
    for value in [*own.values()] if name == "__mp_main__" else ():
        if isinstance(value, types.FunctionType) and value.__module__ == name:
            seen[id(value.__globals__)] = value.__globals__
    return [*seen.values()]
