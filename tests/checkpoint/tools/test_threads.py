"""Work in threads: results in order, one error for all, and no work after it."""

from __future__ import annotations

import threading

import pytest

from fsdp_compat.checkpoint._blocks import Tick
from fsdp_compat.checkpoint._tools.threads import for_each


def test_results_come_in_the_order_of_the_items() -> None:
    later = threading.Event()

    def work(item: int, tick: Tick) -> int:
        if item == 0:
            assert later.wait(20), "the others run meanwhile"
        elif item == 2:
            later.set()
        tick(1)
        return 10 * item

    assert for_each([0, 1, 2, 3], work, workers=3) == [0, 10, 20, 30]
    assert for_each([], work, workers=3) == []


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
