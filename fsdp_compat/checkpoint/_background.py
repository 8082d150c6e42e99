"""Saves that a thread writes: the current one, and failed ones that were not reported.

A failure is reported once: by ``wait``; otherwise by the next save or load, on all ranks; otherwise
on stderr when the process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping

from ..errors import CheckpointError


class _Saves:
    """The saves of this process. An identity is the same on all ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current: tuple[str, threading.Thread] | None = None  # with its identity
        self.failed: dict[str, str] = {}  # by identity: the error, not reported yet
        # Saves that failed on other ranks and are still running here: already reported.
        self.reported_early: set[str] = set()

    def is_current(self, identity: str) -> bool:
        return self.current is not None and self.current[0] == identity


_saves = _Saves()


def wait_for_current() -> None:
    """Return when no save is running."""
    current = _saves.current  # read once: its thread resets it
    if current is not None:
        current[1].join()


def begin(identity: str, thread: threading.Thread) -> None:
    """Register a save. Call it before starting the thread, which calls ``end``."""
    with _saves.lock:
        _saves.current = identity, thread


def end(identity: str, error: str | None) -> None:
    """Unregister a save. error: None if it succeeded."""
    with _saves.lock:
        if _saves.is_current(identity):
            _saves.current = None
        if error is not None and identity not in _saves.reported_early:
            _saves.failed[identity] = error
        _saves.reported_early.discard(identity)
    if not threading.main_thread().is_alive():  # multiprocessing children run no atexit functions
        _print_unreported()


def unreported() -> dict[str, str]:
    """Return the errors of failed saves, by identity, that were not reported yet."""
    with _saves.lock:
        return dict(_saves.failed)


def report_failed(failed: Mapping[str, str], call: str) -> CheckpointError:
    """Return the error about failed saves of any rank, and count them as reported."""
    with _saves.lock:
        for identity in failed:
            if _saves.failed.pop(identity, None) is None and _saves.is_current(identity):
                _saves.reported_early.add(identity)
    return CheckpointError.of(
        "An earlier async_save failed, and its wait() was not called.",
        expected="a complete checkpoint",
        got="; ".join(failed.values()),
        where=call,
        fix=f"fix the cause and repeat this call, which has done nothing: {call}. Call wait() "
        "to see a failure earlier",
    )


def mark_reported(identity: str) -> None:
    """Count the failure of a save as reported: ``wait`` raises it."""
    with _saves.lock:
        _saves.failed.pop(identity, None)


def _print_unreported() -> None:
    with _saves.lock:
        failed = list(_saves.failed.values())
        _saves.failed.clear()
    for error in failed:
        print(
            f"fsdp_compat: an async_save failed, and its wait() was not called.\n{error}",
            file=sys.stderr,
            flush=True,
        )


def _reset() -> None:
    """Forget the parent's saves in a forked process: their threads and errors are the parent's."""
    global _saves
    _saves = _Saves()


os.register_at_fork(after_in_child=_reset)
atexit.register(_print_unreported)
