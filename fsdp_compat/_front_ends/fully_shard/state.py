"""What one call of ``fully_shard`` keeps: stores at once; a unit and a runtime when the modules are
first used, and again when the dtype or device of their parameters has changed."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import _torch_private
from ..._comm.mesh import Mesh
from ..._engine import agreement, hooks, rendezvous
from ..._engine.behavior import Behavior, ReducePolicy
from ..._engine.checks import refuse_in_pass
from ..._engine.dtypes import Precision
from ..._engine.group import Group
from ..._engine.runtime import Runtime
from ..._engine.schedule import Prefetch, RuntimeOptions
from ..._engine.sources import PartialShard
from ..._engine.unit import Residency, Unit, UnitOptions
from ..._features.description import UnitFacts, stored_dtype
from ..._state import optimizer_checks
from ..._state.units import ModelUnit, clean_name, default_form, register
from ..._stores.extension import Context, ExtensionStore, has_extension
from ..._stores.placement import DataMesh
from ..._stores.row_store import RowStore
from ..._torch_patches import patch_for_fully_shard
from ...api import StateDictType
from ...errors import StateError, UsageError, explain
from .arguments import data_group_of, partial_mesh_of, precision_of
from .policies import DataParallelMeshInfo, HSDPMeshInfo, MixedPrecisionPolicy
from .shard_plan import Owners, PlannedStore, ShardPlan
from .whole_state import put_rows_in, refuse_part, taken

_STATE = "_fsdp_compat_state"  # the attribute of a root module that holds its ShardedModules
# {module with managed parameters: {name of the parameter: weak reference to its ShardedModules}}
_owned: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _OwnStore(typing.NamedTuple):
    """A store, and what it was planned for."""

    store: RowStore
    mesh: DataMesh
    gather_dtype: torch.dtype | None  # None: that of the shard


@dataclasses.dataclass(eq=False)
class ShardedModules:
    """The modules of one call, their parameters, and the settings of the user."""

    modules: tuple[nn.Module, ...]
    plan: ShardPlan
    behavior: Behavior
    stores: list[_OwnStore] = dataclasses.field(default_factory=list)
    unit: Unit | None = None  # made at the first use
    runtime: Runtime | None = None  # of the root that was used first, or of one around it
    is_dirty: bool = False  # parameters may have been replaced
    # reshard_after_forward=None: all but the root reshard.
    is_auto: bool = False
    reduces_on_finalize: bool = False  # of the root: the end of backward reduces nothing
    max_inflight_reductions: int = 0  # of the root: see RuntimeOptions
    post_optim_event: torch.Event | None = None  # of the root: the next forward waits for it
    record: ModelUnit | None = None  # for state dicts and checkpoints
    # The outermost call whose modules contain these; None without one.
    root: weakref.ReferenceType[ShardedModules] | None = None

    @property
    def has_one_mesh(self) -> bool:
        """True if all parameters are sharded over the same ranks."""
        return len({id(own.mesh) for own in self.stores}) < 2

    @property
    def has_replicas(self) -> bool:
        """True if a parameter is replicated over ranks."""
        return any(own.mesh.replicate_dim is not None for own in self.stores)

    @property
    def holds_all_reduce(self) -> bool:
        """True if gradients wait for their all-reduce over replicas."""
        return self.has_replicas and not self.behavior.reduction.over_replicas

    def set_reduction(self, **changes: Any) -> None:
        """Change fields of the policy of reductions."""
        self.behavior.reduction = dataclasses.replace(self.behavior.reduction, **changes)

    @property
    def _outermost(self) -> ShardedModules:
        """The outermost call whose modules contain these, as long as it exists."""
        return (None if self.root is None else self.root()) or self

    @property
    def is_root(self) -> bool:
        return self._outermost is self

    @property
    def label(self) -> str:
        if self.unit is not None and self.runtime is not None:
            return self.unit.label
        return f"a {type(self.modules[0]).__name__}"

    def facts(self) -> list[str]:
        """Return what must be alike on all ranks of a mesh, beside the stores."""
        policy, behavior = self.plan.policy, self.behavior
        return [
            f"param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype}",
            f"reshard_after_forward={behavior.partial_ranks or behavior.reshard_after_forward}",
            f"offload to the CPU: {self.plan.offload.to_cpu}",
            f"allow_unused_units={behavior.allow_unused_units}",
        ]

    # -- a unit, and a runtime

    def ready_unit(self) -> Unit:
        """Return the unit of the current parameters. Collective if it has to be made."""
        if self.unit is not None and not self.is_dirty:
            return self.unit
        if self.unit is not None:
            self.unit.reshard()
        has_changed = self.follow_params()
        self.is_dirty = False
        if self.unit is None or has_changed:
            self._refuse_meta()
            self._refuse_device()
            self.unit = self._make_unit()
            if self.runtime is not None:
                self.runtime.stale = True
        return self.unit

    def follow_params(self) -> bool:
        """Follow changed parameters. Return whether a new unit is needed."""
        changed = [self._take_extensions()]
        return any(changed + [own.store.adopt() for own in self.stores])

    def _take_extensions(self) -> bool:
        """Give parameters that got fsdp_pre_all_gather later stores of their own; True if any."""
        stores: list[_OwnStore] = []
        for own in self.stores:
            store, late = own.store, list[int]()
            if not isinstance(store, ExtensionStore):
                present = [place.present() for place in store.orig_params]
                late = [i for i, parameter in enumerate(present) if has_extension(parameter)]
            if not late:
                stores.append(own)
                continue
            if rest := [index for index in range(len(store.orig_params)) if index not in late]:
                stores.append(own._replace(store=store.take_apart(RowStore, rest)))
            extended = ExtensionStore.of(store, late, _context_of(own, self.plan))
            stores.append(own._replace(store=extended))
        has_changed, self.stores = stores != self.stores, stores
        return has_changed

    def _make_unit(self) -> Unit:
        plan, policy = self.plan, self.plan.policy
        with torch.inference_mode(False), torch.no_grad():
            groups = [self._make_group(own) for own in self.stores]
            rendezvous.register(groups)
            options = UnitOptions(
                self.behavior.reshard_after_forward,
                cast_inputs=policy.cast_forward_inputs and policy.param_dtype is not None,
                cast_root_inputs=False,
                compute_dtype=policy.param_dtype or torch.float32,
                device=plan.device,
            )
            unit = Unit(
                self.modules[0], groups, options, modules=self.modules, behavior=self.behavior
            )
            for group in groups:
                optimizer_checks.register_unsharded(group.memory.unsharded_params)
        unit.owner = weakref.ref(self.modules[0])
        return unit

    def _precision(self, own: _OwnStore) -> Precision:
        dtype, policy = own.store.dtype, self.plan.policy
        if not isinstance(own.store, ExtensionStore):
            return precision_of(dtype, own.gather_dtype, policy)
        # Bytes are sent, whatever the dtype of the values and gradients.
        values = precision_of(own.store.reduce_form().dtype, own.gather_dtype, policy)
        return dataclasses.replace(values, gather=dtype)

    def _make_group(self, own: _OwnStore) -> Group:
        group = Group(
            own.store,
            own.mesh.engine_mesh(),
            self._precision(own),
            self.plan.device,
            self.plan.offload.to_cpu,
            reshard_after_forward=self.behavior.reshard_after_forward or self.is_auto,
            behavior=self.behavior,
        )
        mesh = self.behavior.partial_mesh
        if self.behavior.partial_ranks and mesh is not None:
            group.partial = PartialShard(own.store, group.memory, mesh, self.plan.device)
        return group

    def _refuse_meta(self) -> None:
        on_meta = [
            param.name
            for own in self.stores
            for param in own.store.orig_params
            if own.store.shard.is_meta and self.plan.device.type != "meta"
        ]
        if on_meta:
            raise StateError.of(
                "Parameters are still on the meta device.",
                expected="memory and values for all parameters before the first use",
                got=f"{', '.join(on_meta[:5])}{' and more' if len(on_meta) > 5 else ''}",
                where=self.label,
                fix="call model.to_empty(device=...) and fill the values, by "
                "reset_parameters() of the modules or by loading a checkpoint",
            )

    def _refuse_device(self) -> None:
        expected = "cpu" if self.plan.offload.to_cpu else self.plan.device.type
        devices = {own.store.shard.device for own in self.stores}
        for device in devices:
            if device.type not in (expected, "meta"):
                raise StateError.of(
                    "Sharded parameters were moved to another device than they are to live on.",
                    expected=f"parameters on {expected!r}"
                    f"{', with CPUOffloadPolicy' if self.plan.offload.to_cpu else ''}",
                    got=f"parameters on {str(device)!r}",
                    where=self.label,
                    fix=f"call model.to({expected!r}) before the first use, or load values there",
                )

    def ready_runtime(self) -> Runtime:
        """Return the runtime, or make one with these modules as its root, which is collective."""
        if self.runtime is not None and not self.runtime.stale:
            return self.runtime
        made: Runtime = self._outermost._make_runtime()
        if self.runtime is not made:  # no longer among the root's modules
            made = self._make_runtime()
        return made

    @_torch_private.never_compiled
    def _make_runtime(self) -> Runtime:
        compiler = _torch_private.set_compiler(None)  # for what is called here
        try:
            states = named_states_in(self.modules)
            agreement.require_all_alike(_facts_of(states), f"fully_shard of {self.label}")
            units = [state.ready_unit() for state in states]
            _leave_stale_runtimes(units)
            for state in states:
                state.behavior.allow_unused_units = self.plan.allow_unused_units
                if state.is_auto:
                    state.behavior.reshard_after_forward = state is not self
            options = RuntimeOptions(
                forward_prefetch=True,
                backward_prefetch=Prefetch.PRE,
                allow_unused_units=self.plan.allow_unused_units,
                max_inflight_reductions=self.max_inflight_reductions,
            )
            runtime = Runtime(units[0], units, list(states.values()), options)
            runtime.backward.reduces_on_finalize = self.reduces_on_finalize
            rendezvous.number_groups(runtime.groups)
            for state in states:
                state.runtime = runtime
            return runtime
        finally:
            _torch_private.set_compiler(compiler)

    def model_unit(self) -> ModelUnit:
        """Return the record for state dicts and checkpoints. Collective like ``ready_runtime``."""
        self.ready_runtime()
        unit = self.ready_unit()
        if self.record is None or self.record.unit is not unit:
            mesh = self.plan.mesh
            form = default_form(StateDictType.SHARDED_STATE_DICT)  # as state_dict() is
            self.record = ModelUnit(
                unit,
                mesh.engine_mesh(),
                self.plan.device,
                data_group_of(mesh),
                form=form if self.record is None else self.record.form,
                rename=_NameLike(self.modules, self.stores) if len(self.modules) > 1 else None,
            )
        return self.record

    def unit_facts(self) -> UnitFacts:
        """Return what ``describe`` shows of the unit, even before it exists."""
        mesh, policy = self.plan.mesh, self.plan.policy
        stores = [
            (store, precision_of(stored_dtype(store), gather_dtype, policy))
            for store, _, gather_dtype in self.stores
        ]
        return UnitFacts(
            "fully_shard",
            mesh.size(mesh.shard_dim),
            mesh.size(mesh.replicate_dim),
            self.behavior.reshard_after_forward and not (self.is_auto and self.is_root),
            stores,
        )

    # -- what users and torch do

    def reshard(self) -> None:
        """Free the unsharded parameters, unless a forward of the modules runs."""
        if self.unit is not None:
            self.unit.pinned = False
            self.unit.reshard()

    # -- what clients read: _install/contents.py says who

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self.plan.policy

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return ParamGroup(self) if self.stores else None

    def _lazy_init(self) -> None:
        """Decide which module is the root. Collective the first time."""
        self.ready_runtime()

    # -- what torch.distributed.pipelining uses, after the backwards of all microbatches

    @property
    def _state_ctx(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(all_states=())  # torch would reduce the gradients of each

    def _root_post_backward_final_callback(self) -> None:
        """Collective. Reduce the gradients that the backwards have left, and reshard."""
        if self.runtime is not None:
            self.runtime.begin_finalize()
            self.runtime.backward.end_finalize()
        for module in self.modules:
            for state in states_in(module.modules()):
                state.reshard()

    def before_state_dict(self, call: str) -> None:
        """State dicts hold the sharded parameters."""
        self._refuse_in_pass(call)
        self.reshard()

    def _refuse_in_pass(self, call: str) -> None:
        if self.runtime is not None and self.runtime.runs:
            refuse_in_pass(f"{call}()", self.label, StateError)

    def state_dict_of(
        self, module: nn.Module, take: Callable[[], Any], destination: Any, prefix: str
    ) -> Any:
        """Return the state dict of ``module``. take: returns that of DTensors."""
        first = len(destination or ())
        if self.record is None or self.record.unit.view.in_state_dict:  # no form is set
            found = take()
        else:
            named = [(each.model_unit(), name) for each, name in named_states_in([module]).items()]
            found = taken(self.model_unit(), named, module, take, destination, prefix)
        for key in [*itertools.islice(found, first, None)]:  # all, which keeps their order
            found[clean_name(key)] = found.pop(key)
        return found

    def before_taking(self, module: nn.Module) -> None:
        """Prepare for a module's part of a state dict, which may be taken on this rank only: an
        unsharded unit stays so, or ranks would disagree on whether the next forward gathers it."""
        if self.unit is not None and self.unit.residency is Residency.UNSHARDED:
            self._refuse_in_pass("state_dict")
            self.unit.view.show_sharded()
        else:
            self.before_state_dict("state_dict")
        refuse_part(self.record, module, self.label)

    def before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """A module loads its part of a state dict."""
        self.before_state_dict("load_state_dict")
        put_rows_in(state_dict, prefix, module, [own.store for own in self.stores])

    def look_again(self) -> None:
        """Follow parameters that may have been replaced, at the next use."""
        self.is_dirty = True
        if self.runtime is not None:
            self.runtime.stale = True


@dataclasses.dataclass(unsafe_hash=True)
class ParamGroup:
    """What clients read of torch's FSDPParamGroup, and the one attribute that dinov3 sets."""

    _state: ShardedModules

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """The mesh that parameters are sharded over."""
        return self._state.plan.info

    @property
    def post_forward_mesh_info(self) -> DataParallelMeshInfo | None:
        """The mesh that parameters are sharded over between forward and backward: that of
        ``mesh_info``, or a smaller one. None: they stay unsharded. May be set to one of these."""
        behavior = self._state.behavior
        if not behavior.reshard_after_forward:
            return None
        if behavior.partial_ranks and behavior.partial_mesh is not None:
            return HSDPMeshInfo(behavior.partial_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        return self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        behavior, mesh = self._state.behavior, getattr(info, "mesh", None)
        if info is not None and (
            mesh is None or mesh not in (self.mesh_info.mesh, behavior.partial_mesh)
        ):
            raise UsageError.of(
                "Parameters cannot be resharded to this mesh after forward.",
                expected="None, mesh_info, or what post_forward_mesh_info was before",
                got=repr(info),
                where="post_forward_mesh_info",
                fix="pass the number of ranks as reshard_after_forward to fully_shard",
            )
        self._state.is_auto = False
        behavior.reshard_after_forward = info is not None
        if info is not None and mesh != behavior.partial_mesh:
            behavior.partial_ranks, behavior.partial_mesh = 0, None

    def __getattr__(self, name: str) -> typing.NoReturn:
        raise AttributeError(
            explain(
                f"A parameter group of fsdp_compat has no {name!r}.",
                expected="mesh_info or post_forward_mesh_info",
                got=f"the attribute {name!r} of torch's FSDPParamGroup",
                where="module._get_fsdp_state()._fsdp_param_group",
                fix="read module.parameters(), which are DTensors while the module is sharded, and "
                "use the methods of FSDPModule: unshard(), reshard(), finalize_backward()",
            )
        )


def _leave_stale_runtimes(units: Sequence[Unit]) -> None:
    """Take units out of runtimes that also have units whose parameters were replaced since."""
    runtimes = {unit.runtime for unit in units if unit.runtime is not None}
    for runtime in runtimes:
        if isinstance(runtime, Runtime) and runtime.stale:
            staying = [unit for unit in units if unit.runtime is runtime]
            runtime.reshard_all(staying)
            for unit in staying:
                unit.runtime = None


def _facts_of(
    states: Mapping[ShardedModules, str],
) -> Iterator[tuple[Mesh, torch.device, list[str]]]:
    """Yield what must be alike on all ranks of each mesh: the units that ``states`` will make."""
    for state in states:
        if state.unit is not None:
            continue
        state.follow_params()
        seen: list[DataMesh] = []
        for own in state.stores:
            mesh, store = own.mesh.engine_mesh(), own.store
            facts = []
            if own.mesh not in seen:
                facts += [agreement.unit(states[state]), *state.facts()]
                seen.append(own.mesh)
            facts += [
                agreement.parameter(param.name, store.shape(index), store.dtype, requires_grad)
                for index, param in enumerate(store.orig_params)
                for requires_grad in [store.sharded_params[index].parameter.requires_grad]
            ]
            facts.append(f"{store.numel} elements of {store.dtype} on each rank")
            yield mesh, state.plan.device, facts


@dataclasses.dataclass(frozen=True)
class _NameLike:
    """Names the parameters of several modules as a model that contains them does."""

    modules: tuple[nn.Module, ...]
    stores: Sequence[_OwnStore]

    def __call__(self, model: nn.Module) -> None:
        paths: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(module, []).append(path)
        for own in self.stores:
            own.store.orig_params = tuple(
                dataclasses.replace(
                    param,
                    names=tuple(
                        f"{path}.{attribute}" if path else attribute
                        for module, attribute in param.slots
                        for path in paths.get(module, ())
                    )
                    or param.names,
                )
                for param in own.store.orig_params
            )


# -- by module


def state_of(module: nn.Module) -> ShardedModules | None:
    """Return what the call of ``fully_shard`` for a module keeps, or None."""
    return module.__dict__.get(_STATE)


def states_in(modules: Iterable[nn.Module]) -> list[ShardedModules]:
    """Return the states of ``modules`` (not of their submodules), each once."""
    found = (state_of(module) for module in modules)
    return list(dict.fromkeys(state for state in found if state is not None))


def named_states_in(roots: Iterable[nn.Module]) -> dict[ShardedModules, str]:
    """Return the states in ``roots``, those of the roots first, with the names of their modules."""
    found: dict[ShardedModules, str] = {}
    for root in roots:
        for name, module in root.named_modules():
            if (state := state_of(module)) is not None:
                found.setdefault(state, name)
    return found


def _owner_of(module: nn.Module, attribute: str) -> object | None:
    reference = _owned.get(module, {}).get(attribute)
    return None if reference is None else reference()


def _sharded_params(modules: Sequence[nn.Module]) -> set[int]:
    return {
        id(parameter)
        for state in named_states_in(modules)
        for own in state.stores
        for parameter, _ in own.store.sharded_params
    }


owners = Owners(lambda module: state_of(module) is not None, _owner_of, _sharded_params)


# -- a new call


def apply(plan: ShardPlan) -> ShardedModules:
    """Shard a plan's parameters in place and move buffers. Collective if it makes groups."""
    partial_mesh = partial_mesh_of(plan.mesh, plan.partial_ranks) if plan.partial_ranks else None
    state = ShardedModules(
        plan.managed.roots,
        plan,
        Behavior(
            reshard_after_forward=plan.reshard is not False,
            partial_ranks=plan.partial_ranks,
            partial_mesh=partial_mesh,
            reduction=ReducePolicy(rounds_first=True, keeps_unused=False),
            output_dtype=plan.policy.output_dtype,
            process_group=None if plan.mesh.shard_dim is None else data_group_of(plan.mesh),
        ),
        is_auto=plan.reshard is None,
    )
    with torch.inference_mode(False), torch.no_grad():
        state.stores = [
            _OwnStore(_make_store(planned, plan), planned.mesh, planned.gather_dtype)
            for planned in plan.stores
        ]
        for buffer in plan.managed.buffers:
            if buffer.device != plan.device and not buffer.is_meta:
                buffer.data = buffer.to(plan.device)
    for own in state.stores:
        for slot in own.store.shown(None):
            _torch_private.parameters_of(slot.module)[slot.attribute] = slot.parameter
            _owned.setdefault(slot.module, {})[slot.attribute] = weakref.ref(state)
    optimizer_checks.register_replaced(param.parameter for param in plan.managed.params)
    patch_for_fully_shard()
    for module in plan.managed.modules:  # torch.compile asks for these
        module.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
    for module in plan.managed.holders:
        hooks.on_state_dicts(module, state.before_taking, state.before_loading, state.look_again)
    for inner in named_states_in(state.modules):
        inner.root = weakref.ref(state)
    for module in state.modules:
        module.__dict__[_STATE] = state
        _torch_private.note_composable(module, "fully_shard")
    register(state.modules[0], state)
    state.plan = plan.without_parameters()  # they hold the memory of whole parameters
    return state


def _context_of(of: _OwnStore | PlannedStore, plan: ShardPlan) -> Context:
    return Context(of.mesh.shard_mesh, plan.policy, plan.device, of.gather_dtype)


def _make_store(planned: PlannedStore, plan: ShardPlan) -> RowStore:
    mesh, offload = planned.mesh.engine_mesh(), plan.offload
    device = torch.device("cpu") if offload.to_cpu else plan.device
    ranks: dict[str, Any] = {"rank": mesh.shard.rank, "ranks": mesh.shard.ranks, "device": device}
    if planned.is_extended:
        context = _context_of(planned, plan)
        return ExtensionStore(planned.params, planned.placements, **ranks, context=context)
    pin = offload.to_cpu and offload.pin and plan.device.type != "cpu"
    return RowStore(planned.params, planned.placements, **ranks, pin=pin)
