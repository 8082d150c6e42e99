"""Memory of this process that the other ranks of its host can read: blocks of an arena, and the view of a peer's.

The arena is a few large sparse files without a name (memfd), mapped shared. A peer opens them through ``/proc``, so nothing has to
be agreed on beforehand, nothing depends on the size of /dev/shm, and nothing is left behind by a process that is killed. A block is
handed out as a tensor whose storage is exactly as large as it is, and comes back when that storage dies. Its pages are kept for the
next block: a page fault costs several times as much as filling the page.

Where any part of this cannot be had (no Linux, no /proc, another host, user or pid namespace) there are no neighbours, and messages
travel as everywhere else.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import mmap
import os
import struct
import sys
import threading
import typing
import warnings
import weakref

import torch

__all__ = [
    "CARD_NBYTES",
    "MIN_NBYTES",
    "Location",
    "Neighbour",
    "card",
    "copy_of",
    "empty",
    "locate",
    "meet",
    "renounce",
    "zeros",
]

MIN_NBYTES = 1 << 19  # what is smaller is not worth a block: it is there sooner if it is sent, at 3 and 4 ranks
KEPT_NBYTES = 1 << 30  # pages of freed blocks that wait for the next block; what is freed beyond goes back to the system
CHUNK_NBYTES = 1 << 30  # of address space, at least: a chunk is as large as all before it, so that there are few
ALIGN_NBYTES = 64
PAGE_NBYTES = mmap.PAGESIZE

_TOKEN_NBYTES = 16
_CARD = struct.Struct(f"16sQqq{_TOKEN_NBYTES}s")  # boot, pid namespace, pid, first chunk, token
CARD_NBYTES = _CARD.size
_NO_CARD = bytes(CARD_NBYTES)


class Location(typing.NamedTuple):
    """Where something lies, in words that a neighbour understands."""

    epoch: int  # of the arena, when it was said
    chunk: int  # a file descriptor of its process
    offset: int  # bytes


class _Chunk:
    """One file: its pages come when they are written to. The first one holds the token of the arena and its epoch."""

    def __init__(self, nbytes: int, token: bytes) -> None:
        """Raises OSError where the system does not give it."""
        self.nbytes = nbytes
        self.fd = os.memfd_create("fsdp_compat")
        try:
            os.ftruncate(self.fd, nbytes)
            self.map = mmap.mmap(self.fd, nbytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise OSError(f"no room for a mapping of {nbytes} bytes") from error
        self.view = memoryview(self.map)
        self.address = torch.frombuffer(self.view, dtype=torch.uint8).data_ptr()
        self.view[:_TOKEN_NBYTES] = token
        self.epoch = _epoch_in(self.view)
        self.free = [(PAGE_NBYTES, nbytes)]  # (start, end), by start; neighbours are joined
        self.top = PAGE_NBYTES  # what lies above was never written to: it is zero

    def take(self, nbytes: int) -> int | None:
        """Return the offset of the first place that is large enough."""
        for index, (start, end) in enumerate(self.free):
            if end - start >= nbytes:
                self.free[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def put(self, start: int, nbytes: int) -> None:
        end = start + nbytes
        index = bisect.bisect(self.free, (start, end))
        if index < len(self.free) and self.free[index][0] == end:
            end = self.free.pop(index)[1]
        if index and self.free[index - 1][1] == start:
            index -= 1
            start = self.free.pop(index)[0]
        self.free.insert(index, (start, end))

    def forget_pages(self, start: int, nbytes: int) -> None:
        """Give the pages that lie wholly inside back to the system. They read as zeros then."""
        first, last = -(-start // PAGE_NBYTES) * PAGE_NBYTES, (start + nbytes) // PAGE_NBYTES * PAGE_NBYTES
        if last > first:
            self.map.madvise(mmap.MADV_REMOVE, first, last - first)


class _Arena:
    """The blocks of one process."""

    def __init__(self) -> None:
        self.pid, self.token = os.getpid(), os.urandom(_TOKEN_NBYTES)
        self.chunks: list[_Chunk] = []
        self.is_closed = not _is_supported()
        self._lock = threading.Lock()
        # A block may die inside of any allocation, this one's too: what is returned waits here for the next one that takes.
        self._returned: collections.deque[tuple[_Chunk, int, int]] = collections.deque()
        self._kept_nbytes = 0  # about: pages of free blocks

    def open(self) -> bool:
        """Make sure that there is a first chunk; False where there can be none."""
        if not self.chunks and not self.is_closed:
            with self._lock:
                self._grow(0)
        return bool(self.chunks)

    def take(self, nbytes: int, zero: bool) -> memoryview | None:
        """Return a block, which comes back when nothing holds it any more, or None where there is no more room."""
        if self.is_closed and not self.chunks:
            return None
        size = -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        with self._lock:
            while self._returned:
                chunk, start, its = self._returned.popleft()
                chunk.put(start, its)
            found = self._find(size) or (self._find(size) if self._grow(size) else None)
            if found is None:
                return None
            chunk, start = found
            written = min(start + size, chunk.top) - start
            chunk.top = max(chunk.top, start + size)
            if written > 0:
                self._kept_nbytes = max(self._kept_nbytes - written, 0)
        block = chunk.view[start : start + nbytes]
        weakref.finalize(block, self._give_back, chunk, start, size).atexit = False
        if zero and written > 0:
            ctypes.memset(chunk.address + start, 0, min(written, nbytes))
        return block

    def _find(self, size: int) -> tuple[_Chunk, int] | None:
        for chunk in self.chunks:
            start = chunk.take(size)
            if start is not None:
                return chunk, start
        return None

    def _grow(self, size: int) -> bool:
        if self.is_closed:
            return False
        needed = -(-size // PAGE_NBYTES) * PAGE_NBYTES + PAGE_NBYTES
        try:
            self.chunks.append(_Chunk(max(needed, CHUNK_NBYTES, sum(chunk.nbytes for chunk in self.chunks)), self.token))
        except OSError:
            self.is_closed = True  # no descriptors or addresses: what is asked for from now on is ordinary memory
        return not self.is_closed

    def _give_back(self, chunk: _Chunk, start: int, size: int) -> None:
        if os.getpid() != self.pid:
            return
        if self._kept_nbytes + size > KEPT_NBYTES:
            chunk.forget_pages(start, size)
        else:
            self._kept_nbytes += size
        self._returned.append((chunk, start, size))

    def chunk_of(self, address: int) -> _Chunk | None:
        return next((chunk for chunk in self.chunks if chunk.address <= address < chunk.address + chunk.nbytes), None)


def _is_supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


_arena = _Arena()


def _leave_parents() -> None:
    """In a forked process: what it writes from now on is its own, as everywhere else after a fork, and nobody maps it."""
    global _arena
    parents, _arena = _arena, _Arena()
    for chunk in parents.chunks:
        _map_privately(chunk)


def _map_privately(chunk: _Chunk) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    libc.mmap(chunk.address, chunk.nbytes, access, flags, chunk.fd, 0)


_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; Python's mmap does not name them

os.register_at_fork(after_in_child=_leave_parents)


# -- this process's


def empty(numel: int, dtype: torch.dtype, *, zero: bool = False) -> torch.Tensor:
    """Return a new tensor [numel] on the CPU without values, in a block where it is large enough and can be had."""
    nbytes = numel * dtype.itemsize
    block = _arena.take(nbytes, zero) if nbytes >= MIN_NBYTES else None
    if block is None:
        return torch.zeros(numel, dtype=dtype, device="cpu") if zero else torch.empty(numel, dtype=dtype, device="cpu")
    return torch.frombuffer(block, dtype=dtype)


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The same, of zeros. Pages that nobody has written to yet are not touched."""
    return empty(numel, dtype, zero=True)


def copy_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of a 1-D tensor, in ``dtype``, in a block; of MIN_NBYTES and more.

    Raises MemoryError where there is no room for one.
    """
    found = empty(tensor.numel(), dtype or tensor.dtype)
    if locate(found) is None:
        raise MemoryError(f"no shared memory for a message of {found.nbytes} bytes")
    return found.copy_(tensor)


def can_share() -> bool:
    """True if blocks can be had."""
    return _arena.open()


def locate(tensor: torch.Tensor) -> Location | None:
    """Where a contiguous tensor lies in this process's blocks; None: elsewhere. One without elements lies anywhere."""
    if not tensor.numel():
        return Location(now(), _arena.chunks[0].fd, 0) if _arena.chunks else None
    address = tensor.data_ptr()
    chunk = _arena.chunk_of(address)
    return None if chunk is None or not tensor.is_contiguous() else Location(now(), chunk.fd, address - chunk.address)


def now() -> int:
    """The epoch of this process's blocks."""
    return _arena.chunks[0].epoch[0] if _arena.chunks else 0


def renounce() -> None:
    """From now on blocks are no longer what this process has said of them. Who reads one looks at the epoch afterwards."""
    if _arena.chunks:
        _arena.chunks[0].epoch[0] += 1


# -- other processes'


def card() -> bytes:
    """What another process needs to find this one's memory. CARD_NBYTES."""
    if not can_share():
        return _NO_CARD
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = bytes.fromhex(file.read().strip().replace("-", ""))
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError):
        return _NO_CARD
    return _CARD.pack(boot, namespace, os.getpid(), _arena.chunks[0].fd, _arena.token)


class Neighbour:
    """Another process whose blocks this one can read."""

    def __init__(self, pid: int, first: int, token: bytes) -> None:
        """Raises OSError where they cannot be read, or are not those that the token belongs to."""
        self._pid, self._token = pid, token
        self._chunks: dict[int, _Mapped] = {}  # by file descriptor
        self._epoch = _epoch_in(self._chunk(first).view)

    def _chunk(self, fd: int) -> _Mapped:
        found = self._chunks.get(fd)
        if found is None:
            with open(f"/proc/{self._pid}/fd/{fd}", "rb") as file:
                found = _Mapped(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            if found.view[:_TOKEN_NBYTES] != self._token:
                raise OSError("a process of the same number has other memory")
            self._chunks[fd] = found
        return found

    @property
    def epoch(self) -> int:
        """Where it has changed since a location was said, what lies there may be something else."""
        return self._epoch[0]

    def view(self, place: Location, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what lies there, [numel], to be read only. Raises OSError where it cannot be read any more."""
        chunk = self._chunk(place.chunk)
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        # Of its own size: a view of the whole chunk would look like gigabytes to whoever adds up what tensors hold.
        held: typing.Any = (ctypes.c_ubyte * (numel * dtype.itemsize)).from_address(chunk.address + place.offset)
        held.chunk = chunk
        return torch.frombuffer(held, dtype=dtype)


class _Mapped:
    """A chunk of another process."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.view = memoryview(memory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it knows no memory that cannot be written to
            self.address = torch.frombuffer(self.view, dtype=torch.uint8).data_ptr()


def _epoch_in(chunk: memoryview) -> memoryview:
    """The epoch of the arena whose first chunk it is."""
    return chunk[_TOKEN_NBYTES : _TOKEN_NBYTES + 8].cast("q")


_neighbours: weakref.WeakValueDictionary[bytes, Neighbour] = weakref.WeakValueDictionary()


def meet(its_card: bytes) -> Neighbour | None:
    """Return the process of a card as one whose memory can be read from here, or None where it cannot."""
    own = card()
    if _NO_CARD in (its_card, own) or own[:24] != its_card[:24]:
        return None
    found = _neighbours.get(its_card)
    if found is None:
        _, _, pid, first, token = _CARD.unpack(its_card)
        try:
            found = _neighbours[its_card] = Neighbour(pid, first, token)
        except (OSError, ValueError):
            return None
    return found
