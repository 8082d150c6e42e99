"""Directories of checkpoints. A save writes to a fresh directory with a hidden name, which gets its
real name once it is complete.

The rank that creates the directory leads: it alone writes the manifest and renames. If the ranks'
folders are on several file systems, each of these has a leader, and a directory with a manifest of
its own.

A leader owns its fresh directory: it holds a lock (flock) on a file in it. The system releases it
when the process ends, however it ends. The next save to the folder removes fresh directories that
are not locked. Some file systems do not show locks to other machines. The name of the locked file
therefore says on which machine the owner runs; directories of other machines are removed if nothing
in them has changed for a day."""

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

from torch import nn

from .._comm.divergence.processes import host
from ..errors import CheckpointError
from ._blocks import make_directories, sync_directory
from ._manifest import MANIFEST, Manifest, read_manifest
from ._ranks import ranks_of

_NAME = re.compile(r"step-([0-9]{8,})")
_FRESH = re.compile(r"\.step-[0-9]{8,}-[0-9a-f]{32}")
_REMOVED = re.compile(r"\.removed-step-[0-9]{8,}-[0-9a-f]+")
_OWNER = ".owner-"
_LEFT_S = 86400.0  # without a change


class NotSynced(OSError):
    """A checkpoint has its name, but its folder could not be synced to disk."""


def directory_of(folder: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def fresh_name(target: Path, identity: str) -> Path:
    """Return the directory that a save writes to before it becomes ``target``. identity: 32
    hexadecimal digits."""
    return target.with_name(f".{target.name}-{identity}")


def steps_in(folder: Path) -> dict[int, Path]:
    """Return the paths that have the name of a checkpoint, by step."""
    try:
        found = [
            (int(match[1]), path)
            for path in folder.iterdir()
            if (match := _NAME.fullmatch(path.name))
        ]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {step: path for step, path in found if path == directory_of(folder, step)}


def _manifest_in(path: Path, step: int) -> Manifest | str:
    """Return the manifest of the complete checkpoint of a step. For any other directory, return why
    it is not one: "" if its save did not finish."""
    try:
        if not (path / MANIFEST).is_file():
            return ""
        found = read_manifest(path)
    except (CheckpointError, OSError) as error:
        return str(error)
    return found if found.step == step else f"its manifest is that of step {found.step}"


def latest(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Path | None:
    """Return the complete checkpoint with the highest step in ``folder``, or None. Saves that did
    not finish do not count.

    A directory whose manifest is damaged or unreadable is skipped with a warning.

    With a folder per node, nodes may differ: if the job ends while a save gives the checkpoint its
    name, some have it and others do not. Pass the model, which is to be loaded, on all ranks, to
    get the highest step that all of them have, of the same save. Collective then: all ranks.
    """
    complete = _complete(folder)
    if model is None:
        for path, _ in complete:
            return path
        return None
    call = "checkpoint.latest"
    _, ranks = ranks_of(model, call)
    with ranks.taking_part():
        with ranks.agreeing("The folder could not be read.", folder, "") as agreement:
            agreement.own = [(found.step, found.identity) for _, found in complete]
        by_rank = agreement.by_rank
        common = set.intersection(*({(step, of) for step, of in each} for each in by_rank))
        return directory_of(Path(folder), max(common)[0]) if common else None


def _complete(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, Manifest]]:
    """Yield the complete checkpoints in a folder, the highest step first."""
    for step, path in sorted(steps_in(Path(folder)).items(), reverse=True):
        found = _manifest_in(path, step)
        if isinstance(found, Manifest):
            yield path, found
        elif found:
            warnings.warn(f"latest() skips {path}: {found}", stacklevel=3)


class Fresh:
    """A directory that this process created and owns until it is published or discarded."""

    def __init__(self, path: Path, owner: Path, descriptor: int) -> None:
        self.path, self.is_published = path, False
        self._owner, self._descriptor = owner, descriptor

    def publish(self, target: Path, manifest: str) -> None:
        """Write the manifest, then rename to ``target``. The files in it must be durable.

        Raises NotSynced if it was renamed, but the folder could not be synced; any other OSError if
        it is not complete.
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
            raise FileExistsError(f"{target} already exists")
        self.path.rename(target)
        self.is_published = True
        try:
            with contextlib.suppress(OSError):
                (target / self._owner.name).unlink()
            sync_directory(target.parent)
        except OSError as error:
            raise NotSynced(*error.args) from error
        finally:
            self.release()

    def discard(self) -> None:
        """Remove it, if possible. Does nothing once it is published."""
        with contextlib.suppress(OSError):
            remove(self.path)
        self.release()

    def release(self) -> None:
        """Release the lock. May be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                # Closing is not enough: a forked process may hold the descriptor, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            with contextlib.suppress(OSError):  # someone else has closed it
                os.close(descriptor)


def make_fresh(path: Path) -> Fresh | None:
    """Create a directory, and the folder that it is in; return None if it exists. Raises
    OSError."""
    make_directories(path.parent)
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            return None
        owner = path / f"{_OWNER}{host()}"
        with contextlib.suppress(FileNotFoundError):  # another save removed it before it was locked
            return Fresh(path, owner, _own(owner))


def _own(owner: Path) -> int:
    """Create and lock the file that marks the owner of a directory; return its descriptor.

    Raises FileNotFoundError if the directory was removed.
    """
    descriptor = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for a save that may be removing it
        if not os.path.samestat(os.stat(owner), os.fstat(descriptor)):
            raise FileNotFoundError(f"{owner} was removed")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_leftovers(folder: Path) -> None:
    """Remove the directories that killed saves left in a folder. Raises OSError if it cannot be
    listed."""
    for path in [
        path for path in folder.iterdir() if path.name.startswith((".step-", ".removed-"))
    ]:
        with contextlib.suppress(OSError):  # another save may be removing the same one
            if path.is_symlink() or not path.is_dir():
                continue
            if _REMOVED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif _FRESH.fullmatch(path.name):
                with disowned(path) as is_left:
                    if is_left:
                        remove(path)


@contextlib.contextmanager
def disowned(path: Path) -> Iterator[bool]:
    """Yield whether a fresh directory has no living owner. It cannot get one inside the with
    block."""
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
            path.rmdir()  # fails if an owner has just come; a later one creates it again
            yield False
            return
        yield is_old or any(owner.name == f"{_OWNER}{host()}" for owner in owners)


def remove(path: Path) -> None:
    """Remove a directory: it is renamed first, so that its name never stands for a part of it.
    Raises OSError if it stays."""
    step = path.name.removeprefix(".").split("-")[1]
    leaving = path.with_name(f".removed-step-{step}-{uuid.uuid4().hex}")
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def remove_older(folder: Path, step: int, keep_last: int) -> None:
    """Remove the oldest complete checkpoints before ``step``, so that ``keep_last`` are left with
    it. Raises OSError.

    Directories without a manifest of their step are not checkpoints, and stay. So do links: a save
    makes none, and what they lead to is not this folder's.
    """
    older = [
        (number, path)
        for number, path in sorted(steps_in(folder).items())
        if number < step
        and not path.is_symlink()
        and isinstance(_manifest_in(path, number), Manifest)
    ]
    for _, path in older[: max(len(older) - (keep_last - 1), 0)]:
        with contextlib.suppress(OSError):  # another save removes it, or another user owns it
            remove(path)
