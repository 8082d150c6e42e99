"""What this process is doing, as another thread sees it: the current line of the user's code, and
whether the process makes progress.

It makes progress while its stack changes, while it or a child process (a worker of a loader, an
upload) uses the processor, while it reads or writes, and while the kernel wakes it repeatedly, or
blocks it, for a transfer. So a long loop, an evaluation, ``torch.save`` of a large file and an
upload are progress; a sleep, a barrier, and a wait for a file or a message are not. Two cases are
misjudged: a wait that spins (for a CUDA device) looks like work, and a wait for work elsewhere that
causes no traffic looks idle."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import textwrap
import threading
import time
import types
from pathlib import Path

import torch

from .processes import stat_of

__all__ = ["Progress", "activity", "follow", "note_error", "place", "place_of"]

BUSY = 0.1  # of one processor; the threads of 20 idle gloo groups take a quarter of it
BUSY_NBYTES = 1 << 16  # read or written per second
BUSY_WAKES = 25  # waits that ended, per second; a polling loop sleeps longer than that

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PACKAGES = tuple(
    str(Path(file).parent) + os.sep
    for file in (os.path.dirname(os.path.abspath(__file__)), torch.__file__)
)
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))

_followed = threading.main_thread().ident or 0
# Of the followed thread. The main thread has the number of the process; in a forked process,
# ``threading.main_thread().native_id`` is that of a thread of the parent.
_native_id = os.getpid()


def follow() -> None:
    """Follow the calling thread: it makes the collective calls."""
    global _followed, _native_id
    if _followed != threading.get_ident():
        _followed, _native_id = threading.get_ident(), threading.get_native_id()


def _follow_in_child() -> None:
    """The only thread of a forked process has the same number in Python, and another one in the
    system."""
    global _followed, _native_id
    _followed, _native_id = threading.get_ident(), threading.get_native_id()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_follow_in_child)


def _is_users(file: str) -> bool:
    """False for files of this package, of torch and of Python's library."""
    return (
        not file.startswith(_PACKAGES)
        and not file.startswith("<frozen")
        and (not file.startswith(_LIBRARY) or file.startswith(_INSTALLED))
    )


def place_of(frame: types.FrameType | None) -> str:
    """Return ``file:line in function()`` of the user's innermost frame, from ``frame`` outwards."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"
        frame = frame.f_back
    return "a place outside of the user's code"


def _frame() -> types.FrameType | None:
    return sys._current_frames().get(_followed)


def place() -> str:
    """Return the current place of the followed thread."""
    return place_of(_frame())


_error = ""


def note_error(error: BaseException | None) -> None:
    """Keep the error that has ended a pass on this rank, until the next pass (None): other ranks
    may be waiting for the rest of it."""
    global _error
    if error is None:
        _error = ""
    else:
        text = textwrap.shorten(str(error).partition("\n")[0], 200)
        _error = f"has raised {type(error).__name__} in its last pass ({text}), and "


def activity() -> str:
    """Return what the followed thread does, as in "is at train.py:41 in main()"."""
    return f"{_error}is at {place()}"


class Progress:
    """Measures for how long this process has made no progress."""

    def __init__(self) -> None:
        self._last = self._sample()
        self._at = self._moved_at = time.monotonic()

    def idle_s(self) -> float:
        """Return for how many seconds every call has found no progress since the one before; 0.0 if
        this one has found some."""
        now, sample = time.monotonic(), self._sample()
        passed_s, (stack, cpu_s, nbytes, num_wakes) = now - self._at, self._last
        self._last, self._at = sample, now
        moved = (
            sample[0] != stack
            or sample[1] - cpu_s > BUSY * passed_s
            or sample[2] - nbytes > BUSY_NBYTES * passed_s
        )
        if moved or sample[3] - num_wakes > BUSY_WAKES * passed_s or _in_transfer():
            self._moved_at = now
        return now - self._moved_at

    @staticmethod
    def _sample() -> tuple[tuple[tuple[int, int], ...], float, int, int]:
        """Return (stack, seconds of processor time, bytes read and written, number of waits that
        ended), all without the calling thread: measuring often is no progress."""
        stack, frame = [], _frame()
        while frame is not None:
            stack.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return (
            tuple(stack),
            time.process_time() - time.thread_time() + sum(map(_cpu_s, _children())),
            _io_nbytes("self") - _io_nbytes(f"self/task/{threading.get_native_id()}"),
            _num_wakes(),
        )


def _children() -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                found += Path(f"/proc/self/task/{thread}/children").read_text().split()
    return found


def _cpu_s(pid: str) -> float:
    try:
        fields = stat_of(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _io_nbytes(of: str) -> int:
    """Return the bytes read and written by a process or thread, given by its path in /proc."""
    try:
        lines = Path(f"/proc/{of}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1])
        for line in lines
        if line.startswith(("rchar", "wchar", "read_bytes", "write_bytes"))
    )


def _num_wakes() -> int:
    try:
        lines = Path(f"/proc/self/task/{_native_id}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches")), 0
    )


def _in_transfer() -> bool:
    """True while the kernel blocks the followed thread in an uninterruptible transfer."""
    try:
        return stat_of(f"self/task/{_native_id}")[0] == "D"
    except OSError:
        return False
