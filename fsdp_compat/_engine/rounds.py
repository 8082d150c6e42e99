"""Support for ranks that use different units. All ranks all-gather all units in one fixed order, so
that a rank that skips a unit still serves it to the others.

A rank gathers each unit before it needs a later one, at the latest when the pass ends. A method
that calls units a different number of times on each rank runs in *rounds*: a round gathers every
unit once, and a rank that is done takes part in the rounds of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .communicators import Communicators
from .schedule import Order
from .unit import Residency, Unit

__all__ = ["Rounds", "end_gathers"]


def end_gathers(
    units: Sequence[Unit], communicators: Communicators, in_graph: bool = False
) -> None:
    """At the end of a pass: reshard units that were gathered for other ranks or on a wrong guess,
    and flush. Sends never outlive the pass: after it the user may write the shards; in_graph: after
    its backward."""
    for unit in units:
        if unit.residency is Residency.UNSHARDING:
            unit.reshard()
    communicators.flush("parameters that this rank has sent", in_graph)


class Rounds:
    """The fixed order of gathers, where ranks may use different units."""

    def __init__(
        self,
        units: Sequence[Unit],
        communicators: Communicators,
        forward_order: Order,
        allow_unused_units: bool,
    ) -> None:
        """allow_unused_units: in every pass, not only in methods that run in rounds."""
        self._units, self._communicators = units, communicators
        self._forward_order = forward_order
        self.allow_unused_units = allow_unused_units
        self.is_fixed_order = allow_unused_units  # also True while a method runs in rounds
        self._caller: Unit | None = None  # whose method runs in rounds
        self._inside: list[Unit] = []  # the units that this method may use

    @property
    def is_in_method(self) -> bool:
        """True while a method runs in rounds."""
        return self._caller is not None

    @property
    def units_to_gather(self) -> Sequence[Unit]:
        """The units that all ranks gather in a forward, in order."""
        return self._inside or self._units

    def around(self, unit: Unit, method: Callable[..., Any]) -> Callable[..., Any]:
        """Run in rounds until ``end``. Return a function that calls ``method`` and then takes part
        in rounds until all ranks are done."""

        def until_all_ranks_are_done(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                self.gather_rest(self._forward_order)
                while self._next_round(is_running=False):
                    self.gather_rest(self._forward_order)
                self._stop()

        inside = set(unit.module.modules())
        self._caller = unit
        self._inside = [other for other in self._units if other.module in inside]
        self.is_fixed_order = True
        return until_all_ranks_are_done

    def _stop(self) -> None:
        self._inside, self.is_fixed_order = [], self.allow_unused_units

    def end(self) -> None:
        """The method has returned or raised on all ranks."""
        self._caller = None
        self._stop()

    def gather_before(self, unit: Unit, order: Order) -> None:
        """Collective. Gather the units that come before ``unit``, and the unit itself."""
        if (
            self._inside
            and unit.residency is Residency.SHARDED
            and unit not in order.to_issue  # used a second time
        ):
            self.gather_rest(order)
            self._next_round(is_running=True)
        while unit in order.to_issue:
            self._gather(order.to_issue.pop(0), keep=unit)

    def gather_rest(self, order: Order) -> None:
        """Collective. Gather the units that this pass or round has not gathered yet."""
        while self.is_fixed_order and order.to_issue:
            self._gather(order.to_issue.pop(0))

    def _gather(self, unit: Unit, keep: Unit | None = None) -> None:
        """keep: the unit that this rank is about to use."""
        if self._inside and unit.residency is Residency.UNSHARDED:
            unit.unshard_for_others()
        unit.unshard(unit.wanted_dtype())
        if self._inside and unit is not keep and unit.residency is Residency.UNSHARDING:
            unit.reshard()  # one unit at a time; using it after all begins another round

    def _next_round(self, is_running: bool) -> bool:
        """Collective. Every unit was gathered once. If the method still runs on some rank, begin
        another round and return True."""
        end_gathers(self._units, self._communicators)
        [again] = self._communicators.any_rank(
            [is_running], "the end of a method that ranks run in rounds"
        )
        if again:
            self._forward_order.restart([unit for unit in self._inside if unit is not self._caller])
        return again
