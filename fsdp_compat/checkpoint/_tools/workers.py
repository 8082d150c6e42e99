"""Calls on several threads: reading and writing release the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_threads"]

_T = TypeVar("_T")


def in_threads(call: Callable[[_T], object], items: Iterable[_T], workers: int) -> None:
    """Call ``call`` with every item, in order if there is one worker. After an error no further
    call begins, and the first error is raised."""
    if workers == 1:
        for item in items:
            call(item)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fsdp_compat tools")
    try:
        for future in [pool.submit(call, item) for item in items]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
