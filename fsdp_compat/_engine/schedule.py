"""Which unit is gathered next, guessed from the last pass."""

from __future__ import annotations

import enum
import typing
from collections.abc import Sequence

if typing.TYPE_CHECKING:
    from .unit import Unit

__all__ = ["Order", "Prefetch"]


class Prefetch(enum.Enum):
    """When, in backward, the next unit's gather is issued."""

    NONE = enum.auto()  # when it is needed
    POST = enum.auto()  # when it is needed, but before the previous unit's gradients are sent
    PRE = enum.auto()  # while the current unit computes: two units are full


class Order:
    """The units in the order of the last pass. A wrong guess costs a gather, never correctness, if
    all ranks guess alike."""

    def __init__(self) -> None:
        self._last: list[Unit] = []
        self._now: list[Unit] = []
        self.to_issue: list[
            Unit
        ] = []  # with uneven use: what all ranks still gather in this pass, in this order

    def restart(self, to_issue: Sequence[Unit] = ()) -> None:
        self._last, self._now, self.to_issue = self._now or self._last, [], list(to_issue)

    def advance(self, unit: Unit) -> Unit | None:
        """Note the use of ``unit``; return the unit to gather meanwhile, or None."""
        now, last = self._now, self._last
        number = len(now)
        now.append(unit)
        return last[number + 1] if number + 1 < len(last) and last[number] is unit else None

    def first_after_root(self) -> Unit | None:
        """The first unit of the pass that is not the root."""
        return next((unit for unit in self._now or self._last if not unit.is_root), None)
