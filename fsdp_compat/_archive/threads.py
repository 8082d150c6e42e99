"""Work on many tensors in several threads, stopped at once by an error or by Ctrl-C."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import TypeVar

from .._progress import Tick, progress_bar

THREADS = min(4, os.cpu_count() or 1)

_T = TypeVar("_T")
_R = TypeVar("_R")


def for_each(
    items: Sequence[_T],
    work: Callable[[_T, Tick], _R],
    *,
    what: str = "",
    total_nbytes: int = 0,
    progress: bool = False,
) -> list[_R]:
    """Return ``work(item, tick)`` of all items, in order. The first exception ends all work."""
    with progress_bar(progress, what, total_nbytes) as advance:
        if THREADS == 1 or len(items) < 2:
            return [work(item, advance) for item in items]
        lock, errors = threading.Lock(), list[BaseException]()

        def tick(nbytes: int) -> None:
            if errors:
                raise CancelledError
            with lock:
                advance(nbytes)

        def until_stopped(item: _T) -> _R:
            try:
                return work(item, tick)
            except BaseException as error:
                errors.append(error)
                raise

        with ThreadPoolExecutor(min(THREADS, len(items))) as pool:
            futures = [pool.submit(until_stopped, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException as error:  # Ctrl-C
                errors.append(error)
            pool.shutdown(cancel_futures=bool(errors))
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
