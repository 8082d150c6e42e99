"""How the ranks of an axis find, read and map each other's memory on their host.

Mapped shards are an all-gather without a copy. Where every shard begins and ends at a page
boundary, a rank can map the shards of all ranks one after the other: the mapping *is* the
all-gather output, permanently, so the host holds a single copy of the parameters.

The pages are mapped privately: a write to an unsharded parameter is copy-on-write, and
``forget_writes`` drops the copied pages. With a shared mapping a write would reach all ranks; with
a read-only one it would crash the process."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import functools
import mmap
import os
import stat
import typing
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..divergence.processes import Process
from ..transport import ShardMapping
from . import memory_files, shared_memory
from .counters import PeerTable, Table
from .memory_files import HEADER, PAGE_NBYTES, MappedFile, unmap_in
from .shared_memory import Location

_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]

MAX_MAPPED = 1 << 14  # shards mapped by this process; the system has a limit of 65,530 mappings

PAGEMAP = "/proc/self/pagemap"
# bits of its entries, one word per page: the page exists, and it belongs to a file
_EXISTS, _OF_A_FILE = -1 << 62, 1 << 61
_ENTRY_NBYTES = 8

_num_mapped = 0


class Message(typing.NamedTuple):
    """Where a message lies, in words of 64 bits."""

    location: Location
    numel: int
    dtype: torch.dtype | None  # None: unknown here

    def __str__(self) -> str:
        return f"{self.numel} elements of {self.dtype or 'an unknown dtype'}"

    @staticmethod
    def words(location: Location, message: Tensor) -> list[int]:
        return [*location, message.numel(), _DTYPES.index(message.dtype)]

    @staticmethod
    def of_words(words: Sequence[int]) -> Message:
        *location, numel, number = words
        dtype = _DTYPES[number] if 0 <= number < len(_DTYPES) else None
        return Message(Location(*location), numel, dtype)


class PeerArena:
    """Another process's blocks. What it says is checked: the file belongs to its arena and is
    sealed, so that it cannot shrink, and the location lies inside."""

    def __init__(self, pid: int, token: bytes) -> None:
        """token: of its memory."""
        self.pid, self._token = pid, token
        self._chunks: dict[int, MappedFile] = {}  # by index: the latest file

    def open(self, fd: int, number: int) -> MappedFile:
        """Map a file of the process. Raises OSError if the file does not belong to its arena."""
        file = self.descriptor(fd, number)
        try:
            return MappedFile(file, number, mmap.PROT_READ)
        finally:
            os.close(file)

    def descriptor(self, fd: int, number: int) -> int:
        """Open a file of the process for reading. Raises OSError if it is not the arena's."""
        path = f"/proc/{self.pid}/fd/{fd}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device may have an effect
            raise OSError(f"descriptor {fd} of process {self.pid} is not a file")
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"descriptor {fd} of process {self.pid} is a file that may shrink")
            if os.pread(file, HEADER.size, 0) != HEADER.pack(self._token, number):
                raise OSError(f"descriptor {fd} of process {self.pid} is other memory")
        except OSError:
            os.close(file)
            raise
        return file

    def map_chunk(self, location: Location) -> MappedFile:
        """Return the chunk of a location, mapped. Raises OSError if that is impossible."""
        chunk = self._chunks.get(location.chunk)
        if chunk is None or chunk.number != location.number:
            chunk = self._chunks[location.chunk] = self.open(location.fd, location.number)
        return chunk

    def view(self, location: Location, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a read-only tensor [numel]. Raises OSError if that is impossible."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        chunk = self.map_chunk(location)
        nbytes = numel * dtype.itemsize
        if (
            not PAGE_NBYTES <= location.offset <= chunk.nbytes - nbytes
            or location.offset % dtype.itemsize
        ):
            raise OSError(
                f"{nbytes} bytes at {location.offset} do not lie in a chunk of {chunk.nbytes} bytes"
            )
        # a buffer of exactly this size: a storage over the whole chunk would count as gigabytes
        held: typing.Any = (ctypes.c_ubyte * nbytes).from_address(chunk.address + location.offset)
        held.chunk = chunk
        return torch.frombuffer(held, dtype=dtype)


# By this process and by the other one's token: all axes share them.
_arenas: weakref.WeakValueDictionary[tuple[int, bytes], PeerArena] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True)
class Introduction:
    """What other processes need to read this one's memory and counters."""

    process: Process
    token: bytes
    chunk: Location  # of any block's
    table: tuple[int, int]  # descriptor and number of the file of counters


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another rank of this host: its arena, and its counters along an axis."""

    arena: PeerArena
    table: PeerTable


def introduce() -> tuple[Introduction, Table] | None:
    """Return this rank's introduction on an axis, and its counters there; None if no rank could
    read its memory."""
    process, chunk = Process.own(), shared_memory.first_location()
    if process is None or chunk is None:
        return None
    token = shared_memory.arena().token
    try:
        table = Table(token)
    except OSError:
        return None
    assert table.file is not None
    files = table.file.fd, table.file.number
    return Introduction(process, token, chunk, files), table


def attach(introductions: Sequence[Introduction | None], rank: int) -> dict[int, Peer] | None:
    """Return the peers of ``rank``, or None if it cannot read them all. introductions: by rank."""
    found: dict[int, Peer] = {}
    own = introductions[rank]
    for peer, other in enumerate(introductions):
        if own is None or other is None or own.process.machine != other.process.machine:
            return None
        if peer != rank:
            pid = other.process.pid
            arena = _arenas.setdefault((os.getpid(), other.token), PeerArena(pid, other.token))
            try:
                arena.map_chunk(other.chunk)  # now: here all ranks can still send values
                table = PeerTable(arena.open(*other.table), other.process)
            except (OSError, ValueError):
                return None
            found[peer] = Peer(arena, table)
    return found


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
        weakref.finalize(
            held, _unmap, os.getpid(), self._address, self._nbytes, ranks
        ).atexit = False
        self.full = torch.frombuffer(held, dtype=dtype)

    def put(self, rank: int, file: int, offset: int) -> None:
        address = self._address + rank * self._shard_nbytes
        memory_files.map_private(address, self._shard_nbytes, file, offset)

    def keep(self) -> None:
        # writing copies the pages; .data: autograd sees no change
        self.full.data.copy_(self.full.clone())

    def forget_writes(self) -> None:
        memory_files.forget_writes(self._address, self._nbytes)

    def has_writes(self) -> bool:
        first, number = self._address // PAGE_NBYTES, self._nbytes // PAGE_NBYTES
        pages = _open_pages(os.getpid(), PAGEMAP)
        read = os.pread(pages, number * _ENTRY_NBYTES, first * _ENTRY_NBYTES)
        entries = torch.frombuffer(bytearray(read), dtype=torch.int64)
        return bool(((entries & _EXISTS != 0) & (entries & _OF_A_FILE == 0)).any())


def _unmap(pid: int, address: int, nbytes: int, shards: int) -> None:
    global _num_mapped
    if os.getpid() == pid:
        _num_mapped -= shards
    unmap_in(pid, address, nbytes)


def writes_are_found() -> bool:
    """True if ``has_writes`` works here, from now on."""
    try:
        _open_pages(os.getpid(), PAGEMAP)
    except OSError:
        return False
    return PAGE_NBYTES == 4096


@functools.cache
def _open_pages(pid: int, path: str) -> int:
    """Open the page map, once: there may be no descriptor left later. pid: after a fork the
    parent's file still shows the parent's pages."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def map_shards(
    rank: int,
    arenas: Mapping[int, PeerArena],
    shards: Sequence[Tensor],
    locations: Sequence[Sequence[Location]],
    mappings: Sequence[ShardMapping | None],
) -> list[ShardMapping]:
    """Map the shards of all ranks into ``mappings``, or new ones for None, and return these. Raises
    OSError if the system refuses. arenas: of the peers. locations: of the shards, by rank."""
    ranks, found = len(locations), list[ShardMapping]()
    files: dict[tuple[int, int, int], int] = {}  # by rank, descriptor and number
    try:
        for index, (shard, mapping) in enumerate(zip(shards, mappings, strict=True)):
            made = mapping or MappedFiles(ranks, shard.numel(), shard.dtype)
            for each in range(ranks):
                at = locations[each][index]
                if at.offset % PAGE_NBYTES:
                    raise OSError("a shard does not begin at a page boundary")
                key = each, at.fd, at.number
                if each != rank and key not in files:
                    files[key] = arenas[each].descriptor(at.fd, at.number)
                made.put(each, files.get(key, at.fd), at.offset)
            found.append(made)
    finally:
        for file in files.values():
            os.close(file)
    return found
