"""The environment variables of communication, the same on all ranks; UsageError: one is invalid."""

from __future__ import annotations

import contextlib
import os

from ..errors import UsageError

_SAME_HOST = "mapped", "counters", "messages"  # each excludes those before it


def _number(name: str, default: int, unit: str, zero: str = "") -> float:
    """zero: what 0 means, if it is allowed."""
    text = os.environ.get(name, str(default))
    with contextlib.suppress(ValueError):
        number = float(text)
        if 0 < number < float("inf") or (zero and number == 0):
            return number
    expected = f"a positive number of {unit}" + (f", or 0 for {zero}" if zero else "")
    raise _error(name, f"a number of {unit}", expected, default)


def _error(name: str, what: str, expected: str, default: object) -> UsageError:
    return UsageError.of(
        f"{name} is not {what}.",
        expected=expected,
        got=repr(os.environ[name]),
        where="the environment of this process",
        fix=f"set it to the same on all ranks, or unset it for {default}",
    )


def same_host() -> str:
    """Return how far ranks of one host may go: FSDP_COMPAT_SAME_HOST."""
    name, default = "FSDP_COMPAT_SAME_HOST", _SAME_HOST[0]
    way = os.environ.get(name, default)
    if way not in _SAME_HOST:
        raise _error(name, "a way to exchange data", ", ".join(map(repr, _SAME_HOST)), default)
    return way


def map_from_nbytes() -> int:
    """Return the size of the smallest shard that is mapped: FSDP_COMPAT_MAP_FROM, by default 512
    KiB. Below, padding to whole pages and system calls cost more than a copy."""
    return int(_number("FSDP_COMPAT_MAP_FROM", 1 << 19, "bytes"))


def checks_calls() -> bool:
    """False if FSDP_COMPAT_MEET=0 disables the check that all ranks make a call."""
    return os.environ.get("FSDP_COMPAT_MEET", "1") != "0"


def idle_limit_s() -> float:
    """Return how long a missing rank may be idle before the call fails."""
    return _number("FSDP_COMPAT_MEET_TIMEOUT", 10, "seconds")


def warn_after_s() -> float:
    """Return after how long a waiting rank first warns; 0: never."""
    return _number("FSDP_COMPAT_WARN_AFTER", 30, "seconds", zero="no warnings")
