"""Arguments that loading and saving weights share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import errors
from ..errors import UsageError
from ._progress import require_bar

Rename = Callable[[str], str | None]


def check_weights_arguments(call: str, path: Any, rename: Any, dtype: Any, progress: Any) -> None:
    """Raise UsageError for arguments of another type."""
    if not isinstance(path, (str, os.PathLike)):
        raise errors.wrong_type("path", "a path", path, call)
    if rename is not None and not callable(rename):
        raise errors.wrong_type("rename", "a function of a name, or None", rename, call)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise errors.wrong_type("dtype", "a floating-point dtype, or None", dtype, call)
    errors.require_bools(call, progress=progress)
    require_bar(progress, f"{call}(..., progress=True)")


def renamed(names: Iterable[str], rename: Rename | None, call: str) -> dict[str, str]:
    """Return the new name of each name, by the old one; those of which it is None are left out.
    Raises UsageError for what is not a name, and if two get the same one."""
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
