"""A result gets its name once it is complete. Until then it lies in a hidden directory beside its
place, which the next run removes if the process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ...errors import UsageError
from .._blocks import make_directories, sync_directory

_OWNER = "owner"  # a file that is locked as long as the process lives
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
    make_directories(folder)
    _remove_leftovers(folder, target.name)
    hidden = folder / f".{_short(target.name)}.{uuid.uuid4().hex}.part"
    hidden.mkdir()
    try:
        with open(hidden / _OWNER, "xb") as owner:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = hidden / _CONTENT
            yield content
            if content.is_dir():
                sync_directory(content)
            require_free(target, call)
            content.rename(target)
            sync_directory(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _remove_leftovers(folder: Path, name: str) -> None:
    """Remove what killed processes have left of earlier attempts at the same target."""
    for hidden in folder.glob(f".{_escaped(_short(name))}.{'[0-9a-f]' * 32}.part"):
        with contextlib.suppress(OSError), open(hidden / _OWNER, "rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
            shutil.rmtree(hidden, ignore_errors=True)


def _short(name: str) -> str:
    """Return a name to which 39 bytes can be added."""
    return name if len(name.encode()) <= 200 else name[:50]


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "[*?" else character for character in name)
