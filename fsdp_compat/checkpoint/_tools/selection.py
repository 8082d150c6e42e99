"""The names that a call selects, by regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ...errors import UsageError, wrong_type


def compiled(argument: str, patterns: Iterable[str], call: str) -> list[re.Pattern[str]]:
    """Return a list of regular expressions. Raises UsageError for anything else."""
    try:
        if isinstance(patterns, str):
            raise TypeError("one text")
        return [re.compile(pattern) for pattern in patterns]
    except TypeError as error:
        raise wrong_type(argument, "regular expressions", patterns, call) from error
    except re.error as error:
        raise UsageError.of(
            f"{argument} has an invalid pattern.",
            expected="regular expressions, as Python's re has them",
            got=f"{error.pattern!r}: {error}",
            where=call,
            fix="correct the pattern; a dot that is meant as one is written \\.",
        ) from error


def selection(include: Iterable[str], exclude: Iterable[str], call: str) -> Callable[[str], bool]:
    """Return whether a name is selected: with a match of any of ``include``, if there is one, and
    of none of ``exclude``. Raises UsageError for an invalid pattern."""
    wanted, unwanted = compiled("include", include, call), compiled("exclude", exclude, call)

    def is_selected(name: str) -> bool:
        is_wanted = not wanted or any(pattern.search(name) for pattern in wanted)
        return is_wanted and not any(pattern.search(name) for pattern in unwanted)

    return is_selected
