"""Bytes of files in blocks, with a checksum of each block.

The checksum is zlib's CRC-32, of every 4 MiB of the file from its first byte on. It is computed on a second thread, beside the
system calls, as both leave the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .._engine.storage import memory_of
from ..errors import CheckpointError, explain

__all__ = [
    "BLOCK_NBYTES",
    "BlockWriter",
    "Facts",
    "Wanted",
    "check",
    "damaged",
    "merged",
    "nbytes_to_check",
    "read_plain",
    "sync_directory",
]

BLOCK_NBYTES = 4 << 20
QUEUED = 8  # calls that wait for the second thread

STARTED_NBYTES = 32 << 20  # are brought to the disk while the next ones are written
_advise = getattr(os, "posix_fadvise", None)  # not on every system

Tick = Callable[[int], object]  # told of bytes that are done


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a complete file is known to be."""

    nbytes: int
    checksums: tuple[int, ...]  # CRC-32 of each block; the last one may be shorter

    def __post_init__(self) -> None:
        if self.nbytes < 0 or len(self.checksums) != -(-self.nbytes // BLOCK_NBYTES):
            raise ValueError(f"{len(self.checksums)} checksums do not fit {self.nbytes} bytes")


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A run of elements in a file, and where they go."""

    start: int  # byte in the file
    target: torch.Tensor  # 1-D, contiguous
    dtype: torch.dtype | None = None  # of the elements in the file; None: the target's
    through: torch.dtype | None = None  # a dtype that they are rounded to on the way

    @property
    def stored(self) -> torch.dtype:
        return self.dtype or self.target.dtype

    @property
    def nbytes(self) -> int:
        """How many bytes of the file it is."""
        return self.target.numel() * self.stored.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    @property
    def is_direct(self) -> bool:
        """True where the file's bytes are the target's."""
        as_it_is = self.stored == self.target.dtype and self.through in (None, self.stored)
        return as_it_is and self.target.device.type == "cpu"


def merged(wanted: Sequence[Wanted]) -> list[Wanted]:
    """Return the same runs, where those that follow one another in the file and in memory are one."""
    found: list[Wanted] = []
    for one in sorted(wanted, key=lambda one: one.start):
        last = found[-1] if found else None
        direct = last is not None and one.is_direct and last.is_direct
        if last is not None and direct and one.start == last.stop and _follows(one.target, last.target):
            whole = last.target.view(torch.uint8).as_strided((one.stop - last.start,), (1,))
            found[-1] = Wanted(last.start, whole)
        else:
            found.append(one)
    return found


def _follows(one: torch.Tensor, last: torch.Tensor) -> bool:
    same = one.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return same and one.data_ptr() == last.data_ptr() + last.nbytes


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Aside:
    """Calls one after the other on a second thread, few of them waiting; in place where no thread can be started any more."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self._queue: queue.Queue[tuple[Callable[..., Any], Any] | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=True, name="fsdp_compat checksums")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends, and waits for the thread that is here
            self._thread = None

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            self.results.append(call[0](call[1]))

    def do(self, function: Callable[[Any], Any], argument: Any) -> None:
        if self._thread is None:
            self.results.append(function(argument))
        else:
            self._queue.put((function, argument))

    def end(self) -> list[Any]:
        """Return the results of all calls. A second call returns them again."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        return self.results


class BlockWriter:
    """Writes a new file from its first byte to its last; knows its checksums in the end. Nothing is overwritten.

    What is written must not change before ``finish``.
    """

    def __init__(self, path: Path, tick: Tick) -> None:
        """Raises OSError, FileExistsError among them."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._tick, self._aside = tick, _Aside()
        self._nbytes = self._num_started = 0
        self._checksums: list[int] = []
        self._checksum, self._num_checked = 0, 0  # of the block that is not full yet

    def write(self, data: memoryview) -> None:
        """Append. Raises OSError, as for a full disk."""
        for start in range(0, len(data), BLOCK_NBYTES):
            piece = data[start : start + BLOCK_NBYTES]
            self._aside.do(self._check, piece)
            rest = piece
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._nbytes += len(piece)
            self._tick(len(piece))
            if self._nbytes - self._num_started >= STARTED_NBYTES:
                self._start_writing()

    def _start_writing(self) -> None:
        """Let the system bring to the disk what it has, instead of waiting for all of it in the end."""
        if _advise is not None:
            with contextlib.suppress(OSError):
                _advise(self._descriptor, self._num_started, self._nbytes - self._num_started, os.POSIX_FADV_DONTNEED)
        self._num_started = self._nbytes

    def _check(self, data: memoryview) -> None:
        while data:
            piece = data[: BLOCK_NBYTES - self._num_checked]
            data = data[len(piece) :]
            self._checksum = zlib.crc32(piece, self._checksum)
            self._num_checked += len(piece)
            if self._num_checked == BLOCK_NBYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._checksums.append(self._checksum)
        self._checksum, self._num_checked = 0, 0

    def finish(self) -> Facts:
        """Make the file durable and close it."""
        os.fsync(self._descriptor)
        self.close()
        if self._num_checked:
            self._end_block()
        return Facts(self._nbytes, tuple(self._checksums))

    def close(self) -> None:
        """Let go, also of a file that is not complete. A second call does nothing."""
        self._aside.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_plain(path: Path, wanted: Sequence[Wanted], tick: Tick) -> None:
    """Read runs, straight to where they go or, to another dtype or device, by way of a buffer of 4 MiB.

    Raises CheckpointError where the file ends too early, OSError.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for one in sorted(wanted, key=lambda one: one.start):
            if not one.is_direct:
                _read_converted(descriptor, one, path, tick)
                continue
            memory = memory_of(one.target)
            for start in range(0, len(memory), BLOCK_NBYTES):
                piece = memory[start : start + BLOCK_NBYTES]
                _read_into(descriptor, piece, one.start + start, path)
                tick(len(piece))
    finally:
        os.close(descriptor)


def _read_converted(descriptor: int, one: Wanted, path: Path, tick: Tick) -> None:
    through = one.through if one.stored.is_floating_point else None
    size = one.stored.itemsize
    chunk = BLOCK_NBYTES // (size if through is None else size + through.itemsize)
    buffer = torch.empty(min(chunk, one.target.numel()), dtype=one.stored)
    rounded = None if through is None else torch.empty_like(buffer, dtype=through)
    for at in range(0, one.target.numel(), chunk):
        values = buffer[: min(chunk, one.target.numel() - at)]
        _read_into(descriptor, memory_of(values), one.start + at * size, path)
        tick(values.nbytes)
        if rounded is not None:
            values = rounded[: values.numel()].copy_(values)
        one.target[at : at + values.numel()].copy_(values)


def check(path: Path, facts: Facts, wanted: Sequence[Wanted], tick: Tick) -> None:
    """Read the blocks that hold anything wanted, each once, compare their checksums, and keep nothing.

    Raises CheckpointError for a file that is missing, has another length, or in which a block is not what was written. What follows
    reads from the system's memory what was read here, without new memory of its own for it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise damaged(path, f"a file of {facts.nbytes} bytes", "no such file") from error
    try:
        found = os.fstat(descriptor).st_size
        if found != facts.nbytes:
            raise damaged(path, f"a file of {facts.nbytes} bytes", f"{found} bytes")
        blocks, aside = _blocks_of(facts.nbytes, wanted), _Aside()
        buffers = [memoryview(bytearray(BLOCK_NBYTES)) for _ in range(min(len(blocks), QUEUED + 2))]  # others wait to be looked at
        try:
            for number, block in enumerate(blocks):
                start = block * BLOCK_NBYTES
                memory = buffers[number % len(buffers)][: min(BLOCK_NBYTES, facts.nbytes - start)]
                _read_into(descriptor, memory, start, path)
                aside.do(zlib.crc32, memory)
                tick(len(memory))
        finally:
            checksums = aside.end()
        for block, checksum in zip(blocks, checksums, strict=True):
            if checksum != facts.checksums[block]:
                raise damaged(
                    path,
                    f"checksum {facts.checksums[block]:08x} of the block at byte {block * BLOCK_NBYTES}",
                    f"{checksum:08x}: the file was changed, or comes from another checkpoint",
                )
    finally:
        os.close(descriptor)


def nbytes_to_check(facts: Facts, wanted: Sequence[Wanted]) -> int:
    """Return how many bytes ``check`` reads: those of whole blocks."""
    return sum(min(BLOCK_NBYTES, facts.nbytes - block * BLOCK_NBYTES) for block in _blocks_of(facts.nbytes, wanted))


def _blocks_of(nbytes: int, wanted: Sequence[Wanted]) -> list[int]:
    """Return the blocks that hold anything wanted, in order."""
    found: set[int] = set()
    for one in wanted:
        if one.stop > nbytes:
            raise ValueError(f"bytes {one.start} to {one.stop} are wanted of {nbytes}")
        if one.nbytes:
            found.update(range(one.start // BLOCK_NBYTES, -(-one.stop // BLOCK_NBYTES)))
    return sorted(found)


def _read_into(descriptor: int, memory: memoryview, start: int, path: Path) -> None:
    while memory:
        num_read = os.preadv(descriptor, [memory], start)
        if not num_read:
            raise damaged(path, f"at least {start + len(memory)} bytes", f"the file ends at {start}")
        memory, start = memory[num_read:], start + num_read


def damaged(path: Path, expected: str, got: str) -> CheckpointError:
    """The error for a file that is not what was saved."""
    return CheckpointError(
        explain(
            f"{path.name} is not what was saved.",
            expected=expected,
            got=got,
            where=str(path),
            fix="load an older checkpoint, or copy this one again from where it is intact; nothing was loaded",
        )
    )
