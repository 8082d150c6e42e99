"""The backward passes of one runtime: pre-backward, gradients, post-backward, and the end.

One event ends a unit's backward, *post-backward*: reshard the parameters, start the reduction. It
needs no hooks on inputs and no counts of outstanding calls. Every forward call has two ticks, its
begin and its end. At the first pre-backward of a call c, post-backward runs for every unit whose
calls all began after c ended, and at the end of backward for the rest: autograd runs ready nodes
newest first, so when the gradient of a call's output is complete, everything recorded after that
output has run.

Where autograd has a thread for each device, that holds for the nodes of one device only. There
post-backward also waits for the gradients of the calls' inputs. Both depend on the graph alone, so
ranks that use the same groups end units in one order, and reduce the same groups: any gradient is
enough, whichever parameter's. Ranks that may use different units vote (ReduceOrder)."""

from __future__ import annotations

import contextlib
import enum
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from .. import _torch_private
from .._comm.board import events, progress
from ..errors import StateError
from . import hooks
from .checks import Checks
from .device import side_stream
from .gradients import Gradients, InFlightReductions
from .group import Group
from .mapped_shards import Pass
from .schedule import Gathering, Prefetch, RuntimeOptions
from .unit import Call, Residency, Unit


class ReduceOrder(enum.Enum):
    """When one backward reduces its units."""

    # Each in post-backward, which all ranks reach in the same order.
    AS_COMPLETE = enum.auto()
    # The same in any order, where messages have tags; at the end those, with zeros, that only other
    # ranks have used, or that the user wants reduced in any case.
    REST_AT_END = enum.auto()
    # As the former without tags: none in post-backward, all in the reverse order of the units.
    # During backward, if units are gathered in a fixed order (``Rounds.is_fixed_order``) and all
    # ranks reach them in it; otherwise at the end.
    FIXED = enum.auto()


class Backward:
    """One outermost graph task. Only the callback queued at its end holds it: a dead reference
    means that the task is gone, because it raised."""

    _serials = itertools.count()

    def __init__(self) -> None:
        self.serial = next(self._serials)
        self.entered: list[Unit] = []  # between pre-backward and post-backward
        self.reduced: set[Gradients] = set()
        self.order = ReduceOrder.AS_COMPLETE
        # Not AS_COMPLETE: whether some rank, without allow_unused_units this one, has used a group.
        self.is_used: dict[Gradients, bool] = {}
        # FIXED, if units are reduced during backward: those that it has not passed yet.
        self.not_passed: list[Unit] = []
        self.keeps_gathered = False  # backward may reach units again
        # create_graph: the graph of the gradients may read parameters without reaching a hook.
        self.keeps_params = False


class BackwardRunner:
    """Runs the hooks of backward for one runtime."""

    def __init__(
        self, units: Sequence[Unit], gathering: Gathering, checks: Checks, options: RuntimeOptions
    ) -> None:
        self._units, self._gathering, self._checks = units, gathering, checks
        self._communicators, self._streams = gathering.communicators, gathering.streams
        self._allow_unused_units = options.allow_unused_units
        is_late = options.backward_prefetch is Prefetch.POST
        self._prefetches_late = is_late and not self._allow_unused_units
        self._side = side_stream(units[0].options.device, "reduce")
        self._max_in_flight = options.max_inflight_reductions
        self.reductions = InFlightReductions(self._side is not None)
        self._all_gradients: list[Gradients] = []  # of all units, in order
        self.sync = True  # False inside no_sync
        self.reduces_on_finalize = False  # reductions start in ``begin_finalize``, not in backward
        self.steps = False  # optimizers that step in backward do so now
        self._current: Callable[[], Backward | None] = _no_backward  # weak
        self.is_open = False  # a backward began and has not ended
        self._has_recorded = False  # some group has gradients of a backward without communication
        gathering.backward_order.after_gather = self._reduce_passed

    def use_groups(self, groups: Iterable[Group]) -> None:
        """Use ``groups``, those of all units, from now on."""
        self._all_gradients = [group.gradients for group in groups]
        for gradients in self._all_gradients:
            gradients.limit_in_flight = self.reductions.limit_in_flight

    @property
    def is_running(self) -> bool:
        return self.is_open and self._current() is not None

    @property
    def has_raised(self) -> bool:
        """True from a backward that raised until ``discard``."""
        # A thread of autograd may hold the task for a while.
        has_task = self._current() is not None and _torch_private.in_graph_task()
        return self.is_open and not has_task

    def _backward(self) -> Backward:
        """Return the Backward of this graph task, which begins with its first hook."""
        current = self._current()
        if current is None:
            if self.is_open:
                self.discard()
            current, self.is_open = Backward(), True
            if self._has_recorded:
                self._has_recorded = False
                for gradients in self._all_gradients:
                    gradients.clear()
            self._current = weakref.ref(current)
            hooks.on_end_of_backward(lambda: self._end(current))
            try:
                self._checks.before_backward()
            except StateError as error:
                progress.record_error(error)  # the other ranks may wait in this backward
                raise
            self._gathering.begin_backward()
            order = current.order = self._order()
            is_limited = not self._allow_unused_units and order is not ReduceOrder.REST_AT_END
            self.reductions.limit = self._max_in_flight if is_limited else None
            if order is ReduceOrder.FIXED and self._allow_unused_units:
                self._agree_on_order(current)
        return current

    def _order(self) -> ReduceOrder:
        reduces_unused = any(unit.behavior.reduction.reduces_unused for unit in self._units)
        if not (self._allow_unused_units or reduces_unused):
            return ReduceOrder.AS_COMPLETE
        has_tags = self._communicators.have_tags
        return ReduceOrder.REST_AT_END if has_tags else ReduceOrder.FIXED

    def _agree_on_order(self, backward: Backward) -> None:
        """Vote which units some rank uses, and whether this backward reaches each at most once, in
        one order on all ranks. If so, they are reduced during backward; otherwise none is gathered
        twice or reduced before its end. Collective: the model."""
        places = {unit: place for place, unit in enumerate(self._gathering.in_backward)}
        calls = [(call, unit) for unit in self._units for call in unit.calls_left(backward.serial)]
        calls.sort(key=lambda each: -each[0].end_tick)
        reached = [places[unit] for _, unit in calls]
        is_in_order = all(map(operator.lt, reached, reached[1:]))
        hides_calls = any(call.hides_calls for call, _ in calls)
        used = [
            group.gradients.have_come or (places[unit] in reached and group.gradients.is_trainable)
            for unit in self._units
            for group in unit.groups
        ]
        out_of_order, *used = self._communicators.any_rank(
            [hides_calls or not is_in_order, *used], "the units that some rank uses in backward"
        )
        if out_of_order:
            backward.keeps_gathered = True
        else:
            backward.is_used = dict(zip(self._all_gradients, used, strict=True))
            backward.not_passed = list(self._units)

    def _reduce_passed(self, unit: Unit) -> None:
        """After a unit was gathered in the fixed order (``Gathering.in_backward``): run the
        post-backward of units that backward has passed on all ranks. These are the units behind it,
        but not inside it: in the example there, 3 when 1 is gathered. Collective: the model."""
        backward = self._current()
        if backward is None or not backward.not_passed:
            return
        inside = set(unit.attributes.modules)
        while backward.not_passed[-1].module not in inside:
            passed = backward.not_passed.pop()
            self._post_backward(passed, backward)
            if self._side is not None:
                self._side.release()
            self._reduce_used(passed, backward)

    def _join(self, side: bool = False) -> None:
        """Order the current stream after the engine's work, with ``side`` on both streams."""
        if self._streams is not None:
            self._streams.join()
        if side and self._side is not None:
            self._side.join()

    def _on_side(self) -> contextlib.AbstractContextManager[None]:
        return _HERE if self._side is None else self._side.work()

    @_torch_private.outside_transforms
    def pre_backward(self, call: Call, unit: Unit) -> None:
        """Handle a complete gradient of one of the call's outputs: everything recorded after the
        call has run (on this device, where autograd has a thread per device). Collective: the
        unit."""
        if call.summoned or unit.view.summoned:
            raise StateError.of(
                "Backward reached a forward that ran inside summon_full_params.",
                expected="forward and backward outside the context: gradients cannot reach the "
                "parameters that it shows",
                got="a backward through a forward inside it",
                where=unit.label,
                fix="leave the context before the forward, or evaluate with torch.no_grad()",
            )
        backward = self._current() or self._backward()
        if call.seen_by == backward.serial:  # several outputs, one event
            return
        call.seen_by = backward.serial
        if torch.is_grad_enabled() and not backward.keeps_params:
            # A backward through the graph of a gradient may pass no output of a unit.
            backward.keeps_params = True
            for each in self._units:
                hooks.on_gradients_of_collected_params(each)
        if self._streams is not None:
            self._streams.join()
            # Gradients of inputs that this rank's data did not use never come.
            if call.inputs is not None:
                call.inputs.num_left = sum(map(_torch_private.runs_now, call.inputs.nodes))
        entered = backward.entered
        if self._prefetches_late:
            unit.start_unshard(call.dtype)
        end = call.end_tick
        for other in tuple(entered):
            calls = other.calls
            if (
                other is not unit
                and calls[0].begin_tick > end
                and (len(calls) == 1 or all(each.begin_tick > end for each in calls))
                and (self._streams is None or all(map(_has_run_backward, calls)))
            ):
                self._post_backward(other, backward)
        if not unit.calls:
            entered.append(unit)
        unit.calls.append(call)
        if unit.behavior.unshard_in_backward:
            self._gathering.unshard_for_use(unit, call.dtype, backward=True)

    @_torch_private.outside_transforms
    def on_gradient(self, group: Group, index: int, param: nn.Parameter) -> None:
        """Take an accumulated gradient; with a side stream, which takes all in post-backward, free
        those of the previous unit, which it has copied by now. A backward that passes no output of
        a unit begins here."""
        self._join()
        self._backward()
        if self._side is None:
            group.gradients.take(index, param)
        else:
            self._side.release()

    def _post_backward(self, unit: Unit, backward: Backward, at_end: bool = False) -> None:
        """Reshard and start the reduction. Later gradients start another, to add. Collective: the
        unit."""
        if self._streams is not None:
            self._streams.join()
        if unit.calls:
            unit.forget_calls()
            backward.entered.remove(unit)
        keeps = backward.keeps_params or backward.keeps_gathered
        if not keeps and unit.behavior.reshard_after_backward:
            unit.reshard()  # first: gradients may need the memory
        # Both only without tags. FIXED leaves the unit to ``_reduce_used``; otherwise it waits for
        # all its calls, because whether any gradient has come before may differ between ranks.
        if backward.order is ReduceOrder.FIXED or (not at_end and unit.calls_left(backward.serial)):
            return
        if self._side is None:
            self._reduce(unit, backward)
            return
        self._side.release()
        with self._stream_of(unit, at_end):
            self._reduce(unit, backward)

    def _reduce(self, unit: Unit, backward: Backward) -> None:
        """Start to reduce the unit's gradients. Collective: the unit."""
        reduced_now = []
        for group in unit.groups:
            gradients = group.gradients
            gradients.collect()
            # A user's hook does its own communication: where ranks use different units, all of them
            # call it at the end of backward.
            if gradients.wants_reduction(self.sync and not self.reduces_on_finalize) and not (
                self._allow_unused_units and gradients.policy.hook is not None
            ):
                reduced_now.append(gradients)
        if reduced_now:
            backward.reduced.update(reduced_now)
            self._start(unit, reduced_now)

    def _start(self, unit: Unit, reduced_now: list[Gradients]) -> None:
        """Start to reduce these gradients of a unit. Collective: the unit."""
        events.tell(events.REDUCING, unit.label)
        with _torch_private.profiled("reduce", unit.label):
            self.reductions.start(reduced_now)

    def _stream_of(self, unit: Unit, at_end: bool) -> contextlib.AbstractContextManager[None]:
        """Return the stream that takes a unit's gradients. At the end it is the computing stream,
        which has nothing left to compute and can reuse the memory of activations; but gradients
        that stay for later backwards are always allocated on the side stream."""
        policy = unit.behavior.reduction
        leaves_nothing = self.sync and policy.sync and policy.over_replicas
        if at_end and leaves_nothing and not self.reduces_on_finalize:
            return _HERE
        return self._on_side()

    @_torch_private.outside_transforms
    def _end(self, backward: Backward) -> None:
        """End the graph task: the remaining post-backwards, and all reductions. Collective: the
        model."""
        self._join(side=True)
        with torch.no_grad():
            self._gathering.end_backward()
            backward.keeps_gathered = False
            # gradients that came after their unit's post-backward, or without one
            others = self._checks.changes.groups_with_gradients()
            for unit in reversed(self._units):  # the root last: its buffer is the largest
                if (
                    unit.calls
                    or unit.residency is not Residency.SHARDED
                    or any(map(_received_indices, unit.groups))
                    or not others.isdisjoint(unit.groups)
                ):
                    self._post_backward(unit, backward, at_end=True)
            for unit in self._units:
                if unit.residency is Residency.UNSHARDING:  # it stays unsharded
                    unit.finish_unshard()
                if backward.keeps_params and unit.residency is Residency.UNSHARDED:
                    unit.keep_values()
            self._gathering.mapped.stop_reading(Pass.BACKWARD)
            if backward.order is not ReduceOrder.AS_COMPLETE:
                self._reduce_rest(backward)
            self._join(side=True)
            # Where units are reduced, ``.grad`` of the others stays as it is.
            syncs = self.sync and any(unit.behavior.reduction.sync for unit in self._units)
            for gradients in () if syncs or self.reduces_on_finalize else self._all_gradients:
                if gradients.received:
                    gradients.record()
                    self._has_recorded = True
            self.reductions.finish()
            events.tell(events.REDUCED, self._units[0].label)
            self._communicators.settle("gradients and parameters that this rank has sent")
            self._gathering.mapped.end(Pass.BACKWARD)
        self._current, self.is_open = _no_backward, False
        late = itertools.chain.from_iterable(
            [gradients.sharded.late_params for gradients in self._all_gradients]
        )
        if _torch_private.has_optimizers_in_backward() or (
            _torch_private.have_post_accumulate_hooks(late)
        ):
            self._step_optimizers(backward)

    def _reduce_rest(self, backward: Backward) -> None:
        """Reduce what post-backward has left, in one order on all ranks: zeros for groups that only
        other ranks used, or where the user asked for them. Collective: the model."""
        if not backward.is_used:
            used = [
                gradients in backward.reduced or gradients.have_come
                for gradients in self._all_gradients
            ]
            if self._allow_unused_units and self.sync:
                used = self._communicators.any_rank(
                    used, "the list of the units that some rank has used"
                )
            backward.is_used = dict(zip(self._all_gradients, used, strict=True))
        for unit in reversed(self._units):
            self._reduce_used(unit, backward, at_end=True)

    def _reduce_used(self, unit: Unit, backward: Backward, at_end: bool = False) -> None:
        """Reduce the groups of a unit that some rank has used, with zeros if this one has not.
        Collective: the unit."""
        policy = unit.behavior.reduction
        reduces = self.sync and policy.sync and not self.reduces_on_finalize
        is_fixed = backward.order is ReduceOrder.FIXED
        unreduced = [
            group.gradients for group in unit.groups if group.gradients not in backward.reduced
        ]
        reduced_now = [
            gradients
            for gradients in unreduced
            if reduces
            and (
                ((is_fixed or self._allow_unused_units) and backward.is_used[gradients])
                or (policy.reduces_unused and gradients.is_trainable)
            )
        ]
        with self._stream_of(unit, at_end):
            for gradients in unreduced if is_fixed else ():
                gradients.collect()
            if reduced_now:
                backward.reduced.update(reduced_now)
                self._start(unit, reduced_now)

    def begin_finalize(self) -> None:
        """Reshard, and start to reduce what backwards have received. Collective: the model."""
        self._join()
        for unit in reversed(self._units):
            if unit.behavior.reshard_after_backward:
                unit.reshard()  # the backwards may have run without resharding
            reduced_now = [
                group.gradients
                for group in unit.groups
                if group.gradients.wants_reduction(self.sync)
            ]
            if reduced_now:
                with self._on_side():
                    self._start(unit, reduced_now)

    def end_finalize(self) -> None:
        """Wait for these reductions. Collective: the model."""
        with torch.no_grad():
            with self._on_side():
                self.reductions.finish()
            self._join(side=True)
            self._communicators.settle("gradients that this rank has sent")

    def _step_optimizers(self, backward: Backward) -> None:
        """Run optimizers and hooks that step in backward: gradients are complete, and no rank
        reads shards."""
        self.steps = True
        try:
            for gradients in self._all_gradients:
                if gradients in backward.reduced:
                    gradients.sharded.step_in_backward()
        finally:
            self.steps = False

    def discard(self) -> None:
        """After a backward that raised: wait for what is in flight, and drop partial gradients."""
        self._join()
        self.reductions.forget()
        self._gathering.forget_backward()
        for unit in self._units:
            unit.forget_calls()
            with self._on_side():
                for group in unit.groups:
                    group.gradients.discard()
            unit.reshard()
        self._join(side=True)
        self._communicators.settle("messages that this rank sent before an exception")
        self._gathering.mapped.end(Pass.BACKWARD, has_raised=True)
        self._current, self.is_open = _no_backward, False


class ThreadedBackwardRunner(BackwardRunner):
    """For devices with a thread of autograd each, where hooks may run at the same time."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._lock = threading.RLock()

    def pre_backward(self, call: Call, unit: Unit) -> None:
        with self._lock:
            super().pre_backward(call, unit)


_HERE = contextlib.nullcontext()  # on the current stream
_received_indices = operator.attrgetter("gradients.received")
_has_run_backward = operator.attrgetter("has_run_backward")


def _no_backward() -> None:
    return None
