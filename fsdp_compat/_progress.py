"""Progress on stderr: bytes and rate on the first rank, and seconds of what has no length."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from ._text import nbytes_text

_SILENT_S = 2

Tick = Callable[[int], object]  # called with the number of bytes just done


def no_tick(nbytes: int) -> None: ...


@contextlib.contextmanager
def progress_bar(shown: bool, what: str, total_nbytes: int) -> Iterator[Tick]:
    """Show each second how much is done, and how fast, and at the end the total, if ``shown``.
    Yield the function that counts bytes."""
    if not shown:
        yield no_tick
        return
    done, start = 0, time.monotonic()

    def tick(nbytes: int) -> None:
        nonlocal done
        done += nbytes

    def text() -> str:
        percent = 100 * done // total_nbytes if total_nbytes else 100
        rate = nbytes_text(done / max(time.monotonic() - start, 1e-9))
        return f"{what}: {percent}% of {nbytes_text(total_nbytes)}, {rate}/s"

    try:
        with _repeated(text, 1):
            yield tick
    finally:
        print(text(), file=sys.stderr)


@contextlib.contextmanager
def elapsing(shown: bool, what: str) -> Iterator[None]:
    """Show, from two seconds on, for how long the body has run."""
    start = time.monotonic()

    def text() -> str:
        return f"{what} ... {time.monotonic() - start:.0f} s"

    with _repeated(text, _SILENT_S) if shown else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _repeated(text: Callable[[], str], silent_s: int) -> Iterator[None]:
    """Show a text on one line, anew each second from ``silent_s`` on, and remove it at the end."""
    ended = threading.Event()

    def show() -> None:
        shown, wait = False, silent_s
        while not ended.wait(wait):
            print(f"\r{text():79}", end="", file=sys.stderr, flush=True)
            shown, wait = True, 1
        if shown:
            print(f"\r{'':79}\r", end="", file=sys.stderr)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
