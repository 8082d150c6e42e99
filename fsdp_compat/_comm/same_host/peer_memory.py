"""The shared memory of another process of this host, for reading."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import typing
import weakref

import torch

from .memory_files import (
    DONTFORK,
    HEADER,
    PAGE_NBYTES,
    SHARED,
    advise,
    epoch_in,
    map_memory,
    unmap_in,
)

if sys.platform != "win32":
    import fcntl


class Location(typing.NamedTuple):
    """Where a message lies, in terms that other processes understand."""

    epoch: int  # of the arena, at the time the location was made
    chunk: int  # index
    number: int  # of the file of the chunk; no two files of an arena have the same one
    fd: int  # of that file, in its process
    offset: int  # bytes


class PeerMemory:
    """Another process's blocks. Everything it says of them is checked before it is read: the file
    is one of its arena and sealed, so that it cannot shrink, and the location lies inside it."""

    def __init__(self, pid: int, control: int, token: bytes) -> None:
        """control: descriptor of the control file. Raises OSError if the memory cannot be read, or
        does not have this token."""
        self.pid, self._token = pid, token
        self._chunks: dict[int, MappedFile] = {}  # by index: the latest file
        self._control = self.open(control, 0)
        self._epoch = epoch_in(self._control.view)

    def open(self, fd: int, number: int) -> MappedFile:
        """Map a file of the process. Raises OSError if it is not one of its memory."""
        file = self.descriptor(fd, number)
        try:
            return MappedFile(file, number)
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

    @property
    def epoch(self) -> int:
        """If it differs from that of a location, the memory there may hold other values."""
        return self._epoch[0]

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
            not PAGE_NBYTES <= location.offset <= len(chunk.view) - nbytes
            or location.offset % dtype.itemsize
        ):
            raise OSError(
                f"{nbytes} bytes at {location.offset} do not lie in a chunk of "
                f"{len(chunk.view)} bytes"
            )
        # its own buffer: a storage over the whole chunk would count as gigabytes
        held: typing.Any = (ctypes.c_ubyte * nbytes).from_address(chunk.address + location.offset)
        held.chunk = chunk
        return torch.frombuffer(held, dtype=dtype)


class MappedFile:
    """A mapped file of another process. It keeps no descriptor, and children do not inherit the
    mapping, which would keep the memory."""

    def __init__(self, file: int, number: int) -> None:
        self.number, nbytes = number, os.fstat(file).st_size
        self.address = map_memory(None, nbytes, SHARED, file, 0, mmap.PROT_READ)
        weakref.finalize(self, unmap_in, os.getpid(), self.address, nbytes).atexit = False
        advise(self.address, nbytes, DONTFORK)
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)).cast("B")
