"""Progress bars in bytes, on the first rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ._blocks import Tick, no_tick


@contextlib.contextmanager
def progress_bar(shown: bool, what: str, total_nbytes: int | None) -> Iterator[Tick]:
    """Draw a bar with bytes and rate, if ``shown``. Yield the function that advances it."""
    if not shown:
        yield no_tick
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    with tqdm(total=total_nbytes, desc=what, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update
