"""Writing files in blocks of 4 MiB, with zlib's CRC-32 of each, and making them durable. A second
thread computes the checksums, as they and system calls release the interpreter's lock."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

from .._progress import Tick
from ..errors import CheckpointError

BLOCK_NBYTES = 4 << 20
QUEUED = 8  # calls that wait for the second thread, at most
WRITEBACK_NBYTES = 32 << 20  # written out to disk while the following bytes are written
_advise = getattr(os, "posix_fadvise", None)  # not on every system


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """Length and checksums of a complete file."""

    nbytes: int
    checksums: tuple[int, ...]  # CRC-32 of each block; the last block may be shorter

    def __post_init__(self) -> None:
        if self.nbytes < 0 or len(self.checksums) != -(-self.nbytes // BLOCK_NBYTES):
            raise ValueError(f"{len(self.checksums)} checksums do not fit {self.nbytes} bytes")

    def block(self, number: int) -> range:
        """Return the bytes of a block."""
        start = number * BLOCK_NBYTES
        return range(start, min(start + BLOCK_NBYTES, self.nbytes))

    def blocks_of(self, ranges: Iterable[Any]) -> list[int]:
        """Return the blocks that hold bytes of any range from ``start`` to ``stop``, in order."""
        found: set[int] = set()
        for each in ranges:
            if each.stop > self.nbytes:
                raise ValueError(f"bytes {each.start} to {each.stop} requested of {self.nbytes}")
            if each.stop > each.start:
                found.update(range(each.start // BLOCK_NBYTES, -(-each.stop // BLOCK_NBYTES)))
        return sorted(found)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # 9p and CIFS cannot
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create a directory and the parents that it lacks, with durable names. Raises OSError."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in new:
        with contextlib.suppress(PermissionError):  # a folder that may be written, but not read
            sync_directory(each.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, whose content is durable at the end. Never overwrites."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


class SecondThread:
    """Runs calls in order on a second thread; in place if no thread can be started."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "fsdp_compat checksums")
        self._waiting: collections.deque[Future[Any]] = collections.deque()

    def do(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if len(self._waiting) == QUEUED:
            wait([self._waiting.popleft()])
        if self._pool is not None:
            try:
                self._waiting.append(self._pool.submit(function, *arguments))
                return self._waiting[-1]
            except RuntimeError:  # the interpreter is shutting down, and waits for this thread
                self.end()
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done

    def end(self) -> None:
        """Return when all calls are done. May be called again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


class BlockWriter:
    """Writes a new file from start to end and computes its checksums. Never overwrites. Memory
    passed to ``write`` must not change before ``finish``."""

    def __init__(self, path: Path, tick: Tick) -> None:
        """Raises OSError, FileExistsError among them."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.tick, self._second_thread = tick, SecondThread()
        self._nbytes = self._writeback_nbytes = 0
        self._checks: list[Future[None]] = []
        self._checksums: list[int] = []

    def write(self, data: memoryview) -> None:
        """Append. Raises OSError, for example if the disk is full."""
        while data:
            inside = self._nbytes % BLOCK_NBYTES
            piece = data[: BLOCK_NBYTES - inside]
            self._checks.append(self._second_thread.do(self._check, piece, inside == 0))
            rest, data = piece, data[len(piece) :]
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._nbytes += len(piece)
            self.tick(len(piece))
            if self._nbytes - self._writeback_nbytes >= WRITEBACK_NBYTES:
                self._start_writeback()

    def _start_writeback(self) -> None:
        """Make the system write its cached bytes to disk now, so that the final fsync is short."""
        start, self._writeback_nbytes = self._writeback_nbytes, self._nbytes
        if _advise is not None:
            with contextlib.suppress(OSError):
                _advise(self._descriptor, start, self._nbytes - start, os.POSIX_FADV_DONTNEED)

    def _check(self, piece: memoryview, is_first: bool) -> None:
        """is_first: of its block."""
        before = 0 if is_first else self._checksums.pop()
        self._checksums.append(zlib.crc32(piece, before))

    def finish(self) -> FileFacts:
        """Make the file durable and close it."""
        os.fsync(self._descriptor)
        self.close()
        for check in self._checks:
            check.result()  # raises what a checksum raised
        return FileFacts(self._nbytes, tuple(self._checksums))

    def close(self) -> None:
        """Close the file, complete or not. May be called again."""
        self._second_thread.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def changed_meanwhile(error: CheckpointError, path: object) -> CheckpointError:
    """Return the error for files that were intact when they were checked, and no longer are."""
    result = CheckpointError.of(
        "The files changed while they were being loaded.",
        expected="files that do not change before the load returns",
        got=" ".join(line.strip() for line in str(error).splitlines()[:3]),
        where=str(path),
        fix="the model and its optimizer may be partly changed: load this or another "
        "checkpoint before continuing",
    )
    result.__cause__ = error
    return result


def damaged(path: Path, expected: str, got: str) -> CheckpointError:
    """Return the error for a file that was damaged or replaced."""
    return CheckpointError.of(
        f"{path.name} is damaged, or has changed since it was saved.",
        expected=expected,
        got=got,
        where=str(path),
        fix="load an older checkpoint, or restore this one from an intact copy; nothing was loaded",
    )
