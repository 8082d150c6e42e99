"""Refuses ``install()`` when it comes too late."""

from __future__ import annotations

import gc
import re
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import StateError

OLDEST = 2, 11
EARLIER = "call install() earlier, or start the program with python -m fsdp_compat run"


def require_supported_torch() -> None:
    """Raises StateError if this torch is older than OLDEST."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise StateError.of(
            "This torch is too old for fsdp_compat.",
            expected=f"torch {oldest} or newer",
            got=f"torch {torch.__version__}",
            where="fsdp_compat.install()",
            fix=f"pip install 'torch>={oldest}', or use torch's own FSDP",
        )


def require_replaceable(loaded: Mapping[str, types.ModuleType]) -> None:
    """Raise StateError for models sharded by torch, and classes derived from its FSDP1; warn of
    classes derived from others. loaded: torch's modules to be replaced, by name."""
    package: Any = loaded.get("torch.distributed.fsdp")
    wrapper: type | None = getattr(package, "FullyShardedDataParallel", None)
    if wrapper is not None:
        derived = [f"{cls.__module__}.{cls.__qualname__}" for cls in _subclasses(wrapper)]
        if derived:
            raise too_late(
                f"a class derived from torch's FullyShardedDataParallel: {', '.join(derived)}"
            )
    found = wrapper, getattr(package, "FSDPModule", None)
    bases = tuple(cls for cls in found if isinstance(cls, type))
    if not bases:
        return
    live = {
        f"{type(each).__module__}.{type(each).__qualname__}"
        for each in gc.get_objects()
        if issubclass(type(each), bases) and isinstance(each, nn.Module)
    }
    if live:
        raise too_late(f"a model that torch has sharded: {', '.join(sorted(live))}")
    _warn_of_derived_classes(loaded, bases)


def _warn_of_derived_classes(
    loaded: Mapping[str, types.ModuleType], bases: tuple[type, ...]
) -> None:
    own = {
        value
        for module in loaded.values()
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    derived = sorted(
        f"{each.__module__}.{each.__qualname__} from {cls.__name__}"
        for cls in own - set(bases)
        for each in _subclasses(cls)
        if not each.__module__.startswith("torch.")
    )
    if derived:
        warnings.warn(
            "fsdp_compat.install(): classes derived earlier from classes of torch's FSDP stay as "
            f"they are, and may not work with fsdp_compat: {', '.join(derived)}. To avoid "
            f"this, {EARLIER}.",
            stacklevel=3,
        )


def _subclasses(cls: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(cls)
    for each in subclasses:
        if sys.modules.get(each.__module__) is not None:
            yield each
        yield from _subclasses(each)


def too_late(got: str) -> StateError:
    return StateError.of(
        "install() came too late: what torch's FSDP has made stays torch's.",
        expected="no class derived from torch's FSDP, and no model sharded by it",
        got=got,
        where="fsdp_compat.install()",
        fix=EARLIER,
    )
