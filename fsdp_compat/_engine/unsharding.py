"""When units are unsharded: on use, ahead of use (prefetching), and for other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from .communicators import Communicators
from .device import ComputeStreams
from .dtypes import ComputeDtype
from .mapped_shards import MappedShards, Pass
from .rounds import Rounds, end_gathers
from .schedule import Order, Prefetch
from .unit import NOT_UNSHARDED, Residency, Unit

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
        self.mapped = MappedShards()
        self.forward_order, self.backward_order = Order(), Order()
        self.rounds = Rounds(units, communicators, self.forward_order, allow_unused_units)
        self._prefetches_forward = forward_prefetch
        self._prefetches_backward = backward_prefetch is Prefetch.PRE
        # By backward, as far as the last one tells: it stays unsharded until then.
        self._used_first: Unit | None = None

    def unshard_for_use(self, unit: Unit, dtype: ComputeDtype, backward: bool) -> None:
        """Collective. Make ``unit`` unsharded and show it; prefetch the next one. backward: in a
        backward, also to recompute a forward."""
        if self._streams is not None:
            self._streams.join()
        order = self.backward_order if backward else self.forward_order
        rounds = self.rounds
        if rounds.is_fixed_order:
            rounds.gather_before(unit, order)
        if unit.conduct.freshness is not None:
            self._reshard_stale(unit)
        if unit.residency in NOT_UNSHARDED or unit.dtype is not dtype:
            unit.unshard(dtype)
        following = order.advance(unit)
        # First: the prefetched unit can have the memory of this one's output. In forward, where
        # less memory is held, communication need not wait until this output is copied.
        if unit.copies_out and (backward or self._streams is None):
            unit.wait_for_unshard()
        if not rounds.is_fixed_order:
            self._prefetch(unit, following, backward)
        unit.wait_for_unshard()
        if not unit.view.shows_unsharded:
            unit.view.show_unsharded()
        elif unit.conduct.freshness is not None:
            unit.view.keep_showing_unsharded()

    @staticmethod
    def _reshard_stale(unit: Unit) -> None:
        """The unit was kept since forward, but modules showed sharded parameters, and the user has
        changed these since."""
        if (
            unit.residency is Residency.UNSHARDED
            and not unit.view.shows_unsharded
            and not unit.is_fresh
        ):
            unit.reshard()

    def _prefetch(self, unit: Unit, following: Unit | None, backward: bool) -> None:
        """Collective. Start the all-gathers of the units that the user has listed or, without a
        list, of the unit that was used next in the last pass."""
        conduct = unit.conduct
        listed = conduct.backward_prefetch if backward else conduct.forward_prefetch
        if listed:
            units = [other.unit for other in listed if other.unit is not None]
            for other in units:
                if other.runtime is unit.runtime and (
                    not backward or other.conduct.unshard_in_backward
                ):
                    other.unshard(ComputeDtype.TRAIN)
        elif following is not None and (
            (self._prefetches_backward and following.conduct.unshard_in_backward)
            if backward
            else self._prefetches_forward
        ):
            following.unshard(
                following.wanted_dtype()
                if following.options.full_precision_in_eval
                else ComputeDtype.TRAIN
            )

    def after_forward(self, unit: Unit, in_graph: bool) -> None:
        """The last running call of ``unit`` has ended. in_graph: backward will use it."""
        conduct, keeps = unit.conduct, in_graph and not self.rounds.is_fixed_order
        if conduct.freshness is None:
            # In a fixed order no unit is kept: ranks gather the same units again.
            if keeps and (
                not conduct.reshard_after_forward
                or unit is self._used_first
                or unit is self._units[0]  # the root
            ):
                unit.view.show_sharded()
            else:
                unit.reshard()
            return
        conduct.pinned = False
        if not conduct.reshard_after_forward and not self.rounds.is_fixed_order:
            unit.watch_holders(in_graph)
            return  # also after a forward without a graph: generation calls it again and again
        if keeps and conduct.partial_ranks:
            unit.reshard_to_partial()
        elif keeps and unit is self._used_first:
            unit.view.show_sharded()
        else:
            unit.reshard()

    def begin_forward(self) -> None:
        """Collective, if shards may be read where they are mapped. A method that runs in rounds is
        one pass: ranks may make different numbers of calls in it."""
        is_inside = self.rounds.is_in_method and self.mapped.is_open(Pass.FORWARD)
        if not is_inside and self._reads_shards():
            self.mapped.begin(Pass.FORWARD)
        self.forward_order.restart(self.rounds.units_to_gather)
        self._used_first = self.backward_order.first_after_root()

    def _reads_shards(self) -> bool:
        """False if parameters are whole already, in memory of their own. A pass sends nothing then,
        so that ranks may make different numbers of them."""
        return any(
            unit.residency is not Residency.UNSHARDED or unit.is_mapped
            for unit in self._units
            if not unit.view.summoned
        )

    def end_forward(self) -> None:
        """Collective."""
        self.rounds.gather_rest(self.forward_order)

    def end_gathers(self, has_raised: bool, in_graph: bool) -> None:
        """The outermost forward has ended, see ``rounds.end_gathers``. Collective."""
        end_gathers(self._units, self._communicators, in_graph)
        if not self.rounds.is_in_method:
            # in a fixed order, the other ranks can go on without one that has raised
            self.mapped.end(Pass.FORWARD, has_raised and not self.rounds.is_fixed_order)

    def end_rounds(self) -> None:
        """A method that has run in rounds has returned or raised. Collective."""
        self.rounds.end()
        self.mapped.end(Pass.FORWARD)

    def begin_backward(self) -> None:
        """Collective, if shards may be read where they are mapped."""
        if self._reads_shards():
            self.mapped.begin(Pass.BACKWARD)
        self.backward_order.restart(list(reversed(self._units)))

    def end_backward(self) -> None:
        """Collective."""
        self.rounds.gather_rest(self.backward_order)

    def forget_backward(self) -> None:
        """After a backward that raised: ranks may have stopped at different units, so that they
        would guess differently."""
        self.backward_order = Order()
