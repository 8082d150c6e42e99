"""When units are unsharded: on use, ahead of use (prefetching), and for other ranks.

Ranks that use different units all-gather all units in one fixed order, so that a rank that skips a
unit still serves it to the others. A method that calls units a different number of times on each
rank runs in *rounds*: a round gathers every unit once, and a rank that has finished keeps serving
the others' rounds."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

from .communicators import Communicators
from .device import ComputeStreams
from .dtypes import ComputeDtype
from .mapped_shards import MappedShards, Pass
from .unit import Residency, Unit


class Prefetch(enum.Enum):
    """When, in backward, the all-gather of the next unit starts."""

    NONE = enum.auto()  # when the unit is needed
    POST = enum.auto()  # when it is needed, but before the previous unit's gradients are sent
    PRE = enum.auto()  # while the current unit computes: two units are unsharded


@dataclasses.dataclass(frozen=True)
class RuntimeOptions:
    """The user's options for the root, resolved."""

    forward_prefetch: bool
    backward_prefetch: Prefetch
    allow_unused_units: bool  # ranks may use different units
    # Units whose gradients may still be in flight when another unit begins to collect gradients.
    max_inflight_reductions: int = 0


class Order:
    """The units in the order of the last pass. A wrong guess costs an all-gather, never
    correctness, as long as all ranks guess alike."""

    def __init__(self) -> None:
        self._last: list[Unit] = []
        self._now: list[Unit] = []
        # Where all-gathers have a fixed order (``Rounds.is_fixed_order``; ReduceOrder is another):
        # the units to gather yet, and what is called after each
        self.to_issue: list[Unit] = []
        self.after_gather: Callable[[Unit], None] = lambda unit: None

    def restart(self, to_issue: Sequence[Unit] = ()) -> None:
        self._last, self._now, self.to_issue = self._now or self._last, [], list(to_issue)

    def forget(self) -> None:
        self._last, self._now, self.to_issue = [], [], []

    def advance(self, unit: Unit) -> Unit | None:
        """Record the use of ``unit``; return the unit to prefetch, or None."""
        now, last = self._now, self._last
        number = len(now)
        now.append(unit)
        return last[number + 1] if number + 1 < len(last) and last[number] is unit else None

    def first_after_root(self) -> Unit | None:
        """The first unit of the pass that is not the root."""
        return next((unit for unit in self._now or self._last if not unit.is_root), None)


def end_gathers(
    units: Sequence[Unit], communicators: Communicators, in_graph: bool = False
) -> None:
    """End a pass: reshard units gathered for other ranks or on a wrong guess, and flush, because
    the user may write to shards after the pass (in_graph: after its backward)."""
    for unit in units:
        if unit.residency is Residency.UNSHARDING:
            unit.reshard()
    communicators.settle("parameters that this rank has sent", in_graph)


class Rounds:
    """The fixed order of all-gathers where ranks may use different units."""

    def __init__(
        self, units: Sequence[Unit], communicators: Communicators, order: Order, is_always: bool
    ) -> None:
        """order: of forward. is_always: in every pass, not only in methods that run in rounds."""
        self._units, self._communicators, self._forward_order = units, communicators, order
        self._is_always = self.is_fixed_order = is_always
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
        """Run in rounds until ``end``. Return ``method`` extended to serve the other ranks."""

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
        self._inside, self.is_fixed_order = [], self._is_always

    def end(self) -> None:
        """The method has returned or raised on all ranks."""
        self._caller = None
        self._stop()

    def gather_before(self, unit: Unit, order: Order) -> None:
        """Gather the units that come before ``unit``, and the unit itself. Collective: the
        model."""
        if (
            self._inside
            and unit.residency is Residency.SHARDED
            and unit not in order.to_issue  # used a second time
        ):
            self.gather_rest(order)
            self._next_round(is_running=True)
        while unit in order.to_issue:
            self._gather(order, in_use=unit)

    def gather_rest(self, order: Order) -> None:
        """Gather the units that this pass or round has not gathered yet. Collective: the model."""
        while self.is_fixed_order and order.to_issue:
            self._gather(order)

    def _gather(self, order: Order, in_use: Unit | None = None) -> None:
        """in_use: the unit that this rank is about to use."""
        unit = order.to_issue.pop(0)
        if self._inside and unit.residency is Residency.UNSHARDED:
            unit.unshard_for_others()
        unit.start_unshard(unit.wanted_dtype())
        if self._inside and unit is not in_use and unit.residency is Residency.UNSHARDING:
            unit.reshard()  # one unit at a time; using it later begins another round
        order.after_gather(unit)

    def _next_round(self, is_running: bool) -> bool:
        """End a round; begin another, and return True, if the method still runs. Collective: the
        model."""
        end_gathers(self._units, self._communicators)
        [again] = self._communicators.any_rank(
            [is_running], "the end of a method that ranks run in rounds"
        )
        if again:
            self._forward_order.restart([unit for unit in self._inside if unit is not self._caller])
        return again


class Gathering:
    """Unshards the units of one runtime."""

    def __init__(
        self,
        units: Sequence[Unit],
        communicators: Communicators,
        streams: ComputeStreams | None,
        options: RuntimeOptions,
    ) -> None:
        """streams: None for a device without streams."""
        self._units, self.communicators, self.streams = units, communicators, streams
        self.mapped = MappedShards()
        self.forward_order, self.backward_order = Order(), Order()
        self.rounds = Rounds(units, communicators, self.forward_order, options.allow_unused_units)
        self._unit_of = {unit.behavior: unit for unit in units}
        self._prefetches_forward = options.forward_prefetch
        self._prefetches_backward = options.backward_prefetch is Prefetch.PRE
        # The unit that backward will need first, judging by the previous backward; it is not
        # resharded after forward.
        self._first_in_backward: Unit | None = None

    @functools.cached_property
    def in_backward(self) -> list[Unit]:
        """The units as backward reaches them: the last before the first, but units around others
        before these. The root 0, 1, 2 inside 1, and 3 come as 0, 3, 1, 2, sorted by [0], [0, -3],
        [0, -1], [0, -1, -2]."""
        inside, units = [set(unit.attributes.modules) for unit in self._units], self._units
        around = {u: [-i for i, modules in enumerate(inside) if u.module in modules] for u in units}
        return sorted(units, key=around.__getitem__)

    def unshard_for_use(self, unit: Unit, dtype: ComputeDtype, backward: bool) -> None:
        """Unshard and show ``unit``; prefetch. backward: also in recomputations. Collective: the
        unit."""
        if self.streams is not None:
            self.streams.join()
        order = self.backward_order if backward else self.forward_order
        rounds = self.rounds
        if rounds.is_fixed_order:
            rounds.gather_before(unit, order)
        if (
            unit.freshness is not None
            and unit.residency is Residency.UNSHARDED
            and not unit.view.shows_unsharded
            and not unit.is_fresh
        ):  # kept since forward, but the user has changed the sharded parameters, now shown
            unit.reshard()
        unit.start_unshard(dtype)
        following = order.advance(unit)
        # Before prefetching, so that the next unit can reuse the memory of this one's output. In
        # forward less memory is held, and on a device the next all-gather would wait for the copy;
        # on the CPU the host would wait, and copy, right after prefetching anyway.
        if unit.is_copied_from_output and (backward or self.streams is None):
            unit.finish_unshard()
        if not rounds.is_fixed_order:
            self._prefetch(unit, following, backward)
        unit.finish_unshard()
        if not unit.view.shows_unsharded:
            unit.view.show_unsharded()
        elif unit.freshness is not None:
            unit.view.keep_showing_unsharded()

    def _prefetch(self, unit: Unit, following: Unit | None, backward: bool) -> None:
        """Start to gather the units that the user has listed, or ``following``. Collective: these
        units."""
        behavior = unit.behavior
        listed = behavior.backward_prefetch if backward else behavior.forward_prefetch
        if listed:
            for other in map(self._unit_of.get, listed):
                if other is not None and (not backward or other.behavior.unshard_in_backward):
                    other.start_unshard()  # of fully_shard: always in ComputeDtype.TRAIN
        elif following is not None and (
            (self._prefetches_backward and following.behavior.unshard_in_backward)
            if backward
            else self._prefetches_forward
        ):
            following.start_unshard(following.wanted_dtype())

    def after_forward(self, unit: Unit, in_graph: bool) -> None:
        """End the last running call of ``unit``. in_graph: backward will use it.

            reshard_after_forward, unit                in_graph  residency  shows
            -----------------------------------------  --------  ---------  ---------
            False, of fully_shard                      any       UNSHARDED  unsharded
            False, flat                                True      UNSHARDED  sharded
            False, flat, where ``keep_unsharded`` can  False     UNSHARDED  sharded
            True, with partial_ranks                   True      PARTIAL    rows
            True, first in backward, or a flat root    True      UNSHARDED  sharded
            otherwise, and in a fixed order            any       SHARDED    sharded

        What is not SHARDED is resharded in post-backward, except with
        ``reshard_after_backward=False``, and by the next forward, unless the unit
        ``stays_unsharded``."""
        behavior, is_fixed = unit.behavior, self.rounds.is_fixed_order
        # In a fixed order none is kept, so that ranks gather the same units again.
        keeps = in_graph and not is_fixed
        unit.pinned = False
        if not (behavior.reshard_after_forward or is_fixed):
            if not unit.is_flat:  # even without a graph: generation calls forward repeatedly
                unit.views_of_users.watch(in_graph)
            elif in_graph:
                unit.view.show_sharded()
            else:
                unit.keep_unsharded()
        elif keeps and behavior.partial_ranks:
            unit.reshard_to_partial()
        elif keeps and (unit is self._first_in_backward or (unit.is_flat and unit.is_root)):
            unit.view.show_sharded()
        else:
            unit.reshard()

    def begin_forward(self) -> None:
        """A method that runs in rounds is one pass: ranks may make different numbers of calls in
        it. Collective: the model, if mapped shards may be read."""
        is_inside = self.rounds.is_in_method and self.mapped.is_open(Pass.FORWARD)
        if not is_inside and self._reads_shards():
            self.mapped.begin(Pass.FORWARD)
        self.forward_order.restart(self.rounds.units_to_gather)
        self._first_in_backward = self.backward_order.first_after_root()

    def _reads_shards(self) -> bool:
        """False if parameters are unsharded in memory of their own. Such a pass sends nothing, so
        ranks may make different numbers of them."""
        return any(
            unit.residency is not Residency.UNSHARDED or unit.is_mapped
            for unit in self._units
            if not unit.view.summoned
        )

    def gather_rest(self) -> None:
        """Gather what only other ranks use in a forward. Collective: the model."""
        self.rounds.gather_rest(self.forward_order)

    def end_forward(self, has_raised: bool, in_graph: bool) -> None:
        """End the outermost forward, see ``end_gathers``. Collective: the model."""
        end_gathers(self._units, self.communicators, in_graph)
        if not self.rounds.is_in_method:
            # in a fixed order, the other ranks can go on without one that raised
            self.mapped.end(Pass.FORWARD, has_raised and not self.rounds.is_fixed_order)

    def end_rounds(self) -> None:
        """End a method that ran in rounds. Collective: the model."""
        self.rounds.end()
        self.mapped.end(Pass.FORWARD)

    def begin_backward(self) -> None:
        """Collective: the model, if mapped shards may be read."""
        if self._reads_shards():
            self.mapped.begin(Pass.BACKWARD)
        self.backward_order.restart(self.in_backward if self.rounds.is_fixed_order else ())

    def end_backward(self) -> None:
        """Collective: the model."""
        self.rounds.gather_rest(self.backward_order)

    def forget_backward(self) -> None:
        """After a backward that raised, perhaps at different units on each rank."""
        self.backward_order.forget()
