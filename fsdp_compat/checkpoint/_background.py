"""Saves that a thread goes on with: the one that is under way, and those that failed without
anybody having been told.

A failure is told once: by ``wait``, or else by the next call of this package that saves or loads,
on all ranks, or else on stderr when the process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping

from ..errors import CheckpointError, explain

__all__ = ["begin", "end", "hear", "told", "unheard", "wait_for_the_last"]


class _Saves:
    """Those of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way: tuple[str, threading.Thread] | None = (
            None  # identity, which is the same on all ranks
        )
        self.failed: dict[str, str] = {}  # by identity of a save: its error, which nobody was told
        self.heard: set[str] = (
            set()
        )  # failed on other ranks, which have told this one; not ended here

    def is_under_way(self, identity: str) -> bool:
        return self.under_way is not None and self.under_way[0] == identity


_saves = _Saves()


def wait_for_the_last() -> None:
    """Return when no save is under way."""
    last = _saves.under_way  # read once: its thread takes it away
    if last is not None:
        last[1].join()


def begin(identity: str, thread: threading.Thread) -> None:
    """Call it before the thread starts, which calls ``end``."""
    with _saves.lock:
        _saves.under_way = identity, thread


def end(identity: str, error: str | None) -> None:
    """A save has ended, with an error or well."""
    with _saves.lock:
        if _saves.is_under_way(identity):
            _saves.under_way = None
        if error is not None and identity not in _saves.heard:
            _saves.failed[identity] = error
        _saves.heard.discard(identity)
    if (
        not threading.main_thread().is_alive()
    ):  # in a process of multiprocessing nothing is called at its end
        _tell()


def unheard() -> dict[str, str]:
    """Return the errors of failed saves, by identity, that nobody was told."""
    with _saves.lock:
        return dict(_saves.failed)


def hear(failed: Mapping[str, str], call: str) -> CheckpointError:
    """Return the error that tells of failed saves. They are told then."""
    with _saves.lock:
        for identity in failed:
            if _saves.failed.pop(identity, None) is None and _saves.is_under_way(identity):
                _saves.heard.add(identity)
    return CheckpointError(
        explain(
            "An earlier async_save failed, and nobody has waited for it.",
            expected="a checkpoint that is complete",
            got="; ".join(failed.values()),
            where=call,
            fix=f"see to the cause, then make this call again: {call} has done nothing. wait() "
            "tells of a failure earlier",
        )
    )


def told(identity: str) -> None:
    """The caller of a save is told that it has failed."""
    with _saves.lock:
        _saves.failed.pop(identity, None)


def _tell() -> None:
    """Tell on stderr what nobody was told."""
    with _saves.lock:
        failed = list(_saves.failed.values())
        _saves.failed.clear()
    for error in failed:
        print(
            f"fsdp_compat: an async_save failed, and nobody has waited for it.\n{error}",
            file=sys.stderr,
            flush=True,
        )


def _start_afresh() -> None:
    """In a forked process: threads do not come along, and their errors are the parent's to tell."""
    global _saves
    _saves = _Saves()


os.register_at_fork(after_in_child=_start_afresh)
atexit.register(_tell)
