"""The shapes of a model's parameters, for checkpoints that do not hold them."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from .._texts import brief
from .archive import Archive


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
    """Return the shapes of the model that a class or function without arguments returns, called on
    the meta device. place: "my.module:make_model", importable from the current directory. Raises
    UsageError."""
    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise _unusable(
            place, "a path that does not exist, or no colon between module and function"
        )
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
        "The shapes of the model cannot be found.",
        expected='a checkpoint of whole tensors, or "my.module:make_model", a function without '
        "arguments that returns a module",
        got=got,
        where=repr(place),
        fix="pass a function that can be imported from the current directory",
    )


def shapes_of_archive(archive: Archive) -> Shapes:
    """Return the shapes of another checkpoint's model. safetensors loses the order of names."""
    entries = {name: Shape(tensor.shape, tensor.dtype) for name, tensor in archive.tensors.items()}
    is_sorted = "safetensors" in archive.kind.lower()
    return Shapes(entries, dict(archive.aliases), not is_sorted, archive)
