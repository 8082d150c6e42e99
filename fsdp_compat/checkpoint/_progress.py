"""Progress: bars in bytes, on the first rank, and seconds of what has no length."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from ._blocks import Tick, no_tick

_SILENT_S = 2


@contextlib.contextmanager
def progress_bar(shown: bool, what: str, total_nbytes: int | None) -> Iterator[Tick]:
    """Draw a bar with bytes and rate, if ``shown``. Yield the function that advances it."""
    if not shown:
        yield no_tick
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    with tqdm(total=total_nbytes, desc=what, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update


@contextlib.contextmanager
def elapsing(shown: bool, what: str) -> Iterator[None]:
    """Show on stderr, from two seconds on, for how long the body has run."""
    ended = threading.Event()

    def show() -> None:
        number, wait = _SILENT_S, _SILENT_S
        while not ended.wait(wait):
            print(f"\r{what} ... {number} s", end="", file=sys.stderr, flush=True)
            number, wait = number + 1, 1
        if number > _SILENT_S:
            print(f"\r{'':{len(what) + 12}}\r", end="", file=sys.stderr)

    thread = threading.Thread(target=show, daemon=True)
    try:
        if shown:
            thread.start()
        yield
    finally:
        ended.set()
        if shown:
            thread.join()
