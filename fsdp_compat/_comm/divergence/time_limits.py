"""How long ranks wait: the environment variables of waits, in seconds."""

from __future__ import annotations

import contextlib
import functools
import os

from ...errors import UsageError, explain

__all__ = ["idle_limit_s", "quiet_s", "warn_after_s"]


@functools.cache
def _parsed(name: str, text: str, default: str, zero: str = "") -> float:
    """zero: what 0 means, if it is allowed."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf") or (zero and float(text) == 0):
            return float(text)
    raise UsageError(
        explain(
            f"{name} is not a time.",
            expected="a positive number of seconds" + (f", or 0 for {zero}" if zero else ""),
            got=repr(text),
            where="the environment of this process",
            fix=f"set it to the same number of seconds on all ranks, or unset it for {default}",
        )
    )


def _seconds(name: str, default: str, zero: str = "") -> float:
    return _parsed(name, os.environ.get(name, default), default, zero)


def idle_limit_s() -> float:
    """Return how long, in seconds, a missing rank may be idle before the call fails:
    FSDP_COMPAT_MEET_TIMEOUT, by default 10.

    Raises UsageError if the variable is not a time.
    """
    return _seconds("FSDP_COMPAT_MEET_TIMEOUT", "10")


def warn_after_s() -> float:
    """Return after how many seconds a waiting rank first warns: FSDP_COMPAT_WARN_AFTER, by default
    30. 0: it never does.

    Raises UsageError if the variable is not a time.
    """
    return _seconds("FSDP_COMPAT_WARN_AFTER", "30", "no warnings")


def quiet_s() -> float:
    """Return the seconds between two looks at the store while no rank asks and nothing waits. A
    question is answered before the rank that asked would warn, or give this one up."""
    with contextlib.suppress(UsageError):  # raised by the call that needs the limits
        return min(10.0, idle_limit_s(), (warn_after_s() or 30.0) / 3)
    return 10.0
