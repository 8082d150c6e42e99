"""All ranks' shards side by side in the addresses of one process: an all-gather without a copy.

Ranks of one host can read each other's shards in shared memory. Where every shard begins and ends
at a page, a rank can map them one behind the other: the full buffer is that mapping, for ever,
and a host holds one copy of the parameters.

The pages are mapped privately. Who writes to an unsharded parameter gets pages of its own, as with
a buffer that was gathered, and no other rank sees it; ``forget_writes`` drops these pages. A shared
mapping would let a write reach all ranks; one that is read-only would end the process."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import typing
import weakref
from collections.abc import Sequence

import torch

from ..transport import Mapping
from .memory_files import FIXED, NORESERVE, PAGE_NBYTES, advise, map_memory, unmap_in
from .peers import PeerMemory
from .shared_memory import Location

# of the parts that all mappings of this process consist of; the system has a limit of 65,530
MAX_PARTS = 1 << 14

PAGEMAP = "/proc/self/pagemap"
# bits of its entries, one word per page: it is somewhere, and it is a file's
_EXISTS, _OF_A_FILE = -1 << 62, 1 << 61
_ENTRY_NBYTES = 8

_NO_ACCESS = 0
_num_parts = 0


class MappedFiles:
    """Addresses for ``full`` [ranks * S], which stay while a tensor views them."""

    def __init__(self, ranks: int, numel: int, dtype: torch.dtype) -> None:
        """numel: of one shard, whose bytes are whole pages. Raises OSError if the system
        refuses."""
        global _num_parts
        self._part_nbytes = numel * dtype.itemsize
        self._nbytes = ranks * self._part_nbytes
        if _num_parts + ranks > MAX_PARTS:
            raise OSError("too many mappings")
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        self._address = map_memory(None, self._nbytes, private, -1, 0, _NO_ACCESS)
        held: typing.Any = (ctypes.c_ubyte * self._nbytes).from_address(self._address)
        _num_parts += ranks
        # leaves, saved tensors and what the user keeps hold the array, and so the addresses
        weakref.finalize(
            held, _unmap, os.getpid(), self._address, self._nbytes, ranks
        ).atexit = False
        self.full = torch.frombuffer(held, dtype=dtype)

    def put(self, rank: int, file: int, offset: int) -> None:
        """Map the shard of a rank, which lies in a file. Raises OSError if the system refuses."""
        address = self._address + rank * self._part_nbytes
        private = mmap.MAP_PRIVATE | FIXED | NORESERVE
        map_memory(address, self._part_nbytes, private, file, offset)

    def keep(self) -> None:
        """Give this process pages of its own with the present values, whatever is written to the
        shards, until ``forget_writes``."""
        self.full.data.copy_(self.full.clone())  # .data: autograd sees no change

    def forget_writes(self) -> None:
        """Let ``full`` be the shards again."""
        advise(self._address, self._nbytes, mmap.MADV_DONTNEED)

    def has_writes(self) -> bool:
        """True if this process has written to ``full``, by any means."""
        first, number = self._address // PAGE_NBYTES, self._nbytes // PAGE_NBYTES
        pages = _open_pages(os.getpid(), PAGEMAP)
        read = os.pread(pages, number * _ENTRY_NBYTES, first * _ENTRY_NBYTES)
        entries = torch.frombuffer(bytearray(read), dtype=torch.int64)
        return bool(((entries & _EXISTS != 0) & (entries & _OF_A_FILE == 0)).any())


def _unmap(pid: int, address: int, nbytes: int, parts: int) -> None:
    global _num_parts
    if os.getpid() == pid:
        _num_parts -= parts
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
    """Open the pages of this process, for as long as it lives: there may be no descriptor left
    later. After a fork, the parent's file still shows the parent's pages."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def map_shards(
    rank: int,
    memories: typing.Mapping[int, PeerMemory],
    shards: Sequence[torch.Tensor],
    places: Sequence[Sequence[Location]],
    mappings: Sequence[Mapping | None],
) -> list[Mapping]:
    """Map shards of all ranks, each into its mapping or, without one, into a new one, and return
    the mappings. Raises OSError if the system refuses one of them.

    memories: of the peers. places: by rank, where the shards lie.
    """
    ranks, found = len(places), list[Mapping]()
    files: dict[tuple[int, int, int], int] = {}  # by rank, descriptor and number
    try:
        for index, (shard, mapping) in enumerate(zip(shards, mappings, strict=True)):
            made = mapping or MappedFiles(ranks, shard.numel(), shard.dtype)
            for each in range(ranks):
                place = places[each][index]
                if place.offset % PAGE_NBYTES:
                    raise OSError("a shard does not begin at a page")
                key = each, place.fd, place.number
                if each != rank and key not in files:
                    files[key] = memories[each].descriptor(place.fd, place.number)
                made.put(each, files.get(key, place.fd), place.offset)
            found.append(made)
    finally:
        for file in files.values():
            os.close(file)
    return found
