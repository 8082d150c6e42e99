"""The runtime of one root: what happens when a forward enters and exits a unit, and when backward
passes it.

One event ends a unit's backward, *leave*: start the reduction, free the parameters. Every forward
call has two ticks, enter and exit. At the first pre-backward of a call c, every unit whose calls
all entered after c exited is left, at the end of backward the rest. It holds because autograd runs
ready nodes newest first: when the gradient of a call's output is complete, everything that was
recorded after that output has run. No hooks on inputs and no counts of outstanding calls are
needed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import operator
import threading
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import _torch_private
from .._comm.communicator import Communicator
from ..errors import AssertedStateError, StateError, UsageError, explain
from . import hooks
from .device import compute_streams
from .dtypes import cast_floats, move_to, tensors_in
from .external_changes import ExternalChanges
from .materialize import is_uninitialised
from .reduce import CommHook
from .schedule import Order, Prefetch
from .unit import Call, Group, Residency, Unit, Zeroed

__all__ = ["Runtime", "RuntimeOptions", "live_runtimes"]


@dataclasses.dataclass(frozen=True)
class RuntimeOptions:
    """What the root was asked to do, resolved."""

    forward_prefetch: bool
    backward_prefetch: Prefetch
    allow_unused_units: bool  # ranks may use different units
    max_inflight_reductions: int = (
        0  # units whose gradients may still travel when those of a further one begin to collect
    )


class Backward:
    """One outermost graph task. Only the callback queued at its end holds it: a dead reference
    means that the task is gone."""

    _serials = itertools.count()

    def __init__(self) -> None:
        self.serial = next(self._serials)
        self.entered: list[Unit] = []  # whose pre-backward ran and that were not left
        self.reduced: set[Group] = set()
        # create_graph: the gradients' own graph may read parameters without passing an output hook
        self.keep = False


class Runtime:
    """All units below one root, and what they are doing now."""

    def __init__(
        self, root: Unit, units: Sequence[Unit], names: Sequence[str], options: RuntimeOptions
    ) -> None:
        """units: the root first, then those below it, taken over from the runtimes they had. names:
        theirs, for errors."""
        self.root, self.units, self.options = root, list(units), options
        _live.add(self)
        self.sync = True  # False inside of no_sync
        self.has_run = False  # a forward has begun
        self.steps = False  # optimizers step in backward now
        # No parameter or buffer is without a value: looked at before the first forward. A
        # simulation on meta has none at all.
        self._has_values = root.options.device.type == "meta"
        self._units_in_rounds: list[
            Unit
        ] = []  # the units of a method that runs, whose ranks may make different numbers of calls
        for unit, name in zip(self.units, names, strict=True):
            if unit.runtime is not None:
                unit.runtime.rest()
            label = f"unit {name!r}" if name else f"the root unit (a {type(unit.module).__name__})"
            unit.runtime, unit.label, unit.is_root = self, label, unit is root
        self.take_groups()
        self._streams = compute_streams(root.options.device)
        self._joins = self._streams.several
        # Held by the thread of autograd that is in here, where there may be several: one for each
        # device.
        self._lock = threading.RLock() if self._streams.several else None
        # pre_backward(call, unit): the gradient of one of the call's outputs is complete:
        # everything recorded after the call has run. On a device of its own, everything but what
        # goes over the CPU: autograd has a thread for each, and they may come at once.
        self.pre_backward = self._pre_backward if self._lock is None else self._pre_backward_alone
        self._prefetches_backward = options.backward_prefetch is Prefetch.PRE
        self._ticks = itertools.count()
        self._stack: list[Call] = []
        self._forward_order, self._backward_order = Order(), Order()
        self._reductions: collections.deque[list[Group]] = (
            collections.deque()
        )  # those of a unit together, oldest first
        self._backward: Callable[[], Backward | None] = _nothing  # weak
        self._open = False  # a backward was begun and not ended
        self._is_rested = False  # inside of ``rested``
        self._notes_open = False  # some group has collected gradients that were not reduced

    def take_groups(self) -> None:
        """Work with the groups that the units have now."""
        self.groups = [group for unit in self.units for group in unit.groups]
        for unit in self.units:
            for group in unit.groups:
                group.limit_in_flight = self._limit_in_flight
                group.call_it(unit.label)
        self._units_with_parts = [unit for unit in self.units if unit.has_parts]
        self._external_changes = ExternalChanges(self.groups)
        self._wires: list[Communicator] = list(
            {
                id(wire): wire
                for group in self.groups
                for wire in (group.shard, group.replica)
                if wire.ranks > 1
            }.values()
        )
        self._homes = list(
            {
                id(group.home): group.home for group in self.groups if group.home.is_offloaded
            }.values()
        )

    # -- forward

    @property
    def in_forward(self) -> bool:
        return bool(self._stack)

    @property
    def in_backward(self) -> bool:
        return self._open and self._backward() is not None

    @_torch_private.never_compiled
    def run(
        self,
        unit: Unit,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a forward of ``unit``, with whole parameters. Collective.

        A compiler that runs what is called here does not look at what the engine does before and
        after.
        """
        compiler = _torch_private.set_compiler(None)
        call = Call(unit, next(self._ticks))
        try:
            try:
                args, kwargs = self.enter(call, unit, args, kwargs)
                _torch_private.set_compiler(compiler)
                output = function(*args, **kwargs)
            except BaseException:
                _torch_private.set_compiler(None)
                with contextlib.suppress(
                    StateError
                ):  # what cannot be waited for any more is not what happened first
                    self.exit(call, unit, None)
                raise
            _torch_private.set_compiler(None)
            self.exit(call, unit, output)
            return output
        finally:
            _torch_private.set_compiler(compiler)

    @_torch_private.never_compiled
    def run_method(
        self,
        unit: Unit,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks_in_rounds: bool,
    ) -> Any:
        """Run another entry point than forward in the same way. Collective.

        With ``serving``, ranks may call what is inside different numbers of times: the units below
        are gathered in rounds, all of them once in one fixed order, and a rank that is done takes
        part in the rounds of the others. One small reduction per round.
        """
        if not ranks_in_rounds or self._stack or _torch_private.in_graph_task():
            return self.run(unit, function, args, kwargs)

        def until_all_are_done(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                self._issue_rest(self._forward_order)
                while self._next_round(running=False):
                    self._issue_rest(self._forward_order)
                self._units_in_rounds = []

        inside = set(unit.module.modules())
        self._units_in_rounds = [other for other in self.units if other.module in inside]
        try:
            return self.run(unit, until_all_are_done, args, kwargs)
        finally:
            self._units_in_rounds = []

    def _next_round(self, running: bool) -> bool:
        """Every unit was gathered once. Return True, and begin another round, if some rank still
        runs."""
        self._end_gathers()
        flag = torch.tensor([running], dtype=torch.uint8, device=self.root.options.device)
        for wire in self._wires:
            flag = wire.any_of(flag)
        again = bool(flag)
        if again:
            self._forward_order.restart(
                [unit for unit in self._units_in_rounds if unit is not self._stack[0].unit]
            )
        return again

    @property
    def _uneven(self) -> bool:
        return self.options.allow_unused_units or bool(self._units_in_rounds)

    def call(self, unit: Unit) -> Call:
        """Return a forward call that begins now."""
        return Call(unit, next(self._ticks))

    def enter(
        self, call: Call, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """A forward call begins. Returns its inputs, moved and cast."""
        recomputing = _torch_private.graph_task() != -1
        outermost = not recomputing and (unit.is_root or not self._stack)
        if outermost:
            self._begin_forward()
        self._stack.append(call)
        self._use(
            unit,
            call.form,
            self._backward_order if recomputing else self._forward_order,
            recomputing,
        )
        unit.running += 1
        call.counted = True
        if unit.buffers is not None:
            unit.buffers.follow(call.form)
        options = unit.options
        if outermost:
            args, kwargs = move_to(args, options.device), move_to(kwargs, options.device)
        if call.form == 0 and (options.cast_inputs or (outermost and options.cast_root_inputs)):
            args, kwargs = (
                cast_floats(args, options.compute_dtype),
                cast_floats(kwargs, options.compute_dtype),
            )
        return args, kwargs

    def _begin_forward(self) -> None:
        """The outermost forward. Legal from every state, as an exception may have left any. What
        was kept full is stale by now."""
        if self._joins:
            self._streams.join()
        if self._open:
            self._discard()
        self._stack.clear()
        for unit in self.units:
            unit.running = 0
            if unit.residency is not Residency.SHARDED or unit.shown_full:
                unit.free()
        if not self._external_changes.stands():
            self._look_at_units()
            self._external_changes.note()
            self.has_run = True
        if not self._has_values:
            self._require_values()
        for unit in self._units_with_parts:
            unit.hide_parts()
        self._forward_order.restart(self._units_in_rounds or self.units)

    def _look_at_units(self) -> None:
        """Follow what somebody has changed between steps, or refuse it."""
        for unit in self.units:
            for group in () if unit.summoned else unit.groups:
                stray = group.stray_gradient()
                if stray is not None:
                    self._refuse_stray(unit, group, stray)
                group.store.check(group.name)
                group.require_unsharded_params()
                for index, unsharded_param in group.follow_requires_grad():
                    hooks.on_gradient_of_leaf(unit, group, index, unsharded_param)

    def _require_values(self) -> None:
        """Raise UsageError, on all ranks, if a tensor that came from the meta device has been given
        no value up to now.

        Collective: one byte, once, as one rank alone may lack something.
        """
        left, names = [], []
        for unit in self.units:
            for name, read in unit.uninitialised:
                names.append(f"{name!r} of {unit.label}")
                value = read()
                if value is not None and is_uninitialised(value):
                    left.append(names[-1])
        flag = torch.tensor([bool(left)], dtype=torch.uint8, device=self.root.options.device)
        for wire in self._wires:
            flag = wire.any_of(flag)
        if flag:
            found = (
                left or names or ["what another rank has from its meta device"]
            )  # of which this one holds nothing
            raise UsageError(
                explain(
                    "Parameters or buffers were never given values: they came from the meta device "
                    "as uninitialised memory.",
                    expected="reset_parameters() or param_init_fn to fill all of a module's "
                    "tensors, unsaved buffers too; or "
                    "load_state_dict(), or sync_module_states=True with values on the first rank",
                    got=f"nothing in {', '.join(found[:5])}{' and more' if len(found) > 5 else ''}",
                    where=self.root.label,
                    fix="fill them in reset_parameters() or param_init_fn",
                )
            )
        self._has_values = True
        for unit in self.units:
            unit.uninitialised = []

    def _use(self, unit: Unit, form: int, order: Order, backward: bool) -> None:
        """Make ``unit`` full and shown.

        Collective. With uneven use all ranks gather all units in one fixed order, each at the
        latest when it needs a later one or when the pass ends, so that a rank which skips a unit
        still serves it.
        """
        if self._joins:
            self._streams.join()
        allow_unused_units = self.options.allow_unused_units or bool(self._units_in_rounds)
        if allow_unused_units:
            if (
                self._units_in_rounds
                and unit.residency is Residency.SHARDED
                and unit not in order.to_issue
            ):
                self._issue_rest(order)
                self._next_round(running=True)
            while unit in order.to_issue:
                self._gather_for_others(order.to_issue.pop(0), keep=unit)
        if unit.residency is Residency.SHARDED or unit.form != form:
            unit.gather(form)
        following = order.advance(unit)
        if (
            following is not None
            and not allow_unused_units
            and (self._prefetches_backward if backward else self.options.forward_prefetch)
        ):
            following.gather(0 if following.has_one_form else following.wanted_form())
        unit.wait()
        if not unit.shown_full:
            unit.show(True)

    def exit(self, call: Call, unit: Unit, output: object) -> None:
        """A forward call has ended, with None where it raised. A recomputation frees nothing:
        backward is about to use it."""
        stack = self._stack
        if call not in stack:
            return
        while stack.pop() is not call:
            pass
        if call.counted and unit.running:
            unit.running -= 1
        call.exit, in_graph = next(self._ticks), False
        if torch.is_grad_enabled():
            tensors = unit.attributes()
            if type(output) is torch.Tensor:
                tensors.append(output)
            else:
                tensors += tensors_in(output)
            for tensor in tensors:
                if tensor.requires_grad and tensor.grad_fn is not None:
                    hooks.on_gradient_of_output(tensor, call)
                    in_graph = True
        if unit.running or _torch_private.graph_task() != -1:
            return
        if self._joins:
            self._streams.join()
        if in_graph and self._keeps(unit):
            unit.show(False)
        else:
            unit.free()
        if not self._stack:
            self._end_forward()

    def _keeps(self, unit: Unit) -> bool:
        """What backward uses first is not freed. With uneven use nothing stays: ranks have to
        gather the same again in backward."""
        if self._uneven:
            return False
        return (
            unit.is_root
            or not unit.options.reshard_after_forward
            or unit is self._backward_order.first_after_root()
        )

    def _end_forward(self) -> None:
        """Sends never outlive the pass that posted them: after it, somebody may write the
        shards."""
        self._issue_rest(self._forward_order)
        for unit in self._units_with_parts:
            unit.reveal_parts()
        self._end_gathers()

    def _end_gathers(self) -> None:
        for unit in self.units:
            if unit.residency is Residency.UNSHARDING:  # gathered for others, or on a wrong guess
                unit.free()
        self._drain("parameters that this rank has sent")

    def _gather_for_others(self, unit: Unit, keep: Unit | None = None) -> None:
        """keep: the unit that this rank is about to use."""
        if self._units_in_rounds and unit.residency is Residency.UNSHARDED:
            unit.send_again()
        unit.gather(unit.wanted_form())
        if self._units_in_rounds and unit is not keep and unit.residency is Residency.UNSHARDING:
            unit.free()  # one at a time; should it be used after all, a further round begins

    def _issue_rest(self, order: Order) -> None:
        while self._uneven and order.to_issue:
            self._gather_for_others(order.to_issue.pop(0))

    def _drain(self, what: str) -> None:
        for wire in self._wires:
            wire.flush_sends(what)
        for home in self._homes:
            home.wait_readers()

    # -- backward

    def _current_backward(self) -> Backward:
        """The Backward of this graph task; it begins at the first pre-backward or the first
        gradient."""
        current = self._backward()
        if current is None:
            if self._open:
                self._discard()
            current, self._open = Backward(), True
            self._drop_zeroed()
            self._backward = weakref.ref(current)
            hooks.on_end_of_backward(lambda: self._end_backward(current))
            self._require_parameters_of_forward()
            self._backward_order.restart(list(reversed(self.units)))
        return current

    def _require_parameters_of_forward(self) -> None:
        """Raise AssertedStateError if parameters that are kept whole from forward to backward were
        given other memory meanwhile.

        Of the other units the new values count, as they are gathered again.
        """
        follow = not self._external_changes.targets_stand()
        for unit in self.units:
            kept = unit.residency is Residency.UNSHARDED
            for group in () if unit.summoned else unit.groups:
                if kept:
                    group.require_unsharded_params()
                if follow and not group.store.stands():
                    if kept:
                        raise AssertedStateError(
                            explain(
                                "Parameters were changed between forward and backward, which goes "
                                "on with those of forward.",
                                expected="changes by `.data =` before forward or after backward, "
                                "as this unit stays whole between",
                                got="a parameter that has other memory than in forward",
                                where=group.name,
                                fix="move the change, or choose a strategy that frees parameters "
                                "after forward (FULL_SHARD)",
                            )
                        )
                    group.store.check(group.name)

    def _pre_backward_alone(self, call: Call, unit: Unit) -> None:
        assert self._lock is not None
        with self._lock:
            self._pre_backward(call, unit)

    def _pre_backward(self, call: Call, unit: Unit) -> None:
        if call.summoned or unit.summoned:
            self._refuse_lent(unit)
        backward = self._backward() or self._current_backward()
        if call.seen_by == backward.serial:  # several outputs, one event
            return
        call.seen_by = backward.serial
        backward.keep |= torch.is_grad_enabled()
        if self._joins:
            self._streams.join()
        entered = backward.entered
        if self.options.backward_prefetch is Prefetch.POST and not self.options.allow_unused_units:
            unit.gather(call.form)
        for other in tuple(entered):
            calls = other.calls
            if (
                other is not unit
                and calls[0].enter > call.exit
                and (len(calls) == 1 or all(its.enter > call.exit for its in calls))
                and (self._lock is None or other.lacks_no_gradient())
            ):
                self._leave(other, backward)
        if not unit.calls:
            entered.append(unit)
        unit.calls.append(call)
        self._use(unit, call.form, self._backward_order, backward=True)

    def on_gradient(self, group: Group, index: int, unsharded_param: torch.nn.Parameter) -> None:
        """A large leaf's gradient was accumulated."""
        with self._lock or _UNLOCKED:
            if self._joins:
                self._streams.join()
            self._current_backward()
            group.take(index, unsharded_param)

    def _leave(self, unit: Unit, backward: Backward) -> None:
        """Start the reduction and free. A gradient that comes later starts a further reduction,
        which adds."""
        if self._joins:
            self._streams.join()
        if unit.calls:
            unit.forget_calls()
            backward.entered.remove(unit)
        if not backward.keep:
            unit.free()  # first: gradients may need memory
        found = []
        for group in unit.groups:
            group.collect()
            # A user's hook communicates by itself: with uneven use the ranks meet in it at the end
            # of backward only.
            if (
                self.sync
                and group.filled
                and (group.hook is None or not self.options.allow_unused_units)
            ):
                found.append(group)
        if found:
            self._reduce(found, backward)

    def _reduce(self, groups: list[Group], backward: Backward) -> None:
        """Start the reductions of a unit."""
        backward.reduced.update(groups)
        if len(self._reductions) > self.options.max_inflight_reductions:
            self._limit_in_flight()
        for group in groups:
            group.start_reduction()
        self._reductions.append(groups)

    def _limit_in_flight(self) -> None:
        """A reduce buffer is about to be filled or sent: end so many earlier reductions that no
        more than wanted are held."""
        while (
            len(self._reductions) > self.options.max_inflight_reductions
            and not self.options.allow_unused_units
        ):
            for group in self._reductions.popleft():
                group.finish_reduction()

    def _end_backward(self, backward: Backward) -> None:
        """The graph task has ended: leave every unit, finish every reduction."""
        with torch.no_grad():
            self._issue_rest(self._backward_order)
            left_some = self._external_changes.has_gradients()
            for unit in reversed(self.units):  # blocks before the root, whose buffer is the largest
                if (
                    left_some
                    or unit.calls
                    or unit.residency is not Residency.SHARDED
                    or any(map(_filled, unit.groups))
                ):
                    self._leave(unit, backward)
            if self.options.allow_unused_units and self.sync:
                self._reduce_what_others_reduced(backward)
            for group in self.groups:
                if group.filled:  # no_sync
                    group.note_unreduced()
                    self._notes_open = True
            for _ in range(3):  # every stage for all groups, before the next for any
                for group in itertools.chain.from_iterable(self._reductions):
                    if group.reduction is not None:
                        group.reduction.advance()
            for group in itertools.chain.from_iterable(self._reductions):
                group.finish_reduction()
            self._reductions.clear()
            self._drain("gradients and parameters that this rank has sent")
        self._backward, self._open = _nothing, False
        if _torch_private.has_optimizers_in_backward():
            self._step_in_backward(backward.reduced)

    def _step_in_backward(self, reduced: set[Group]) -> None:
        """Let optimizers that step in backward do it: at its end, when nobody reads the shards any
        more, nor adds a gradient."""
        self.steps = True
        try:
            for group in self.groups:
                if group in reduced:
                    group.step_in_backward()
        finally:
            self.steps = False

    def _reduce_what_others_reduced(self, backward: Backward) -> None:
        """One byte per group and backward: a rank without gradients supplies zeros; a group used
        nowhere keeps ``.grad`` None."""
        here = [group in backward.reduced or group.has_gradients for group in self.groups]
        flags = torch.tensor(here, dtype=torch.uint8, device="cpu")
        for wire in self._wires:
            flags = wire.any_of(flags.to(self.root.options.device)).cpu()
        for group, used in zip(self.groups, flags.tolist(), strict=True):
            if used and group not in backward.reduced:
                self._reduce([group], backward)

    def _drop_zeroed(self) -> None:
        """What zero_grad has cleared since a backward without communication is dropped from what
        was collected, too.

        Replaced gradients (``set_to_none``) are plain to see. One that was written to, was zero and
        still is, tells nothing: then other gradients decide, on all ranks together, whether the
        write was a zero_grad or a change of scale.
        """
        if not self._notes_open:
            return
        self._notes_open = False
        noted = [group for group in self.groups if group.unreduced]
        found = {group: group.was_zeroed() for group in noted}
        cleared = True
        if any(
            group.was_written() for group in noted
        ):  # alike on all ranks: they run the same program
            scaled = torch.tensor(
                [any(group.scaled() for group in noted)],
                dtype=torch.uint8,
                device=self.root.options.device,
            )
            for wire in self._wires:
                scaled = wire.any_of(scaled)
            cleared = not bool(scaled)
        for group, answers in found.items():
            group.drop_unreduced(
                [a is Zeroed.YES or (a is Zeroed.UNCLEAR and cleared) for a in answers]
            )

    def _discard(self) -> None:
        """After a backward that raised: wait for what travels, drop partial gradients."""
        self._reductions.clear()
        self._backward_order = (
            Order()
        )  # ranks may have come to different places: nobody guesses from it
        for unit in self.units:
            unit.forget_calls()
            for group in unit.groups:
                group.discard()
            unit.free()
        self._drain("what this rank has sent before an exception")
        self._backward, self._open = _nothing, False

    # -- between steps

    @property
    def broken(self) -> bool:
        """True between a backward that raised and whatever comes next."""
        return self._open and self._backward() is None

    @contextlib.contextmanager
    def rested(self, what: str) -> Iterator[None]:
        """Around a call between steps that needs every unit sharded: what is called inside does not
        look at all units again.

        Raises StateError if ``what`` is called from inside of forward or backward.
        """
        if self._is_rested:
            yield
            return
        self.require_idle(what)
        self.rest()
        self._is_rested = True
        try:
            yield
        finally:
            self._is_rested = False

    def rest(self, units: Iterable[Unit] | None = None) -> None:
        """Bring units, by default all, to their sharded form, from whatever an exception or a
        forward without backward has left."""
        if self.broken:
            self._discard()
        if self._stack and not self.in_backward:
            self._stack.clear()
            for unit in self.units:
                unit.running = 0
        for unit in self.units if units is None else units:
            unit.free()
            unit.reveal_parts()
        self.require_own(units)

    def require_own(self, units: Iterable[Unit] | None = None) -> None:
        """Raise StateError if somebody has replaced parameters; what was written by `.data =`
        between steps counts from now on."""
        for unit in self.units if units is None else units:
            unit.require_own()
            for group in () if unit.summoned else unit.groups:
                group.store.check(group.name)

    @property
    def runs(self) -> bool:
        """True inside of a forward or backward."""
        return _torch_private.in_graph_task() or any(unit.running for unit in self.units)

    def require_idle(self, what: str, error: type[StateError] = StateError) -> None:
        """Raise ``error`` if ``what`` is called from inside of forward or backward."""
        if self.runs:
            raise error(
                explain(
                    f"{what} was called while the model runs.",
                    expected="a call between steps",
                    got="a call from inside of forward or backward",
                    where=self.root.label,
                    fix="call it before forward, or after backward has returned",
                )
            )

    def require_parts(self, what: str) -> None:
        """Raise StateError if ``what`` is called inside of summon_full_params, or after parameters
        were replaced."""
        if any(unit.summoned for unit in self.units):
            raise StateError(
                explain(
                    f"{what} was called inside of summon_full_params, where parameters and "
                    "gradients are whole for the while.",
                    expected="a call outside of the context",
                    got="a call inside of it",
                    where=self.root.label,
                    fix="leave the context first",
                )
            )
        self.require_own()

    def set_comm_hook(self, hook: CommHook) -> None:
        """Sum and average gradients in the user's way."""
        if any(group.has_gradients for group in self.groups):
            raise StateError(
                explain(
                    "Gradients are being collected already.",
                    expected="a communication hook that is registered before the first backward",
                    got="gradients of a backward inside of no_sync",
                    where=self.root.label,
                    fix="register the hook right after wrapping",
                )
            )
        for group in self.groups:
            group.set_hook(hook)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @staticmethod
    def _refuse_lent(unit: Unit) -> typing.NoReturn:
        raise StateError(
            explain(
                "Backward reached a forward that ran inside of summon_full_params.",
                expected="forward and backward outside of the context, which shows parameters that "
                "gradients cannot reach",
                got="a backward through a forward inside of it",
                where=unit.label,
                fix="leave the context before the forward; for evaluation inside of it use "
                "torch.no_grad()",
            )
        )

    @staticmethod
    def _refuse_stray(unit: Unit, group: Group, index: int) -> typing.NoReturn:
        group.discard()
        raise StateError(
            explain(
                "A gradient came past every hook, so it was never reduced over the ranks.",
                expected="backward from the outputs of a unit's forward, or from tensors its "
                "modules keep as attributes",
                got=f"a gradient on parameter {index} "
                f"(shape {tuple(group.unsharded_params[index].shape)}) left by an earlier backward",
                where=group.name,
                fix="return the tensor that the loss is made of from forward, or keep it as an "
                "attribute of a module of the unit",
            )
        )


_UNLOCKED = contextlib.nullcontext()
_filled = operator.attrgetter("filled")


def _nothing() -> None:
    return None


_live: weakref.WeakSet[Runtime] = weakref.WeakSet()


def live_runtimes() -> Iterable[Runtime]:
    """All that somebody still holds. One whose units an outer one took over has its groups no
    longer to itself."""
    return (runtime for runtime in _live if runtime.root.runtime is runtime)
