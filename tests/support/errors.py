"""Errors of communication that ranks raise soon, as tests need no long time limits."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from fsdp_compat import StateError
from fsdp_compat._comm.divergence import deadlock

PROMPT_S = 8.0  # for an error, on a busy machine; every time limit is far beyond it


@contextlib.contextmanager
def limits(idle_s: float = 0.4, patience_s: float = 0.3) -> Iterator[None]:
    """Inside the context missing ranks are distinguished from busy ones sooner than by default."""
    name = "FSDP_COMPAT_MEET_TIMEOUT"
    before = os.environ.get(name), deadlock.PATIENCE
    os.environ[name], deadlock.PATIENCE = str(idle_s), patience_s
    try:
        yield
    finally:
        deadlock.PATIENCE = before[1]
        os.environ.pop(name)
        if before[0] is not None:
            os.environ[name] = before[0]


def message_of(call: Callable[[], object]) -> str:
    """Return the message of the StateError that ``call`` raises soon, or ""."""
    started = time.monotonic()
    with limits():
        try:
            call()
        except StateError as error:
            assert time.monotonic() - started < PROMPT_S, f"late: {error}"
            return str(error)
    return ""
