"""Tensors in memory that the other ranks of this host can read: ``allocate`` puts them into blocks
of this process's arena, and ``locate`` says where a tensor lies. If the system runs out of
descriptors or addresses, new tensors are ordinary memory.

The blocks lie in a few large, sparse, anonymous files (memfd), mapped shared. Peers open them
through ``/proc``: there are no names to agree on, and a killed process leaves nothing behind. A
block returns when its buffer dies; its pages are kept for the next block, because a page fault
costs several times as much as filling the page.

Forks. The child must keep seeing the memory as it was, so the parent stops writing to its files: a
fork *freezes* every file that holds a live block. From then on parent and child both map it
privately, which copies the pages that either writes to, and the parent maps a new file at the free
addresses of the chunk. A block *thaws*, by a copy into the new file, when it is sent again. So a
fork costs a few system calls, and all forks between two gathers together cost one copy of this
rank's shards.

Children forked by C code run no Python hooks. They lack the blocks, so that they cannot read torn
weights or write to the parent's, and get a segmentation fault if they try."""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import mmap
import os
import threading
import typing
import weakref

import torch
from torch import Tensor

from . import memory_files
from .memory_files import PAGE_NBYTES, MappedFile, SealedFile, refusal_of

KEPT_NBYTES = 1 << 30  # pages of freed blocks for the next block; the rest returns to the system
CHUNK_NBYTES = 1 << 30  # least address space of a chunk: each is as large as all before together


class Location(typing.NamedTuple):
    """Where a tensor lies, as other processes find it."""

    chunk: int  # index
    number: int  # of the file of the chunk: its inode
    fd: int  # of that file, in its process
    offset: int  # bytes


class Chunk:
    """A range of addresses and the file mapped there, whose pages are allocated when written to.

    ``frozen`` blocks are private mappings of an earlier file. A chunk that has lost its file at a
    fork has only private blocks, and hands out no more."""

    def __init__(self, index: int, nbytes: int) -> None:
        """Raises OSError if the system refuses."""
        self.index, self.nbytes = index, nbytes
        self.file: SealedFile | None = SealedFile(nbytes)
        # from before forks: a peer may have received a descriptor and not opened it yet
        self.old_files: list[SealedFile] = []
        self._memory = MappedFile(self.file.fd)
        self.address, self.view = self._memory.address, self._memory.view
        self.taken: dict[int, int] = {}  # by start: size
        self.frozen: list[int] = []  # starts, in order
        self.top = 0  # memory above was never written to: it is zero

    @property
    def free(self) -> list[tuple[int, int]]:
        """The ranges (start, end) between blocks, in order."""
        starts = sorted(self.taken)
        ends = [0, *(start + self.taken[start] for start in starts)]
        return [
            (end, start)
            for end, start in zip(ends, [*starts, self.nbytes], strict=True)
            if end < start
        ]

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a new block, or None if no free range is large enough."""
        for start, end in () if self.file is None else self.free:
            if end - start >= nbytes:
                self.taken[start] = nbytes
                return start
        return None

    def put(self, start: int, nbytes: int) -> None:
        del self.taken[start]
        if self.file is not None and start in self.frozen:
            memory_files.map_shared(self.address + start, nbytes, self.file.fd, start)
            self.frozen.remove(start)

    def forget_pages(self, start: int, nbytes: int) -> None:
        """Return pages to the system, except of a frozen block, which are not the file's."""
        if start not in self.frozen:
            with contextlib.suppress(OSError):  # another thread is forking
                memory_files.advise(self.address + start, nbytes, mmap.MADV_REMOVE)

    def freeze(self) -> int:
        """Prepare for a fork. Return how many bytes of free blocks were returned to the system. If
        it raises OSError, the chunk has lost its file."""
        live = sorted(self.taken.keys() - set(self.frozen))
        if not live or self.file is None:
            return 0
        old, free = self.file, self.free
        self.old_files.append(old)
        # if anything below fails, the chunk has no file
        self.frozen, self.file = sorted(self.taken), None
        for start in live:
            memory_files.map_private(self.address + start, self.taken[start], old.fd, start)
        new = SealedFile(self.nbytes)
        forgotten = 0
        for start, end in free:
            written = min(end, self.top) - start
            if written > 0:
                forgotten += written
                memory_files.advise(self.address + start, written, mmap.MADV_REMOVE)
            memory_files.map_shared(self.address + start, end - start, new.fd, start)
        self.file = new
        self.top = max(start + size for start, size in self.taken.items())
        return forgotten

    def locate(self, offset: int) -> Location | None:
        """Return a place in the file, after thawing the block there; None if that is impossible."""
        # read before `frozen`: a fork in another thread freezes first, and until then the old file
        # holds the right values
        file = self.file
        if self.frozen:
            with arena.lock:
                file = self._thaw(offset)
        return None if file is None else Location(self.index, file.number, file.fd, offset)

    def _thaw(self, offset: int) -> SealedFile | None:
        """Move the block at this offset into the file. Return the file, or None if it lacks it."""
        index = bisect.bisect(self.frozen, offset) - 1
        start = self.frozen[index] if index >= 0 else 0
        end = start + self.taken.get(start, 0)
        if self.file is None or offset >= end:
            return self.file
        try:
            written = start
            while written < end:
                written += os.pwrite(self.file.fd, self.view[written:end], written)
            memory_files.map_shared(self.address + start, end - start, self.file.fd, start)
        except OSError:
            return None
        del self.frozen[index]
        return self.file


class Arena:
    """The blocks of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.chunks: list[Chunk] = []
        self.refusal = "no files in memory"  # the last one of the system
        self.lock = threading.RLock()
        # A block may die during any allocation, even one of the arena's: it waits here for the next
        # call of `take`.
        self._returned: collections.deque[tuple[Chunk, int, int]] = collections.deque()
        self._kept_nbytes = 0  # approximately: pages of free blocks

    def take(self, nbytes: int, zero: bool) -> memoryview | None:
        """Return a block, freed with its last reference, or None if there is no more memory."""
        size = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        with self.lock:
            self._take_back()
            found = self._find(size) or (self.grow(size) and self._find(size))
            if not found:
                return None
            chunk, start = found
            written = max(min(start + size, chunk.top) - start, 0)
            chunk.top = max(chunk.top, start + size)
            self._kept_nbytes = max(self._kept_nbytes - written, 0)
        block = chunk.view[start : start + nbytes]
        weakref.finalize(block, self._give_back, chunk, start, size).atexit = False
        if zero:
            ctypes.memset(chunk.address + start, 0, min(written, nbytes))
        return block

    def _take_back(self) -> None:
        while self._returned:
            chunk, start, size = self._returned.popleft()
            chunk.put(start, size)

    def _find(self, size: int) -> tuple[Chunk, int] | None:
        for chunk in self.chunks:
            start = chunk.take(size)
            if start is not None:
                return chunk, start
        return None

    def grow(self, size: int) -> bool:
        """Add a chunk with a free range of whole pages. Return False if the system refuses."""
        if not memory_files.are_supported():
            return False
        needed, all_before = size or PAGE_NBYTES, sum(each.nbytes for each in self.chunks)
        for nbytes in (max(needed, CHUNK_NBYTES, all_before), needed):
            try:
                self.chunks.append(Chunk(len(self.chunks), nbytes))
                return True
            except OSError as error:
                self.refusal = refusal_of(error)
        return False

    def _give_back(self, chunk: Chunk, start: int, size: int) -> None:
        if os.getpid() != self.pid:
            memory_files.unmap_in(os.getpid(), chunk.address + start, size)
            return
        if self._kept_nbytes + size > KEPT_NBYTES:
            chunk.forget_pages(start, size)
        else:
            self._kept_nbytes += size
        self._returned.append((chunk, start, size))

    def freeze(self) -> None:
        self._take_back()
        for chunk in self.chunks:
            with contextlib.suppress(OSError):  # the fork goes on
                self._kept_nbytes = max(self._kept_nbytes - chunk.freeze(), 0)


_num_forks = 0
arena = Arena()  # of this process


def num_forks() -> int:
    """Return how often this process has forked; each fork may move tensors to another file. Under
    the lock, so that a fork in another thread is counted exactly if it has frozen blocks: a
    location that was requested afterwards is stale only if the count has changed."""
    with arena.lock:
        return _num_forks


def _before_fork() -> None:
    global _num_forks
    arena.lock.acquire()  # held during the fork: no block is taken or thawed meanwhile
    arena.freeze()
    _num_forks += 1


def _after_fork_in_child() -> None:
    global arena
    for chunk in arena.chunks:  # close the parent's files; private mappings stay
        chunk.file = None
        chunk.old_files.clear()
    arena = Arena()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: arena.lock.release(),
    after_in_child=_after_fork_in_child,
)


def allocate(numel: int, dtype: torch.dtype, *, zero: bool = False) -> Tensor:
    """Return a CPU tensor [numel], uninitialised unless ``zero``, in a block if there is memory.
    Pages that were never written to are not touched."""
    nbytes = numel * dtype.itemsize
    block = arena.take(nbytes, zero) if nbytes else None
    if block is None:
        make = torch.zeros if zero else torch.empty
        return make(numel, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(block, dtype=dtype)
    vars(tensor.untyped_storage())["resize_"] = _resize  # of this storage, through any view of it
    return tensor


def _resize(nbytes: int) -> None:
    """``resize_`` of a storage in a block. Clients free a model by ``resize_(0)``, but other ranks
    may still be reading: the memory is freed with its last tensor instead."""
    if nbytes:
        raise RuntimeError("memory that fsdp_compat shares with other ranks cannot be resized")


def locate(tensor: Tensor) -> Location | None:
    """Return where a contiguous tensor lies in this process's blocks, or None. A tensor without
    elements lies anywhere."""
    if not tensor.numel():
        return Location(0, 0, 0, 0)
    address = tensor.data_ptr()
    for chunk in arena.chunks:
        if 0 <= address - chunk.address < chunk.nbytes:
            return chunk.locate(address - chunk.address) if tensor.is_contiguous() else None
    return None


def first_location() -> Location | None:
    """Return the start of a chunk that peers can map, or None if there is none."""
    if not arena.chunks:
        with arena.lock:
            arena.grow(0)
    files = ((chunk.index, chunk.file) for chunk in arena.chunks)
    return next((Location(index, file.number, file.fd, 0) for index, file in files if file), None)


def forget_old_files() -> None:
    """Close the files from before forks. Only while no peer has anything left to read."""
    for chunk in arena.chunks:
        chunk.old_files.clear()
