"""Calls in a child process with limits: what they do may take any amount of time or memory."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import time
from collections.abc import Callable

_MOST_S = 6
_MOST_NBYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Used:
    """What a call has used. error: the class of the exception that it raised; "" for none, "killed"
    if it reached a limit of the process."""

    error: str
    seconds: float  # of a processor
    nbytes: int  # of memory at its peak, beyond what the process had before


def bounded(call: Callable[[], object]) -> Used:
    """Make a call in a fork of this process that may use 6 s of a processor and 1 GiB more memory
    than this one."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(_used(call)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return Used(*json.loads(said)) if said else Used("killed", _MOST_S, _MOST_NBYTES)


def _used(call: Callable[[], object]) -> tuple[str, float, int]:
    size = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (size + _MOST_NBYTES, resource.RLIM_INFINITY))
    most = int(time.process_time()) + _MOST_S
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    before, start, error = _status("VmRSS"), time.process_time(), ""
    try:
        call()
    except BaseException as raised:  # the parent is told
        error = type(raised).__name__
    return error, time.process_time() - start, _status("VmHWM") - before


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10
