"""Directories of checkpoints: a fresh one under a name of its own, which gets its real name when
everything is in it.

On one file system the rank that makes the directory is its leader: it alone writes the manifest and
renames. Ranks whose folders lie on several file systems have several leaders, and each of them has
a directory with a manifest of its own.

A leader owns its fresh directory: it holds a lock (flock) on a file in it, which the system
releases when the process ends, in whatever way. The next save to the folder removes the directories
whose lock nobody holds. Some file systems do not show a lock to other machines, so the file's name
says on which one the owner was; what was left by another machine is removed when nothing in it has
changed for a day."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from .._comm.processes import host
from ..errors import CheckpointError
from ._blocks import sync_directory
from ._manifest import MANIFEST, read_manifest

__all__ = [
    "Fresh",
    "NotSynced",
    "directory_of",
    "fresh_name",
    "latest",
    "make_fresh",
    "remove_left_overs",
    "remove_older",
]

_NAME = re.compile(r"step-([0-9]{8,})")
_FRESH = re.compile(r"\.step-[0-9]{8,}-[0-9a-f]{32}")
_REMOVED = re.compile(r"\.removed-step-[0-9]{8,}-[0-9a-f]+")
_OWNER = ".owner-"
_LEFT_S = 86400.0  # without a change


class NotSynced(OSError):
    """A checkpoint has its name, but its folder could not be made durable."""


def directory_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step stands, or will stand."""
    return folder / f"step-{step:08d}"


def fresh_name(target: Path, identity: str) -> Path:
    """Return where a save of this identity, 32 hexadecimal digits, writes what will be
    ``target``."""
    return target.with_name(f".{target.name}-{identity}")


def _steps_in(folder: Path) -> dict[int, Path]:
    """Return what has the name of a checkpoint, by step."""
    try:
        found = [
            (int(match[1]), path)
            for path in folder.iterdir()
            if (match := _NAME.fullmatch(path.name))
        ]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {step: path for step, path in found if path == directory_of(folder, step)}


def _problem_with(path: Path, step: int) -> str | None:
    """Return why a directory is not the complete checkpoint of a step; "" where no save has
    completed it, None if it is."""
    try:
        if not (path / MANIFEST).is_file():
            return ""
        found = read_manifest(path).step
    except (CheckpointError, OSError) as error:
        return str(error)
    return None if found == step else f"its manifest is that of step {found}"


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint with the highest step in ``folder``, or None. What a save has
    not ended is not one.

    A directory whose manifest is damaged, or cannot be read, is passed over with a warning.
    """
    for step, path in sorted(_steps_in(Path(folder)).items(), reverse=True):
        problem = _problem_with(path, step)
        if problem is None:
            return path
        if problem:
            warnings.warn(f"latest() passes over {path}: {problem}", stacklevel=2)
    return None


class Fresh:
    """A directory that this process has made and owns, until it is published or discarded."""

    def __init__(self, path: Path, owner: Path, descriptor: int) -> None:
        self.path = path
        self._owner, self._descriptor = owner, descriptor

    def publish(self, target: Path, manifest: str) -> None:
        """Complete it, when its files are durable: the manifest, then the real name.

        Raises NotSynced if it has its name, but the folder could not be synced; any other OSError
        if it is not complete.
        """
        sync_directory(self.path)
        unnamed = self.path / f"{MANIFEST}.part"
        with open(unnamed, "x", encoding="utf-8", newline="\n") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        unnamed.rename(self.path / MANIFEST)
        sync_directory(self.path)
        if target.exists():  # rename would replace an empty directory
            raise FileExistsError(f"{target} exists already")
        self.path.rename(target)
        try:
            with contextlib.suppress(OSError):
                (target / self._owner.name).unlink()
            sync_directory(target.parent)
        except OSError as error:
            raise NotSynced(*error.args) from error
        finally:
            self.release()

    def discard(self) -> None:
        """Remove it, as far as that can be."""
        with contextlib.suppress(OSError):
            _remove(self.path)
        self.release()

    def release(self) -> None:
        """Own it no more. A second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(
                    self._descriptor, fcntl.LOCK_UN
                )  # a forked process may hold the descriptor, too
            os.close(self._descriptor)
            self._descriptor = -1


def make_fresh(path: Path) -> Fresh | None:
    """Make a directory, and the folder that it is in; None if another process has. Raises
    OSError."""
    folder = path.parent
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if is_new:
        with contextlib.suppress(PermissionError):
            sync_directory(folder.parent)
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            return None
        owner = path / f"{_OWNER}{host()}"
        with contextlib.suppress(
            FileNotFoundError
        ):  # another save has removed it, as nobody owned it yet
            return Fresh(path, owner, _own(owner))


def _own(owner: Path) -> int:
    """Make and lock the file that says whose directory it is in; return its descriptor.

    Raises FileNotFoundError if the directory was removed.
    """
    descriptor = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(
                descriptor, fcntl.LOCK_EX
            )  # waits for a save that is just about to remove it
        if not os.path.samestat(os.stat(owner), os.fstat(descriptor)):
            raise FileNotFoundError(f"{owner} was removed")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_left_overs(folder: Path) -> None:
    """Remove what killed saves have left in a folder, and no living one owns. Raises OSError where
    it cannot be listed."""
    for path in [
        path for path in folder.iterdir() if path.name.startswith((".step-", ".removed-"))
    ]:
        with contextlib.suppress(
            OSError
        ):  # others remove, too, and what cannot be removed harms nobody
            if path.is_symlink() or not path.is_dir():
                continue
            if _REMOVED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif _FRESH.fullmatch(path.name):
                with _disowned(path) as is_left:
                    if is_left:
                        _remove(path)


@contextlib.contextmanager
def _disowned(path: Path) -> Iterator[bool]:
    """Give True if no living save owns a fresh directory, nor can while this lasts."""
    inside = list(path.iterdir())
    owners = [file for file in inside if file.name.startswith(_OWNER)]
    is_old = time.time() - max(file.lstat().st_mtime for file in [path, *inside]) > _LEFT_S
    with contextlib.ExitStack() as held:
        for owner in owners:
            descriptor = os.open(owner, os.O_RDWR)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # a file system without locks
                yield is_old
                return
        if not inside:
            path.rmdir()  # unless its owner comes just now, who makes it again otherwise
            yield False
            return
        yield is_old or any(owner.name == f"{_OWNER}{host()}" for owner in owners)


def _remove(path: Path) -> None:
    """Remove a directory, which at no moment is there in part under its name. Raises OSError if it
    stays."""
    step = path.name.removeprefix(".").split("-")[1]
    leaving = path.with_name(f".removed-step-{step}-{uuid.uuid4().hex}")
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def remove_older(folder: Path, step: int, keep_last: int) -> None:
    """Remove complete checkpoints of steps before ``step``, as many as leave ``keep_last`` with it.
    Raises OSError.

    What does not have a manifest of that step is not one, and stays.
    """
    older = [
        (its, path)
        for its, path in sorted(_steps_in(folder).items())
        if its < step and _problem_with(path, its) is None
    ]
    for _, path in older[: max(len(older) - (keep_last - 1), 0)]:
        with contextlib.suppress(OSError):  # another save removes it, or it is not this user's
            _remove(path)
