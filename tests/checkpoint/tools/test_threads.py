"""Work in threads: one error for all, and no work after it."""

from __future__ import annotations

import threading

import pytest

from fsdp_compat.checkpoint._blocks import Tick
from fsdp_compat.checkpoint._tools.threads import for_each


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_stops_the_others_at_their_next_tick_and_is_raised(
    error: type[BaseException],
) -> None:
    started = threading.Barrier(2, timeout=20)
    begun: list[int] = []

    def work(item: int, tick: Tick) -> None:
        begun.append(item)
        if item > 1:
            return
        started.wait()
        if item == 1:
            raise error("of item 1")
        while True:  # ends only because a tick raises
            tick(1)

    with pytest.raises(error, match="of item 1"):
        for_each(list(range(50)), work, workers=2)
    assert len(begun) < 50
