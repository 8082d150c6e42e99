"""What the kernel keeps: bytes on their way to the disk, files in the page cache, resident memory.
It needs Linux."""

from __future__ import annotations

import os
from pathlib import Path


def make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop_pages(folder: Path) -> None:
    """Let the page cache keep nothing of the files in ``folder``."""
    os.sync()  # only what is on the disk is dropped
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def restart_peak() -> int:
    """Let the peak of this process begin anew; return its resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_nbytes("VmRSS")


def memory_nbytes(field: str = "VmHWM") -> int:
    """Return a field of the process's status; by default its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise KeyError(field)
