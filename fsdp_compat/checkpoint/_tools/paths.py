"""Files of a checkpoint directory: names that its content gives are untrusted."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from .._texts import brief


def member(directory: Path, name: str) -> Path:
    """Return the path of a file that the content of a checkpoint names. Raises CheckpointError for
    a name, or a link, that leads out of the directory."""
    if not name or "\0" in name or name.startswith("/") or ".." in Path(name).parts:
        raise _outside(directory, name)
    return require_inside(directory, directory / name)


def require_inside(directory: Path, path: Path) -> Path:
    """Return ``path`` unchanged. Raises CheckpointError if it is a link out of ``directory``, or
    one that leads back to itself.

    The cache of Hugging Face's hub is an exception: its snapshots are links to blobs beside them.
    """
    try:
        real, home = path.resolve(), directory.resolve()
    except RuntimeError as error:
        raise CheckpointError.of(
            "A link in the checkpoint leads back to itself.",
            expected="a file, or a link to one",
            got=brief(error),
            where=str(path),
            fix="restore the file from an intact copy; nothing was read",
        ) from error
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
