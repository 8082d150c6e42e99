"""The runtime of one root: its units, their forward calls, and the state between steps. Backward
passes are in backward.py."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._comm.board import events, progress, ring
from ..errors import StateError
from . import hooks, rendezvous
from .backward import BackwardRunner, ThreadedBackwardRunner
from .behavior import CommHook
from .checks import Checks, refuse_in_pass, require_own
from .communicators import Communicators
from .device import compute_streams, is_simulated
from .dtypes import ComputeDtype
from .group import Group
from .nested import cast_floats, map_tensors, move_to
from .schedule import Gathering, RuntimeOptions
from .unit import Call, Residency, Unit


class Runtime:
    """All units below one root, and the running pass."""

    def __init__(
        self, root: Unit, units: Sequence[Unit], names: Sequence[str], options: RuntimeOptions
    ) -> None:
        """units: the root, then those below it, taken over from earlier runtimes."""
        self.root, self.units = root, list(units)
        self.groups: list[Group] = []
        _live.add(self)
        self.has_run = False  # a forward has begun
        if not is_simulated():
            ring.begin()
        for unit, name in zip(self.units, names, strict=True):
            if unit.runtime is not None:
                runtime_of(unit).reshard_all()
            label = f"unit {name!r}" if name else f"the root unit (a {type(unit.module).__name__})"
            unit.runtime, unit.label = self, label
        device = root.options.device
        self._streams = compute_streams(device)
        self._communicators = Communicators(device)
        self._checks = Checks(root, self.units, self._communicators)
        self._gathering = Gathering(self.units, self._communicators, self._streams, options)
        runner = BackwardRunner if self._streams is None else ThreadedBackwardRunner
        self.backward = runner(self.units, self._gathering, self._checks, options)
        self._may_differ = options.allow_unused_units
        self._units_with_parts: list[Unit] = []
        self._units_of_several: list[Unit] = []
        self.use_groups()
        self._ticks = itertools.count()
        self._stack: list[Call] = []  # forward calls that have begun and not ended
        self._is_at_rest = False  # inside ``at_rest``
        self.stale = False  # the front end has rebuilt a unit: a new runtime is needed

    def use_groups(self) -> None:
        """Use the units' current groups from now on."""
        self.groups = [group for unit in self.units for group in unit.groups]
        for unit in self.units:
            for group in unit.groups:
                group.set_name(unit.label)
        if self._may_differ:
            events.tell(events.MAY_DIFFER, self.root.label)
            for axis in itertools.chain.from_iterable(each.communicators for each in self.groups):
                axis.activity.may_differ = True
        self._units_of_several = [unit for unit in self.units if len(unit.modules) > 1]
        self._units_with_parts = [unit for unit in self.units if unit.view.shows_parts]
        self._communicators.use(
            itertools.chain.from_iterable(group.communicators for group in self.groups),
            (group.offload for group in self.groups),
        )
        self._checks.use_groups(self.groups)
        self.backward.use_groups(self.groups)
        self._gathering.mapped.use_groups(self.groups, self.root.label)

    # -- forward

    @_torch_private.never_compiled
    def run(
        self,
        unit: Unit,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        """Run a forward of ``unit`` with unsharded parameters. torch.compile traces only
        ``function``. module: the called one, if the unit has several. Collective: the unit."""
        compiler = _torch_private.set_compiler(None)
        call = Call(unit, next(self._ticks), module)
        try:
            try:
                args, kwargs = self.pre_forward(call, unit, args, kwargs)
                if unit.attributes.has_new_hooks():
                    hooks.on_hooked_tensors(unit)
                call.age = _torch_private.next_age()
                _torch_private.set_compiler(compiler)
                output = function(*args, **kwargs)
            except BaseException as error:
                _torch_private.set_compiler(None)
                if _torch_private.graph_task() == -1:  # a recomputation may end early
                    progress.record_error(error)
                    events.tell(events.RAISED, unit.label, error)
                # A failed wait must not hide the exception that came first.
                with contextlib.suppress(StateError):
                    self.post_forward(call, unit, has_raised=True)
                raise
            _torch_private.set_compiler(None)
            # Backward may begin at any tensor that the call has made: an output, or one that it has
            # put into attributes of modules or, in place or in a container, into its inputs.
            if type(output) is Tensor:
                output = call.let_leave(output, True)
            else:
                leave = functools.partial(call.let_leave, is_output=True)
                output = map_tensors(output, leave, in_place=True)
            unit.attributes.change(call.let_leave)
            for value in (*args, *kwargs.values()):
                node = value.grad_fn if type(value) is Tensor else None
                is_older = node is not None and _torch_private.age_of(node) < call.age
                if type(value) is not Tensor or not (node is None or is_older):
                    map_tensors(value, call.let_leave, in_place=True)
            with _torch_private.unrecorded():
                self.post_forward(call, unit)
            if unit.behavior.output_dtype is not None:
                output = cast_floats(output, unit.behavior.output_dtype)
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
        """Run another entry point in the same way. ranks_in_rounds: ranks may call the units below
        different numbers of times (see Rounds). Collective: the model."""
        if not ranks_in_rounds or self._stack or _torch_private.in_graph_task():
            return self.run(unit, function, args, kwargs)
        rounds = self._gathering.rounds
        try:
            return self.run(unit, rounds.around(unit, function), args, kwargs)
        finally:
            self._gathering.end_rounds()

    def pre_forward(
        self, call: Call, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Begin a forward call. Returns its inputs, moved and cast. Collective: the unit."""
        recomputing = _torch_private.graph_task() != -1
        # Recomputing the root, too, starts from the inputs as the user passed them.
        outermost = unit is self.root or not (recomputing or self._stack)
        with _torch_private.unrecorded():
            if outermost and not recomputing:
                self._begin_forward()
            self._stack.append(call)
            # Empty: this is the first call, or all modules were called and begin again.
            if call.module is not None and not recomputing and not unit.modules_to_run:
                unit.modules_to_run.update(unit.modules)
            self._gathering.unshard_for_use(unit, call.dtype, recomputing)
            unit.running += 1
            call.counted = True
            if unit.buffers is not None:
                unit.buffers.follow(call.dtype)
        options = unit.options
        if outermost:
            args, kwargs = move_to((args, kwargs), options.device)
        if self._streams is not None and torch.is_grad_enabled():
            args, kwargs = hooks.alias_inputs(args, kwargs, call, options.device)
        if call.dtype is ComputeDtype.TRAIN and (
            options.cast_inputs or (outermost and options.cast_root_inputs)
        ):
            args, kwargs = cast_floats((args, kwargs), options.compute_dtype)
        return args, kwargs

    def _begin_forward(self) -> None:
        """Begin the outermost forward, whatever stale state an exception may have left."""
        events.tell(events.FORWARD, self.root.label)
        if self._streams is not None:
            self._streams.join()
        if self.backward.is_open:
            self.backward.discard()
        self._stack.clear()
        for unit in self.units:
            unit.running = 0
            if (
                unit.residency is not Residency.SHARDED or unit.view.shows_unsharded
            ) and not unit.stays_unsharded:
                unit.reshard()
        progress.record_error(None)
        self._checks.before_forward()
        if not self.has_run:
            rendezvous.number_groups(self.groups)
        self.has_run = True
        for unit in self._units_with_parts:
            unit.view.begin_hiding_parts()
        self._gathering.begin_forward()

    def let_see(self, value: Any) -> Any:
        """Return what a user's hook on a module sees: its tensors leave the running calls."""
        for call in self._stack:
            value = map_tensors(value, call.let_leave, in_place=True)
        return value

    def post_forward(self, call: Call, unit: Unit, has_raised: bool = False) -> None:
        """End a forward call. A recomputation reshards nothing: backward needs the parameters."""
        leaving, call.leaving = ([] if has_raised else call.leaving), []
        if call.inputs is not None:
            call.inputs.put_back()
        stack = self._stack
        if call not in stack:
            return
        while stack.pop() is not call:
            pass
        if call.counted and unit.running:
            unit.running -= 1
        call.end_tick = next(self._ticks)
        for tensor in leaving:
            hooks.on_gradient_of_output(tensor, call)
        if unit.running or _torch_private.graph_task() != -1:
            return
        in_graph = bool(leaving)
        if not self._communicators.have_tags:
            if leaving:
                unit.track_call(call, [tensor.grad_fn for tensor in leaving])
            elif not torch.is_grad_enabled():
                for outer in stack:
                    outer.hides_calls |= any(group.gradients.is_trainable for group in unit.groups)
        if self._streams is not None:
            self._streams.join()
        if call.module is not None:
            unit.modules_to_run.discard(call.module)
        if not unit.modules_to_run:
            self._gathering.after_forward(unit, in_graph)
        if not self._stack:
            self._end_forward(has_raised, in_graph)

    def _end_forward(self, has_raised: bool, in_graph: bool) -> None:
        for unit in self._units_of_several:
            if unit.modules_to_run:  # its other modules were not called
                unit.modules_to_run.clear()
                self._gathering.after_forward(unit, True)
        self._gathering.gather_rest()
        for unit in self._units_with_parts:
            unit.view.end_hiding_parts()
        self._gathering.end_forward(has_raised, in_graph)

    # -- backward

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.backward.sync = self.backward.sync, False
        try:
            yield
        finally:
            self.backward.sync = before

    def begin_finalize(self) -> None:
        """Start to reduce what backwards have received. Collective: the model."""
        self.require_idle("finalize_backward()")
        self.backward.begin_finalize()

    def reset(self) -> None:
        """Discard what an exception has left, even gradients. Collective: the model, if any
        gradient is in flight."""
        self.require_idle("reset_iter_state()")
        self._stack.clear()
        self.backward.discard()
        for unit in self.units:
            unit.running = 0
            unit.modules_to_run.clear()
            unit.reshard()

    def set_comm_hook(self, hook: CommHook) -> None:
        """Sum and average gradients by the user's hook."""
        if any(group.gradients.received for group in self.groups):
            raise StateError.of(
                "Gradients were already received.",
                expected="a communication hook that is registered before the first backward",
                got="gradients of a backward inside no_sync",
                where=self.root.label,
                fix="register the hook right after wrapping",
            )
        for group in self.groups:
            group.gradients.set_hook(hook)

    # -- between steps

    @contextlib.contextmanager
    def at_rest(self, what: str) -> Iterator[bool]:
        """A context with every unit sharded, for calls between steps. In nested calls only the
        outermost checks all units, and gets True. Raises StateError inside forward or backward."""
        if self._is_at_rest:
            yield False
            return
        self.require_idle(what)
        self.reshard_all()
        self._is_at_rest = True
        try:
            yield True
        finally:
            self._is_at_rest = False

    def wait_copies(self) -> None:
        """Wait until offloaded shards may be overwritten."""
        self._communicators.wait_copies()

    def reshard_all(self, units: Iterable[Unit] | None = None) -> None:
        """Reshard units, by default all, whatever an exception or a lone forward has left."""
        if self.backward.has_raised:
            self.backward.discard()
        if self._stack and not self.backward.is_running:
            self._stack.clear()
            for unit in self.units:
                unit.running = 0
        self.wait_copies()  # those of a forward without a backward
        units = self.units if units is None else list(units)
        for unit in units:
            unit.reshard()
            unit.view.end_hiding_parts()
        require_own(units)

    @property
    def runs(self) -> bool:
        """True inside forward or backward."""
        return _torch_private.in_graph_task() or any(unit.running for unit in self.units)

    def require_idle(self, what: str, error: type[StateError] = StateError) -> None:
        """Raise ``error`` if ``what`` is called inside forward or backward."""
        if self.runs:
            refuse_in_pass(what, self.root.label, error)

    def require_parts(self, what: str) -> None:
        """Raise StateError inside summon_full_params, or after parameters were replaced."""
        self.require_not_summoned(what)
        require_own(self.units)

    def require_not_summoned(self, what: str) -> None:
        """Raise StateError inside summon_full_params."""
        if any(unit.view.summoned for unit in self.units):
            raise StateError.of(
                f"{what} was called inside summon_full_params, where all parameters are whole.",
                expected="a call outside the context",
                got="a call inside it",
                where=self.root.label,
                fix="leave the context first",
            )


_live: weakref.WeakSet[Runtime] = weakref.WeakSet()


def live_runtimes() -> Iterable[Runtime]:
    """Return the live runtimes, except those whose units an outer one has taken over."""
    return (runtime for runtime in _live if runtime.root.runtime is runtime)


def runtime_of(unit: Unit) -> Runtime:
    """Return the runtime that manages a unit."""
    assert isinstance(unit.runtime, Runtime)
    return unit.runtime


def run_as_forward(
    locate: Callable[[], tuple[Runtime, Unit]], method: Callable[..., Any], *, synced: bool | None
) -> Callable[..., Any]:
    """Return a function that runs a method of a unit's module like its forward. Collective: its
    calls. synced: see ``register_fsdp_forward_method``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        runtime, unit = locate()
        in_rounds = not torch.is_grad_enabled() if synced is None else synced
        output = runtime.run_method(unit, method, args, kwargs, in_rounds)
        return _items(runtime, unit, output) if inspect.isgenerator(output) else output

    return functools.update_wrapper(run, method)


def _items(runtime: Runtime, unit: Unit, generator: Generator[Any, Any, Any]) -> Iterator[Any]:
    """Yield a generator's items. Each step runs like a forward. Collective: each step."""
    end = object()
    while (item := runtime.run(unit, next, (generator, end), {})) is not end:
        yield item
