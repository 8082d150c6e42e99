"""Arguments that several calls share: what each may be, ``rename``, and patterns of names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from .. import errors
from ..errors import UsageError

Rename = Callable[[str], str | None]


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and "\0" not in os.fsdecode(value)


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def _is_tolerance(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _are_patterns(value: Any) -> bool:
    try:
        _compiled(value)
    except (TypeError, re.error):
        return False
    return isinstance(value, Collection)


# By name: what an argument is, and whether a value other than None is that.
_ARGUMENTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("folder", "other", "target"), ("a path without NUL characters", _is_path)),
    "path": (
        "a path without NUL characters; latest(folder) returns None without a complete checkpoint",
        _is_path,
    ),
    "optimizer": (
        "a torch.optim.Optimizer, or None",
        lambda value: isinstance(value, torch.optim.Optimizer),
    ),
    "step": ("a whole number, at least 0", _at_least(0)),
    "keep_last": ("a whole number, at least 1, or None", _at_least(1)),
    "rename": ("a function of a name, or None", callable),
    "dtype": ("a floating-point dtype, or None", _is_floating),
    "max_file_size": ("a number of bytes, at least 1", _at_least(1)),
    "world_size": ("a number of ranks, at least 1, or None", _at_least(1)),
    "rtol": ("a finite number of at least 0", _is_tolerance),
    "atol": ("a finite number of at least 0", _is_tolerance),
    "include": ("regular expressions", _are_patterns),
    "exclude": ("regular expressions", _are_patterns),
    "unit": ("a regular expression, or None", _are_patterns),
}


def require_arguments(call: str, progress: Any, **arguments: Any) -> None:
    """Raise UsageError for an argument that is not what its name asks for."""
    for name, value in arguments.items():
        expected, fits = _ARGUMENTS[name]
        if not (fits(value) or (value is None and expected.endswith("or None"))):
            raise errors.unusable(name, expected, value, f"argument {name!r} of {call}")
    errors.require_bools(call, progress=progress)


def renamed(names: Iterable[str], rename: Rename | None, call: str) -> dict[str, str]:
    """Return new names; None drops one. Raises UsageError for other values and duplicates."""
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in dict.fromkeys(names):
        new: Any = name if rename is None else rename(name)
        if new is None:
            continue
        if not isinstance(new, str):
            what = f"a name for {name!r}, or None"
            raise errors.wrong_type("the result of rename", what, new, call)
        if new in taken:
            raise UsageError.of(
                "Two tensors get the same name.",
                expected="a different name for each",
                got=f"{new!r} for {taken[new]!r} and for {name!r}",
                where=call,
                fix="make rename return different names, or None for one of them",
            )
        taken[new], found[name] = name, new
    return found


def _compiled(patterns: Collection[str]) -> list[re.Pattern[str]]:
    return [re.compile(each) for each in ([patterns] if isinstance(patterns, str) else patterns)]


def selection(include: Collection[str], exclude: Collection[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches ``include``, and not ``exclude``."""
    wanted, unwanted = _compiled(include), _compiled(exclude)

    def is_selected(name: str) -> bool:
        is_wanted = not wanted or any(pattern.search(name) for pattern in wanted)
        return is_wanted and not any(pattern.search(name) for pattern in unwanted)

    return is_selected
