"""The environment variables of communication, the same on all ranks. An invalid one is a
UsageError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ..errors import UsageError

_SAME_HOST = "mapped", "counters", "messages"  # each excludes those before it


def _number(
    name: str, default: str, what: str, parse: Callable[[str], float], zero: str = ""
) -> float:
    """zero: what 0 means, if it is allowed."""
    text = os.environ.get(name, default)
    with contextlib.suppress(ValueError):
        number = parse(text)
        if 0 < number < float("inf") or (zero and number == 0):
            return number
    expected = "a positive " + what.removeprefix("a ") + (f", or 0 for {zero}" if zero else "")
    raise _error(name, f"not {what}", expected, text, default)


def _error(name: str, what: str, expected: str, text: str, default: str) -> UsageError:
    return UsageError.of(
        f"{name} is {what}.",
        expected=expected,
        got=repr(text),
        where="the environment of this process",
        fix=f"set it to the same on all ranks, or unset it for {default}",
    )


def same_host() -> str:
    """Return how far ranks of one host may go: FSDP_COMPAT_SAME_HOST."""
    name = "FSDP_COMPAT_SAME_HOST"
    found = os.environ.get(name, _SAME_HOST[0])
    if found not in _SAME_HOST:
        expected = ", ".join(map(repr, _SAME_HOST))
        raise _error(name, "not a way to exchange data", expected, found, _SAME_HOST[0])
    return found


def map_from_nbytes() -> int:
    """Return the size of the smallest shard that is mapped: FSDP_COMPAT_MAP_FROM, by default 512
    KiB. Below, padding to whole pages and system calls cost more than a copy."""
    return int(_number("FSDP_COMPAT_MAP_FROM", str(1 << 19), "a number of bytes", int))


def checks_calls() -> bool:
    """False if FSDP_COMPAT_MEET=0 disables the check that all ranks make a call."""
    return os.environ.get("FSDP_COMPAT_MEET", "1") != "0"


def idle_limit_s() -> float:
    """Return how long a missing rank may be idle before the call fails."""
    return _number("FSDP_COMPAT_MEET_TIMEOUT", "10", "a number of seconds", float)


def warn_after_s() -> float:
    """Return after how long a waiting rank first warns; 0: never."""
    name = "FSDP_COMPAT_WARN_AFTER"
    return _number(name, "30", "a number of seconds", float, zero="no warnings")


def quiet_s() -> float:
    """Return how often the store is polled while no rank asks and nothing waits: often enough to
    answer before the asking rank would warn, or give this one up."""
    with contextlib.suppress(UsageError):  # raised by the call that needs the limits
        return min(10.0, idle_limit_s(), (warn_after_s() or 30.0) / 3)
    return 10.0
