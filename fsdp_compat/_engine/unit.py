"""Units: groups of parameters that are unsharded, shown, reduced and resharded together."""

from __future__ import annotations

import dataclasses
import enum
import typing
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._comm.board import events
from ..errors import StateError
from .behavior import Behavior
from .buffers import CastBuffers
from .dtypes import ComputeDtype
from .group import Group, start_groups
from .module_view import ModuleView, TensorAttributes
from .nested import map_tensors
from .store import ModuleSlot
from .user_changes import Freshness


class Residency(enum.Enum):
    """What memory the groups of a unit hold."""

    SHARDED = enum.auto()  # holds: own shard
    UNSHARDING = enum.auto()  # holds: own shard + all-gather output, not readable yet
    UNSHARDED = enum.auto()  # holds: own shard + unsharded parameters, readable
    # holds: own shard + rows of the unsharded parameters, for an all-gather among fewer ranks
    PARTIAL = enum.auto()


NOT_UNSHARDED = (Residency.SHARDED, Residency.PARTIAL)


@dataclasses.dataclass(frozen=True)
class UnitOptions:
    """The user's options for one unit, resolved."""

    reshard_after_forward: bool
    cast_inputs: bool  # floating-point inputs of forward are cast to `compute_dtype`
    cast_root_inputs: bool  # the same, for the unit that a forward begins with
    compute_dtype: torch.dtype
    device: torch.device
    full_precision_in_eval: bool = False  # evaluation computes in the dtype of the shard


class Uninitialised(typing.NamedTuple):
    """A parameter or buffer that has no values yet."""

    name: str  # in the unit's module
    read: Callable[[], Tensor | None]  # returns what this rank holds of it


class Inputs:
    """The inputs of a call that are in the graph on its device."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.num_left = 0  # how many of them the running backward has yet to reach
        # While the call runs: containers of inputs, and by id of an alias in them: alias, input
        self.containers: list[Any] = []
        self.originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put_back(self) -> None:
        """Put inputs back into their containers, which hold aliases while the call runs."""
        for value in self.containers:
            map_tensors(value, lambda t: self.originals.get(id(t), (t, t))[1], in_place=True)
        self.containers, self.originals = [], {}


class Call:
    """One forward call of a unit, in ticks of the runtime, held by the hooks of its outputs. It
    releases the unit in post-backward: the garbage collector does not see through graphs, so a loss
    that is stored on a module would leak the module."""

    def __init__(self, unit: Unit, begin_tick: int, module: nn.Module | None = None) -> None:
        """module: the called one, if the unit has several."""
        self.unit: Unit | None = unit
        self.module = module
        self._unit_reference, self.begin_tick = weakref.ref(unit), begin_tick
        self.end_tick = -1  # set when the call ends
        self.inputs: Inputs | None = None  # on devices with streams
        self.inside: list[Any] = []  # without tags: nodes that its backward passes
        # Backward may reach calls inside that are in no graph yet (reentrant checkpoints)
        self.hides_calls = False
        self.summoned = unit.view.summoned
        self.dtype = unit.wanted_dtype()
        self.counted = False  # among the unit's running calls
        self.leaving: list[torch.Tensor] = []  # tensors in the graph that leave the call
        self.age = 0  # of its first node in the graph
        self.seen_by = -1  # serial of the last backward that reached the call

    def let_leave(self, tensor: torch.Tensor, is_output: bool = False) -> torch.Tensor:
        """Return a tensor that leaves the call, in a copy if its memory is that of parameters,
        which is freed or changes. Tensors older than the call are left alone, and so are shards,
        unless they are outputs."""
        node = tensor.grad_fn
        if node is not None and not is_output and _torch_private.age_of(node) < self.age:
            return tensor
        if node is None or tensor._is_view():  # what an operator made has memory of its own
            key = _torch_private.storage_key(tensor)
            for group in (self.unit or self.hold_unit()).groups:
                memory = group.memory
                if key in memory.keys and (is_output or not memory.aliased):
                    tensor = tensor.clone()
                    break
        if torch.is_grad_enabled():
            for layer in _torch_private.layers_of(tensor):
                if layer.requires_grad and layer.grad_fn is not None:
                    self.leaving.append(layer)
        return tensor

    @property
    def has_run_backward(self) -> bool:
        """True if backward has run all that the call computed from its inputs, on any device. Never
        for a call without inputs in the graph."""
        return self.inputs is not None and bool(self.inputs.nodes) and self.inputs.num_left <= 0

    def runs_now(self) -> bool:
        """True if the running backward includes the call."""
        return any(map(_torch_private.runs_now, self.inside))

    def hold_unit(self) -> Unit:
        """Return the unit, for another backward through the call."""
        unit = self.unit = self._unit_reference()
        if unit is None:
            raise StateError.of(
                "backward() reached a graph whose FSDP model has been garbage-collected.",
                expected="a model that lives as long as there are backwards through it",
                got="a graph that retain_graph=True kept longer than its model",
                where="an output of a sharded module",
                fix="keep the model until the last backward",
            )
        return unit


class BackwardHooks(typing.Protocol):
    """What hooks and checks ask of backward.py."""

    is_open: bool

    def pre_backward(self, call: Call, unit: Unit) -> None: ...

    def on_gradient(self, group: Group, index: int, param: nn.Parameter) -> None: ...


class UnitRuntime(typing.Protocol):
    """What units and hooks ask of the runtime, in runtime.py."""

    root: Unit

    @property
    def backward(self) -> BackwardHooks: ...

    def let_see(self, value: Any) -> Any: ...


class ViewsOfUsers:
    """Views of a unit's unsharded parameters that seem to outlive these: their memory is not freed,
    because reading it would crash the process."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._expected = -1  # holders of the memory without further views; -1: unknown
        self._fewest = 0  # holders ever counted; 0: never counted

    def watch(self, in_graph: bool) -> None:
        """Count the holders of unsharded memory after a pass that leaves the unit unsharded. Later
        ones are the user's views, unless a graph holds some."""
        now = -1 if in_graph else self._num_holders()
        # Views that users kept from earlier times do not count as the engine's.
        self._expected = min(now, self._fewest) if self._fewest else now
        if not in_graph:
            self._fewest = self._expected

    def _num_holders(self) -> int:
        return sum(group.memory.num_holders for group in self._groups)

    def exist(self) -> bool:
        """True if there are more holders than ``watch`` has counted, which counts once."""
        expected, self._expected = self._expected, -1
        return expected >= 0 and self._num_holders() > expected


_VIEWS_OUTLIVE = (
    "Views of unsharded parameters of {} outlive these, for example detached ones of "
    "named_parameters(). They keep the memory of all unsharded parameters of the unit, and their "
    "values change at the next all-gather. Clone them, or call reshard() first and use the sharded "
    "parameters."
)


class Unit:
    """The groups of one module, unsharded together around its forward calls and backwards."""

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Group],
        options: UnitOptions,
        modules: Sequence[nn.Module] = (),
        behavior: Behavior | None = None,
    ) -> None:
        """modules: if several modules' calls are the unit's. behavior: see ``Group.is_flat``."""
        self.modules, self.groups, self.options = tuple(modules) or (module,), list(groups), options
        self.buffers: CastBuffers | None = None  # those that are cast, if any
        self.behavior = behavior or Behavior(options.reshard_after_forward)
        # None for flat units: modules show sharded parameters between forward and backward, and
        # the next forward reshards what is unsharded, except while ``kept``.
        self.freshness = None if behavior is None else Freshness([g.store for g in groups])
        # Of a flat unit, while ``keep_unsharded`` keeps it after a forward without a graph
        self.kept: Freshness | None = None
        # Set by the user's unshard(), until the next forward has ended or reshard() is called.
        self.pinned = False
        self.views_of_users = ViewsOfUsers(self.groups)
        self.owner: Callable[[], nn.Module | None] = lambda: None  # weak: the wrapper, if any
        self.runtime: UnitRuntime | None = None  # the runtime sets this and the next
        self.label = "a unit"  # for errors
        self.running = 0  # forward calls that have begun and not ended
        # If there are several: those not called yet in this pass. Empty: none was called, or all.
        self.modules_to_run: set[nn.Module] = set()
        self.calls: list[Call] = []  # between pre-backward and post-backward
        # Without tags: calls with graphs. A backward must pass all of them before the unit is
        # reduced.
        self._calls_in_graphs: list[weakref.ref[Call]] = []
        self.uninitialised: list[Uninitialised] = []  # checked before the first forward
        self.residency = Residency.SHARDED  # only this class sets it
        self.dtype = ComputeDtype.TRAIN  # of the unsharded parameters, now or last
        self.attributes = TensorAttributes(*self.modules)
        self.view = ModuleView(self, *self._slots())

    @property
    def module(self) -> nn.Module:
        return self.modules[0]

    @property
    def is_flat(self) -> bool:
        """See ``Group.is_flat``."""
        return self.freshness is None

    @property
    def is_guarded(self) -> bool:
        """True if modules refuse their own calls and state dicts while the unit is sharded."""
        return all(group.store.is_guarded for group in self.groups)

    @property
    def is_copied_from_output(self) -> bool:
        """True if unsharded parameters are copied out of the all-gather output."""
        return any(group.memory.copied_from_output for group in self.groups)

    @property
    def is_root(self) -> bool:
        return self.runtime is not None and self.runtime.root is self

    def _slots(self) -> tuple[list[list[ModuleSlot]], list[ModuleSlot]]:
        dtypes = ComputeDtype if self.options.full_precision_in_eval else (ComputeDtype.TRAIN,)
        unsharded = [
            [
                slot
                for group in self.groups
                for slot in group.store.shown(
                    group.memories[min(dtype, len(group.memories) - 1)].unsharded_params
                )
            ]
            for dtype in dtypes
        ]
        return unsharded, [slot for group in self.groups for slot in group.store.shown(None)]

    def exchange_groups(self, groups: Sequence[Group]) -> None:
        """Use new groups: ``.half()`` or ``.to()`` changed the stores. Only while sharded."""
        assert self.residency is Residency.SHARDED
        self.groups, self.dtype = list(groups), ComputeDtype.TRAIN
        self.view.replace_slots(*self._slots())

    @property
    def summoned(self) -> bool:
        """True while other code shows whole parameters (summon_full_params)."""
        return self.view.summoned

    def wanted_dtype(self) -> ComputeDtype:
        """Return the dtype that a forward call would compute in now."""
        if self.options.full_precision_in_eval and not self.module.training:
            return ComputeDtype.EVAL
        return ComputeDtype.TRAIN

    def _begin_unshard(self) -> None:
        self.residency = Residency.UNSHARDING
        events.tell(events.UNSHARDING, self.label)

    def start_unshard(self, dtype: ComputeDtype = ComputeDtype.TRAIN) -> None:
        """Start the all-gather, unless it was started in this dtype. Collective: the shard axes."""
        if self.dtype is not dtype and not self.running and not self.view.summoned:
            self.reshard()
            self.dtype = dtype
            self.view.use_dtype(dtype)
            for group in self.groups:
                group.use_dtype(dtype)
        if self.residency in NOT_UNSHARDED and not self.view.summoned:
            self._begin_unshard()
            if self.freshness is not None:
                self.freshness.record()
            if _torch_private.counts_collectives():
                self._count_gathers()
            with _torch_private.profiled("all_gather", self.label):
                start_groups(self.groups)

    def _count_gathers(self) -> None:
        """Count one all-gather for all groups over the same ranks, even if nothing is sent."""
        if self.behavior.custom_all_gather is None:
            for _ in {group.shard for group in self.groups if group.shard.ranks > 1}:
                _torch_private.count_collective("_allgather_base_")

    def finish_unshard(self) -> None:
        """Make the unsharded parameters readable. Collective: the shard axes."""
        if self.residency is Residency.UNSHARDING:
            events.tell(events.WAITING, self.label)
            with _torch_private.profiled("wait_for_all_gather", self.label):
                for group in self.groups:
                    group.finish_unshard()
            self.residency = Residency.UNSHARDED
            events.tell(events.UNSHARDED, self.label)

    def reshard(self) -> None:
        """Show the sharded parameters and free the unsharded ones; not during a forward call of the
        unit, in which a backward may run (forces = autograd.grad(energy, x))."""
        if self.running:
            return
        self.pinned = False
        if self.view.shows_unsharded:
            self.view.show_sharded()
        if self.residency is not Residency.SHARDED:
            keeps_storage = self.behavior.keeps_storage
            if self.views_of_users.exist():
                if not keeps_storage:
                    warnings.warn(_VIEWS_OUTLIVE.format(self.label), stacklevel=2)
                keeps_storage = True
            self.view.hide_partial()
            for group in self.groups:
                group.reshard(keeps_storage)
            self.residency = Residency.SHARDED
            self.kept = None

    @property
    def is_mapped(self) -> bool:
        """True if unsharded parameters view the shards of all ranks, and change with them."""
        return any(group.memory.viewed_mapping is not None for group in self.groups)

    def keep_unsharded(self) -> None:
        """After a forward inside no_grad: stay unsharded for further ones, as long as nothing is
        written to the sharded parameters, which are shown. Not where that cannot be seen, nor where
        nothing is gathered."""
        stores = [group.store for group in self.groups]
        params = [param for store in stores for param, _ in store.sharded_params]
        is_gathered = not (self.is_mapped or all(group.memory.aliased for group in self.groups))
        if torch.is_grad_enabled() or not is_gathered or any(map(Tensor.is_inference, params)):
            self.reshard()
            return
        self.view.show_sharded()
        if self.kept is None:
            self.kept = Freshness(stores)
            self.kept.record()

    def keep_values(self) -> None:
        """Keep the values of a unit that stays unsharded after a pass (GroupMemory.keep_values)."""
        for group in self.groups:
            group.memory.keep_values()

    def reshard_to_partial(self) -> None:
        """Keep, and show, rows of the parameters for backward's all-gather among fewer ranks."""
        assert self.residency is Residency.UNSHARDED
        self.view.show_sharded()
        params = [group.keep_rows() for group in self.groups]
        self.residency = Residency.PARTIAL
        self.view.show_partial(
            [
                slot
                for group, shown in zip(self.groups, params, strict=True)
                for slot in group.store.shown(shown)
            ]
        )

    @property
    def is_fresh(self) -> bool:
        """True if the unsharded parameters have the values of the sharded ones."""
        return self.freshness is not None and self.freshness.is_current

    @property
    def stays_unsharded(self) -> bool:
        """True if the user wants the unit unsharded in a new pass, and its values are current."""
        if self.kept is not None:
            return self.kept.is_current and not torch.is_grad_enabled()
        return (
            self.pinned
            or bool(self.modules_to_run)
            or not self.behavior.reshard_after_forward
            or not self.behavior.reshard_after_backward
        ) and self.is_fresh

    def unshard_for_others(self) -> None:
        """Gather an unsharded unit again for other ranks that gather it. Collective: the shard
        axes."""
        self.residency = Residency.SHARDED  # as on those ranks
        self.start_unshard(self.dtype)
        self.finish_unshard()

    def track_call(self, call: Call, nodes: Sequence[Any]) -> None:
        """Remember a finished call, for the order of reductions. nodes: of its outputs."""
        call.inside = _torch_private.nodes_before(nodes)
        alive = [reference for reference in self._calls_in_graphs if reference() is not None]
        self._calls_in_graphs = [*alive, weakref.ref(call)]

    def calls_left(self, serial: int) -> list[Call]:
        """Without tags: return the calls that the running backward, with this serial, has yet to
        reach."""
        calls = [reference() for reference in self._calls_in_graphs]
        return [c for c in calls if c is not None and c.seen_by != serial and c.runs_now()]

    def forget_calls(self) -> None:
        """In post-backward: no call needs the unit any more."""
        for call in self.calls:
            call.unit = None
        self.calls.clear()
