"""Forked processes that run one function."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any


def forked(function: Callable[..., None], *args: Any) -> int:
    """Run ``function`` in a forked process and return its id. The exit status is 1 after an
    error."""
    process = os.fork()
    if process:
        return process
    try:
        function(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
