"""Names that other modules imported from torch.distributed.fsdp: before ``install()`` they are
torch's, afterwards ours, and with ``uninstall()`` torch's again."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from . import log
from .modules import ROOT, Modules

# Parts of torch that need torch's own classes, as they look into them.
_OF_TORCH = (
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed._tools.fsdp2_mem_tracker",
)


class Rebinding:
    """Swaps values by identity in the namespaces of modules."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._swapped: list[tuple[dict[str, Any], str, Any, Any]] = []  # where, name, torch's, ours

    def put(self) -> None:
        ours = {id(theirs): (theirs, own) for theirs, own in self._modules.counterparts()}
        for name, namespace in _namespaces():
            found = []
            for key, value in list(namespace.items()):
                theirs, own = ours.get(id(value), (None, None))
                if theirs is not None and theirs is value:
                    namespace[key] = own
                    self._swapped.append((namespace, key, value, own))
                    found.append(key)
            if found:
                log.changed("in module %s: %s", name, ", ".join(found))

    def undo(self) -> None:
        """Call it once torch's modules are back."""
        for namespace, key, theirs, own in self._swapped:
            if namespace.get(key) is own:
                namespace[key] = theirs
        read: dict[int, tuple[Any, str, str]] = {}
        for (_, module, attribute), namespace in self._modules.readers.items():
            own = self._modules.made[module].names[attribute]
            read[id(own)] = own, module, attribute
            _swap(namespace, own, module, attribute)
        # Modules of torch also import these names from one another, and have none of ours for any
        # other reason.
        for name, namespace in _namespaces():
            found = {id(value) for value in list(namespace.values())} & read.keys()
            for each in found if name.startswith("torch.") else ():
                _swap(namespace, *read[each])


def _swap(namespace: dict[str, Any], own: Any, module: str, attribute: str) -> None:
    """Put torch's object in the place of ours. Where this torch does not have it, ours stays."""
    for key in [key for key, value in namespace.items() if value is own]:
        try:
            namespace[key] = getattr(__import__(module, fromlist=[attribute]), attribute)
        except (ImportError, AttributeError):
            return


def _namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if name.startswith((ROOT, *_OF_TORCH)) or name.partition(".")[0] == "fsdp_compat":
            continue
        namespace = getattr(module, "__dict__", None)
        if isinstance(module, types.ModuleType) and type(namespace) is dict:
            yield name, namespace
