"""Files of a checkpoint directory, whose names come from its content and are untrusted."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import CheckpointError


def member(directory: Path, name: str) -> Path:
    """Return the path of a named file. Raises CheckpointError if it is not in the directory."""
    if not name or "\0" in name or name.startswith("/") or ".." in Path(name).parts:
        raise _outside(directory, name)
    return require_inside(directory, directory / name)


def require_inside(directory: Path, path: Path) -> Path:
    """Return ``path``. Raises CheckpointError for links out, except to Hugging Face's blobs."""
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    if not real.is_relative_to(home):
        blobs = home.parent.parent / "blobs"
        if not (home.parent.name == "snapshots" and real.is_relative_to(blobs)):
            raise _outside(directory, path.name)
    return path


def _outside(directory: Path, name: str) -> CheckpointError:
    return CheckpointError.of(
        "A file of the checkpoint lies outside of its directory.",
        expected="names and links that stay in the directory",
        got=repr(name[:200]),
        where=str(directory),
        fix="copy the file into the directory, if you trust it; nothing was read",
    )
