"""How the ranks of an axis find and read each other's memory on their host."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import stat
import sys
import typing
import weakref
from collections.abc import Sequence

import torch

from ..divergence.processes import Process
from . import shared_memory
from .counters import PeerTable, Table
from .memory_files import HEADER, PAGE_NBYTES, MappedFile
from .shared_memory import Location

if sys.platform != "win32":
    import fcntl

_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]


class Message(typing.NamedTuple):
    """Where a message lies, in words of 64 bits."""

    location: Location
    numel: int
    dtype: torch.dtype | None  # None: unknown here

    def __str__(self) -> str:
        return f"{self.numel} elements of {self.dtype or 'an unknown dtype'}"

    @staticmethod
    def words(location: Location, message: torch.Tensor) -> list[int]:
        return [*location, message.numel(), _DTYPES.index(message.dtype)]

    @staticmethod
    def of_words(words: Sequence[int]) -> Message:
        *location, numel, number = words
        dtype = _DTYPES[number] if 0 <= number < len(_DTYPES) else None
        return Message(Location(*location), numel, dtype)


class PeerMemory:
    """Another process's blocks. Everything it says of them is checked before it is read: the file
    is one of its arena and sealed, so that it cannot shrink, and the location lies inside it."""

    def __init__(self, pid: int, token: bytes) -> None:
        """token: of its memory."""
        self.pid, self._token = pid, token
        self._chunks: dict[int, MappedFile] = {}  # by index: the latest file

    def open(self, fd: int, number: int) -> MappedFile:
        """Map a file of the process. Raises OSError if it is not one of its memory."""
        file = self.descriptor(fd, number)
        try:
            return MappedFile(file, number, mmap.PROT_READ)
        finally:
            os.close(file)

    def descriptor(self, fd: int, number: int) -> int:
        """Open a file of the process for reading, and return the descriptor. Raises OSError if it
        is not one of its memory."""
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
        """Return the chunk of a location, mapped. Raises OSError if the system refuses, or if the
        file is not one of its memory."""
        chunk = self._chunks.get(location.chunk)
        if chunk is None or chunk.number != location.number:
            chunk = self._chunks[location.chunk] = self.open(location.fd, location.number)
        return chunk

    def view(self, location: Location, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a read-only tensor [numel] over the memory. Raises OSError if it cannot be
        read."""
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
        # its own buffer: a storage over the whole chunk would count as gigabytes
        held: typing.Any = (ctypes.c_ubyte * nbytes).from_address(chunk.address + location.offset)
        held.chunk = chunk
        return torch.frombuffer(held, dtype=dtype)


# By this process and by the other one's token: all axes share them.
_memories: weakref.WeakValueDictionary[tuple[int, bytes], PeerMemory] = (
    weakref.WeakValueDictionary()
)


@dataclasses.dataclass(frozen=True)
class Introduction:
    """What other processes need to read this one's memory and counters."""

    process: Process
    token: bytes
    chunk: Location  # of any block's
    table: tuple[int, int]  # descriptor and number of the file of counters


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another rank of this host: its memory, and its counters along an axis."""

    memory: PeerMemory
    table: PeerTable


def introduce() -> tuple[Introduction, Table] | None:
    """Return what is told to the other ranks of an axis, and this rank's counters there. None: no
    rank could read its memory."""
    process, chunk = Process.own(), shared_memory.first_location()
    if process is None or chunk is None:
        return None
    token = shared_memory.token()
    try:
        table = Table(token)
    except OSError:
        return None
    assert table.file is not None
    files = table.file.fd, table.file.number
    return Introduction(process, token, chunk, files), table


def attach(told: Sequence[Introduction | None], rank: int) -> dict[int, Peer] | None:
    """Return the peers of ``rank``, or None if it cannot read the memory of all of them. told: by
    rank."""
    found: dict[int, Peer] = {}
    own = told[rank]
    for peer, other in enumerate(told):
        if own is None or other is None or own.process.machine != other.process.machine:
            return None
        if peer != rank:
            pid = other.process.pid
            memory = _memories.setdefault((os.getpid(), other.token), PeerMemory(pid, other.token))
            try:
                memory.map_chunk(other.chunk)  # now: here all ranks can still send values
                table = PeerTable(memory.open(*other.table), other.process)
            except (OSError, ValueError):
                return None
            found[peer] = Peer(memory, table)
    return found
