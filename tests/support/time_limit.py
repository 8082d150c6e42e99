"""How long a test waits for processes: longer where all takes longer."""

from __future__ import annotations

import functools
import subprocess
import sys
import time

_LIMIT_S = 120.0  # far longer than anything here takes on a quiet machine
_QUIET_START_S = 0.05
_VALID_S = 30.0  # the load of a machine changes


def limit_s(quiet_s: float = _LIMIT_S) -> float:
    """Return how long something may take that takes at most ``quiet_s`` on a quiet machine: more by
    the factor by which a Python process takes longer to start now."""
    return quiet_s * _slowness(time.monotonic() // _VALID_S)


@functools.lru_cache(maxsize=1)
def _slowness(_when: float) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import json, unittest.mock"], check=True)
    return max(1.0, (time.monotonic() - started) / _QUIET_START_S)
