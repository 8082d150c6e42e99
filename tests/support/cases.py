"""Several cases in one test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def about(case: object) -> Iterator[None]:
    """Add the case to an error raised inside the context."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise
