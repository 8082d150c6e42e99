"""A result gets its name once it is complete. Until then it lies in a hidden directory beside its
place, which the next run removes if the process is killed."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ...errors import UsageError
from .._blocks import sync_directory
from .._directory import disowned, make_fresh

_CONTENT = "content"


def require_free(target: Path, call: str) -> None:
    """Raise UsageError if something stands at ``target`` already."""
    if os.path.lexists(target):
        raise UsageError.of(
            "The target exists, and is never overwritten.",
            expected="a path at which there is nothing",
            got="a directory" if target.is_dir() else "a file",
            where=str(target),
            fix=f"pass another target to {call}, or remove this one",
        )


@contextlib.contextmanager
def published(target: Path, call: str) -> Iterator[Path]:
    """Yield a path at which a file or a directory is to be made; it gets the name ``target`` when
    the with block ends. If it ends with an error, nothing is left.

    Everything in it must be durable by then. Raises UsageError if ``target`` exists, and OSError.
    """
    require_free(target, call)
    folder = target.absolute().parent
    fresh = make_fresh(folder / f".{_short(target.name)}.{uuid.uuid4().hex}.part")
    assert fresh is not None  # nothing else has its name
    content = fresh.path / _CONTENT
    try:
        _remove_leftovers(folder, target.name)
        yield content
        if content.is_dir():
            sync_directory(content)
        require_free(target, call)
        content.rename(target)
        sync_directory(folder)
    finally:
        shutil.rmtree(fresh.path, ignore_errors=True)
        fresh.release()


def _remove_leftovers(folder: Path, name: str) -> None:
    """Remove what killed processes have left of earlier attempts at the same target."""
    pattern = f".{glob.escape(_short(name))}.{'[0-9a-f]' * 32}.part"
    for hidden in folder.glob(pattern):
        with contextlib.suppress(OSError), disowned(hidden) as is_left:
            if is_left:
                shutil.rmtree(hidden, ignore_errors=True)


def _short(name: str) -> str:
    """Return a name to which 39 bytes can be added."""
    return name if len(name.encode()) <= 200 else name[:50]
