"""Files of a checkpoint directory: names that its content gives are untrusted."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import CheckpointError


def member(directory: Path, name: str) -> Path:
    """Return the path of a file that the content of a checkpoint names. Raises CheckpointError for
    a name, or a link, that leads out of the directory."""
    if not name or "\0" in name or name.startswith("/") or ".." in Path(name).parts:
        raise _outside(directory, name)
    return require_inside(directory, directory / name)


def require_inside(directory: Path, path: Path) -> Path:
    """Return ``path`` unchanged. Raises CheckpointError if it is a link out of ``directory``.

    The cache of Hugging Face's hub is an exception: its snapshots are links to blobs beside them.
    """
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
