"""The last events of this process, in a file that outlives it: also SIGKILL, an abort by a watchdog
in C++, and a wait inside of a backend, where no Python code runs any more.

``FSDP_COMPAT_BLACK_BOX=folder`` keeps a file of 130 KiB per rank in that folder, which should be on
a local disk or in /dev/shm. ``fsdp-compat diagnose FOLDER`` compares those of all ranks.

A record is four 64-bit words, each in a column of its own. Its number is written last: a record cut
short by a kill still has the number of the one that it replaces, the oldest, which is not read."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import mmap
import os
import socket
import struct
import sys
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from .._comm.divergence import progress
from ..errors import UsageError
from . import events
from .device import is_simulated

VARIABLE = "FSDP_COMPAT_BLACK_BOX"
_NUM_RECORDS = 1 << 12
# mark; rank, process id, wall-clock time minus time.perf_counter, both in ns; host
_HEAD = struct.Struct("<8siIq64s")
_MARK = b"fsdpbox2"
_ENDED, _LINE, _ERROR, _RECORDS = 511, slice(512, 1024), slice(1024, 2048), 2048  # in the file
_NBYTES = _RECORDS + 4 * 8 * _NUM_RECORDS
_FORWARD, _UNIT = 1 << 20, 1 << 4  # in a code: forward, unit, event


class Record(NamedTuple):
    """An event that all ranks tell in the same order."""

    number: int  # from 1
    event: int
    unit: str
    forward: int  # how many have begun
    ns: int  # wall-clock time
    until: int  # when a wait has ended; 0 if it has not


class BlackBox(NamedTuple):
    """What one rank has left."""

    rank: int
    pid: int
    host: str
    line: str  # of the user's code that called the model last
    error: str  # the exception that ended the last pass; "" for none
    is_running: bool  # the process holds the file, on this host
    has_ended: bool  # without being killed
    records: list[Record]  # the oldest first


class _File:
    """The file of this process, and what is seldom written to it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank}.box"
        try:
            self.memory = _mapped(path)
        except BlockingIOError:
            warnings.warn(f"Another process has {path}. Give each job a folder.", stacklevel=2)
            path = path.with_suffix(f".{os.getpid()}.box")
            self.memory = _mapped(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC  # open from now on: paths may be relative
        self._names = os.open(path.with_suffix(".units"), flags, 0o666)
        self._unwritten = b""  # names for which there was no space
        offset, host = time.time_ns() - time.perf_counter_ns(), socket.gethostname().encode()
        _HEAD.pack_into(self.memory, 0, _MARK, rank, os.getpid(), offset, host[:64])
        self._has_raised = False

    def add_name(self, label: str) -> None:
        """Write the name of the next unit."""
        self._unwritten += label.replace("\n", " ").encode(errors="backslashreplace") + b"\n"
        with contextlib.suppress(OSError):
            self._unwritten = self._unwritten[os.write(self._names, self._unwritten) :]

    def note(self, event: int, error: BaseException | None) -> None:
        """Write of an event that has no record."""
        if event == events.FORWARD:
            self._write(_LINE, progress.location())
            if self._has_raised:  # and has gone on
                self._write(_ERROR, "")
            self._has_raised = False
        elif event == events.RAISED and error is not None:
            self._write(_ERROR, _described(error))
            self._has_raised = True
        elif event == events.ENDED:
            self.memory[_ENDED] = 1

    def _write(self, where: slice, text: str) -> None:
        nbytes = where.stop - where.start
        data = text.encode(errors="backslashreplace")
        self.memory[where] = data[:nbytes].ljust(nbytes, b"\0")


def _mapped(path: Path) -> mmap.mmap:
    """Return a file of zeros in memory, with all its space: a hole in a full disk would end the
    process. Locks it until the process ends. Raises BlockingIOError if another one has, OSError."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(bytes(_NBYTES))
        file.truncate()
        return mmap.mmap(file.fileno(), _NBYTES)


def listener(folder: Path, rank: int) -> events.Listener:
    """Return what writes events to the file of a rank. Raises OSError."""
    # A closure, because this runs for each unit several times in a step.
    file = _File(folder, rank)
    numbers, codes, times, untils = _columns(file.memory)
    units: dict[str, int] = {}
    number = slot = forward = 0
    now, unsharded, last_of_records = time.perf_counter_ns, events.UNSHARDED, events.GATHERING_STATE

    def tell(event: int, label: str, error: BaseException | None = None) -> None:
        nonlocal number, slot, forward
        if event > last_of_records:
            if event == unsharded:
                untils[slot] = now()
                return
            if event == events.FORWARD:
                forward += _FORWARD
            with contextlib.suppress(Exception):  # the program's own error must arrive
                file.note(event, error)
            return
        try:
            unit = units[label]
        except KeyError:
            unit = units[label] = min(len(units), 65535) * _UNIT
            file.add_name(label)
        number += 1
        slot = number % _NUM_RECORDS
        codes[slot] = forward + unit + event
        times[slot] = now()
        numbers[slot] = number

    return tell


def _columns(data: mmap.mmap | bytes) -> list[memoryview]:
    """Return the words of all records: numbers, codes, times, and ends of waits."""
    words = memoryview(data)[_RECORDS:].cast("Q")
    return [words[start : start + _NUM_RECORDS] for start in range(0, len(words), _NUM_RECORDS)]


def _described(error: BaseException) -> str:
    """Return the error and the user's innermost line that it came through."""
    first, where = progress.first_line_of(error), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if progress.is_users(frame.f_code.co_filename):
            where = f" at {frame.f_code.co_filename}:{line}"
    return f"{type(error).__name__}{': ' * bool(first)}{first}{where}"


_begun = False


def begin_if_asked() -> None:
    """Write events from now on if FSDP_COMPAT_BLACK_BOX names a folder. Raises UsageError if it
    cannot be written to."""
    global _begun
    folder = os.environ.get(VARIABLE)
    if _begun or not folder or is_simulated():
        return
    _begun = True
    try:
        tell = listener(Path(folder), dist.get_rank())
    except OSError as error:
        raise UsageError.of(
            f"{VARIABLE} cannot be used.",
            expected="a folder on a local disk that this process may write to",
            got=str(error),
            where="the environment of this process",
            fix="name another folder, or unset it",
        ) from error
    events.listen(tell)
    os.register_at_fork(after_in_child=lambda: events.listen(None))
    atexit.register(lambda: events.tell(events.ENDED, ""))
    before = sys.excepthook

    def note_uncaught(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        events.tell(events.RAISED, "", error)
        before(kind, error, trace)

    sys.excepthook = note_uncaught


def read(path: Path) -> BlackBox:
    """Read the file of a rank. Raises ValueError if it is none, and OSError."""
    data, later, is_running = path.read_bytes(), path.read_bytes(), False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_running = True
    if len(data) != _NBYTES or not data.startswith(_MARK):
        raise ValueError(f"{path} is not a black box")
    _, rank, pid, offset, host = _HEAD.unpack_from(data)
    names = path.with_suffix(".units").read_text(encoding="utf-8").splitlines()
    host, line, error = (
        field.rstrip(b"\0").decode(errors="replace") for field in (host, data[_LINE], data[_ERROR])
    )
    records = _records(data, later, offset, names)
    return BlackBox(rank, pid, host, line, error, is_running, bool(data[_ENDED]), records)


def _records(data: bytes, later: bytes, offset: int, names: list[str]) -> list[Record]:
    """Return the records that are the same in two readings, as the process may still write."""
    numbers = _columns(later)[0]
    last_lost = max(*numbers, _NUM_RECORDS - 1) - _NUM_RECORDS + 1  # replaced, or about to be
    return sorted(
        Record(
            number,
            code % _UNIT,
            names[code % _FORWARD // _UNIT],
            code // _FORWARD,
            ns + offset,
            until + offset if until > ns else 0,
        )
        for number, code, ns, until, number_later in zip(*_columns(data), numbers, strict=True)
        if last_lost < number == number_later
    )
