"""Module objects under torch's names whose contents are fsdp_compat's, in ``sys.modules`` and in
the namespaces of modules that imported torch's names before."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import itertools
import operator
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch.distributed as dist

from .. import _torch_private
from .._torch_patches.patches import Undo, Variable, swap, variables_of
from . import log
from .contents import INSTEAD, KEPT, contents
from .kept import redirect_class

ROOT = "torch.distributed.fsdp"

# Parts of torch that need torch's own classes.
_OF_TORCH = (
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed._tools.fsdp2_mem_tracker",
)


class Modules(importlib.abc.MetaPathFinder):
    """Ours and torch's modules of one ``install()``. The first finder, for reloads of ours. Modules
    that others do not find below ours are names that do not exist, and errors say so."""

    def __init__(self) -> None:
        """Make the modules; nothing is changed."""
        spec = sys.modules[ROOT].__spec__ if ROOT in sys.modules else importlib.util.find_spec(ROOT)
        path = list(spec.submodule_search_locations or ()) if spec is not None else []
        names = {f"{ROOT}.{name}" if name else ROOT: names for name, names in contents().items()}
        _torch_private.load_collectives()
        self.made = {
            name: FsdpModule(name, found, path if name == ROOT else [])
            for name, found in names.items()
        }
        self.replaced = {name: sys.modules[name] for name in names if name in sys.modules}
        self._undo: list[Undo] = []
        self._swapped: list[Variable] = []  # as they were
        self._own: dict[int, Any] = {}  # {id of torch's: ours}

    def put(self) -> None:
        """Let imports find ours, and give ours to modules that have imported torch's."""
        package = self.made[ROOT]
        for name, module in self.made.items():
            sys.modules[name] = module
            if name != ROOT:
                vars(package)[name.removeprefix(ROOT + ".")] = module
        for name in KEPT:  # torch's own modules that stay are attributes of the package
            if (kept := sys.modules.get(f"{ROOT}.{name}")) is not None:
                vars(package)[name] = kept
        dist.fsdp = package
        sys.meta_path.insert(0, self)
        log.logger.info("modules replaced: %s", ", ".join(self.made))
        pairs = {id(theirs): (theirs, own) for theirs, own in self._counterparts()}.values()
        wrapper = self.made[ROOT].names["FullyShardedDataParallel"]
        for theirs, own in pairs:
            self._undo += redirect_class(theirs, own) if own is wrapper else []
        self._swapped = swap(pairs, where=lambda name: not name.startswith((ROOT, *_OF_TORCH)))
        self._own = {id(theirs): own for theirs, own in pairs}
        for name, found in itertools.groupby(self._swapped, operator.attrgetter("module")):
            log.logger.info("in module %s: %s", name, ", ".join(each.name for each in found))

    def remove(self) -> None:
        """Let imports find torch's again, as do modules that had imported them, and torch's own."""
        while self._undo:
            self._undo.pop()()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in self.made.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self.replaced)
        if ROOT in self.replaced:
            dist.fsdp = self.replaced[ROOT]
        else:
            vars(dist).pop("fsdp", None)
        kept = {name: sys.modules.get(f"{ROOT}.{name}") for name in KEPT}
        if any(kept.values()):  # imported while ours was their package
            package = importlib.import_module(ROOT)
            vars(package).update({name: module for name, module in kept.items() if module})
        for each in self._swapped:
            if each.namespace.get(each.name) is self._own[id(each.value)]:
                each.namespace[each.name] = each.value
        self._give_back_to_torch()

    def _give_back_to_torch(self) -> None:
        """Put torch's objects where torch's modules have imported ours meanwhile."""
        origins: dict[int, tuple[Any, str, str]] = {}
        for name, module in self.made.items():
            for attribute, own in module.names.items():
                if isinstance(own, (type, types.FunctionType)):
                    origins.setdefault(id(own), (own, name, attribute))
        ours = [own for own, _, _ in origins.values()]
        for each in variables_of(ours, where=lambda name: name.startswith("torch.")):
            _, name, attribute = origins[id(each.value)]
            with contextlib.suppress(ImportError, AttributeError):  # this torch does not have it
                each.namespace[each.name] = getattr(importlib.import_module(name), attribute)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find ours. Raise ModuleNotFoundError, which users see, for a name that a module lacks."""
        above, _, name = fullname.rpartition(".")
        module = self.made.get(fullname)
        if module or above not in self.made or name in dir(self.made[above]):
            return module.__spec__ if module else None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if (spec := finder.find_spec(fullname, path, target)) is not None:
                return spec
        # `from module import name` ignores the error of a module that is called like `name`
        raise ModuleNotFoundError(_missing(above, name), name=above)

    def _counterparts(self) -> Iterator[tuple[Any, Any]]:
        """Yield pairs of an object of torch's modules and ours of the same name."""
        for name, theirs in self.replaced.items():
            made = self.made[name]
            yield theirs, made
            for attribute, value in vars(theirs).items():
                own = made.names.get(attribute)
                if own is not None and own is not value and _is_of_fsdp(value):
                    yield value, own


def _is_of_fsdp(value: object) -> bool:
    if isinstance(value, (type, types.FunctionType)):
        return value.__module__.startswith(ROOT)
    return isinstance(value, (list, tuple))


class FsdpModule(types.ModuleType):
    """A module of torch.distributed.fsdp whose names are ours."""

    def __init__(self, name: str, names: dict[str, Any], path: list[str]) -> None:
        """path: where torch has further modules below this one."""
        super().__init__(name, f"fsdp_compat in the place of {name}.")
        spec = ModuleSpec(name, _Loader(self), origin="fsdp_compat", is_package=True)
        spec.submodule_search_locations = path
        vars(self).update(
            names=names,
            __all__=[each for each in names if not each.startswith("_")],
            __spec__=spec,
            __loader__=spec.loader,
            __package__=name,
            __path__=path,
        )

    def __getattr__(self, name: str) -> Any:
        names: dict[str, Any] = vars(self)["names"]
        if name in names:
            if name.startswith("_") or "._" in self.__name__:
                log.read(self.__name__, name)
            return names[name]
        if self.__name__ == ROOT and name in KEPT:
            with contextlib.suppress(ImportError):
                return importlib.import_module(f"{ROOT}.{name}")
        if not name.startswith("__"):
            log.read(self.__name__, f"{name}, which does not exist,")
        raise AttributeError(_missing(self.__name__, name))

    def __setattr__(self, name: str, value: Any) -> None:
        private = "._" in self.__name__ and not name.startswith("__")
        if private and value is not vars(self)["names"].get(name):
            warnings.warn(
                f"{self.__name__}.{name} was replaced, which has no effect in training: "
                "fsdp_compat.install() is on, and fsdp_compat does not call torch's private "
                f"functions. Use {_instead(self.__name__)}.",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *vars(self)["names"]} - {"names"})


def _missing(module: str, name: str) -> str:
    return (
        f"module {module!r} is fsdp_compat's, see fsdp_compat.install(), and has no attribute "
        f"{name!r}. To do: use {_instead(module)}"
    )


def _instead(module: str) -> str:
    return INSTEAD.get(module[len(ROOT) + 1 :], f"public names of {ROOT}")


class _Loader(importlib.abc.Loader):
    """Returns the existing module, even when it is reloaded."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        pass
