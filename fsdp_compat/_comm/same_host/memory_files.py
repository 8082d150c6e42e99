"""Anonymous files in memory, and mappings of them at given addresses (Linux). What asks the system
raises OSError if it refuses."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import weakref

PAGE_NBYTES = mmap.PAGESIZE

_FIXED, _NORESERVE = 0x10, 0x4000  # flags that the mmap module does not have
_READ_WRITE, _NO_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE, 0
_LIMITS = {
    errno.EMFILE: "file descriptors of this process (ulimit -n)",
    errno.ENFILE: "open files of the system (sysctl fs.file-max)",
    errno.ENOMEM: "address space (ulimit -v) or mappings (sysctl vm.max_map_count)",
}

_libc = ctypes.CDLL(None, use_errno=True)
_pages, _number = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
_libc.mmap.argtypes = (*_pages, _number, _number, _number, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes, _libc.madvise.argtypes = _pages, (*_pages, _number)


def are_supported() -> bool:
    """True if such files and counters work, and other processes can open them."""
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and ctypes.sizeof(ctypes.c_void_p) == 8
        and hasattr(os, "memfd_create")
        and os.path.isdir("/proc/self/fd")
    )


def refusal_of(error: OSError) -> str:
    """Return, in words, which limit of the system was reached."""
    limit = _LIMITS.get(error.errno or 0)
    return str(error) if limit is None else f"no more {limit}"


class SealedFile:
    """A memfd that cannot shrink: pages that a reader has mapped stay valid."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("fsdp_compat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.number = os.fstat(self.fd).st_ino
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)


class MappedFile:
    """A mapping of a file for as long as this object lives. Children do not inherit it."""

    def __init__(self, fd: int, access: int = _READ_WRITE) -> None:
        about = os.fstat(fd)
        self.number, self.nbytes = about.st_ino, about.st_size
        self.address = _map(None, self.nbytes, mmap.MAP_SHARED, fd, 0, access)
        weakref.finalize(self, unmap_in, os.getpid(), self.address, self.nbytes).atexit = False
        advise(self.address, self.nbytes, mmap.MADV_DONTFORK)
        self.view = memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")


def map_shared(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map a file at an address. Children do not inherit it."""
    _map(address, nbytes, mmap.MAP_SHARED | _FIXED, fd, offset)
    advise(address, nbytes, mmap.MADV_DONTFORK)


def map_private(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map a file at an address, copy-on-write."""
    _map(address, nbytes, mmap.MAP_PRIVATE | _FIXED | _NORESERVE, fd, offset)


def reserve(nbytes: int) -> int:
    """Return the first of so many unused addresses."""
    return _map(None, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0, _NO_ACCESS)


def unmap_in(pid: int, address: int, nbytes: int) -> None:
    """Unmap in one process only: in its children, other memory may lie at the address."""
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)


def _map(
    address: int | None, nbytes: int, flags: int, fd: int, offset: int, access: int = _READ_WRITE
) -> int:
    found = _libc.mmap(address, nbytes, access, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"no mapping of {nbytes} bytes")
    return int(found)


def advise(address: int, nbytes: int, advice: int) -> None:
    if _libc.madvise(address, nbytes, advice):
        raise OSError(ctypes.get_errno(), f"madvise {advice} of {nbytes} bytes")
