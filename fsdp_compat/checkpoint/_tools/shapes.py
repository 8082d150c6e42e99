"""The shapes of a model's parameters, for checkpoints that do not hold them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
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
    """One parameter."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The parameters of a model, by their names in the unwrapped model. May include buffers."""

    entries: dict[str, Shape]  # in the order of the modules, if is_ordered
    ties: dict[str, str] = dataclasses.field(default_factory=dict)
    # ^ second names of tied parameters: the first name of each
    is_ordered: bool = True
    # The checkpoint they come from, which may hold a tied parameter under each name.
    source: Archive | None = dataclasses.field(default=None, compare=False, repr=False)

    def as_text(self) -> str:
        """Return the content of a file that ``load`` reads."""
        described = {
            "format": _FORMAT,
            "version": _VERSION,
            "ordered": self.is_ordered,
            "entries": {
                name: {"shape": list(shape.sizes), "dtype": dtype_name(shape.dtype)}
                for name, shape in self.entries.items()
            },
            "ties": self.ties,
        }
        return json.dumps(described, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Shapes:
        """Read what ``fsdp-compat shapes`` has written. Raises CheckpointError and OSError."""
        try:
            return cls._from_json(parse_json(read_text(path)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError.of(
                f"{path.name} does not hold the shapes of a model.",
                expected="JSON that `fsdp-compat shapes` has written",
                got=brief(error),
                where=str(path),
                fix="write it again: fsdp-compat shapes my.module:make_model -o model.json",
            ) from error

    @classmethod
    def _from_json(cls, described: Any) -> Shapes:
        known = described["format"], described["version"], type(described["ordered"])
        if known != (_FORMAT, _VERSION, bool):
            raise ValueError(f"the format {known!r:.200}")
        entries = {
            name: Shape(shape_in(facts["shape"]), dtype_of(facts["dtype"]))
            for name, facts in described["entries"].items()
        }
        ties = {text_in(name): text_in(first) for name, first in described["ties"].items()}
        ties = {name: first for name, first in ties.items() if first in entries}
        return cls(entries, ties, described["ordered"])


def shapes_of(model: nn.Module) -> Shapes:
    """Return the shapes of a model that is not wrapped; on the meta device too."""
    entries: dict[str, Shape] = {}
    ties: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(param), name)
        if first != name:
            ties[name] = first
        else:
            entries[name] = Shape(tuple(param.shape), param.dtype)
    return Shapes(entries, ties)


def shapes_from_callable(place: str) -> Shapes:
    """place: "my.module:make_model", a class or a function without arguments that returns a module.
    It is called on the meta device, importable from the current directory. Raises UsageError."""
    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise _unusable(place, "no colon between a module and a function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model: Any = importlib.import_module(module_name)
        for part in name.split("."):
            model = getattr(model, part)
        if not isinstance(model, nn.Module):
            with torch.device("meta"):
                model = model()
    except Exception as error:  # of the user's code
        raise _unusable(place, brief(error)) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(model, nn.Module):
        raise _unusable(place, f"a {type(model).__name__}")
    return shapes_of(model)


def _unusable(place: str, got: str) -> UsageError:
    return UsageError.of(
        "The model cannot be made.",
        expected='"my.module:make_model", a function without arguments that returns a module',
        got=got,
        where=repr(place),
        fix="pass a function that can be imported from the current directory",
    )


def shapes_of_archive(archive: Archive) -> Shapes:
    """Return the shapes of another checkpoint's model. safetensors loses the order of names."""
    entries = {name: Shape(tensor.shape, tensor.dtype) for name, tensor in archive.tensors.items()}
    is_sorted = "safetensors" in archive.kind.lower()
    return Shapes(entries, dict(archive.aliases), not is_sorted, archive)
