"""A result gets its name once it is complete. Until then it is in a hidden directory beside its
target, which the next attempt removes if the process was killed.

The process that creates the directory owns it and locks a file in it (flock); the system releases
the lock when the process ends. Some file systems do not show locks to other machines, so the name
of the locked file tells the machine of the owner. Directories of other machines are removed after a
day without a change."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from ..._archive.blocks import make_directories, new_file, sync_directory
from ..._comm.board.processes import host
from ...errors import UsageError

CONTENT = "content"  # what will be published: a file or a directory
_OWNER = ".owner-"
_LEFT_S = 86400.0  # without a change


def hidden_beside(target: Path, identity: str) -> Path:
    """Return the hidden directory of a result. identity: 32 hexadecimal digits."""
    return target.with_name(f".{target.name[:50]}-{identity}")


class OwnedDirectory:
    """A hidden directory that this process created and owns."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.content, self.is_published = path, path / CONTENT, False
        self._descriptor = descriptor

    def publish(self, target: Path) -> None:
        """Rename the durable content to ``target``. On OSError it may be published anyway."""
        if self.content.is_dir():
            sync_directory(self.content)
        if os.path.lexists(target):  # rename would replace a file, or an empty directory
            raise FileExistsError(f"{target} already exists")
        self.content.rename(target)
        self.is_published = True
        sync_directory(target.parent)

    def discard(self) -> None:
        """Release the lock, and remove the directory, if possible. May be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        # Released first: NFS keeps a file that is open, and so its directory.
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # someone else has closed it
                try:  # closing is not enough: a forked process may also hold the descriptor
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                finally:
                    os.close(descriptor)
        with contextlib.suppress(OSError):
            remove(self.path)


def make_fresh(path: Path) -> OwnedDirectory | None:
    """Create a hidden directory and its folder; return None if it exists. Raises OSError."""
    make_directories(path.parent)
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            return None
        with contextlib.suppress(FileNotFoundError):  # another save removed it before it was locked
            return OwnedDirectory(path, _own(path / f"{_OWNER}{host()}"))


def _own(owner: Path) -> int:
    """Create and lock the owner's file. Raises FileNotFoundError if the directory is gone."""
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


def remove_leftovers(folder: Path, names: str) -> None:
    """Remove hidden directories of killed processes, by a pattern of names. Raises OSError."""
    for path in list(folder.iterdir()):
        left = re.fullmatch(rf"\.({names}|removed)-[0-9a-f]{{32}}", path.name)
        if left is None or path.is_symlink() or not path.is_dir():
            continue
        if left[1] == "removed":
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # another process may be removing the same one
                _remove_unless_owned(path)


def _remove_unless_owned(path: Path) -> None:
    """Remove a hidden directory without a living owner. It cannot get one meanwhile."""
    inside = list(path.rglob("*"))
    owners = [file for file in inside if file.name.startswith(_OWNER)]
    is_old = time.time() - max(file.lstat().st_mtime for file in [path, *inside]) > _LEFT_S
    is_left = is_old or any(owner.name == f"{_OWNER}{host()}" for owner in owners)
    with contextlib.ExitStack() as held:
        for owner in owners:
            descriptor = os.open(owner, os.O_RDWR)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:  # a file system without locks
                is_left = is_old
        if not inside:
            path.rmdir()  # fails if an owner has just come; a later one creates it again
        elif is_left:
            remove(path)


def remove(path: Path) -> None:
    """Remove a directory, renamed first so that none is left half removed. Raises OSError."""
    leaving = path.with_name(f".removed-{uuid.uuid4().hex}")
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a new file, durably."""
    with new_file(path) as file:
        file.write(text.encode())


# -- one result of one process


def require_free(target: Path) -> None:
    """Raise UsageError if ``target`` exists."""
    if os.path.lexists(target):
        raise UsageError.of(
            "The target exists, and is never overwritten.",
            expected="a path that does not exist yet",
            got="a directory" if target.is_dir() else "a file",
            where=str(target),
            fix="pass another target, or remove this one",
        )


@contextlib.contextmanager
def published(target: Path) -> Iterator[Path]:
    """Yield a path for content that is durable at the end and then renamed to ``target``; after an
    error nothing is left. Raises UsageError if ``target`` exists, and OSError."""
    require_free(target)
    target = target.absolute()
    owned = make_fresh(hidden_beside(target, uuid.uuid4().hex))
    assert owned is not None  # nothing else has its name
    try:
        remove_leftovers(target.parent, re.escape(target.name[:50]))
        yield owned.content
        require_free(target)
        owned.publish(target)
    finally:
        owned.discard()
