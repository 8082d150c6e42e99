"""Bytes of files in blocks, with a checksum of each block.

The checksum is zlib's CRC-32, of every 4 MiB of the file from its first byte on. It is computed on
a second thread, beside the system calls, as both leave the interpreter's lock."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import threading
import zlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from .._comm.host_memory import memory_of
from ..errors import CheckpointError, explain
from ._texts import open_file

__all__ = [
    "BLOCK_NBYTES",
    "BlockWriter",
    "FileFacts",
    "ReadRequest",
    "changed_meanwhile",
    "check",
    "damaged",
    "merged",
    "nbytes_to_check",
    "read_checked",
    "read_plain",
    "sync_directory",
]

BLOCK_NBYTES = 4 << 20
QUEUED = 8  # calls that wait for the second thread
NUM_BUFFERS = 4  # blocks that are read, or wait for their checksums

STARTED_NBYTES = 32 << 20  # are brought to the disk while the next ones are written
_advise = getattr(os, "posix_fadvise", None)  # not on every system

Tick = Callable[[int], object]  # told of bytes that are done


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """What a complete file is known to be."""

    nbytes: int
    checksums: tuple[int, ...]  # CRC-32 of each block; the last one may be shorter

    def __post_init__(self) -> None:
        if self.nbytes < 0 or len(self.checksums) != -(-self.nbytes // BLOCK_NBYTES):
            raise ValueError(f"{len(self.checksums)} checksums do not fit {self.nbytes} bytes")


@dataclasses.dataclass(frozen=True)
class ReadRequest:
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


def merged(wanted: Sequence[ReadRequest]) -> list[ReadRequest]:
    """Return the same runs, where those that follow one another in the file and in memory are
    one."""
    found: list[ReadRequest] = []
    for one in sorted(wanted, key=lambda one: one.start):
        last = found[-1] if found else None
        direct = last is not None and one.is_direct and last.is_direct
        if (
            last is not None
            and direct
            and one.start == last.stop
            and _follows(one.target, last.target)
        ):
            whole = last.target.view(torch.uint8).as_strided((one.stop - last.start,), (1,))
            found[-1] = ReadRequest(last.start, whole)
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
    """Calls one after the other on a second thread, few of them waiting; in place where no thread
    can be started any more."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Callable[[Any], Any], Any, Future[Any]] | None] = (
            queue.Queue(QUEUED)
        )
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, daemon=True, name="fsdp_compat checksums"
        )
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends, and waits for the thread that is here
            self._thread = None

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            function, argument, future = call
            future.set_result(function(argument))

    def do(self, function: Callable[[Any], Any], argument: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._thread is None:
            future.set_result(function(argument))
        else:
            self._queue.put((function, argument, future))
        return future

    def end(self) -> None:
        """Return when all calls have been made. A second call does nothing."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


class BlockWriter:
    """Writes a new file from its first byte to its last; knows its checksums in the end. Nothing is
    overwritten.

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
        """Let the system bring to the disk what it has, instead of waiting for all of it in the
        end."""
        if _advise is not None:
            with contextlib.suppress(OSError):
                _advise(
                    self._descriptor,
                    self._num_started,
                    self._nbytes - self._num_started,
                    os.POSIX_FADV_DONTNEED,
                )
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

    def finish(self) -> FileFacts:
        """Make the file durable and close it."""
        os.fsync(self._descriptor)
        self.close()
        if self._num_checked:
            self._end_block()
        return FileFacts(self._nbytes, tuple(self._checksums))

    def close(self) -> None:
        """Let go, also of a file that is not complete. A second call does nothing."""
        self._aside.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Run:
    """A run that is being read: gives memory for its next bytes, and brings them to where they go,
    in their dtype there.

    That memory is the target's or, for another dtype or device, a buffer of 4 MiB.
    """

    def __init__(self, one: ReadRequest) -> None:
        self.position = one.start  # of the next byte in the file
        self._one = one
        self._num_done = 0  # elements of a run that is converted
        self._buffer: torch.Tensor | None = None
        self._through = one.through if one.stored.is_floating_point else None
        self._room = memory_of(one.target) if one.is_direct else memoryview(b"")

    @property
    def is_done(self) -> bool:
        return self.position == self._one.stop

    def room(self) -> memoryview:
        """Return memory for the next bytes: 4 MiB at most, and none at all only where the run is
        done."""
        if not self._room and not self.is_done:
            if self._buffer is None:
                self._buffer = torch.empty(
                    min(self._chunk, self._one.target.numel()), dtype=self._one.stored
                )
            self._room = memory_of(self._buffer[: self._one.target.numel() - self._num_done])
        return self._room[:BLOCK_NBYTES]

    @property
    def _chunk(self) -> int:
        size = self._one.stored.itemsize
        return max(
            1, BLOCK_NBYTES // (size if self._through is None else size + self._through.itemsize)
        )

    def advance(self, nbytes: int) -> None:
        """So many bytes are there."""
        self.position += nbytes
        self._room = self._room[nbytes:]
        if self._buffer is not None and not self._room:
            values = self._buffer[: self._one.target.numel() - self._num_done]
            if self._through is not None:
                values = values.to(self._through)
            self._one.target[self._num_done : self._num_done + values.numel()].copy_(values)
            self._num_done += values.numel()
            if self.is_done:
                self._buffer = None

    def take(self, data: memoryview) -> int:
        """Take the next bytes out of ``data``, as many as are wanted of them; return how many."""
        num_taken = 0
        while (piece := data[num_taken:]) and (room := self.room()):
            nbytes = min(len(piece), len(room))
            room[:nbytes] = piece[:nbytes]
            self.advance(nbytes)
            num_taken += nbytes
        return num_taken


def read_plain(path: Path, wanted: Sequence[ReadRequest], tick: Tick) -> None:
    """Read runs, straight to where they go or, to another dtype or device, by way of a buffer of 4
    MiB.

    Raises CheckpointError where the file ends too early or is not a regular file, OSError.
    """
    descriptor = open_file(path)
    try:
        for one in sorted(wanted, key=lambda one: one.start):
            run = _Run(one)
            while room := run.room():
                _read_into(descriptor, room, run.position, path)
                run.advance(len(room))
                tick(len(room))
    finally:
        os.close(descriptor)


def check(path: Path, facts: FileFacts, wanted: Sequence[ReadRequest], tick: Tick) -> None:
    """Read the blocks that hold anything wanted, each once, compare their checksums, and keep
    nothing.

    Raises as ``read_checked`` does. What follows reads from the system's memory what was read here.
    """
    with contextlib.closing(_checked_blocks(path, facts, wanted)) as blocks:
        for _, content in blocks:
            tick(len(content))


def read_checked(path: Path, facts: FileFacts, wanted: Sequence[ReadRequest], tick: Tick) -> None:
    """Read runs to where they go, out of blocks whose checksums hold: no byte is copied before that
    of its block was compared.

    Raises CheckpointError for a file that is missing, has another length, or in which a block is
    not what was written, OSError.
    """
    to_begin = collections.deque(sorted(wanted, key=lambda one: one.start))
    with contextlib.closing(_checked_blocks(path, facts, wanted)) as blocks:
        runs: list[_Run] = []
        for start, content in blocks:
            runs = [run for run in runs if not run.is_done]
            while to_begin and to_begin[0].start < start + len(content):
                runs.append(_Run(to_begin.popleft()))
            for run in runs:
                tick(run.take(content[run.position - start :]))


def _checked_blocks(
    path: Path, facts: FileFacts, wanted: Sequence[ReadRequest]
) -> Generator[tuple[int, memoryview], None, None]:
    """Yield where every block begins that holds anything wanted, and what it holds, in order, if
    its checksum is the right one.

    What was yielded is valid until the next one is asked for. The checksums are computed while the
    next blocks are read.
    """
    try:
        descriptor = open_file(path)
    except FileNotFoundError as error:
        raise damaged(path, f"a file of {facts.nbytes} bytes", "no such file") from error
    try:
        found = os.fstat(descriptor).st_size
        if found != facts.nbytes:
            raise damaged(path, f"a file of {facts.nbytes} bytes", f"{found} bytes")
        blocks, aside = _blocks_of(facts.nbytes, wanted), _Aside()
        buffers = [
            memoryview(bytearray(BLOCK_NBYTES)) for _ in range(min(len(blocks), NUM_BUFFERS))
        ]
        waiting: collections.deque[tuple[int, memoryview, Future[int]]] = collections.deque()
        try:
            for number, block in enumerate(blocks):
                if len(waiting) == len(buffers):
                    yield _verified(path, facts, *waiting.popleft())
                start = block * BLOCK_NBYTES
                memory = buffers[number % len(buffers)][: min(BLOCK_NBYTES, facts.nbytes - start)]
                _read_into(descriptor, memory, start, path)
                waiting.append((block, memory, aside.do(zlib.crc32, memory)))
            while waiting:
                yield _verified(path, facts, *waiting.popleft())
        finally:
            aside.end()
    finally:
        os.close(descriptor)


def _verified(
    path: Path, facts: FileFacts, block: int, memory: memoryview, checksum: Future[int]
) -> tuple[int, memoryview]:
    start, expected, found = block * BLOCK_NBYTES, facts.checksums[block], checksum.result()
    if found != expected:
        raise damaged(
            path,
            f"checksum {expected:08x} of the block at byte {start}",
            f"{found:08x}: the file was changed, or comes from another checkpoint",
        )
    return start, memory


def nbytes_to_check(facts: FileFacts, wanted: Sequence[ReadRequest]) -> int:
    """Return how many bytes ``check`` reads: those of whole blocks."""
    return sum(
        min(BLOCK_NBYTES, facts.nbytes - block * BLOCK_NBYTES)
        for block in _blocks_of(facts.nbytes, wanted)
    )


def _blocks_of(nbytes: int, wanted: Sequence[ReadRequest]) -> list[int]:
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
            raise damaged(
                path, f"at least {start + len(memory)} bytes", f"the file ends at {start}"
            )
        memory, start = memory[num_read:], start + num_read


def changed_meanwhile(error: CheckpointError, path: object) -> CheckpointError:
    """The error for files that were right before anything was changed, and are not any more:
    ``error`` says what is wrong."""
    made = CheckpointError(
        explain(
            "The files changed while they were being loaded.",
            expected="files that stay as they were checked until the load has returned",
            got=" ".join(line.strip() for line in str(error).splitlines()[:3]),
            where=str(path),
            fix="the model and its optimizer may be partly changed: load again before you go on, "
            "this checkpoint or another one",
        )
    )
    made.__cause__ = error
    return made


def damaged(path: Path, expected: str, got: str) -> CheckpointError:
    """The error for a file that is not what was saved."""
    return CheckpointError(
        explain(
            f"{path.name} is not what was saved.",
            expected=expected,
            got=got,
            where=str(path),
            fix="load an older checkpoint, or copy this one again from where it is intact; nothing "
            "was loaded",
        )
    )
