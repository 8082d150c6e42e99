"""The last events of this process, in a ring that is always written. With
``FSDP_COMPAT_BLACK_BOX=folder`` it is a file of 130 KiB in that folder, on a local disk or in
/dev/shm, which outlives the process: also SIGKILL, an abort by a watchdog in C++, and a wait inside
of a backend, where no Python code runs any more. ``fsdp-compat diagnose FOLDER`` compares those of
all ranks; without a file, board.py tells other ranks the last event.

A record is four 64-bit words, each in a column of its own. Its number is written last: a record cut
short by a kill still has the number of the one that it replaces, the oldest, which is not read."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import mmap
import os
import socket
import stat
import struct
import sys
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ...errors import UsageError
from . import events, progress

VARIABLE = "FSDP_COMPAT_BLACK_BOX"
_NUM_RECORDS = 1 << 12
# mark; rank, process id, wall-clock time minus time.perf_counter, both in ns; host
_HEAD = struct.Struct("<8siIq64s")
_MARK = b"fsdpbox3"
# in the file; may differ: ranks may use different units
_MAY_DIFFER, _ENDED, _LINE, _ERROR, _RECORDS = 510, 511, slice(512, 1024), slice(1024, 2048), 2048
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

    def __str__(self) -> str:
        return f"{events.NAMES[self.event]} of {self.unit}"


class BlackBox(NamedTuple):
    """What one rank has left."""

    rank: int
    pid: int
    host: str
    line: str  # of the user's code that called the model last
    error: str  # the exception that ended the last pass; "" for none
    is_running: bool  # the process holds the file, on this host
    has_ended: bool  # without being killed
    may_differ: bool  # ranks may use different units
    records: list[Record]  # the oldest first


class Ring:
    """The ring of this process, and what is seldom written to it."""

    def __init__(self, rank: int, folder: Path | None = None) -> None:
        """Raises OSError."""
        self.memory: mmap.mmap | bytearray = bytearray(_NBYTES)
        self.units: dict[str, int] = {}  # in the order of their numbers
        self._file = -1  # of the units' names
        self._unwritten = b""  # names for which there was no space
        self._has_raised = False
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank}.box"
        try:
            self.memory = _mapped(path)
        except BlockingIOError:
            warnings.warn(f"Another process has {path}. Give each job a folder.", stacklevel=2)
            path = path.with_suffix(f".{os.getpid()}.box")
            self.memory = _mapped(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC  # open from now on: paths may be relative
        self._file = os.open(path.with_suffix(".units"), flags, 0o666)
        offset, host = time.time_ns() - time.perf_counter_ns(), socket.gethostname().encode()
        _HEAD.pack_into(self.memory, 0, _MARK, rank, os.getpid(), offset, host[:64])

    def add_unit(self, label: str) -> int:
        """Number another unit, and return its part of a code."""
        number = self.units[label] = min(len(self.units), 65535) * _UNIT
        if self._file >= 0:
            self._unwritten += label.replace("\n", " ").encode(errors="backslashreplace") + b"\n"
            with contextlib.suppress(OSError):
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        return number

    def note(self, event: int, error: BaseException | None) -> None:
        """Write of an event that has no record."""
        if event == events.FORWARD:
            if self._file >= 0:
                self._write(_LINE, progress.location())
            if self._has_raised:  # and has gone on
                self._write(_ERROR, "")
            self._has_raised = False
        elif event == events.RAISED and error is not None:
            self._write(_ERROR, _described(error))
            self._has_raised = True
        elif event == events.MAY_DIFFER:
            self.memory[_MAY_DIFFER] = 1
        elif event == events.ENDED:
            self.memory[_ENDED] = 1

    def _write(self, where: slice, text: str) -> None:
        nbytes = where.stop - where.start
        data = text.encode(errors="backslashreplace")
        self.memory[where] = data[:nbytes].ljust(nbytes, b"\0")

    def listener(self) -> events.Listener:
        """Return what writes events."""
        # A closure, because this runs for each unit several times in a step.
        numbers, codes, times, untils = _columns(self.memory)
        units, add_unit, note = self.units, self.add_unit, self.note
        number = slot = forward = 0
        now, unsharded, last_of_records = time.perf_counter_ns, events.UNSHARDED, max(events.NAMES)

        def tell(event: int, label: str, error: BaseException | None = None) -> None:
            nonlocal number, slot, forward
            if event > last_of_records:
                if event == unsharded:
                    untils[slot] = now()
                    return
                if event == events.FORWARD:
                    forward += _FORWARD
                with contextlib.suppress(Exception):  # the program's own error must arrive
                    note(event, error)
                return
            unit = units.get(label)
            if unit is None:
                unit = add_unit(label)
            number += 1
            slot = number % _NUM_RECORDS
            codes[slot] = forward + unit + event
            times[slot] = now()
            numbers[slot] = number

        return tell


def _mapped(path: Path) -> mmap.mmap:
    """Return a file of zeros in memory, with all its space: a hole in a full disk would end the
    process. Locks it until the process ends. Raises BlockingIOError if another one has, OSError."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(bytes(_NBYTES))
        file.truncate()
        return mmap.mmap(file.fileno(), _NBYTES)


def _columns(data: mmap.mmap | bytearray | bytes) -> list[memoryview]:
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


_own: Ring | None = None


def begin() -> None:
    """Write events from now on. Raises UsageError if FSDP_COMPAT_BLACK_BOX names a folder that
    cannot be written to."""
    global _own
    if _own is not None:
        return
    folder = os.environ.get(VARIABLE)
    try:
        _own = Ring(dist.get_rank(), Path(folder)) if folder else Ring(0)
    except OSError as error:
        raise UsageError.of(
            f"{VARIABLE} cannot be used.",
            expected="a folder on a local disk that this process may write to",
            got=str(error),
            where="the environment of this process",
            fix="name another folder, or unset it",
        ) from error
    events.listen(_own.listener())
    os.register_at_fork(after_in_child=_end_in_child)
    if folder:
        atexit.register(lambda: events.tell(events.ENDED, ""))
        before = sys.excepthook

        def note_uncaught(
            kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
        ) -> None:
            events.tell(events.RAISED, "", error)
            before(kind, error, trace)

        sys.excepthook = note_uncaught


def _end_in_child() -> None:
    global _own
    _own = None
    events.listen(None)


def last() -> str:
    """Return what this process did last with a unit, in words, or ""."""
    if _own is None:
        return ""
    numbers, codes, *_ = _columns(_own.memory)
    code = codes[max(range(_NUM_RECORDS), key=numbers.__getitem__)]
    if not code:
        return ""
    unit = [*_own.units][code % _FORWARD // _UNIT]
    return f"{events.NAMES[code % _UNIT]} of {unit} in forward {code // _FORWARD}"


def read(path: Path) -> BlackBox:
    """Read the file of a rank. Raises ValueError if it is none, or is damaged, and OSError."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode) or about.st_size != _NBYTES:
        raise ValueError(f"{path} is not a black box")
    data, later, is_running = path.read_bytes(), path.read_bytes(), False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_running = True
    if not data.startswith(_MARK):
        raise ValueError(f"{path} is not a black box")
    _, rank, pid, offset, host = _HEAD.unpack_from(data)
    names = path.with_suffix(".units").read_text(encoding="utf-8").splitlines()
    host, line, error = (
        field.rstrip(b"\0").decode(errors="replace") for field in (host, data[_LINE], data[_ERROR])
    )
    try:
        records = _records(data, later, offset, names)
    except (IndexError, KeyError) as damage:
        raise ValueError(f"{path} is damaged, or {path.with_suffix('.units')} is") from damage
    ends = is_running, bool(data[_ENDED]), bool(data[_MAY_DIFFER])
    return BlackBox(rank, pid, host, line, error, *ends, records)


def _records(data: bytes, later: bytes, offset: int, names: list[str]) -> list[Record]:
    """Return the records that are the same in two readings, as the process may still write. Raises
    LookupError if one is damaged."""
    numbers = _columns(later)[0]
    last_lost = max(*numbers, _NUM_RECORDS - 1) - _NUM_RECORDS + 1  # replaced, or about to be
    found = [
        (number, code, ns, until)
        for number, code, ns, until, number_later in zip(*_columns(data), numbers, strict=True)
        if last_lost < number == number_later
    ]
    if len(found) != len({number for number, *_ in found}):
        raise KeyError("two records of one number")
    return sorted(
        Record(
            *(number, code % _UNIT, names[code % _FORWARD // _UNIT], code // _FORWARD),
            *(ns + offset, until + offset if until > ns else 0),
        )
        for number, code, ns, until in found
        if events.NAMES[code % _UNIT]
    )
