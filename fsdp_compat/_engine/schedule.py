"""Which unit to prefetch, guessed from the order of the last pass."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from .unit import Unit

__all__ = ["Order", "Prefetch"]


class Prefetch(enum.Enum):
    """When, in backward, the all-gather of the next unit starts."""

    NONE = enum.auto()  # when the unit is needed
    POST = enum.auto()  # when it is needed, but before the previous unit's gradients are sent
    PRE = enum.auto()  # while the current unit computes: two units are unsharded


class Order:
    """The units in the order in which the last pass used them.

    A wrong guess costs an all-gather, never correctness, as long as all ranks guess alike.
    """

    def __init__(self) -> None:
        self._last: list[Unit] = []
        self._now: list[Unit] = []
        self.to_issue: list[Unit] = []  # where ranks may use different units: see rounds.py

    def restart(self, to_issue: Sequence[Unit] = ()) -> None:
        self._last, self._now, self.to_issue = self._now or self._last, [], list(to_issue)

    def advance(self, unit: Unit) -> Unit | None:
        """Note the use of ``unit``; return the unit to prefetch, or None."""
        now, last = self._now, self._last
        number = len(now)
        now.append(unit)
        return last[number + 1] if number + 1 < len(last) and last[number] is unit else None

    def first_after_root(self) -> Unit | None:
        """The first unit of the pass that is not the root."""
        for unit in self._now or self._last:
            if not unit.is_root:
                return unit
        return None
