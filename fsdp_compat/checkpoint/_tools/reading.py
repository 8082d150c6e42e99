"""Values of stored tensors: read from the files piece by piece, through a bounded buffer."""

from __future__ import annotations

import bisect
import collections
import contextlib
import math
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..._comm.host_memory import memory_of
from ..._layout.box import Box
from ...errors import CheckpointError
from .._blocks import BLOCK_NBYTES, FileFacts, damaged
from .._texts import open_file
from .archive import Checksum, Piece, Span, StoredTensor, intersection, row_major, whole

_MAX_OPEN = 64
SLAB_NBYTES = 16 << 20
# Values that are read and written at once: what the processor's caches hold is copied to and from
# the page cache twice as fast as 16 MiB.
AT_ONCE_NBYTES = 1 << 20


class Files:
    """Open files, at most 64 at a time. Safe to use from several threads.

    Of files with checksums each block is compared with its own before anything of it is used, and
    so is each record of a zip archive. compares_records: False if the caller does that itself.
    """

    def __init__(
        self, checksums: Mapping[Path, FileFacts] | None = None, compares_records: bool = True
    ) -> None:
        self._checksums = checksums or {}
        self._compares_records = compares_records
        self._checked: set[tuple[Path, int]] = set()  # blocks, by file and number
        self._records: dict[tuple[Path, Checksum], threading.Lock] = {}
        self._equal: set[tuple[Path, Checksum]] = set()  # records that were compared
        self._open: collections.OrderedDict[Path, int] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
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

    def read_into(
        self, path: Path, start: int, room: memoryview, checksum: Checksum | None = None
    ) -> None:
        """Fill ``room`` from byte ``start`` on. checksum: of the record that the bytes are in.
        Raises CheckpointError if the file ends before, or a checksum is wrong."""
        with self.descriptor(path) as descriptor:
            self.check(path, descriptor, start, len(room), checksum)
            while room:
                num_read = os.preadv(descriptor, [room], start)
                if not num_read:
                    raise _too_short(path, start + len(room))
                room, start = room[num_read:], start + num_read

    def compare(
        self, path: Path, checksum: Checksum, tick: Callable[[int], object] | None = None
    ) -> None:
        """Compare the checksum of a record, unless it was done before. Raises CheckpointError.
        tick: called with the number of bytes just read."""
        key = path, checksum
        if key in self._equal:
            return
        with self._lock:
            lock = self._records.setdefault(key, threading.Lock())
        with lock:
            if key not in self._equal:
                self._compare(path, checksum, tick)
                self._equal.add(key)

    def _compare(
        self, path: Path, checksum: Checksum, tick: Callable[[int], object] | None
    ) -> None:
        found, start, stop = 0, checksum.start, checksum.start + checksum.nbytes
        room = memoryview(bytearray(min(AT_ONCE_NBYTES, checksum.nbytes)))
        while start < stop:
            piece = room[: stop - start]
            self.read_into(path, start, piece)
            found, start = zlib.crc32(piece, found), start + len(piece)
            if tick is not None:
                tick(len(piece))
        if found != checksum.crc32:
            raise damaged(
                path,
                f"checksum {checksum.crc32:08x} of the record at byte {checksum.start}",
                f"{found:08x}",
            )

    def check(
        self,
        path: Path,
        descriptor: int,
        start: int,
        nbytes: int,
        checksum: Checksum | None,
    ) -> None:
        """Compare the checksums of the blocks and of the record of some bytes, unless it was done
        before. Raises CheckpointError. Reading the bytes then finds them in the page cache."""
        if checksum is not None and self._compares_records:
            self.compare(path, checksum)
        facts = self._checksums.get(path)
        if facts is None or not nbytes:
            return
        for number in range(start // BLOCK_NBYTES, (start + nbytes - 1) // BLOCK_NBYTES + 1):
            if (path, number) in self._checked:
                continue
            block = os.pread(descriptor, BLOCK_NBYTES, number * BLOCK_NBYTES)
            if number >= len(facts.checksums) or zlib.crc32(block) != facts.checksums[number]:
                first = number * BLOCK_NBYTES
                raise damaged(
                    path,
                    f"the saved checksum for bytes {first} to {first + BLOCK_NBYTES}",
                    f"{len(block)} bytes with another one",
                )
            self._checked.add((path, number))


def read(tensor: StoredTensor, files: Files) -> torch.Tensor:
    """Return the values of a whole tensor, contiguous, on the CPU."""
    return read_box(tensor, whole(tensor.shape), files)


def boxes_of(shape: tuple[int, ...], max_numel: int) -> Iterator[Box]:
    """Yield boxes that follow one another in row-major order and cover the shape: each contiguous,
    with at most ``max_numel`` elements (but at least one)."""
    if not math.prod(shape):
        return
    if math.prod(shape) <= max(max_numel, 1):
        yield whole(shape)
        return
    row = math.prod(shape[1:])
    rows = max_numel // row
    if not rows:
        for index in range(shape[0]):
            for box in boxes_of(shape[1:], max_numel):
                yield Box((index, *box.offsets), (1, *box.sizes))
        return
    for first in range(0, shape[0], rows):
        offsets = (first, *(0,) * (len(shape) - 1))
        yield Box(offsets, (min(rows, shape[0] - first), *shape[1:]))


def slabs(
    tensor: StoredTensor, files: Files, nbytes: int = SLAB_NBYTES
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield all values in row-major order: the number of the first element, and a 1-D tensor of at
    most ``nbytes``, and 1 MiB. Its memory is used again for the next one."""
    max_numel = max(min(nbytes, AT_ONCE_NBYTES) // tensor.dtype.itemsize, 1)
    buffer = torch.empty(min(max_numel, tensor.numel), dtype=tensor.dtype)
    pieces = sorted(tensor.pieces, key=lambda piece: piece.box.offsets)
    start = first = 0  # the element; the first piece that does not end before it
    for box in boxes_of(tensor.shape, max_numel):
        values = buffer[: box.numel]
        if box.sizes:
            row = box.offsets[0]
            while first < len(pieces) and _end(pieces[first].box) <= row:
                first += 1
            stop = bisect.bisect_left(
                pieces, row + box.sizes[0], first, key=lambda piece: piece.box.offsets[0]
            )
            _read_pieces(tensor.dtype, pieces[first:stop], box, files, values.view(box.sizes))
        else:
            _read_pieces(tensor.dtype, pieces, box, files, values.view(()))
        yield start, values
        start += box.numel


def _end(box: Box) -> int:
    """Return the row behind a box."""
    return box.offsets[0] + box.sizes[0]


def read_box(
    tensor: StoredTensor, box: Box, files: Files, target: torch.Tensor | None = None
) -> torch.Tensor:
    """Read the values of a box of a tensor to ``target`` (of the sizes of the box, contiguous), and
    return it. Raises CheckpointError and OSError."""
    if target is None:
        target = torch.empty(box.sizes, dtype=tensor.dtype)
    _read_pieces(tensor.dtype, tensor.pieces, box, files, target)
    return target


def _read_pieces(
    dtype: torch.dtype, pieces: Sequence[Piece], box: Box, files: Files, target: torch.Tensor
) -> None:
    for piece in pieces:
        common = intersection(piece.box, box)
        if common is not None:
            place = tuple(
                slice(at - origin, at - origin + size)
                for at, origin, size in zip(common.offsets, box.offsets, common.sizes, strict=True)
            )
            _read_part(dtype, piece, common, files, target[place])


def _read_part(
    dtype: torch.dtype, piece: Piece, common: Box, files: Files, target: torch.Tensor
) -> None:
    """Read the values of ``common``, a box inside the piece's."""
    inside = tuple(
        at - origin for at, origin in zip(common.offsets, piece.box.offsets, strict=True)
    )
    source = piece.source
    if isinstance(source, torch.Tensor):
        place = tuple(slice(at, at + size) for at, size in zip(inside, common.sizes, strict=True))
        target.copy_(source[place])
        return
    strides = source.strides
    start = source.start + dtype.itemsize * sum(map(int.__mul__, inside, strides))
    last = sum((size - 1) * stride for size, stride in zip(common.sizes, strides, strict=True))
    numel = last + 1  # from the first to the last element
    if _follow_one_another(common.sizes, strides):
        if target.is_contiguous():
            files.read_into(source.path, start, memory_of(target.reshape(-1)), source.checksum)
        else:
            values = torch.empty(common.sizes, dtype=dtype)
            files.read_into(source.path, start, memory_of(values.view(-1)), source.checksum)
            target.copy_(values)
        return
    _read_strided(source, start, numel, files, target)


def _follow_one_another(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the elements of a box lie in the file in row-major order, without gaps."""
    return all(
        size == 1 or stride == expected
        for size, stride, expected in zip(sizes, strides, row_major(sizes), strict=True)
    )


def _read_strided(source: Span, start: int, numel: int, files: Files, target: torch.Tensor) -> None:
    path, dtype = source.path, target.dtype
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = start - page + numel * dtype.itemsize
    with files.descriptor(path) as descriptor:
        if os.fstat(descriptor).st_size < page + length:
            raise _too_short(path, page + length)
        files.check(path, descriptor, page, length, source.checksum)
        mapped = mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, offset=page)
    # torch.frombuffer keeps the mapping alive; it goes with the tensor.
    flat = torch.frombuffer(mapped, dtype=torch.uint8)[start - page :]
    if (start - page) % dtype.itemsize:
        flat = flat.clone()
    values = flat[: numel * dtype.itemsize].view(dtype)
    target.copy_(values.as_strided(target.shape, source.strides))


def _too_short(path: Path, nbytes: int) -> CheckpointError:
    return CheckpointError.of(
        f"{path.name} ends too early.",
        expected=f"at least {nbytes} bytes",
        got="fewer",
        where=str(path),
        fix="restore the file from an intact copy",
    )
