"""How the ranks of an axis find, read and map each other's memory on their host.

Mapped shards are an all-gather without a copy. Where every shard begins and ends at a page
boundary, a rank can map the shards of all ranks one after the other: the mapping *is* the
all-gather output, permanently, so the host holds a single copy of the parameters.

The pages are mapped privately: a write to an unsharded parameter is copy-on-write, and
``forget_writes`` drops the copied pages. With a shared mapping a write would reach all ranks; with
a read-only one it would crash the process."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import stat
import typing
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..board.processes import Process
from ..transport import ShardMapping
from . import memory_files
from .counters import PeerTable
from .memory_files import PAGE_NBYTES, MappedFile, unmap_in
from .shared_memory import Location

MAX_MAPPED = 1 << 14  # shards mapped by this process; the system has a limit of 65,530 mappings

PAGEMAP = "/proc/self/pagemap"
# bits of its entries, of 8 bytes per page: the page exists, and it belongs to a file
_EXISTS, _OF_A_FILE = -1 << 62, 1 << 61

_num_mapped = 0


class PeerArena:
    """Another process's blocks. What it says is checked: the file is the one that it has named and
    is sealed, so that it cannot shrink, and the location lies inside. Raises OSError otherwise, or
    if the system refuses."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._chunks: dict[int, MappedFile] = {}  # by index: the latest file

    @contextlib.contextmanager
    def descriptor(self, fd: int, number: int) -> Iterator[int]:
        """Open a file of the process for reading, inside the context."""
        path, name = f"/proc/{self._pid}/fd/{fd}", f"descriptor {fd} of process {self._pid}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device may have an effect
            raise OSError(f"{name} is not a file")
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"{name} is a file that may shrink")
            if os.fstat(file).st_ino != number:
                raise OSError(f"{name} is other memory")
            yield file
        finally:
            os.close(file)

    def open(self, fd: int, number: int) -> MappedFile:
        """Map a file of the process."""
        with self.descriptor(fd, number) as file:
            return MappedFile(file, mmap.PROT_READ)

    def map_chunk(self, location: Location) -> MappedFile:
        """Return the chunk of a location, mapped."""
        chunk = self._chunks.get(location.chunk)
        if chunk is None or chunk.number != location.number:
            chunk = self._chunks[location.chunk] = self.open(location.fd, location.number)
        return chunk

    def view(self, location: Location, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a read-only tensor [numel]."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        chunk, offset, nbytes = self.map_chunk(location), location.offset, numel * dtype.itemsize
        if not 0 <= offset <= chunk.nbytes - nbytes or offset % dtype.itemsize:
            raise OSError(f"{nbytes} bytes at {offset} do not lie in {chunk.nbytes} bytes")
        # a buffer of exactly this size: a storage over the whole chunk would count as gigabytes
        held: typing.Any = (ctypes.c_ubyte * nbytes).from_address(chunk.address + offset)
        held.chunk = chunk
        return torch.frombuffer(held, dtype=dtype)


# By this process's id and the other one: all axes share them.
_arenas = weakref.WeakValueDictionary[tuple[int, Process], PeerArena]()


class Peer(typing.NamedTuple):
    """Another rank of this host: its arena, and its counters along an axis."""

    arena: PeerArena
    table: PeerTable


def attach(process: Process, chunk: Location, table: tuple[int, int]) -> Peer:
    """Return a peer. Raises OSError or ValueError if its memory cannot be read. chunk: of its
    memory. table: descriptor and number of the file of its counters."""
    arena = _arenas.setdefault((os.getpid(), process), PeerArena(process.pid))
    arena.map_chunk(chunk)  # now: here all ranks can still send values
    return Peer(arena, PeerTable(arena.open(*table), process))


class MappedFiles:
    """A ShardMapping. Its addresses stay as long as a tensor views them."""

    def __init__(self, ranks: int, numel: int, dtype: torch.dtype) -> None:
        """numel: of one shard, in whole pages. Raises OSError if the system refuses."""
        global _num_mapped
        self._shard_nbytes = numel * dtype.itemsize
        self._nbytes = ranks * self._shard_nbytes
        if _num_mapped + ranks > MAX_MAPPED:
            raise OSError("too many mappings")
        self._address = memory_files.reserve(self._nbytes)
        held: typing.Any = (ctypes.c_ubyte * self._nbytes).from_address(self._address)
        _num_mapped += ranks
        # parameters, saved tensors and the user's views hold the array, and so the addresses
        unmap = weakref.finalize(held, _unmap, os.getpid(), self._address, self._nbytes, ranks)
        unmap.atexit = False
        self.full = torch.frombuffer(held, dtype=dtype)

    def put(self, rank: int, file: int, offset: int) -> None:
        address = self._address + rank * self._shard_nbytes
        memory_files.map_private(address, self._shard_nbytes, file, offset)

    def keep(self) -> None:
        self.full.data.copy_(self.full.clone())  # copies the pages; .data: unseen by autograd

    def forget_writes(self) -> None:
        memory_files.advise(self._address, self._nbytes, mmap.MADV_DONTNEED)

    def has_writes(self) -> bool:
        first, number = self._address // PAGE_NBYTES, self._nbytes // PAGE_NBYTES
        read = os.pread(_open_pages(os.getpid(), PAGEMAP), 8 * number, 8 * first)
        entries = torch.frombuffer(bytearray(read), dtype=torch.int64)
        return bool(((entries & _EXISTS != 0) & (entries & _OF_A_FILE == 0)).any())


def _unmap(pid: int, address: int, nbytes: int, shards: int) -> None:
    global _num_mapped
    if os.getpid() == pid:
        _num_mapped -= shards
    unmap_in(pid, address, nbytes)


def writes_are_found() -> bool:
    """True if ``has_writes`` works here, from now on."""
    with contextlib.suppress(OSError):
        _open_pages(os.getpid(), PAGEMAP)
        return True
    return False


@functools.cache
def _open_pages(pid: int, path: str) -> int:
    """Open the page map, once: there may be no descriptor left later. pid: after a fork the
    parent's file still shows the parent's pages."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def map_shards(
    peers: Mapping[int, Peer],
    shards: Sequence[Tensor],
    locations: Sequence[Sequence[Location]],
    mappings: Sequence[ShardMapping | None],
) -> list[ShardMapping]:
    """Map the shards of all ranks into ``mappings``, or new ones for None, and return these. Raises
    OSError if the system refuses. locations: of the shards, by rank."""
    ranks, found = len(locations), list[ShardMapping]()
    files: dict[tuple[int, int, int], int] = {}  # by rank, descriptor and number
    with contextlib.ExitStack() as stack:
        for index, (shard, mapping) in enumerate(zip(shards, mappings, strict=True)):
            made = mapping or MappedFiles(ranks, shard.numel(), shard.dtype)
            for each in range(ranks):
                at = locations[each][index]
                key = each, at.fd, at.number
                if each in peers and key not in files:
                    opened = peers[each].arena.descriptor(at.fd, at.number)
                    files[key] = stack.enter_context(opened)
                made.put(each, files.get(key, at.fd), at.offset)
            found.append(made)
    return found
