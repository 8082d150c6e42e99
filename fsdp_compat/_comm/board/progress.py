"""What this process is doing, as another thread sees it: the current line of the user's code, and
whether the process waits.

It waits while the followed thread's innermost Python frame is a collective of torch.distributed or
of ../backend.py, or a lock while all other threads wait too. Everything else counts as work, even a
sleep or a C function of the user. It is measured while the process stands still (board.py); waits
over gloo are known from ``Activity.waiting``."""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import sysconfig
import textwrap
import threading
import time
import types
from concurrent.futures import thread as thread_pool
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

_COMM = Path(__file__).absolute().parents[1]
_PACKAGES = tuple(str(folder) + os.sep for folder in (_COMM.parent, Path(torch.__file__).parent))
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))

# Files whose functions wait for other ranks, and for other threads.
_COLLECTIVES = frozenset({distributed_c10d.__file__, str(_COMM / "backend.py")})
_WAITS = _COLLECTIVES | {threading.__file__, queue.__file__, thread_pool.__file__}

_followed = threading.main_thread().ident or 0


def follow() -> None:
    """Follow the calling thread, which makes the collective calls."""
    global _followed
    _followed = threading.get_ident()


os.register_at_fork(after_in_child=follow)  # a thread that forks is the only one of its child


def is_users(file: str) -> bool:
    """Return False for files of this package, of torch and of Python's library."""
    return (
        not file.startswith(_PACKAGES)
        and not file.startswith("<frozen")
        and (not file.startswith(_LIBRARY) or file.startswith(_INSTALLED))
    )


def location_of(frame: types.FrameType | None) -> str:
    """Return ``file:line in function()`` of the user's innermost frame, from ``frame`` outwards."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"
        frame = frame.f_back
    return "a place outside of the user's code"


def location() -> str:
    """Return the current location of the followed thread in the user's code."""
    return location_of(sys._current_frames().get(_followed))


def first_line_of(error: BaseException | None) -> str:
    """Return the first line of an error's text. Raises nothing, whatever the error's class does."""
    try:
        text = str(error)
    except BaseException:
        return "its text raises an error"
    return text.partition("\n")[0][:700].encode(errors="backslashreplace").decode()


_error = ""


def record_error(error: BaseException | None) -> None:
    """Remember, until the next pass (None), the error that ended one: other ranks may wait."""
    global _error
    _error = ""
    if error is not None:
        text = textwrap.shorten(first_line_of(error), 200)
        _error = f"has raised {type(error).__name__} in its last pass ({text}), and "


def activity() -> str:
    """Return what the followed thread does, as in "is at train.py:41 in main()"."""
    return f"{_error}is at {location()}"


def raise_soon(error: Exception | None) -> None:
    """Raise an error in the followed thread when it runs Python code again, unless it handles one;
    None: no longer. A wait in C++ that was aborted returns as if nothing had happened."""
    kind: type[Exception] | None = None
    if error is not None:
        handled = sys._current_exceptions().get(_followed)
        if handled not in (None, (None, None, None)):
            return
        of, text = type(error), str(error)
        body = {"__init__": lambda self: of.__init__(self, text), "__module__": of.__module__}
        kind = type(of.__name__, (of,), body)
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(_followed), raised)


class Progress:
    """Measures for how long this process has been in the same wait."""

    def __init__(self) -> None:
        # Held, so that no other call gets a frame of the same identity. It also holds the frame's
        # variables, so this object must not outlive the standstill.
        self._frame: types.FrameType | None = None
        self._instruction, self._since = 0, 0.0

    def idle_s(self) -> float:
        """Return for how many seconds all calls have found this process in one wait; or 0.0."""
        frames, now, own = sys._current_frames(), time.monotonic(), threading.get_ident()
        frame = frames.get(_followed)
        files = {each.f_code.co_filename for ident, each in frames.items() if ident != own}
        if frame is None or not (frame.f_code.co_filename in _COLLECTIVES or files <= _WAITS):
            self._frame = None
            return 0.0
        if frame is not self._frame or frame.f_lasti != self._instruction:
            self._frame, self._instruction, self._since = frame, frame.f_lasti, now
        return now - self._since
