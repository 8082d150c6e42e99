"""How long ranks wait: the environment variables of waits, in seconds."""

from __future__ import annotations

import contextlib
import os

from ...errors import UsageError


def _seconds(name: str, default: str, zero: str = "") -> float:
    """zero: what 0 means, if it is allowed."""
    text = os.environ.get(name, default)
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < float("inf") or (zero and seconds == 0):
            return seconds
    raise UsageError.of(
        f"{name} is not a time.",
        expected="a positive number of seconds" + (f", or 0 for {zero}" if zero else ""),
        got=repr(text),
        where="the environment of this process",
        fix=f"set it to the same number of seconds on all ranks, or unset it for {default}",
    )


def idle_limit_s() -> float:
    """Return how long a missing rank may be idle before the call fails. Raises UsageError if the
    variable is not a time, as ``warn_after_s`` does."""
    return _seconds("FSDP_COMPAT_MEET_TIMEOUT", "10")


def warn_after_s() -> float:
    """Return after how long a waiting rank first warns. 0: it never does."""
    return _seconds("FSDP_COMPAT_WARN_AFTER", "30", "no warnings")


def quiet_s() -> float:
    """Return how long the store is not looked at while no rank asks and nothing waits. A question
    is answered before the rank that asked would warn, or give this one up."""
    with contextlib.suppress(UsageError):  # raised by the call that needs the limits
        return min(10.0, idle_limit_s(), (warn_after_s() or 30.0) / 3)
    return 10.0
