"""Counters in shared memory: how ranks of one host tell each other how far they have come.

Each rank has a ``Table`` that it alone writes and that its peers map read-only. It has a row for
every tag: the number of the last message that this rank has sent, that of the last one that it has
read of all its peers, and a few words about the one sent. A peer sleeps in the kernel (a futex)
until a counter reaches the number that it waits for; idle ranks do no work.

A waiting rank wakes every ``SLICE_S`` seconds to check that the peer's process still runs the same
program (divergence/processes.py), that its table is open, and that the wait was not aborted.

Requires x86-64, where stores become visible in program order, and Linux, for the futex; other
machines send values (messages.py)."""

from __future__ import annotations

import ctypes
import datetime
import functools
import itertools
import os
import platform
import struct
import time
import weakref
from collections.abc import Callable, Sequence

from ..divergence.processes import Process
from . import memory_files
from .memory_files import DONTFORK, PAGE_NBYTES, SHARED, SealedFile, advise, map_memory, unmap_in
from .peer_memory import MappedFile, PeerMemory

NUM_TAGS = 1 << 18
NUM_WORDS = 7  # about a message
SLICE_S = 0.1  # of a wait, between two looks at what may end it

# A row: number of the last message sent, of the last one read, words about the one sent.
_ROW_NBYTES = 64
_WORDS = struct.Struct(f"{NUM_WORDS}q")
_SENT, _READ, _SAID = 0, 1, 8  # the first two in counters, the third in bytes
_CLOSED = 16  # a counter, in the first page: 1 when the owner has closed the table

_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, (1 << 31) - 1


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


_SLICE = ctypes.pointer(_Time(0, int(SLICE_S * 1e9)))
_numbers = itertools.count(1 << 40)  # of files: no table has the number of a chunk


def are_supported() -> bool:
    """True if this machine has what counters need."""
    return (
        memory_files.are_supported()
        and platform.machine() == "x86_64"
        and ctypes.sizeof(ctypes.c_void_p) == 8
    )


@functools.cache
def _futex() -> Callable[..., int]:
    call = ctypes.CDLL(None).syscall
    call.restype, word, pointer = ctypes.c_long, ctypes.c_long, ctypes.c_void_p
    call.argtypes = (word, pointer, word, word, pointer, pointer, word)
    return functools.partial(call, _FUTEX)


class Table:
    """The counters of this rank along one axis."""

    def __init__(self, token: bytes) -> None:
        """token: of this process's memory. Raises OSError if the system refuses."""
        # None when the peers have opened it
        self.file: SealedFile | None = SealedFile(_NBYTES, token, next(_numbers))
        self._address = map_memory(None, _NBYTES, SHARED, self.file.fd, 0)
        weakref.finalize(self, unmap_in, os.getpid(), self._address, _NBYTES).atexit = False
        advise(self._address, _NBYTES, DONTFORK)
        self._bytes = memoryview((ctypes.c_ubyte * _NBYTES).from_address(self._address)).cast("B")
        self._counters = self._bytes.cast("I")

    def send(self, tag: int, number: int, words: Sequence[int]) -> None:
        """Tell the peers of a message, in NUM_WORDS of 64 bits. They have read the last one of the
        tag."""
        row = _row(tag)
        _WORDS.pack_into(self._bytes, row + _SAID, *words)
        self._set(row, _SENT, number)

    def acknowledge(self, tag: int, number: int) -> None:
        """Tell the peers that their messages were read."""
        self._set(_row(tag), _READ, number)

    def _set(self, row: int, counter: int, number: int) -> None:
        self._counters[row // 4 + counter] = number
        _futex()(self._address + row + 4 * counter, _WAKE, _ALL, None, None, 0)

    def close(self) -> None:
        """Let the waits of all peers fail."""
        self._counters[_CLOSED] = 1


class PeerTable:
    """The counters of a peer."""

    def __init__(self, memory: PeerMemory, fd: int, number: int, process: Process) -> None:
        """fd, number: of the file, in the peer's process. Raises OSError if it cannot be read."""
        self._file: MappedFile = memory.open(fd, number)
        if len(self._file.view) != _NBYTES:
            raise OSError("a table of another size")
        self._counters = self._file.view.cast("I")
        self._process = process

    def words(self, tag: int) -> tuple[int, ...]:
        """Return what the peer has said of its last message."""
        return _WORDS.unpack_from(self._file.view, _row(tag) + _SAID)

    def sent(self, tag: int, number: int) -> CounterWork:
        """Return the wait until the peer has sent a message."""
        return CounterWork(self, _row(tag) // 4 + _SENT, number)

    def read(self, tag: int, number: int) -> CounterWork:
        """Return the wait until the peer has read a message of this rank."""
        return CounterWork(self, _row(tag) // 4 + _READ, number)

    def has_reached(self, counter: int, number: int) -> bool:
        return self._counters[counter] >= number

    def sleep(self, counter: int, number: int) -> None:
        """Wait until a counter may have reached a number, for at most a slice."""
        value = self._counters[counter]
        if value < number:
            _futex()(self._file.address + 4 * counter, _WAIT, value, _SLICE, None, 0)

    @property
    def is_lost(self) -> bool:
        """True if the peer will not count any more."""
        return bool(self._counters[_CLOSED]) or self._process.has_ended()


class CounterWork:
    """A wait for a counter of a peer, which is waited for as a torch.distributed Work is."""

    __slots__ = ("_counter", "_is_aborted", "_number", "_table")

    def __init__(self, table: PeerTable, counter: int, number: int) -> None:
        self._table, self._counter, self._number = table, counter, number
        self._is_aborted = False

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Return False if the wait was aborted. Raises RuntimeError at the time limit, or if the
        peer has gone."""
        table, counter, number = self._table, self._counter, self._number
        if table.has_reached(counter, number):
            return True
        end = time.monotonic() + timeout.total_seconds()
        while True:
            table.sleep(counter, number)
            if table.has_reached(counter, number):
                return True
            is_lost = table.is_lost  # first: what the peer has counted before it ended is seen
            if table.has_reached(counter, number):
                return True
            if self._is_aborted:
                return False
            if is_lost:
                raise RuntimeError("the connection was closed")
            if time.monotonic() > end:
                raise RuntimeError("Timed out")

    def abort(self) -> None:
        """End the wait, now or later, from another thread."""
        self._is_aborted = True


def _row(tag: int) -> int:
    return PAGE_NBYTES + tag * _ROW_NBYTES


_NBYTES = _row(NUM_TAGS)  # of a table
