"""When units are unsharded: on use, ahead of use (prefetching), and for other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from .communicators import Communicators
from .device import ComputeStreams
from .dtypes import ComputeDtype
from .rounds import Rounds, end_gathers
from .schedule import Order, Prefetch
from .unit import Residency, Unit

__all__ = ["Unsharding"]


class Unsharding:
    """Unshards the units of one runtime."""

    def __init__(
        self,
        units: Sequence[Unit],
        communicators: Communicators,
        streams: ComputeStreams | None,
        forward_prefetch: bool,
        backward_prefetch: Prefetch,
        allow_unused_units: bool,
    ) -> None:
        """streams: None where there is only one."""
        self._units, self._communicators, self._streams = units, communicators, streams
        self.forward_order, self.backward_order = Order(), Order()
        self.rounds = Rounds(units, communicators, self.forward_order, allow_unused_units)
        self._prefetches_forward = forward_prefetch
        self._prefetches_backward = backward_prefetch is Prefetch.PRE

    def unshard_for_use(self, unit: Unit, dtype: ComputeDtype, backward: bool) -> None:
        """Collective. Make ``unit`` unsharded and show it; prefetch the next one. backward: in a
        backward, also to recompute a forward."""
        if self._streams is not None:
            self._streams.join()
        order = self.backward_order if backward else self.forward_order
        rounds = self.rounds
        if rounds.is_fixed_order:
            rounds.gather_before(unit, order)
        if unit.residency is Residency.SHARDED or unit.dtype is not dtype:
            unit.unshard(dtype)
        following = order.advance(unit)
        if (
            following is not None
            and not rounds.is_fixed_order
            and (self._prefetches_backward if backward else self._prefetches_forward)
        ):
            following.unshard(
                following.wanted_dtype()
                if following.options.full_precision_in_eval
                else ComputeDtype.TRAIN
            )
        unit.wait_for_unshard()
        if not unit.view.shows_unsharded:
            unit.view.show_unsharded()

    def keeps_after_forward(self, unit: Unit) -> bool:
        """True if the unit stays unsharded between forward and backward: by its options, or as
        backward uses it first. In a fixed order none does: ranks gather the same units again."""
        if self.rounds.is_fixed_order:
            return False
        return (
            unit.is_root
            or not unit.options.reshard_after_forward
            or unit is self.backward_order.first_after_root()
        )

    def begin_forward(self) -> None:
        self.forward_order.restart(self.rounds.units_to_gather)

    def end_forward(self) -> None:
        """Collective."""
        self.rounds.gather_rest(self.forward_order)

    def end_gathers(self) -> None:
        """See ``rounds.end_gathers``."""
        end_gathers(self._units, self._communicators)

    def begin_backward(self) -> None:
        self.backward_order.restart(list(reversed(self._units)))

    def end_backward(self) -> None:
        """Collective."""
        self.rounds.gather_rest(self.backward_order)

    def forget_backward(self) -> None:
        """After a backward that raised: ranks may have stopped at different units, so that they
        would guess differently."""
        self.backward_order = Order()
