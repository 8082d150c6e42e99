"""What ``install()`` cannot replace any more."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import StateError, explain

__all__ = ["require_replaceable"]


def require_replaceable(loaded: Mapping[str, types.ModuleType]) -> None:
    """loaded: torch's modules that are to be replaced, by their names.

    Raises StateError if there are classes derived from torch's FullyShardedDataParallel, or models
    that torch's FSDP1 or FSDP2 has sharded.
    """
    package: Any = loaded.get("torch.distributed.fsdp")
    wrapper: type | None = getattr(package, "FullyShardedDataParallel", None)
    if wrapper is not None:
        derived = [f"{cls.__module__}.{cls.__qualname__}" for cls in _subclasses(wrapper)]
        if derived:
            raise _too_late(
                f"a class derived from torch's FullyShardedDataParallel: {', '.join(derived)}"
            )
    bases = tuple(
        cls for cls in (wrapper, getattr(package, "FSDPModule", None)) if isinstance(cls, type)
    )
    if not bases or not any(cls.__subclasses__() or cls is wrapper for cls in bases):
        return
    live = {
        f"{type(found).__module__}.{type(found).__qualname__}"
        for found in gc.get_objects()
        if issubclass(type(found), bases) and isinstance(found, nn.Module)
    }
    if live:
        raise _too_late(f"a model that torch has sharded: {', '.join(sorted(live))}")


def _subclasses(cls: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(cls)
    for each in subclasses:
        if sys.modules.get(each.__module__) is not None:
            yield each
        yield from _subclasses(each)


def _too_late(got: str) -> StateError:
    return StateError(
        explain(
            "install() came too late: what torch's FSDP has made stays torch's.",
            expected="no class derived from torch's FSDP, and no model sharded by it",
            got=got,
            where="fsdp_compat.install()",
            fix="call install() earlier, or start the program with python -m fsdp_compat run",
        )
    )
