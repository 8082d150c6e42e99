"""Errors of communication that ranks raise soon, as tests need no long time limits."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from unittest import mock

from fsdp_compat import StateError
from fsdp_compat._comm.board import board

PROMPT_S = 8.0  # for an error, on a busy machine; every time limit is far beyond it


@contextlib.contextmanager
def limits(idle_s: float = 0.4, patience_s: float = 0.3) -> Iterator[None]:
    """Inside the context missing ranks are distinguished from busy ones sooner than by default."""
    with (
        mock.patch.dict(os.environ, {"FSDP_COMPAT_MEET_TIMEOUT": str(idle_s)}),
        mock.patch.object(board, "PATIENCE", patience_s),
    ):
        yield


def message_of(call: Callable[[], object]) -> str:
    """Return the message of the StateError that ``call`` raises soon, within ``limits``, or ""."""
    with limits():
        return prompt_message_of(call)


def prompt_message_of(call: Callable[[], object]) -> str:
    """Return the message of the StateError that ``call`` raises soon, or ""."""
    started = time.monotonic()
    try:
        call()
    except StateError as error:
        passed_s = time.monotonic() - started
        assert passed_s < PROMPT_S, f"after {passed_s:.1f} s: {error}"
        return str(error)
    return ""


def assert_told(message: str, *patterns: str) -> None:
    for pattern in patterns:
        assert re.search(pattern, message), f"{pattern!r} is not in\n{message}"
