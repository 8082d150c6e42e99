"""Processes, in words with which others on their machine find them: whether one that says nothing
still lives."""

from __future__ import annotations

import dataclasses
import functools
import os
import uuid
from pathlib import Path

__all__ = ["Process", "host", "stat_of"]

_STATE, _START_TIME = 0, 19  # among the fields of a process's stat after its name


@functools.cache
def host() -> str:
    """What tells this machine, since it was started, from every other one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


def stat_of(process: str) -> list[str]:
    """Return what the system says of a process, or of a thread (``self/task/7``), in numbers.
    Raises OSError if there is none."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, in words with which others on its machine find it. A killed process says nothing,
    and a stopped one neither."""

    machine: str  # the same for all processes that see each other's ids
    pid: int
    started: str  # tells it from a later process with the same id

    @staticmethod
    def with_id(pid: int) -> Process | None:
        """Return a process of this machine, or None where others cannot look for it."""
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
            return Process(f"{host()}/{namespace}", pid, stat_of(str(pid))[_START_TIME])
        except OSError:
            return None

    @staticmethod
    def own() -> Process | None:
        return Process.with_id(os.getpid())

    def has_ended(self) -> bool:
        """True if it does not run any more. The caller is on its machine."""
        try:
            fields = stat_of(str(self.pid))
        except (FileNotFoundError, ProcessLookupError):
            return True
        return (
            fields[_STATE] in "ZX" or fields[_START_TIME] != self.started
        )  # Z: its parent has not waited for it yet

    def is_known_to_have_ended(self) -> bool:
        """False for one that lives, and for one of another machine."""
        own = Process.own()
        return own is not None and own.machine == self.machine and self.has_ended()
