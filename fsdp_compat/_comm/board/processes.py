"""The processes of ranks: which of them share a machine, and whether a silent one is alive."""

from __future__ import annotations

import dataclasses
import functools
import os
import uuid
from pathlib import Path

# Indices into the fields of a process's stat after its name. The address of its stack is random and
# changes by an exec, which changes nothing else; it is 0 for readers without permission.
_STATE, _START_TIME, _STACK = 0, 19, 25


@functools.cache
def host() -> str:
    """Return a name of this machine, unique until it reboots. Tests replace it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/.../stat after the name, or raise OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@dataclasses.dataclass(frozen=True)
class Process:
    """Identifies a process and its program. It tells a killed process from a stopped one."""

    machine: str  # the same for processes that see each other's ids
    pid: int
    started: str  # distinguishes it from a later process with the same id
    stack: str  # distinguishes its program from the one that it runs after an exec

    @staticmethod
    def with_id(pid: int) -> Process | None:
        """Return a process of this machine, or None if there is no /proc."""
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
            fields = _stat_of(pid)
            return Process(f"{host()}/{namespace}", pid, fields[_START_TIME], fields[_STACK])
        except OSError:
            return None

    @staticmethod
    def own() -> Process | None:
        return Process.with_id(os.getpid())

    def has_ended(self) -> bool:
        """True if it no longer runs, or runs another program. The caller is on its machine."""
        try:
            fields = _stat_of(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # this process has no descriptor left to look
            return False
        return (
            fields[_STATE] in "ZX"  # Z: a zombie
            or fields[_START_TIME] != self.started
            or (fields[_STACK] != self.stack and "0" not in (fields[_STACK], self.stack))
        )
