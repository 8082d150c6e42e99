"""Progress bars in bytes, on the first rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..errors import UsageError


def require_bar(wanted: bool, where: str) -> None:
    """Raise UsageError if a bar is wanted and tqdm is not installed."""
    if wanted:
        try:
            import tqdm  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
        except ModuleNotFoundError as error:
            raise UsageError.of(
                "progress=True requires tqdm.",
                expected="the package tqdm",
                got="not installed",
                where=where,
                fix="pip install 'fsdp_compat[progress]', or pass progress=False",
            ) from error


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
