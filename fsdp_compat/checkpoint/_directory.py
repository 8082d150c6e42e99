"""Directories of checkpoints: a fresh one under a name of its own, which gets its real name when everything is in it.

On one file system the rank that makes the directory is its leader: it alone writes the manifest and renames. Ranks whose folders
lie on several file systems have several leaders, and each of them has a directory with a manifest of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from ._blocks import sync_directory
from ._manifest import MANIFEST

__all__ = ["complete_steps", "directory_of", "latest", "make_fresh", "publish", "remove_older"]

_NAME = re.compile(r"step-(\d{8,})")


def directory_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step stands, or will stand."""
    return folder / f"step-{step:08d}"


def complete_steps(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a folder by step."""
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {int(path.name.removeprefix("step-")): path for path in found}


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint with the highest step in ``folder``, or None. What a save has not ended is not one."""
    steps = complete_steps(Path(folder))
    return steps[max(steps)] if steps else None


def make_fresh(path: Path) -> bool:
    """Make a directory, and the folder that it is in; False if another process has. Raises OSError."""
    folder = path.parent
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if is_new:
        with contextlib.suppress(PermissionError):
            sync_directory(folder.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def publish(fresh: Path, target: Path, manifest: str) -> None:
    """Complete a directory whose files are durable: the manifest, then the real name. Raises OSError; then it is not complete."""
    sync_directory(fresh)
    unnamed = fresh / f"{MANIFEST}.part"
    with open(unnamed, "x", encoding="utf-8", newline="\n") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    unnamed.rename(fresh / MANIFEST)
    sync_directory(fresh)
    if target.exists():  # rename would replace an empty directory
        raise FileExistsError(f"{target} exists already")
    fresh.rename(target)
    sync_directory(target.parent)


def remove_older(folder: Path, step: int, keep_last: int) -> None:
    """Remove complete checkpoints of steps before ``step``, as many as leave ``keep_last`` with it."""
    older = sorted((its, path) for its, path in complete_steps(folder).items() if its < step)
    for _, path in older[: max(len(older) - (keep_last - 1), 0)]:
        leaving = path.with_name(f".removed-{path.name}-{os.getpid()}")  # at no moment a half of one under its name
        path.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
