"""Values of stored tensors: reads are planned, checked and carried out, in three steps.

A plan is a list of `Read`. Adjacent reads become one. Bytes go straight to their target if it has
their dtype and order, and through a buffer of 4 MiB otherwise."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import threading
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from .._comm.host_memory import memory_of
from .._engine.device import has_streams
from .._layout.box import Box
from .._layout.spec import extent
from .._progress import Tick, no_tick
from . import blocks
from .archive import Checksum, Span, StoredTensor
from .blocks import FileFacts, SecondThread, damaged
from .texts import identity_of, open_file
from .walk import map_values

_MAX_OPEN = 64
_SAMPLE_NUMEL = 4096
SLAB_NBYTES = 16 << 20  # of values, and of what is computed from them, in memory in each thread
AT_ONCE_NBYTES = 1 << 20  # read and written at once: what caches hold is copied twice as fast
SKIPPED_NBYTES = 4096  # between two rows: from here on, two system calls take less than reading it
NUM_BUFFERS = 4  # blocks in memory that are being read, or whose checksums are being computed


# -- what is read


@dataclasses.dataclass(frozen=True)
class Read:
    """Elements of a file or of memory, and their target, of the same sizes and any dtype."""

    source: Span | torch.Tensor
    dtype: torch.dtype  # of the source
    target: torch.Tensor
    through: torch.dtype | None = None  # round floating-point values to this dtype first

    @staticmethod
    def of_bytes(path: Path, start: int, target: torch.Tensor) -> Read:
        """target: 1-D, of bytes."""
        return Read(Span(path, start, (1,)), torch.uint8, target)

    @property
    def span(self) -> Span:
        assert isinstance(self.source, Span)
        return self.source

    @property
    def start(self) -> int:
        """The first byte in the file."""
        return self.span.start

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes in the file from the first to the last element, gaps included."""
        return extent(self.target.shape, self.span.strides) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    @property
    def most(self) -> int:
        """The largest part in bytes. Rounded values are in memory beside it."""
        return blocks.BLOCK_NBYTES // (1 if self.through is None else 2)

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the file are those of the target."""
        return (
            self.dtype == self.target.dtype
            and self.through in (None, self.dtype)
            and self.target.device.type == "cpu"
            and self.nbytes == self.target.nbytes
            and self.target.stride() == self.span.strides
        )

    def in_file_order(self) -> Read:
        """Return the read with its dims in the order of the file, contiguous ones joined."""
        dims: list[tuple[int, int, int]] = []  # size, stride in the file, stride in the target
        for stride, its, size in sorted(
            zip(self.span.strides, self.target.stride(), self.target.shape, strict=True),
            reverse=True,
        ):
            if size == 1:
                continue
            if dims and dims[-1][1:] == (size * stride, size * its):
                size *= dims.pop()[0]
            dims.append((size, stride, its))
        sizes, strides, its_strides = zip(*(dims or [(1, 1, 1)]), strict=True)
        span = dataclasses.replace(self.span, strides=strides)
        target = self.target.as_strided(sizes, its_strides)
        return dataclasses.replace(self, source=span, target=target)

    def parts(self) -> Iterator[Read]:
        """Yield ranges of at most a block. Dims are in the order of the file."""
        strides, sizes, most = self.span.strides, self.target.shape, self.most
        itemsize = self.dtype.itemsize
        inner = [extent(sizes[dim + 1 :], strides[dim + 1 :]) for dim in range(len(sizes))]
        skips = any(
            size > 1 and (stride - its) * itemsize >= SKIPPED_NBYTES
            for size, stride, its in zip(sizes, strides, inner, strict=True)
        )
        if not skips and self.nbytes <= most:
            yield self
            return
        at_once = 1 if skips else max((most // itemsize - inner[0]) // strides[0] + 1, 1)
        first = 0
        while first < sizes[0]:
            start = self.start + first * strides[0] * itemsize
            number = min(at_once, sizes[0] - first)
            if strides[0] == 1 and (beyond := start % most):  # to the end of the block
                number = min(number, -(-(most - beyond) // itemsize))
            span, target = dataclasses.replace(self.span, start=start), self.target
            if number == 1 and len(sizes) > 1:
                span, target = dataclasses.replace(span, strides=strides[1:]), target[first]
            else:
                target = target[first : first + number]
            yield from dataclasses.replace(self, source=span, target=target).parts()
            first += number

    def put(self, content: torch.Tensor) -> None:
        """Copy the values to the target. content: 1-D, the bytes in the file."""
        if content.storage_offset() % self.dtype.itemsize:
            content = content.clone()
        values = content.view(self.dtype).as_strided(self.target.shape, self.span.strides)
        if self.through is not None and self.dtype.is_floating_point:
            values = values.to(self.through)
        self.target.copy_(
            values, non_blocking=has_streams(self.target.device) and values.is_pinned()
        )


def reads_of(
    tensor: StoredTensor, box: Box, target: torch.Tensor, through: torch.dtype | None = None
) -> list[Read]:
    """Plan to read the values of a box of a tensor to ``target``, of the sizes of the box."""
    return [
        Read(piece.source, tensor.dtype, target[piece.box.in_part(box.offsets).index], through)
        for piece in tensor.pieces_in(box)
    ]


def merged(reads: Iterable[Read]) -> list[Read]:
    """Return the reads of one file in its order, joined if adjacent in the file and in memory."""
    found: list[Read] = []
    for read in sorted(reads, key=lambda read: read.start):
        if not read.target.numel():
            continue
        read = read.in_file_order()
        if read.is_direct:
            target = read.target.as_strided((read.target.numel(),), (1,)).view(torch.uint8)
            read = Read.of_bytes(read.span.path, read.start, target)
            last = found[-1] if found else None
            if (
                last is not None
                and last.is_direct
                and last.stop == read.start
                and last.target.data_ptr() + last.nbytes == target.data_ptr()
                and last.target.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
            ):
                together = last.target.as_strided((last.nbytes + read.nbytes,), (1,))
                found[-1] = Read.of_bytes(read.span.path, last.start, together)
                continue
        found.append(read)
    return found


# -- files


class Files:
    """Open files, at most 64 at a time. Safe to use from several threads.

    Each block or zip record with a checksum is compared before anything of it is used.
    compares_records: False if the caller compares the records."""

    def __init__(
        self, checksums: Mapping[Path, FileFacts] | None = None, compares_records: bool = True
    ) -> None:
        self._checksums = checksums or {}
        self._compares_records = compares_records
        self._compared: set[tuple[Path, int | Checksum]] = set()  # blocks, by number, and records
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *unused: object) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    @contextlib.contextmanager
    def descriptor(self, path: Path) -> Iterator[int]:
        """Yield a descriptor of a regular file. Raises OSError and CheckpointError."""
        with self._lock:
            descriptor = self._open.pop(path, None)
        if descriptor is None:
            descriptor = open_file(path)
        try:
            yield descriptor
        finally:
            with self._lock:
                if path in self._open or len(self._open) >= _MAX_OPEN:
                    os.close(descriptor)
                else:
                    self._open[path] = descriptor

    # -- reading

    def read(self, reads: Iterable[Read], tick: Tick = no_tick, anew: bool = False) -> None:
        """Read values to their targets. No byte is copied before its checksum was compared: once,
        or with ``anew`` in the memory that it is copied from.

        Raises CheckpointError for files that are missing, truncated or changed; OSError."""
        reads = list(reads)
        for read in reads:
            if isinstance(read.source, torch.Tensor):
                read.target.copy_(read.source)
        for path, of_file in _by_file(reads).items():
            for read in of_file if self._compares_records else ():
                if read.span.checksum is not None:
                    self.compare(path, read.span.checksum)
            if anew and path in self._checksums:
                self._read_anew(path, merged(of_file), tick)
            else:
                self._read_plain(path, merged(of_file), tick)
        self.require_unchanged(reads)

    def require_unchanged(self, reads: Iterable[Read]) -> None:
        """Raise CheckpointError for a file that has changed since it was opened; OSError."""
        for path, of_file in _by_file(reads).items():
            if known := {read.span.file for read in of_file} - {None}:
                with self.descriptor(path) as descriptor:
                    if known != {identity_of(descriptor)}:
                        expected = "the file in which the tensors were found, unchanged"
                        raise damaged(path, expected, "a file that was replaced or written to")

    def _read_plain(self, path: Path, reads: Sequence[Read], tick: Tick) -> None:
        if path in self._checksums:
            self.check_blocks(path, self._checksums[path].blocks_of(reads))
        sizes = (min(read.nbytes, read.most) for read in reads if not read.is_direct)
        buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8)
        with self.descriptor(path) as descriptor:
            for part in (part for read in reads for part in read.parts()):
                if part.is_direct:
                    _read_into(descriptor, memory_of(part.target), part.start, path)
                else:
                    _read_into(descriptor, memory_of(buffer)[: part.nbytes], part.start, path)
                    part.put(buffer[: part.nbytes])
                tick(part.nbytes)

    def _read_anew(self, path: Path, reads: Sequence[Read], tick: Tick) -> None:
        parts = collections.deque(
            sorted((part for read in reads for part in read.parts()), key=lambda part: part.start)
        )
        before = torch.empty(0, dtype=torch.uint8)  # the end of the blocks before
        numbers = self._checksums[path].blocks_of(reads)
        devices = {read.target.device for read in reads if has_streams(read.target.device)}
        with contextlib.closing(self._blocks(path, numbers, bool(devices))) as found:
            for start, block in found:
                stop = start + len(block)
                while parts and parts[0].stop <= stop:
                    part = parts.popleft()
                    first = part.start - start
                    if first < 0:
                        part.put(torch.cat((before[first:], block))[: part.nbytes])
                    else:
                        part.put(block[first : first + part.nbytes])
                    tick(part.nbytes)
                if parts and parts[0].start < stop:
                    before = block.clone()
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()

    # -- checksums

    def check(self, reads: Sequence[Read], tick: Tick = no_tick) -> None:
        """Check each block that a read needs, once, and that files are unchanged, as ``read``."""
        self.require_unchanged(reads)
        for path, numbers in self._blocks_of(reads):
            self.check_blocks(path, numbers, tick)

    def nbytes_to_check(self, reads: Iterable[Read]) -> int:
        """Return how many bytes ``check`` reads: whole blocks."""
        found = ((self._checksums[path], numbers) for path, numbers in self._blocks_of(reads))
        return sum(len(facts.block(number)) for facts, numbers in found for number in numbers)

    def _blocks_of(self, reads: Iterable[Read]) -> list[tuple[Path, list[int]]]:
        return [
            (path, self._checksums[path].blocks_of(of_file))
            for path, of_file in sorted(_by_file(reads).items())
            if path in self._checksums
        ]

    def check_blocks(self, path: Path, numbers: Sequence[int], tick: Tick = no_tick) -> None:
        """Compare the checksums of blocks of a file, unless it was done before. Raises what
        ``read`` raises."""
        numbers = [number for number in numbers if (path, number) not in self._compared]
        if not numbers:
            return
        with contextlib.closing(self._blocks(path, numbers)) as found:
            for _, content in found:
                tick(len(content))
        self._compared.update((path, number) for number in numbers)

    def compare(self, path: Path, checksum: Checksum, tick: Tick = no_tick) -> None:
        """Compare the checksum of a record, unless it was done before. Raises CheckpointError."""
        if (path, checksum) in self._compared:
            return
        found, start, stop = 0, checksum.start, checksum.start + checksum.nbytes
        room = memoryview(bytearray(min(AT_ONCE_NBYTES, checksum.nbytes)))
        with self.descriptor(path) as descriptor:
            if hasattr(os, "posix_fadvise"):  # read from the disk what follows, too
                os.posix_fadvise(descriptor, start, 2 * checksum.nbytes, os.POSIX_FADV_WILLNEED)
            while start < stop:
                piece = room[: stop - start]
                _read_into(descriptor, piece, start, path)
                found, start = zlib.crc32(piece, found), start + len(piece)
                tick(len(piece))
        if found != checksum.crc32:
            what = f"checksum {checksum.crc32:08x} of the record at byte {checksum.start}"
            raise damaged(path, what, f"{found:08x}")
        self._compared.add((path, checksum))

    def _blocks(
        self, path: Path, numbers: Sequence[int], is_pinned: bool = False
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yield (first byte, content) of blocks whose checksums fit; it is valid until the next, or
        if it is pinned, until copies of it have ended: then torch uses the memory again."""
        facts = self._checksums[path]
        num_buffers = min(len(numbers), NUM_BUFFERS)
        buffers = [_new_block() for _ in range(num_buffers)] if not is_pinned else []
        waiting: collections.deque[tuple[int, torch.Tensor, Future[int]]] = collections.deque()
        with contextlib.ExitStack() as at_end:
            descriptor = _opened(path, facts)
            at_end.callback(os.close, descriptor)
            second_thread = SecondThread()
            at_end.callback(second_thread.end)
            for turn, number in enumerate([*numbers, *[None] * num_buffers]):
                if number is not None:
                    room = _new_block(is_pinned) if is_pinned else buffers[turn % num_buffers]
                    block = room[: len(facts.block(number))]
                    memory = memory_of(block)
                    _read_into(descriptor, memory, facts.block(number).start, path)
                    waiting.append((number, block, second_thread.do(zlib.crc32, memory)))
                if waiting and (number is None or len(waiting) == num_buffers):
                    first, block, checksum = waiting.popleft()
                    start, expected = facts.block(first).start, facts.checksums[first]
                    if (got := checksum.result()) != expected:
                        what = f"checksum {expected:08x} of the block at byte {start}"
                        raise damaged(path, what, f"checksum {got:08x}")
                    yield start, block


def _new_block(is_pinned: bool = False) -> torch.Tensor:
    return torch.empty(blocks.BLOCK_NBYTES, dtype=torch.uint8, pin_memory=is_pinned)


def _opened(path: Path, facts: FileFacts) -> int:
    """Open a file that must have its length."""
    expected = f"a file of {facts.nbytes} bytes"
    try:
        descriptor = open_file(path)
    except FileNotFoundError as error:
        raise damaged(path, expected, "no such file") from error
    if (nbytes := os.fstat(descriptor).st_size) != facts.nbytes:
        os.close(descriptor)
        raise damaged(path, expected, f"{nbytes} bytes")
    return descriptor


def _by_file(reads: Iterable[Read]) -> dict[Path, list[Read]]:
    found: dict[Path, list[Read]] = {}
    for read in reads:
        if isinstance(read.source, Span):
            found.setdefault(read.source.path, []).append(read)
    return found


def _read_into(descriptor: int, memory: memoryview, start: int, path: Path) -> None:
    while memory:
        num_read = os.preadv(descriptor, [memory], start)
        if not num_read:
            what = f"at least {start + len(memory)} bytes"
            raise damaged(path, what, f"the file ends at {start}")
        memory, start = memory[num_read:], start + num_read


# -- values of tensors


def read(tensor: StoredTensor, files: Files) -> torch.Tensor:
    """Return the values of a whole tensor, contiguous, on the CPU."""
    return read_box(tensor, Box.of_whole(tensor.shape), files)


def read_box(tensor: StoredTensor, box: Box, files: Files) -> torch.Tensor:
    """Return the values of a box of a tensor. Raises CheckpointError and OSError."""
    target = torch.empty(box.sizes, dtype=tensor.dtype)
    files.read(reads_of(tensor, box, target))
    return target


def values_of(
    tensor: StoredTensor, files: Files, max_numel: int, tick: Tick
) -> Iterator[torch.Tensor]:
    """Yield the values of a tensor, at most ``max_numel`` elements at a time."""
    for box in Box.of_whole(tensor.shape).cut(max_numel):
        yield (values := read_box(tensor, box, files))
        tick(values.nbytes)


def sample(tensor: StoredTensor, files: Files, num_parts: int = 1) -> bytes:
    """Return the first and the last values of about ``num_parts`` parts, which copies share."""
    found = []
    for part in Box.of_whole(tensor.shape).cut(max(_SAMPLE_NUMEL, tensor.numel // num_parts)):
        first = next(part.cut(_SAMPLE_NUMEL))
        to_last = tuple(map(int.__sub__, part.sizes, first.sizes))
        found += [read_box(tensor, box, files) for box in (first, first.moved(to_last))]
    return b"".join(bytes(memory_of(values)) for values in found)


def read_all(value: Any, files: Files) -> Any:
    """Return nested values with the tensors in them read."""
    return map_values(
        value, lambda leaf: read(leaf, files) if isinstance(leaf, StoredTensor) else leaf
    )
