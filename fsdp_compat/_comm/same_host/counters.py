"""Counters in shared memory: how ranks of one host tell each other how far they have come.

Each rank has a ``Table`` that it alone writes and that its peers map read-only. It has a row for
every tag: the numbers of the last message sent and of the last one read from all peers, and a few
words that describe the one sent. A peer sleeps in the kernel (a futex) until a counter reaches the
number that it waits for; idle ranks do no work. It wakes ten times a second to check that the
peer still runs the same program, that its table is open, and that the wait was not aborted.

Requires x86-64, where stores become visible in program order, and Linux, for the futex; other
machines send values (gloo.py)."""

from __future__ import annotations

import ctypes
import datetime
import functools
import struct
import time
from collections.abc import Sequence

from ..board.processes import Process
from ..transport import VALUES
from .memory_files import MappedFile, SealedFile

NUM_WORDS = 6  # about a message

# A row: number of the last message sent, of the last one read, words about the one sent.
_ROW_NBYTES = 64
_WORDS = struct.Struct(f"{NUM_WORDS}q")
_SENT, _READ, _SAID = 0, 1, 8  # the first two in counters, the third in bytes
_NBYTES = (VALUES + 2) * _ROW_NBYTES  # of a table
_STATE = (VALUES + 1) * _ROW_NBYTES // 4  # a counter in the last row
_OPEN, _CLOSED, _FAILED = range(3)

_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, (1 << 31) - 1


_SLICE = (ctypes.c_long * 2)(0, 100_000_000)  # a waiting rank wakes this often: (s, ns)
_word, _pointer = ctypes.c_long, ctypes.c_void_p
_syscall = ctypes.CDLL(None).syscall
_syscall.restype = _word
_syscall.argtypes = (_word, _pointer, _word, _word, _pointer, _pointer, _word)
_futex = functools.partial(_syscall, _FUTEX)


class Table:
    """The counters of this rank along one axis."""

    def __init__(self) -> None:
        """Raises OSError if the system refuses."""
        # None once the peers have opened it
        self.file: SealedFile | None = SealedFile(_NBYTES)
        self._memory = MappedFile(self.file.fd)
        self._counters = self._memory.view.cast("I")
        self.location = self.file.fd, self.file.number  # as peers find it

    def send(self, tag: int, number: int, words: Sequence[int]) -> None:
        """Announce a message to the peers, in NUM_WORDS words of 64 bits. They must have read the
        last one with this tag."""
        _WORDS.pack_into(self._memory.view, _row(tag) + _SAID, *words)
        self._set(_row(tag) // 4 + _SENT, number)

    def acknowledge(self, tag: int, number: int) -> None:
        """Tell the peers that their messages were read."""
        self._set(_row(tag) // 4 + _READ, number)

    def _set(self, counter: int, number: int) -> None:
        self._counters[counter] = number
        _futex(self._memory.address + 4 * counter, _WAKE, _ALL, None, None, 0)

    def close(self, has_failed: bool) -> None:
        """End the waits of all peers. has_failed: also invalidate what they are reading now."""
        self._counters[_STATE] = _FAILED if has_failed else _CLOSED


class PeerTable:
    """The counters of a peer."""

    def __init__(self, memory: MappedFile, process: Process) -> None:
        """memory: of the table. Raises OSError if it is of another size."""
        if memory.nbytes != _NBYTES:
            raise OSError("a table of another size")
        self._memory, self._process = memory, process
        self._counters = memory.view.cast("I")

    def words(self, tag: int) -> tuple[int, ...]:
        """Return the words that describe the peer's last message."""
        return _WORDS.unpack_from(self._memory.view, _row(tag) + _SAID)

    def sent(self, tag: int, number: int) -> CounterWork:
        """Return the wait until the peer has sent a message."""
        return CounterWork(self, _row(tag) // 4 + _SENT, number)

    def read(self, tag: int, number: int) -> CounterWork:
        """Return the wait until the peer has read a message of this rank."""
        return CounterWork(self, _row(tag) // 4 + _READ, number)

    @property
    def has_failed(self) -> bool:
        """True if the peer's communication has failed: values read from it may be wrong."""
        return self._counters[_STATE] == _FAILED

    @property
    def is_lost(self) -> bool:
        """True if the peer's counters will never change again."""
        return self._counters[_STATE] != _OPEN or self._process.has_ended()


class CounterWork:
    """A wait for a counter of a peer. (A Work.)"""

    __slots__ = ("_counter", "_is_aborted", "_number", "_table")

    def __init__(self, table: PeerTable, counter: int, number: int) -> None:
        self._table, self._counter, self._number = table, counter, number
        self._is_aborted = False

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Return False if aborted. Raises RuntimeError at the limit, or if the peer is gone."""
        table, counters, index = self._table, self._table._counters, self._counter
        end = time.monotonic() + timeout.total_seconds()
        while (value := counters[index]) < self._number:
            _futex(table._memory.address + 4 * index, _WAIT, value, _SLICE, None, 0)
            is_lost = counters[index] < self._number and table.is_lost
            if counters[index] >= self._number:  # it has counted before it ended
                break
            if self._is_aborted:
                return False
            if is_lost:
                raise RuntimeError("the connection was closed")
            if time.monotonic() > end:
                raise RuntimeError("Timed out")
        return True

    def abort(self) -> None:
        """End the wait, now or later, from another thread."""
        self._is_aborted = True


def _row(tag: int) -> int:
    return tag * _ROW_NBYTES
