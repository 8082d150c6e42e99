"""What users can reach: the public modules, the names in their ``__all__``, and their members."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "fsdp_compat"
ROOT = Path(__file__).resolve().parents[2]


def public_modules() -> list[str]:
    """The package and its modules whose names have no underscore in front, folders included."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / PACKAGE).rglob("*.py")]
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return sorted(
        name for name in names if not any(part.startswith("_") for part in name.split("."))
    )


def public_objects() -> list[tuple[str, Any]]:
    """Each public class or function once, with the first name it has."""
    found: dict[int, tuple[str, Any]] = {}
    for module_name in public_modules():
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name, None)
            if callable(value):
                found.setdefault(id(value), (f"{module_name}.{name}", value))
    return list(found.values())


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods, as functions, and properties that the package gives a class."""
    seen = set[str]()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != PACKAGE:
            continue
        for name, member in vars(base).items():
            member = getattr(member, "__func__", member)  # a staticmethod or classmethod
            is_member = inspect.isfunction(member) or isinstance(member, property)
            if is_member and not name.startswith("_") and name not in seen:
                yield name, member
            seen.add(name)
