"""Module objects under torch's names whose contents are fsdp_compat's, in ``sys.modules`` and in
the namespaces of modules that imported torch's names before."""

from __future__ import annotations

import dis
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
from .._engine.patches import Swapped, Undo, swap
from . import log
from .contents import INSTEAD, KEPT, contents
from .kept import redirect_class

ROOT = "torch.distributed.fsdp"

_PUBLIC = "public names of torch.distributed.fsdp"

# Parts of torch that need torch's own classes.
_OF_TORCH = (
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed._tools.fsdp2_mem_tracker",
)

# Who has read what while the modules were in place: the namespace, by its name, the module and the
# name in it. Programs may read a name in every step.
Readers = dict[tuple[str, str, str], dict[str, Any]]


class Modules:
    """Ours and torch's modules of one ``install()``."""

    def __init__(self) -> None:
        """Make the modules; nothing is changed."""
        spec = sys.modules[ROOT].__spec__ if ROOT in sys.modules else importlib.util.find_spec(ROOT)
        path = list(spec.submodule_search_locations or ()) if spec is not None else []
        names = {f"{ROOT}.{name}" if name else ROOT: names for name, names in contents().items()}
        _torch_private.load_collectives()
        self.readers: Readers = {}
        self.made = {
            name: FsdpModule(name, found, path if name == ROOT else None, self.readers)
            for name, found in names.items()
        }
        self.replaced = {name: sys.modules[name] for name in names if name in sys.modules}
        self._undo: list[Undo] = []
        self._swapped: list[Swapped] = []

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
        log.logger.info("modules replaced: %s", ", ".join(self.made))
        pairs = {id(theirs): (theirs, own) for theirs, own in self._counterparts()}.values()
        wrapper = self.made[ROOT].names["FullyShardedDataParallel"]
        for theirs, own in pairs:
            self._undo += redirect_class(theirs, own) if own is wrapper else []
        self._swapped = swap(pairs, skipped=(ROOT, *_OF_TORCH))
        for name, found in itertools.groupby(self._swapped, operator.attrgetter("module")):
            log.logger.info("in module %s: %s", name, ", ".join(each.name for each in found))

    def remove(self) -> None:
        """Let imports find torch's again, including where ours were imported meanwhile."""
        while self._undo:
            self._undo.pop()()
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
        for _, namespace, key, theirs, own in self._swapped:
            if namespace.get(key) is own:
                namespace[key] = theirs
        self._give_back_to_readers()

    def _give_back_to_readers(self) -> None:
        """Put torch's objects where ours were read while the modules were in place."""
        read: dict[int, tuple[Any, str, str]] = {}
        for (_, module, attribute), namespace in self.readers.items():
            own = self.made[module].names[attribute]
            read[id(own)] = own, module, attribute
            _swap(namespace, own, module, attribute)
        # Modules of torch also import these names from one another, and have none of ours for any
        # other reason.
        for name, namespace in namespaces():
            found = {id(value) for value in list(namespace.values())} & read.keys()
            for each in found if name.startswith("torch.") else ():
                _swap(namespace, *read[each])

    def _counterparts(self) -> Iterator[tuple[Any, Any]]:
        """Yield pairs of an object of torch's modules and ours of the same name."""
        for name, theirs in self.replaced.items():
            made = self.made[name]
            yield theirs, made
            for attribute, value in vars(theirs).items():
                own = made.names.get(attribute)
                if own is not None and own is not value and _is_of_fsdp(value):
                    yield value, own


def _swap(namespace: dict[str, Any], own: Any, module: str, attribute: str) -> None:
    """Put torch's object in the place of ours. Where this torch does not have it, ours stays."""
    for key in [key for key, value in namespace.items() if value is own]:
        try:
            namespace[key] = getattr(__import__(module, fromlist=[attribute]), attribute)
        except (ImportError, AttributeError):
            return


def namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every module that may have names of torch's FSDP, and its namespace."""
    for name, module in list(sys.modules.items()):
        if name.startswith((ROOT, *_OF_TORCH)) or name.partition(".")[0] == "fsdp_compat":
            continue
        namespace = getattr(module, "__dict__", None)
        if isinstance(module, types.ModuleType) and type(namespace) is dict:
            yield name, namespace


def _is_of_fsdp(value: object) -> bool:
    if isinstance(value, (type, types.FunctionType)):
        return value.__module__.startswith(ROOT)
    return isinstance(value, (list, tuple))


class FsdpModule(types.ModuleType):
    """A module of torch.distributed.fsdp whose names are ours."""

    def __init__(
        self, name: str, names: dict[str, Any], path: Sequence[str] | None, readers: Readers
    ) -> None:
        """path: where a package has its modules. readers: gets the namespaces that read names."""
        super().__init__(name, f"fsdp_compat in the place of {name}.")
        spec = ModuleSpec(name, _Loader(self), origin="fsdp_compat", is_package=path is not None)
        spec.submodule_search_locations = None if path is None else list(path)
        vars(self).update(
            names=names,
            readers=readers,
            __all__=[each for each in names if not each.startswith("_")],
            __spec__=spec,
            __loader__=spec.loader,
            __package__=name if path is not None else name.rpartition(".")[0],
        )
        if path is not None:
            vars(self)["__path__"] = spec.submodule_search_locations

    def __getattr__(self, name: str) -> Any:
        names: dict[str, Any] = vars(self)["names"]
        reader = _reader()
        if name in names:
            if name.startswith("_") or "._" in self.__name__:
                log.read(self.__name__, name, reader.get("__name__", "?"))
            if (by := reader.get("__name__")) in sys.modules:
                vars(self)["readers"][by, self.__name__, name] = reader
            return names[name]
        if self.__name__ == ROOT and name in KEPT:
            try:
                return importlib.import_module(f"{ROOT}.{name}")
            except ImportError:
                pass
        if not name.startswith("__"):
            log.read(self.__name__, name, f"{reader.get('__name__', '?')}, which does not exist")
        text = (
            f"module {self.__name__!r} is fsdp_compat's, see fsdp_compat.install(), and has no "
            f"attribute {name!r}. To do: use {INSTEAD.get(self.__name__[len(ROOT) + 1 :], _PUBLIC)}"
        )
        caller = sys._getframe(1)
        if dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
            raise ImportError(text, name=self.__name__)  # the text of an AttributeError is lost
        raise AttributeError(text)

    def __setattr__(self, name: str, value: Any) -> None:
        private = "._" in self.__name__ and not name.startswith("__")
        if private and value is not vars(self)["names"].get(name):
            warnings.warn(
                f"{self.__name__}.{name} was replaced, which has no effect in training: "
                "fsdp_compat.install() is on, and fsdp_compat does not call torch's private "
                f"functions. Use {INSTEAD.get(self.__name__[len(ROOT) + 1 :], _PUBLIC)}.",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *vars(self)["names"]} - {"names", "readers"})


def _reader() -> dict[str, Any]:
    """Return the namespace of the code that reads an attribute of a module."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals


class _Loader(importlib.abc.Loader):
    """Returns the existing module, even when it is reloaded."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        pass
