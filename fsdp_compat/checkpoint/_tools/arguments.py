"""Arguments that several calls have: limits, and regular expressions that select names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from ...errors import unusable
from .._progress import require_bar

MEMORY = 268_435_456  # bytes of values at a time, unless the caller says otherwise
_LEAST_MEMORY = 1 << 20  # per worker


def require_count(name: str, value: Any, least: int, unit: str, call: str) -> None:
    """Raise UsageError unless ``value`` is a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        raise unusable(name, f"at least {least} {unit}", value, f"argument {name!r} of {call}")


def require_tolerance(name: str, value: Any, call: str) -> None:
    """Raise UsageError unless ``value`` is a finite number of at least 0."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        expected = "a finite number of at least 0"
        raise unusable(name, expected, value, f"argument {name!r} of {call}")


def require_limits(memory: int, workers: int, progress: bool, call: str) -> None:
    """Raise UsageError unless there is memory for each worker, and tqdm if a bar is wanted."""
    require_count("workers", workers, 1, "threads", call)
    require_count("memory", memory, _LEAST_MEMORY * workers, "bytes", call)
    require_bar(progress, call)


def compiled(argument: str, patterns: str | Iterable[str], call: str) -> list[re.Pattern[str]]:
    """Return a list of regular expressions. Raises UsageError for anything else."""
    try:
        return [
            re.compile(each) for each in ([patterns] if isinstance(patterns, str) else patterns)
        ]
    except (TypeError, re.error) as error:
        expected = "regular expressions, as Python's re has them"
        fix = f"correct the pattern: {error}"
        raise unusable(
            argument, expected, patterns, f"argument {argument!r} of {call}", fix
        ) from error


def selection(
    include: str | Iterable[str], exclude: str | Iterable[str], call: str
) -> Callable[[str], bool]:
    """Return whether a name is selected: with a match of any of ``include``, if there is one, and
    of none of ``exclude``. Raises UsageError for an invalid pattern."""
    wanted, unwanted = compiled("include", include, call), compiled("exclude", exclude, call)

    def is_selected(name: str) -> bool:
        is_wanted = not wanted or any(pattern.search(name) for pattern in wanted)
        return is_wanted and not any(pattern.search(name) for pattern in unwanted)

    return is_selected
