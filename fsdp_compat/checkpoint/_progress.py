"""Progress bars in bytes, on the first rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    shown: bool, what: str, total_nbytes: int | None
) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of bytes just done. shown: draw a bar with bytes and
    rate."""
    if not shown:
        yield lambda nbytes: None
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    with tqdm(total=total_nbytes, desc=what, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update
