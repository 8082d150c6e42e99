"""The last events of this process, in a file that outlives it: also SIGKILL, an abort by a watchdog
in C++, and a wait inside of a backend, where no Python code runs any more.

``FSDP_COMPAT_BLACK_BOX=folder`` keeps a file of 130 KiB per rank in that folder, which should be on
a local disk or in /dev/shm. ``fsdp-compat diagnose FOLDER`` compares those of all ranks."""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import socket
import struct
import sys
import time
import types
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from .._comm.divergence import progress
from ..errors import UsageError
from . import events
from .device import is_simulated
from .events import Event

VARIABLE = "FSDP_COMPAT_BLACK_BOX"
_NUM_RECORDS = 1 << 12
# mark; rank, process id, wall-clock time minus time.perf_counter, both in ns; host
_HEAD = struct.Struct("<8siIq64s")
_MARK = b"fsdpbox1"
_LINE, _ERROR, _RECORDS = slice(512, 1024), slice(1024, 2048), 2048  # in the file
# number from 1; ns; event; unit; forwards, communications and uses of units that have begun
_RECORD = struct.Struct("<QQHHIII")
_pack, _now = _RECORD.pack_into, time.perf_counter_ns


class Record(NamedTuple):
    """An event. The counts are those of all that has begun until then."""

    number: int
    ns: int  # wall-clock time
    event: Event
    unit: str
    forwards: int
    communications: int  # all-gathers and reductions, which all ranks begin in the same order
    uses: int  # waits for a unit's parameters


class BlackBox(NamedTuple):
    """What one rank has left."""

    rank: int
    pid: int
    host: str
    line: str  # of the user's code that called the model last
    error: str  # the exception that ended the last pass; "" for none
    is_running: bool  # the process holds the file, on this host
    records: list[Record]  # the oldest first


class _Ring:
    """Writes the events of this process."""

    __slots__ = (
        "_communications",
        "_forwards",
        "_has_raised",
        "_memory",
        "_names_path",
        "_number",
        "_units",
        "_uses",
    )

    def __init__(self, folder: Path, rank: int) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._names_path = folder / f"rank_{rank}.units"
        self._names_path.write_text("")
        nbytes = _RECORDS + _NUM_RECORDS * _RECORD.size
        with (folder / f"rank_{rank}.box").open("w+b") as file:
            file.truncate(nbytes)
            fcntl.flock(file, fcntl.LOCK_EX)  # until the process ends, as the map keeps it open
            self._memory = mmap.mmap(file.fileno(), nbytes)
        offset, host = time.time_ns() - time.perf_counter_ns(), socket.gethostname().encode()
        _HEAD.pack_into(self._memory, 0, _MARK, rank, os.getpid(), offset, host[:64])
        self._units: dict[str, int] = {}
        self._has_raised = False
        self._number = self._forwards = self._communications = self._uses = 0

    def tell(self, event: int, label: str, error: BaseException | None = None) -> None:
        if event == 5:  # numbers: attributes of enums are slow
            self._uses += 1
        elif event == 2 or event == 6:  # UNSHARDING, REDUCING
            self._communications += 1
        elif event == 8:
            self._forwards += 1
            self._write(_LINE, progress.location())
            if self._has_raised:  # and has gone on
                self._has_raised = False
                self._write(_ERROR, "")
        elif error is not None:
            self._has_raised = True
            self._write(_ERROR, _described(error))
        try:
            unit = self._units[label]
        except KeyError:
            unit = self._add(label)
        number = self._number
        self._number = number + 1
        _pack(
            self._memory,
            _RECORDS + (number & (_NUM_RECORDS - 1)) * 32,
            number + 1,
            _now(),
            event,
            unit,
            self._forwards,
            self._communications,
            self._uses,
        )

    def _add(self, label: str) -> int:
        unit = self._units[label] = min(len(self._units), 65535)
        with self._names_path.open("a", encoding="utf-8") as file:
            file.write(label.replace("\n", " ") + "\n")
        return unit

    def _write(self, where: slice, text: str) -> None:
        nbytes = where.stop - where.start
        self._memory[where] = text.encode()[:nbytes].ljust(nbytes, b"\0")


def _described(error: BaseException) -> str:
    """Return the error and the user's innermost line that it came through."""
    frame: types.FrameType | None = None
    trace = error.__traceback__
    while trace is not None:
        if progress.is_users(trace.tb_frame.f_code.co_filename):
            frame, line = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    first = str(error).partition("\n")[0]
    where = f" at {frame.f_code.co_filename}:{line}" if frame is not None else ""
    return f"{type(error).__name__}{': ' * bool(first)}{first[:700]}{where}"


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
        ring = _Ring(Path(folder), dist.get_rank())
    except OSError as error:
        raise UsageError.of(
            f"{VARIABLE} cannot be used.",
            expected="a folder on a local disk that this process may write to",
            got=str(error),
            where="the environment of this process",
            fix="name another folder, or unset it",
        ) from error
    events.listen(ring.tell)
    os.register_at_fork(after_in_child=lambda: events.listen(None))
    atexit.register(lambda: events.tell(Event.ENDED, ""))
    before = sys.excepthook

    def note_uncaught(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        events.tell(Event.RAISED, "", error)
        before(kind, error, trace)

    sys.excepthook = note_uncaught


def read(path: Path) -> BlackBox:
    """Read the file of a rank. Raises ValueError if it is none, and OSError."""
    with path.open("rb") as file:
        data, is_running = file.read(), False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_running = True
    if len(data) < _RECORDS or not data.startswith(_MARK):
        raise ValueError(f"{path} is not a black box")
    _, rank, pid, offset, host = _HEAD.unpack_from(data)
    names = path.with_suffix(".units").read_text(encoding="utf-8").splitlines()
    records = [
        Record(number, ns + offset, Event(event), names[unit], *counts)
        for number, ns, event, unit, *counts in _RECORD.iter_unpack(data[_RECORDS:])
        if number and unit < len(names)
    ]
    line, error = (data[where].rstrip(b"\0").decode(errors="replace") for where in (_LINE, _ERROR))
    return BlackBox(
        rank, pid, host.rstrip(b"\0").decode(), line, error, is_running, sorted(records)
    )
