"""Reading and writing files in blocks, with a checksum of each block.

The checksum is zlib's CRC-32 of every 4 MiB of the file, from its first byte on. A second thread
computes it in parallel with the system calls; both release the interpreter's lock."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from .._comm.host_memory import memory_of
from .._layout.pieces import Rows
from .._layout.spec import Interval
from ..errors import CheckpointError
from ._texts import open_file

BLOCK_NBYTES = 4 << 20
QUEUED = 8  # calls that wait for the second thread, at most
SKIPPED_NBYTES = 4096  # between two rows: from here on, two system calls take less than reading it
NUM_BUFFERS = 4  # blocks in memory that are being read, or whose checksums are being computed

WRITEBACK_NBYTES = 32 << 20  # written out to disk while the following bytes are written
_advise = getattr(os, "posix_fadvise", None)  # not on every system

Tick = Callable[[int], object]  # called with the number of bytes just done


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """Length and checksums of a complete file."""

    nbytes: int
    checksums: tuple[int, ...]  # CRC-32 of each block; the last block may be shorter

    def __post_init__(self) -> None:
        if self.nbytes < 0 or len(self.checksums) != -(-self.nbytes // BLOCK_NBYTES):
            raise ValueError(f"{len(self.checksums)} checksums do not fit {self.nbytes} bytes")


@dataclasses.dataclass(frozen=True)
class ReadRequest:
    """Elements in a file, and the memory to read them to: consecutive ones, or ``rows`` of them, of
    which ``start`` is the first one and ``target`` begins where the first row goes."""

    start: int  # first byte in the file
    target: torch.Tensor  # 1-D, contiguous
    dtype: torch.dtype | None = None  # of the elements in the file; None: the target's
    through: torch.dtype | None = None  # round to this dtype first
    rows: Rows | None = None

    @staticmethod
    def of_rows(
        start: int,
        rows: Rows,
        target: torch.Tensor,
        dtype: torch.dtype,
        through: torch.dtype | None = None,
    ) -> ReadRequest:
        """Return the request for ``rows`` of a tensor of ``dtype`` that begins at byte ``start``.
        target: 1-D, what the rows count their places in."""
        own = target[rows.to : rows.to + rows.to_span]
        at = start + rows.start * dtype.itemsize
        return ReadRequest(at, own, dtype, through, rows if rows.count > 1 else None)

    @property
    def numel(self) -> int:
        """Elements in the file, those between the rows included."""
        return self.target.numel() if self.rows is None else self.rows.span

    def one_by_one(self) -> Iterator[ReadRequest]:
        """Yield this request, or one for each row if what lies between them is worth skipping."""
        rows = self.rows
        if rows is None or (rows.stride - rows.numel) * self.stored.itemsize < SKIPPED_NBYTES:
            yield self
            return
        for number in range(rows.count):
            at = self.start + number * rows.stride * self.stored.itemsize
            target = self.target[number * rows.to_stride :][: rows.numel]
            yield ReadRequest(at, target, self.dtype, self.through)

    @property
    def stored(self) -> torch.dtype:
        return self.dtype or self.target.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.stored.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes can be read straight to the target."""
        is_same_dtype = self.stored == self.target.dtype and self.through in (None, self.stored)
        return is_same_dtype and self.target.device.type == "cpu" and self.rows is None

    def put(self, first: int, values: torch.Tensor) -> None:
        """Copy consecutive elements of the file, from element ``first`` of the request on, to the
        target."""
        if self.rows is None:
            self.target[first : first + values.numel()].copy_(values)
            return
        place = Interval(first, first + values.numel())
        for rows in dataclasses.replace(self.rows, start=0, to=0).within(place):
            size = rows.count, rows.numel
            self.target.as_strided(
                size, (rows.to_stride, 1), self.target.storage_offset() + rows.to
            ).copy_(
                values.as_strided(
                    size, (rows.stride, 1), values.storage_offset() + rows.start - first
                )
            )


def merged(requests: Sequence[ReadRequest]) -> list[ReadRequest]:
    """Return the requests, with those that are adjacent in the file and in memory combined."""
    found: list[ReadRequest] = []
    for request in sorted(requests, key=lambda request: request.start):
        last = found[-1] if found else None
        if (
            last is not None
            and request.is_direct
            and last.is_direct
            and request.start == last.stop
            and _follows(request.target, last.target)
        ):
            whole = last.target.view(torch.uint8).as_strided((request.stop - last.start,), (1,))
            found[-1] = ReadRequest(last.start, whole)
        else:
            found.append(request)
    return found


def _follows(tensor: torch.Tensor, last: torch.Tensor) -> bool:
    same = tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return same and tensor.data_ptr() == last.data_ptr() + last.nbytes


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create a directory and the parents that it lacks, with durable names. Raises OSError."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in new:
        with contextlib.suppress(PermissionError):  # a folder that may be written, but not read
            sync_directory(each.parent)


class _SecondThread:
    """Runs calls in order on a second thread, with a short queue. Runs them in place if no thread
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
        except RuntimeError:  # the interpreter is shutting down, and waits for the current thread
            self._thread = None

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            function, argument, future = call
            try:
                future.set_result(function(argument))
            except BaseException as error:  # raised by ``result``; this thread has more to do
                future.set_exception(error)

    def do(self, function: Callable[[Any], Any], argument: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._thread is None:
            future.set_result(function(argument))
        else:
            self._queue.put((function, argument, future))
        return future

    def end(self) -> None:
        """Return when all calls are done. May be called again."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


class BlockWriter:
    """Writes a new file from start to end and computes its checksums. Never overwrites.

    The memory passed to ``write`` must not change before ``finish``.
    """

    def __init__(self, path: Path, tick: Tick) -> None:
        """Raises OSError, FileExistsError among them."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._tick, self._second_thread = tick, _SecondThread()
        self._nbytes = self._writeback_nbytes = 0
        self._checks: list[Future[None]] = []
        self._checksums: list[int] = []
        self._checksum, self._num_checked = 0, 0  # of the current block

    def write(self, data: memoryview) -> None:
        """Append. Raises OSError, for example if the disk is full."""
        for start in range(0, len(data), BLOCK_NBYTES):
            piece = data[start : start + BLOCK_NBYTES]
            self._checks.append(self._second_thread.do(self._check, piece))
            rest = piece
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._nbytes += len(piece)
            self._tick(len(piece))
            if self._nbytes - self._writeback_nbytes >= WRITEBACK_NBYTES:
                self._start_writeback()

    def _start_writeback(self) -> None:
        """Make the system write its cached bytes to disk now, so that the final fsync is short."""
        if _advise is not None:
            with contextlib.suppress(OSError):
                _advise(
                    self._descriptor,
                    self._writeback_nbytes,
                    self._nbytes - self._writeback_nbytes,
                    os.POSIX_FADV_DONTNEED,
                )
        self._writeback_nbytes = self._nbytes

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
        for check in self._checks:
            check.result()  # raises what a checksum raised
        if self._num_checked:
            self._end_block()
        return FileFacts(self._nbytes, tuple(self._checksums))

    def close(self) -> None:
        """Close the file, complete or not. May be called again."""
        self._second_thread.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Reader:
    """Reads one request: provides memory for the next bytes, and converts them to the target.

    The memory is the target's or, for another dtype or device, a buffer of 4 MiB.
    """

    def __init__(self, request: ReadRequest) -> None:
        self.position = request.start  # of the next byte in the file
        self._request = request
        self._num_done = 0  # elements that were converted
        self._buffer: torch.Tensor | None = None
        self._through = request.through if request.stored.is_floating_point else None
        self._room = memory_of(request.target) if request.is_direct else memoryview(b"")

    @property
    def is_done(self) -> bool:
        return self.position == self._request.stop

    def room(self) -> memoryview:
        """Return memory for the next bytes: at most 4 MiB, and none only once the request is
        done."""
        if not self._room and not self.is_done:
            if self._buffer is None:
                self._buffer = torch.empty(
                    min(self._chunk, self._request.numel), dtype=self._request.stored
                )
            self._room = memory_of(self._buffer[: self._request.numel - self._num_done])
        return self._room[:BLOCK_NBYTES]

    @property
    def _chunk(self) -> int:
        size = self._request.stored.itemsize
        return max(
            1, BLOCK_NBYTES // (size if self._through is None else size + self._through.itemsize)
        )

    def advance(self, nbytes: int) -> None:
        """Take ``nbytes`` more bytes, which are in ``room`` now."""
        self.position += nbytes
        self._room = self._room[nbytes:]
        if self._buffer is not None and not self._room:
            values = self._buffer[: self._request.numel - self._num_done]
            if self._through is not None:
                values = values.to(self._through)
            self._request.put(self._num_done, values)
            self._num_done += values.numel()
            if self.is_done:
                self._buffer = None

    def take(self, data: memoryview) -> int:
        """Copy the next bytes from ``data``, as many as are still needed; return how many."""
        num_taken = 0
        while (piece := data[num_taken:]) and (room := self.room()):
            nbytes = min(len(piece), len(room))
            room[:nbytes] = piece[:nbytes]
            self.advance(nbytes)
            num_taken += nbytes
        return num_taken


def read_plain(path: Path, requests: Sequence[ReadRequest], tick: Tick) -> None:
    """Read requests without checksums: straight to the target or, for another dtype or device,
    through a buffer of 4 MiB.

    Raises CheckpointError if the file ends too early or is not a regular file; OSError.
    """
    descriptor = open_file(path)
    try:
        for request in sorted(requests, key=lambda request: request.start):
            for each in request.one_by_one():
                reader = _Reader(each)
                while room := reader.room():
                    _read_into(descriptor, room, reader.position, path)
                    reader.advance(len(room))
                    tick(len(room))
    finally:
        os.close(descriptor)


def check(path: Path, facts: FileFacts, requests: Sequence[ReadRequest], tick: Tick) -> None:
    """Read each block that a request needs once, compare its checksum, and drop it.

    Raises what ``read_checked`` raises. A later read finds the blocks in the page cache.
    """
    with contextlib.closing(_checked_blocks(path, facts, requests)) as blocks:
        for _, content in blocks:
            tick(len(content))


def read_checked(path: Path, facts: FileFacts, requests: Sequence[ReadRequest], tick: Tick) -> None:
    """Read requests from blocks with correct checksums. No byte is copied before the checksum of
    its block was compared.

    Raises CheckpointError for a file that is missing, has another length, or in which a block has
    changed; OSError.
    """
    waiting = collections.deque(sorted(requests, key=lambda request: request.start))
    with contextlib.closing(_checked_blocks(path, facts, requests)) as blocks:
        readers: list[_Reader] = []
        for start, content in blocks:
            readers = [reader for reader in readers if not reader.is_done]
            while waiting and waiting[0].start < start + len(content):
                readers.append(_Reader(waiting.popleft()))
            for reader in readers:
                tick(reader.take(content[reader.position - start :]))


def _checked_blocks(
    path: Path, facts: FileFacts, requests: Sequence[ReadRequest]
) -> Generator[tuple[int, memoryview], None, None]:
    """Yield (first byte, content) of each block that a request needs, in order, once its checksum
    was compared.

    The content is valid until the next block is yielded. Checksums are computed while the next
    blocks are read.
    """
    try:
        descriptor = open_file(path)
    except FileNotFoundError as error:
        raise damaged(path, f"a file of {facts.nbytes} bytes", "no such file") from error
    try:
        found = os.fstat(descriptor).st_size
        if found != facts.nbytes:
            raise damaged(path, f"a file of {facts.nbytes} bytes", f"{found} bytes")
        blocks, second_thread = _blocks_of(facts.nbytes, requests), _SecondThread()
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
                waiting.append((block, memory, second_thread.do(zlib.crc32, memory)))
            while waiting:
                yield _verified(path, facts, *waiting.popleft())
        finally:
            second_thread.end()
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
            f"{found:08x}: the file was changed, or is from another checkpoint",
        )
    return start, memory


def nbytes_to_check(facts: FileFacts, requests: Sequence[ReadRequest]) -> int:
    """Return how many bytes ``check`` reads: whole blocks."""
    return sum(
        min(BLOCK_NBYTES, facts.nbytes - block * BLOCK_NBYTES)
        for block in _blocks_of(facts.nbytes, requests)
    )


def _blocks_of(nbytes: int, requests: Sequence[ReadRequest]) -> list[int]:
    """Return the blocks that the requests need, in order."""
    found: set[int] = set()
    for request in requests:
        if request.stop > nbytes:
            raise ValueError(f"bytes {request.start} to {request.stop} requested of {nbytes}")
        if request.nbytes:
            found.update(range(request.start // BLOCK_NBYTES, -(-request.stop // BLOCK_NBYTES)))
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
    """Return the error for files that were intact when they were checked, and no longer are:
    ``error`` says why."""
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
        f"{path.name} is not what was saved.",
        expected=expected,
        got=got,
        where=str(path),
        fix="load an older checkpoint, or restore this one from an intact copy; nothing was loaded",
    )
