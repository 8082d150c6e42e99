"""What the results of ``inspect``, ``verify`` and ``diff`` have in common: they become JSON."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

import torch

from .._header import dtype_name


class Facts:
    """A dataclass of facts."""

    in_json: ClassVar[tuple[str, ...]] = ()  # fields, properties, methods; empty: the fields

    def as_json(self) -> dict[str, Any]:
        """Return the same as values for ``json.dumps``: bytes are numbers, dtypes and paths are
        texts, and so is an infinite number ("inf")."""
        fields: Any = self
        names = self.in_json or [field.name for field in dataclasses.fields(fields)]
        found = {name: getattr(self, name) for name in names}
        return {name: _plain(item() if callable(item) else item) for name, item in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Facts):
        return value.as_json()
    if isinstance(value, dict):
        # What no rank is known to have written, or lies in no file, has None as its key.
        return {_text(key): _plain(item) for key, item in value.items() if key is not None}
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    if isinstance(value, (torch.dtype, Path)):
        return _text(value)
    return "inf" if value == math.inf else value


def _text(value: Any) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
