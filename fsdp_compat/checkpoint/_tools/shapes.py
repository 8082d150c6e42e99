"""The shapes of a model's parameters and buffers, for checkpoints that do not hold them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, UsageError
from .._header import dtype_name, dtype_of
from .._texts import brief, parse_json, read_text, shape_in, text_in
from .archive import Archive

_FORMAT = "fsdp_compat shapes"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """One parameter or buffer."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool | None = False  # None: not known
    is_saved: bool = True  # False for a buffer that state dicts leave out


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The parameters and buffers of a model, by their names in the unwrapped model."""

    entries: dict[str, Shape]  # in the order of the modules, if is_ordered
    ties: dict[str, str] = dataclasses.field(default_factory=dict)
    # ^ further names of tied parameters: the first name of each
    is_ordered: bool = True
    # The checkpoint that they are those of. It may hold a tied parameter once for each name.
    source: Archive | None = dataclasses.field(default=None, compare=False, repr=False)

    def as_json(self) -> dict[str, Any]:
        entries: dict[str, dict[str, Any]] = {}
        for name, shape in self.entries.items():
            entries[name] = {"shape": list(shape.sizes), "dtype": dtype_name(shape.dtype)}
            if shape.is_buffer is not False:
                entries[name]["buffer"] = shape.is_buffer
            if not shape.is_saved:
                entries[name]["saved"] = False
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "ordered": self.is_ordered,
            "entries": entries,
            "ties": self.ties,
        }

    def save(self, path: Path) -> None:
        """Write the shapes to a file. Raises OSError."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Shapes:
        """Read what ``save`` has written. Raises CheckpointError and OSError."""
        try:
            return cls.from_json(parse_json(read_text(path)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError.of(
                f"{path.name} does not hold the shapes of a model.",
                expected="JSON that `fsdp-compat shapes` has written",
                got=brief(error),
                where=str(path),
                fix="write it again: fsdp-compat shapes my.module:make_model -o model.json",
            ) from error

    @classmethod
    def from_json(cls, described: Any) -> Shapes:
        """Return the shapes that ``as_json`` describes. Raises ValueError, TypeError, KeyError."""
        if described["format"] != _FORMAT or described["version"] != _VERSION:
            raise ValueError(f"format {described['format']!r}, version {described['version']!r}")
        entries = {
            name: Shape(
                shape_in(facts["shape"]),
                dtype_of(facts["dtype"]),
                _flag(facts.get("buffer", False), can_be_none=True),
                bool(_flag(facts.get("saved", True))),
            )
            for name, facts in described["entries"].items()
        }
        ties = {text_in(name): text_in(first) for name, first in described["ties"].items()}
        if not set(ties.values()) <= set(entries) or set(ties) & set(entries):
            raise ValueError("ties to names without shapes")
        return cls(entries, ties, bool(_flag(described["ordered"])))


def _flag(value: Any, can_be_none: bool = False) -> bool | None:
    if isinstance(value, bool) or (value is None and can_be_none):
        return value
    raise TypeError(f"a {type(value).__name__} instead of true or false")


def shapes_of(model: nn.Module) -> Shapes:
    """Return the shapes of a model that is not wrapped; on the meta device too."""
    entries: dict[str, Shape] = {}
    ties: dict[str, str] = {}
    first_names: dict[int, str] = {}
    saved = set(model.state_dict(keep_vars=True))
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [
            *((name, tensor, False) for name, tensor in module._parameters.items()),
            *((name, tensor, True) for name, tensor in module._buffers.items()),
        ]
        for short, tensor, is_buffer in own:
            if tensor is None:
                continue
            name = f"{prefix}.{short}" if prefix else short
            first = first_names.setdefault(id(tensor), name)
            if first != name:
                ties[name] = first
            else:
                entries[name] = Shape(
                    tuple(tensor.shape), tensor.dtype, is_buffer, not is_buffer or name in saved
                )
    return Shapes(entries, ties)


def shapes_from_callable(place: str) -> Shapes:
    """place: "my.module:make_model", a function without arguments, or a class, that returns a
    module. It is imported from the current directory or the installed packages, and called on the
    meta device. Raises UsageError."""
    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise _unusable(place, "no colon between a module and a function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make: Any = importlib.import_module(module_name)
        for part in name.split("."):
            make = getattr(make, part)
        model = _called(make)
    except Exception as error:  # of the user's code
        raise _unusable(place, brief(error)) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(model, nn.Module):
        raise _unusable(place, f"a {type(model).__name__}")
    return shapes_of(model)


def _called(make: Callable[[], Any]) -> Any:
    if isinstance(make, nn.Module):
        return make
    with torch.device("meta"):
        return make()


def _unusable(place: str, got: str) -> UsageError:
    return UsageError.of(
        "The shapes of the model cannot be found.",
        expected='"my.module:make_model", a function without arguments that returns a module',
        got=got,
        where=repr(place),
        fix="pass the place of a function that can be called in the current directory",
    )


def shapes_of_archive(archive: Archive) -> Shapes:
    """Return the shapes of the model in another checkpoint.

    safetensors sorts the names, so the order of the modules is known only from other formats.
    """
    entries = {
        name: Shape(tensor.shape, tensor.dtype, None) for name, tensor in archive.tensors.items()
    }
    is_sorted = "safetensors" in archive.kind.lower()
    return Shapes(entries, dict(archive.aliases), not is_sorted, archive)
