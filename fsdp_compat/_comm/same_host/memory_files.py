"""Anonymous files in memory, and mappings of them at given addresses (Linux)."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import platform
import struct
import sys
import weakref

if sys.platform != "win32":
    import fcntl

PAGE_NBYTES = mmap.PAGESIZE
TOKEN_NBYTES = 16
HEADER = struct.Struct(f"{TOKEN_NBYTES}sq")  # at the beginning of every file: token, number

# flags and advice that the mmap module does not have
SHARED, FIXED, NORESERVE, REMOVE, DONTFORK = 0x01, 0x10, 0x4000, 9, 10


def are_supported() -> bool:
    """True if this machine has such files, other processes can open them, and counters work
    (counters.py)."""
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and ctypes.sizeof(ctypes.c_void_p) == 8
        and hasattr(os, "memfd_create")
        and os.path.isdir("/proc/self/fd")
    )


_numbers = itertools.count()


class SealedFile:
    """A memfd that cannot shrink: pages that a reader has mapped stay valid."""

    def __init__(self, nbytes: int, token: bytes) -> None:
        """token: of this process's memory. Raises OSError if the system refuses."""
        self.fd = os.memfd_create("fsdp_compat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.number = next(_numbers)
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        os.pwrite(self.fd, HEADER.pack(token, self.number), 0)


class MappedFile:
    """The memory of a file, mapped as long as this object lives. Children do not inherit it: their
    copy would keep the memory."""

    def __init__(
        self, fd: int, number: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE
    ) -> None:
        """Raises OSError if the system refuses."""
        self.number, self.nbytes = number, os.fstat(fd).st_size
        self.address = map_memory(None, self.nbytes, SHARED, fd, 0, access)
        weakref.finalize(self, unmap_in, os.getpid(), self.address, self.nbytes).atexit = False
        advise(self.address, self.nbytes, DONTFORK)
        self.view = memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    pages, number = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    libc.mmap.argtypes = (*pages, number, number, number, ctypes.c_long)
    libc.munmap.argtypes, libc.madvise.argtypes = pages, (*pages, number)
    return libc


def map_memory(
    address: int | None,
    nbytes: int,
    flags: int,
    fd: int,
    offset: int,
    access: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> int:
    """Map a file and return the address. Raises OSError if the system refuses."""
    found = _libc().mmap(address, nbytes, access, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"no mapping of {nbytes} bytes")
    return int(found)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Call madvise. Raises OSError if the system refuses."""
    if _libc().madvise(address, nbytes, advice):
        raise OSError(ctypes.get_errno(), f"madvise {advice} of {nbytes} bytes")


_LIMITS = {
    errno.EMFILE: "file descriptors of this process (ulimit -n)",
    errno.ENFILE: "open files of the system (sysctl fs.file-max)",
    errno.ENOMEM: "address space (ulimit -v) or mappings (sysctl vm.max_map_count)",
}


def refusal_of(error: OSError) -> str:
    """Return, in words, which limit of the system was reached."""
    limit = _LIMITS.get(error.errno or 0)
    return str(error) if limit is None else f"no more {limit}"


def unmap_in(pid: int, address: int, nbytes: int) -> None:
    """Unmap in one process only: in its children, other memory may lie at the address."""
    if os.getpid() == pid:
        _libc().munmap(address, nbytes)
