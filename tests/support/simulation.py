"""Several ranks in one process, on a clock that the test moves: waits that take minutes end at
once, and every run has the same order.

    simulation = Simulation()
    monkeypatch.setattr(module, "time", simulation)
    results = simulation.run(first, second)  # what each returns or raises"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

LIMIT_S = 10_000.0  # of simulated time


class Simulation:
    """Runs functions in threads, one at a time. When one sleeps, the clock jumps to the next that
    wakes up. ``monotonic`` and ``sleep`` replace those of the time module."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.interrupts: dict[int, float] = {}  # by index of the function: when
        self._end = self.now + LIMIT_S
        self._changed = threading.Condition()
        self._wakes: dict[int, float] = {}  # by index of the function
        self._running: int | None = None
        self._own = threading.local()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        index = self._own.index
        with self._changed:
            self._wakes[index], self._running = self.now + seconds, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running == index)
        if self.now >= self.interrupts.get(index, float("inf")):
            del self.interrupts[index]
            raise KeyboardInterrupt
        assert self.now < self._end, "it never ends"

    def run(self, *functions: Callable[[], Any]) -> list[Any]:
        """Call all functions, and return what each returns, or the exception that it raises."""
        results: list[Any] = [None] * len(functions)
        self._wakes = dict.fromkeys(range(len(functions)), self.now)

        def act(index: int) -> None:
            self._own.index = index
            with self._changed:
                self._changed.wait_for(lambda: self._running == index)
            try:
                results[index] = functions[index]()
            except BaseException as error:
                results[index] = error
            finally:
                with self._changed:
                    del self._wakes[index]
                    self._running = None
                    self._changed.notify_all()

        threads = [threading.Thread(target=act, args=(n,)) for n in range(len(functions))]
        for thread in threads:
            thread.start()
        with self._changed:
            while self._wakes:
                self._running = min(self._wakes, key=lambda index: (self._wakes[index], index))
                self.now = max(self.now, self._wakes[self._running])
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._running is None)
        for thread in threads:
            thread.join()
        return results


class RecordedStore:
    """A store that records the names of its calls."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.store, name)
