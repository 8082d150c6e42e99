"""The class of modules that ``fully_shard`` was applied to."""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import deprecated

from ... import _torch_private
from ..._engine.behavior import CustomReduceScatter
from ..._engine.checks import refuse_meta
from ..._engine.runtime import runtime_of
from ..._features.description import describe_unit
from ..._state.model_loading import completed, is_on, not_loaded
from ...errors import (
    AssertedStateError,
    FsdpCompatError,
    StateError,
    TypeUsageError,
    UsageError,
    takes,
    truth,
    wrong_type,
)
from ..flat.flat_unit import require_root
from .handles import GradientReductionHandle, UnitHandle, UnshardHandle
from .policies import AllGather, ReduceScatter
from .state import ShardedModules, state_of, states_in

if typing.TYPE_CHECKING:  # classes of sharded modules have FSDPModule and their own class as bases
    _Module: typing.TypeAlias = nn.Module
else:
    _Module = object


class FSDPModule(_Module):
    """The mixin that ``fully_shard`` adds to the class of a module.

    Setters may be called at any time between steps; those that affect communication need the same
    values on all ranks. With ``recurse=True`` they also set the value for all sharded modules
    inside."""

    _orig_cls_mro_index: int = 2  # of the module's own class: [FSDPLinear, FSDPModule, Linear, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the module's own class, as a slice of a container needs."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        self = original.__new__(original, *args, **kwargs)
        if _initialises_new:
            self.__init__(*args, **kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with unsharded parameters.

        Collective: all ranks of the model's mesh."""
        state = self._get_fsdp_state()
        runtime = state.runtime
        if runtime is None or runtime.stale:
            with _torch_private.unrecorded():
                runtime = state.ready_runtime()
        if state.post_optim_event is not None:
            _wait_for_optimizer(state)
        assert state.unit is not None
        called = None if len(state.modules) == 1 else self
        return runtime.run(state.unit, super().__call__, args, kwargs, called)

    if typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # the attributes of its own class
            ...

    def __deepcopy__(self, memo: Any) -> typing.NoReturn:
        raise AssertedStateError.of(
            "A sharded module cannot be copied.",
            expected="a copy of the model before fully_shard",
            got=f"copy.deepcopy of a {type(self).__name__}",
            where="copy.deepcopy",
            fix="build a second model, apply fully_shard to it, and load state_dict() of the "
            "first one into it",
        )

    def extra_repr(self) -> str:
        """Return the module's own line, and one that says how it is sharded."""
        state = state_of(self)
        lines = [
            super().extra_repr(),
            "" if state is None else str(describe_unit(state.unit_facts())),
        ]
        return "\n".join(filter(None, lines))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return ``nn.Module.state_dict(*args, **kwargs)`` with DTensors as parameters.

        After ``FullyShardedDataParallel.set_state_dict_type(model, FULL_STATE_DICT)`` parameters
        are whole tensors instead.

        Collective: all ranks of the model's mesh, for whole tensors."""
        given = {**kwargs, **dict(zip(("destination", "prefix"), args, strict=False))}
        result: dict[str, Any] = self._get_fsdp_state().state_dict_of(
            self,
            functools.partial(super().state_dict, *args, **kwargs),
            given.get("destination"),
            given.get("prefix", ""),
        )
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _torch_private.IncompatibleKeys:
        """Load a state dict of DTensors, or of whole tensors on every rank.

        With ``FullStateDictConfig(rank0_only=True)`` set for the model, the first rank alone may
        have it: the others pass ``{}``. Collective then, and if values are sharded in another way.

        Args:
            state_dict: values by name, as ``state_dict`` or the unsharded module returns them.
            strict: whether missing and unknown keys are an error.
            assign: accepted as by ``nn.Module.load_state_dict``.

        Returns:
            The missing and the unexpected keys.

        Raises:
            CheckpointError: the state dict does not fit."""
        state = self._get_fsdp_state()
        if state.record is not None and is_on(state.record.form):
            state_dict = completed(self, state_dict, strict, assign)
        if state.unit is not None and state.unit.runtime is not None:
            runtime_of(state.unit).wait_copies()
        try:
            keys: _torch_private.IncompatibleKeys
            more = {"assign": True} if assign else {}  # classes of users may not take it
            keys = super().load_state_dict(state_dict, strict, **more)
            return keys
        except FsdpCompatError:
            raise
        except RuntimeError as error:
            raise not_loaded(str(error), self._get_fsdp_state().label, state_dict) from error

    # -- parameters

    def reshard(self) -> None:
        """Free this module's unsharded parameters, and show the sharded ones.

        Sharded modules inside keep theirs. Nothing happens while the module's forward runs."""
        self._get_fsdp_state().reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard this module's parameters, in the dtypes of its mixed precision.

        Sharded modules inside are left out. The parameters stay unsharded until ``reshard`` or the
        end of the next forward.

        Collective: all ranks of the module's mesh.

        Args:
            async_op: only start, and return a handle. The module's forward waits by itself.

        Returns:
            A handle whose ``wait`` makes the parameters readable; None without ``async_op``."""
        async_op = truth("async_op", async_op, "unshard")
        state = self._get_fsdp_state()
        unit = state.ready_unit()
        if not unit.is_fresh:
            unit.reshard()
        unit.start_unshard()
        unit.pinned = True
        handle = UnitHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Reset the model after forward or backward has raised; call it on the root.

        It waits for what is in flight, reshards everything, and drops gradients that were not
        reduced, those of ``set_requires_gradient_sync(False)`` included. The next step works
        without it, but it frees memory and drops partial gradients at once.

        Collective: all ranks of the model's mesh, if communication is in flight.

        Raises:
            StateError: the module is not the root."""
        state = self._get_fsdp_state()
        require_root(state.is_root, state.label, "reset_iter_state()")
        if state.runtime is not None:
            state.runtime.reset()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set ``reshard_after_forward``: whether parameters are resharded after forward."""
        where = "set_reshard_after_forward"
        if not isinstance(reshard_after_forward, bool):
            raise wrong_type("reshard_after_forward", "a bool", reshard_after_forward, where)
        for state in self._states(recurse):
            state.is_auto = False
            behavior = state.behavior
            behavior.reshard_after_forward = reshard_after_forward
            behavior.partial_ranks, behavior.partial_mesh = 0, None

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set ``reshard_after_backward``: whether parameters are resharded after backward.

        False saves the all-gather of the next forward, for gradient accumulation."""
        where = "set_reshard_after_backward"
        flag = truth("reshard_after_backward", reshard_after_backward, where)
        for state in self._states(recurse):
            state.behavior.reshard_after_backward = flag

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set ``unshard_in_backward``: whether backward unshards this module's parameters.

        False is for modules whose backward does not read their parameters, such as embeddings."""
        flag = truth("unshard_in_backward", unshard_in_backward, "set_unshard_in_backward")
        self._get_fsdp_state().behavior.unshard_in_backward = flag

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether to ``keep`` the memory of unsharded parameters, and so the data pointers."""
        flag = truth("keep", keep, "set_keep_unsharded_storage")
        for state in self._states(recurse):
            state.behavior.keeps_storage = flag

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the ``modules`` whose all-gathers start when forward has unsharded this module.

        They start in this order, in place of the module that came next in the last forward."""
        states = _states_of(modules, "set_modules_to_forward_prefetch")
        self._get_fsdp_state().behavior.forward_prefetch = [each.behavior for each in states]

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the ``modules`` whose all-gathers start when backward has unsharded this module.

        They start in this order, in place of the module that came next in the last backward."""
        states = _states_of(modules, "set_modules_to_backward_prefetch")
        self._get_fsdp_state().behavior.backward_prefetch = [each.behavior for each in states]

    # -- gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept and ignore ``is_last_backward``: every backward waits for its reductions."""
        truth("is_last_backward", is_last_backward, "set_is_last_backward")

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set ``requires_gradient_sync``: whether backward reduces gradients.

        False accumulates them on each rank in the dtype of the reduction, without communication."""
        where = "set_requires_gradient_sync"
        flag = truth("requires_gradient_sync", requires_gradient_sync, where)
        for state in self._states(recurse):
            state.set_reduction(sync=flag, over_replicas=flag)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set ``requires_all_reduce``: whether backward also sums over the replicas of a 2-D mesh.

        False accumulates reduced gradients until a backward with True."""
        flag = truth("requires_all_reduce", requires_all_reduce, "set_requires_all_reduce")
        for state in self._states(recurse):
            state.set_reduction(over_replicas=flag)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set ``enabled``, on the root: whether only ``finalize_backward`` reduces gradients.

        Backwards accumulate until it is called."""
        where = "set_manual_backward_finalization"
        flag, state = truth("enabled", enabled, where), self._get_fsdp_state()
        require_root(state.is_root, state.label, f"{where}()")
        if state.runtime is not None:
            state.runtime.require_idle(f"{where}()")
            state.runtime.backward.reduces_on_finalize = flag
        state.reduces_on_finalize = flag

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what backwards have accumulated, on the root.

        For use after ``set_manual_backward_finalization(True)``. Modules that reshard after
        backward are resharded.

        Collective: all ranks of the model's mesh.

        Args:
            async_op: only start, and return a handle.

        Returns:
            A handle whose ``wait`` completes the gradients; None without ``async_op``: they are
            complete.

        Raises:
            StateError: manual finalization is off, or a module's gradient synchronization or its
                all-reduce over replicas is."""
        async_op = truth("async_op", async_op, "finalize_backward")
        state = self._get_fsdp_state()
        require_root(state.is_root, state.label, "finalize_backward()")
        _require_finalizable(state, self._states(True))
        if state.runtime is not None:
            state.runtime.begin_finalize()
        handle = GradientReductionHandle(state.runtime)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set ``reduce_scatter_unused_params``: whether missing gradients are reduced as zeros.

        True is needed where ranks use different parameters."""
        where = "set_reduce_scatter_unused_params"
        flag = truth("reduce_scatter_unused_params", reduce_scatter_unused_params, where)
        for state in self._states(recurse):
            state.set_reduction(reduces_unused=flag)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the ``factor`` that divides this module's gradients; not set: the number of ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise wrong_type("factor", "a number above 0", factor, "set_gradient_divide_factor")
        self._get_fsdp_state().set_reduction(divide_by=float(factor))

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the ``factor``: the old name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept and ignore ``enable``: collectives always sum, and division is separate."""
        truth("enable", enable, "set_force_sum_reduction_for_comms")

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Set a function that gets each reduced gradient shard and may change it in place.

        It runs after division and, on a 2-D mesh, after the all-reduce. With a hook, parameters
        that no rank has used get gradients of zeros.

        Args:
            hook: takes the gradient shard [S], in the dtype of the reduction.
            stream: the stream that the hook runs on; not supported on a 2-D mesh. None: on devices
                with streams, the one that reduces gradients.

        Raises:
            UsageError: ``hook`` is not a function of one tensor, or the mesh has replicas and a
                stream was given, or the module's parameters are on several meshes."""
        state = self._get_fsdp_state()
        _require_one_mesh(state, "set_all_reduce_hook")
        if not callable(hook) or not takes(hook, 1):
            expected = "a function that takes one tensor"
            raise wrong_type("hook", expected, hook, "set_all_reduce_hook")
        if stream is not None and state.has_replicas:
            raise UsageError.of(
                "The hook cannot have a stream of its own on a mesh with replicas.",
                expected="stream=None: the hook runs where the all-reduce does",
                got=f"stream={stream!r}",
                where="set_all_reduce_hook",
                fix="leave out stream=",
            )
        state.set_reduction(all_reduce_hook=hook, all_reduce_stream=stream)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the root's next forward wait for an ``event`` after the optimizer's step.

        Needed for optimizers that step on another stream: record it there after the step."""
        if not callable(getattr(event, "wait", None)):
            raise wrong_type("event", "a torch.Event", event, "set_post_optim_event")
        self._get_fsdp_state().post_optim_event = event

    # -- collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Let ``comm`` run this module's all-gathers, in buffers of its method ``allocate``."""
        state = self._get_fsdp_state()
        _require_one_mesh(state, "set_custom_all_gather")
        _require_comm(comm, "an AllGather", "set_custom_all_gather")
        state.behavior.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Let ``comm`` run this module's reduce-scatters, in buffers of its method ``allocate``."""
        state = self._get_fsdp_state()
        _require_one_mesh(state, "set_custom_reduce_scatter")
        _require_comm(comm, "a ReduceScatter", "set_custom_reduce_scatter")
        state.set_reduction(custom=CustomReduceScatter(comm, state.behavior.process_group))

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set ``max_input_buffers``: how many units' gradient buffers may be in flight at once.

        The root's value counts. On devices with streams there is one buffer, whatever is set."""
        where = "set_reduce_scatter_max_input_buffers"
        is_number = isinstance(max_input_buffers, int) and not isinstance(max_input_buffers, bool)
        if not is_number or max_input_buffers < 1:
            expected = "a whole number above 0"
            raise wrong_type("max_input_buffers", expected, max_input_buffers, where)
        for state in self._states(recurse):
            if state.max_inflight_reductions != max_input_buffers - 1:
                state.max_inflight_reductions = max_input_buffers - 1
                if state.runtime is not None and state.is_root:
                    state.runtime.stale = True  # another one, with the new value

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accept and ignore ``enable``: all-gathers and reduce-scatters do not wait for each other.

        They do on backends that run the collectives of a group one after the other."""
        truth("enable", enable, "set_separate_reduce_scatter_group")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept and ignore ``enable``: torch's allocator provides the buffers of collectives.

        Torch's FSDP does the same where the backend cannot allocate."""
        truth("enable", enable, "set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Accept and ignore ``backend``: symmetric memory is not used."""

    # -- what torch calls

    def _get_fsdp_state(self) -> ShardedModules:
        state = state_of(self)
        if state is None:
            raise AssertedStateError.of(
                "The module has the class of a sharded module, but no sharded parameters.",
                expected="a module that fully_shard was applied to",
                got=f"a {type(self).__name__} without them",
                where=type(self).__name__,
                fix="build a new module, and apply fully_shard to it",
            )
        return state

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move or cast the sharded parameters, as ``to`` and ``to_empty`` do."""
        state = self._get_fsdp_state()
        shards = [own.store.shard for each in self._states(recurse) for own in each.stores]
        refuse_meta(fn, shards, state.label)
        state.before_state_dict("Module.to")
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        state.look_again()
        return result

    def _states(self, recurse: bool) -> list[ShardedModules]:
        return states_in(self.modules() if recurse else [self])


# -- checks of arguments and of the moment


def _require_finalizable(root: ShardedModules, states: Iterable[ShardedModules]) -> None:
    if not root.reduces_on_finalize:
        raise StateError.of(
            "finalize_backward() was called without manual finalization.",
            expected="set_manual_backward_finalization(True) before the backward",
            got="backwards that reduce gradients themselves",
            where=root.label,
            fix="leave out the call, or turn on manual finalization",
        )
    all_states = list(states)
    for setter, what, is_off in (
        ("set_requires_gradient_sync", "synchronisation", lambda s: not s.behavior.reduction.sync),
        ("set_requires_all_reduce", "the all-reduce", lambda s: s.holds_all_reduce),
    ):
        off = next(filter(is_off, all_states), None)
        if off is not None:
            raise StateError.of(
                f"finalize_backward() was called while {what} is off.",
                expected=f"{setter}(True) before it",
                got=f"{setter}(False)",
                where=off.label,
                fix=f"call {setter}(True) before the last backward",
            )


def _require_one_mesh(state: ShardedModules, where: str) -> None:
    if not state.has_one_mesh:
        raise UsageError.of(
            "The module's parameters are on several meshes.",
            expected="a module whose parameters are on one mesh",
            got="other meshes from shard_placement_fn",
            where=where,
            fix="apply fully_shard separately to the modules with these parameters",
        )


def _require_comm(comm: Any, expected: str, where: str) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        expected = f"{expected}: callable, with a method allocate(size, *, dtype, device)"
        raise wrong_type("comm", expected, comm, where)


def _states_of(modules: Any, where: str) -> list[ShardedModules]:
    listed = list(modules) if isinstance(modules, Iterable) else None
    if listed is None or not all(isinstance(module, FSDPModule) for module in listed):
        raise TypeUsageError.of(
            "These are not sharded modules.",
            expected="a list of modules that fully_shard was applied to",
            got=str([type(module).__name__ for module in listed])
            if listed is not None
            else f"a {type(modules).__name__}",
            where=where,
            fix="apply fully_shard to the modules first",
        )
    return states_in(listed)


def _wait_for_optimizer(state: ShardedModules) -> None:
    event, state.post_optim_event = state.post_optim_event, None
    device = state.plan.device
    if event is not None and device.type != "cpu":
        torch.accelerator.current_stream(device).wait_event(event)


# -- classes

_classes: dict[type, type] = {}
_initialises_new = True


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return {class of a module: the class that ``fully_shard`` gives it}."""
    return _classes


def shard_class(cls: type) -> type:
    """Return the class of sharded modules of class ``cls``: always the same one."""
    if cls not in _classes:
        contents = {"__module__": cls.__module__}
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), contents)
    return _classes[cls]


@contextlib.contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Construct instances of sharded classes without their own ``__init__`` inside the context."""
    global _initialises_new
    before, _initialises_new = _initialises_new, False
    try:
        yield
    finally:
        _initialises_new = before


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Check that ``modules`` are sharded: all models of a process use the same streams anyway."""
    _states_of(modules, "share_comm_ctx")
