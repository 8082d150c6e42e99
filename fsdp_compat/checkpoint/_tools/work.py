"""Work on many tensors: in several threads, within bounded memory, and stopped at once by an error
or by Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from .._progress import progress_bar
from .reading import SLAB_NBYTES

_T = TypeVar("_T")
_R = TypeVar("_R")
Tick = Callable[[int], object]  # called with the number of bytes just read


class _Stopped(Exception):
    """Ends the work of a thread after another one failed."""


def numel_at_once(memory: int, workers: int, nbytes_per_element: int) -> int:
    """Return how many elements a worker may have in memory, if each takes so many bytes with all
    temporary values. More than a few MB at a time are not faster."""
    return max(min(memory // workers, SLAB_NBYTES) // nbytes_per_element, 1)


def for_each(
    items: Sequence[_T],
    work: Callable[[_T, Tick], _R],
    *,
    workers: int,
    what: str = "",
    total_nbytes: int | None = None,
    progress: bool = False,
) -> list[_R]:
    """Return ``work(item, tick)`` of every item, in order. work: calls ``tick`` after each slab.

    The first exception ends all work and is raised."""
    with progress_bar(progress, what, total_nbytes) as advance:
        if workers == 1 or len(items) < 2:
            return [work(item, advance) for item in items]
        tick = _SharedTick(advance)

        def until_stopped(item: _T) -> _R:
            try:
                return work(item, tick)
            except BaseException:
                tick.stop()
                raise

        with ThreadPoolExecutor(min(workers, len(items))) as pool:
            futures = [pool.submit(until_stopped, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # nothing is left to stop, or Ctrl-C, or an error
                tick.stop()
                pool.shutdown(wait=True, cancel_futures=True)
        errors = [future.exception() for future in futures if not future.cancelled()]
        for error in errors:
            if error is not None and not isinstance(error, _Stopped):
                raise error
        return [future.result() for future in futures]


class _SharedTick:
    """A tick that several threads may call, until one of them fails."""

    def __init__(self, advance: Tick) -> None:
        self._advance, self._lock, self._is_stopped = advance, threading.Lock(), False

    def __call__(self, nbytes: int) -> None:
        if self._is_stopped:
            raise _Stopped
        with self._lock:
            self._advance(nbytes)

    def stop(self) -> None:
        self._is_stopped = True
