"""The flat front end: ``FullyShardedDataParallel``, which resolves arguments, builds units, and hands every call on."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import inspect
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim import Optimizer

from . import _clipping as clipping
from . import _copying as copying
from ._construction import (
    buffers_to_cast,
    listed,
    prepare,
    refuse_managed,
    refuse_module,
    remember,
    renamed,
    settings_of,
    unwritten_of,
)
from ._engine import grad_norm, hooks, torch_private
from ._engine.buffers import CastBuffers
from ._engine.reduce import CommHook
from ._engine.runtime import Runtime
from ._engine.tree import Member, assign_owners, group_members
from ._engine.unit import Group, Unit
from ._optimizers import convert
from ._settings import Arguments, Settings, resolve
from ._state.full_params import full_parameters
from ._state.model import full_entries, in_module_order, load_unit, sharded_entries
from ._state.names import FSDP_WRAPPED_MODULE, clean_name, without_checkpoint_wrapper
from ._state.optim import NamedUnit, optim_state, optim_state_to_load
from ._stores.flat_store import FlatStore, home_attribute
from ._stores.registration import FLAT_PARAM, FlatParameter
from .api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    as_ours,
)
from .errors import StateError, UsageError, explain
from .wrap import CustomPolicy, ModuleWrapPolicy, plan_wrapping, replace_modules

__all__ = ["FLAT_PARAM", "FlatParameter", "FullyShardedDataParallel", "OptimStateKeyType", "register_fsdp_forward_method"]


class OptimStateKeyType(enum.Enum):
    """How the state in an optimizer's dict is keyed: by parameter names, or by numbers."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over the ranks of a process group.

    Every rank holds one part of each parameter; the parameters of a unit (this module, less what nested instances hold) are whole
    only while forward or backward need them. Gradients are averaged over the ranks. Make the optimizer after wrapping.

    Collective: construction, forward and backward are called on all ranks of the process group, in the same order.

    Args:
        module: the module to wrap; it becomes the child ``_fsdp_wrapped_module``.
        process_group: the ranks to shard over; default: all. For hybrid strategies a tuple (shard group, replica group).
        sharding_strategy: default FULL_SHARD.
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards on the CPU; on a CPU they are there anyway.
        auto_wrap_policy: which submodules become units of their own, see ``fsdp_compat.wrap``; default: none.
        backward_prefetch: when backward gathers the next unit; None, for the least memory, also turns off prefetching in forward.
        mixed_precision: dtypes in which parameters compute and gradients travel; shards keep their own.
        ignored_modules: modules (with all below them) whose parameters stay as they are, unsharded and unsynchronised.
        param_init_fn: materialises one module of the meta device; default: ``to_empty`` and its ``reset_parameters``.
        device_id: where to compute and keep the shards; default: where the parameters are, or what the backend needs.
        sync_module_states: overwrite parameters and buffers with those of the group's first rank before sharding.
        forward_prefetch: gather the next unit in forward even with ``backward_prefetch=None``.
        limit_all_gathers: accepted; two units at most are ever in flight.
        use_orig_params: the optimizer sees the module's own Parameter objects, as views of the shard, instead of FlatParameters.
        ignored_states: parameters, or modules, to ignore; not together with ``ignored_modules``.
        device_mesh: a 1-D mesh, or for hybrid strategies a 2-D one (replica, shard), instead of ``process_group``.
        allow_unused_units: ranks may run different units; costs one byte per unit and backward, prefetching, and that every
            strategy frees parameters after forward.

    Raises:
        UsageError: an argument, or a combination of them, cannot work; on every rank, before anything is sent or changed.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | ModuleWrapPolicy | CustomPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        allow_unused_units: bool = False,
    ) -> None:
        super().__init__()
        arguments = Arguments(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=as_ours(mixed_precision, MixedPrecision, "mixed_precision"),
            ignored_modules=None if ignored_modules is None else listed(ignored_modules),
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=None if ignored_states is None else listed(ignored_states),
            device_mesh=device_mesh,
            allow_unused_units=allow_unused_units,
        )
        refuse_module(module, FullyShardedDataParallel)
        settings = resolve(module, arguments)
        nested = [child for child in module.modules() if isinstance(child, FullyShardedDataParallel)]
        closed = {*nested, *settings.ignored_modules}
        refuse_managed(module, closed, settings.ignored_parameters)
        plan: dict[nn.Module, Settings] = {}
        apart = [child for child in module.modules() if child is not module and isinstance(child, settings.uncast_classes)]
        if auto_wrap_policy is not None or apart:
            planned = plan_wrapping(
                module,
                auto_wrap_policy or _no_module,
                {*settings.ignored_modules, *(below for child in nested for below in child.modules())},
                settings.ignored_parameters,
                {field: getattr(arguments, field) for field in arguments.__dataclass_fields__},
                is_wrapped=lambda child: isinstance(child, FullyShardedDataParallel),
            )
            plan = {child: settings_of(child, kwargs, arguments, settings) for child, kwargs in planned.items()}
        left = prepare(module, settings, closed)
        owned = assign_owners(module, [module, *plan], settings.ignored_parameters, closed)
        replace_modules(
            module, {child: {} for child in plan}, lambda child: self._of_unit(child, plan[child], owned.pop(child), left)
        )
        self._build(module, settings, owned.pop(module), left)
        if settings.mixed_precision.param_dtype is not None:
            taken = {below for child in closed for below in child.modules()}
            for child in apart:
                if child not in taken:
                    hooks.cast_around(child, _own_dtype(child))
        _slow_transformers(module)

    # -- construction

    _unit: Unit
    _settings: Settings
    _state_settings: StateDictSettings
    _attribute_order: dict[str, list[str]]  # by module: its parameters as they were, for the order of state dicts
    _loading: tuple[str, set[str]]  # while a state dict is loaded: where this is in it, and the keys of sharded forms
    _forward_methods: dict[str, bool | None]  # other entry points of the wrapped module, see register_fsdp_forward_method

    @classmethod
    def _of_unit(
        cls, module: nn.Module, settings: Settings, members: list[Member], left: set[tuple[nn.Module, str]]
    ) -> FullyShardedDataParallel:
        """Wrap a submodule that a policy chose, whose parameters were assigned by the instance around it."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._build(module, settings, members, left, relative_to=module)
        return self

    def _build(
        self,
        module: nn.Module,
        settings: Settings,
        members: list[Member],
        left: set[tuple[nn.Module, str]],
        relative_to: nn.Module | None = None,
    ) -> None:
        """left: where there are no values yet, see ``prepare``."""
        if relative_to is not None:
            members = renamed(members, relative_to)
        self._attribute_order = {
            clean_name(name): [attribute for attribute, p in child._parameters.items() if p is not None]
            for name, child in module.named_modules(remove_duplicate=False)
        }
        self._loading, self._forward_methods = ("", set()), {}
        self._state_settings = _default_settings(StateDictType.FULL_STATE_DICT)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)
        self._fsdp_wrapped_module = module
        taken = {below for child in FullyShardedDataParallel.fsdp_modules(module) for below in child.modules()}
        with torch.inference_mode(False), torch.no_grad():
            stores = [self._make_store(module, settings, index, its) for index, (_, its) in enumerate(group_members(members))]
            self._set_up(stores, settings, buffers_to_cast(module, settings, taken))
        remember(module, [member.parameter for member in members], stores)
        self._unit.unwritten = unwritten_of(module, stores, left, taken)

    def _set_up(self, stores: Sequence[FlatStore], settings: Settings, buffers: CastBuffers | None) -> None:
        """Make the unit around its stores, and the runtime around it and the units below."""
        device, offload = settings.device, settings.offload
        groups = [Group(store, settings.mesh, settings.precision(store.dtype), device, offload) for store in stores]
        unit = self._unit = Unit(self._fsdp_wrapped_module, groups, settings.unit_options(), buffers)
        self._settings = settings
        hooks.guard_state_dicts(unit)
        instances = FullyShardedDataParallel.fsdp_modules(self)
        names = {child: clean_name(name) for name, child in self.named_modules() if isinstance(child, FullyShardedDataParallel)}
        clipping.teach_torch()
        clipping.watch(Runtime(unit, [child._unit for child in instances], [names[child] for child in instances], settings.runtime))

    @staticmethod
    def _make_store(module: nn.Module, settings: Settings, index: int, members: list[Member]) -> FlatStore:
        return FlatStore(
            members,
            rank=settings.mesh.shard.rank,
            ranks=settings.mesh.shard.ranks,
            home=(module, home_attribute(index)),
            use_orig_params=settings.use_orig_params,
            device=settings.home,
            pin=settings.offload and settings.device.type != "cpu",
        )

    # -- as a module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy it was made with."""
        return self._settings.strategy

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks over which one copy of the parameters is spread."""
        return self._settings.group

    @property
    def compute_device(self) -> torch.device:
        """Where forward and backward run."""
        return self._settings.device

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes it was made with."""
        return self._settings.mixed_precision

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.groups)

    @property
    def _is_root(self) -> bool:
        return self._unit.is_root

    @property
    def _runtime(self) -> Runtime:
        assert self._unit.runtime is not None
        return self._unit.runtime

    def __getattr__(self, name: str) -> Any:
        """What this module does not have is looked up on the wrapped one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            found = getattr(super().__getattr__(FSDP_WRAPPED_MODULE), name)
        if name in self._forward_methods:
            return functools.update_wrapper(functools.partial(self._run_method, found, self._forward_methods[name]), found)
        return found

    def _run_method(self, method: Callable[..., Any], synced: bool | None, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the wrapped module as its forward is run. Collective."""
        serving = not torch.is_grad_enabled() if synced is None else synced
        output = self._runtime.run_method(self._unit, method, args, kwargs, serving)
        return self._steps_of(output) if inspect.isgenerator(output) else output

    def _steps_of(self, generator: Generator[Any, Any, Any]) -> Iterator[Any]:
        """What a generator yields; every step of it runs as a forward does, and is collective."""
        end = object()
        while (item := self._runtime.run(self._unit, next, (generator, end), {})) is not end:
            yield item

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped module, such as an nn.Sequential."""
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    @torch_private.never_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with whole parameters. Collective."""
        unit = self._unit
        return unit.runtime.run(unit, unit.module, args, kwargs)  # type: ignore[union-attr]

    def __repr__(self) -> str:
        """As nn.Module's; the shapes that modules print of themselves are those of whole parameters."""
        with contextlib.ExitStack() as stack:
            for instance in FullyShardedDataParallel.fsdp_modules(self):
                stack.enter_context(instance._unit.described())
            return super().__repr__()

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """A second module with shards of its own, over the same process groups; like parameters, without gradients. Collective."""
        return copying.deepcopy_of(self, memo)

    def __reduce_ex__(self, protocol: typing.SupportsIndex) -> Any:
        """This rank's part, for pickle. Process groups are found again by their names; loading is collective."""
        return copying.reduced(self)

    def __setstate__(self, state: Any) -> None:
        copying.restore(self, state)

    def check_is_root(self) -> bool:
        """True if no other instance is around this one."""
        return self._unit.is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the instances in ``module``, itself included, the outer ones first; ``root_only``: only those that are roots."""
        found = [child for child in module.modules() if isinstance(child, FullyShardedDataParallel)]
        return [child for child in found if child._unit.is_root] if root_only else found

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on every submodule and on this one, with whole parameters, and keep what it changes. Collective."""
        if self._unit.lent:
            super().apply(fn)
            return self
        with self.summon_full_params(self):
            super().apply(fn)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's; inside of ``summon_full_params`` names are those of the model before wrapping."""
        if self._runtime.broken:  # an exception in backward has left units shown full
            self._runtime.rest()
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield clean_name(name) if self._unit.lent else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As nn.Module's; inside of ``summon_full_params`` names are those of the model before wrapping."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean_name(name) if self._unit.lent else name, buffer

    # -- training

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Collect gradients in backward without sending them; the next backward outside of the context reduces them all.

        They are kept whole, as long as they are not reduced. Called on the root.
        """
        if not self._unit.is_root:
            raise StateError(_on_root_only("no_sync()", self._unit.label))
        with self._runtime.no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Sum and average gradients with ``hook`` instead of the built-in way, in this instance and all below it.

        Where gradients are split over ranks: ``hook(state, grad, output)``, grad [ranks * S] the flat gradient of a unit in the
        dtype it is reduced in, output [S] this rank's part to fill; where they are not (NO_SHARD, one rank): ``hook(state, grad)``,
        which changes grad [S] in place. The hook divides as well; hybrid strategies average over the replicas afterwards. The hooks
        of ``torch.distributed.algorithms._comm_hooks.default_hooks`` fit.

        Called once, on the root, on all ranks, before the first backward.
        """
        if not callable(hook):
            raise UsageError(
                explain(
                    "A communication hook has to be a function.",
                    expected="hook(state, grad, output), or hook(state, grad) where gradients are not split",
                    got=f"{hook!r} of type {type(hook).__name__}",
                    where="register_comm_hook(state, hook)",
                    fix="pass the function second, its state first",
                )
            )
        if not self._unit.is_root:
            raise AssertedStateError(_on_root_only("register_comm_hook()", self._unit.label))
        self._runtime.require_idle("register_comm_hook")
        if self._comm_hook is not None:
            raise AssertedStateError(
                explain(
                    "A communication hook is registered already.",
                    expected="one call of register_comm_hook for each model",
                    got=f"a second one, with {hook!r}",
                    where=self._unit.label,
                    fix="register one hook that does both",
                )
            )
        self._runtime.set_comm_hook(CommHook(state, hook))
        self._comm_hook = hook

    _comm_hook: Callable[..., Any] | None = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; return the norm before, 0-d.

        Collective: all ranks, on the root. One all-reduce per shard axis. Gradients of parameters that no unit manages (ignored
        ones) count once.
        """
        if not self._unit.is_root:
            raise StateError(_on_root_only("clip_grad_norm_()", self._unit.label))
        norm_type = clipping.checked_norm_type(norm_type)
        clipping.check_max_norm(max_norm)
        self._runtime.require_idle("clip_grad_norm_")
        groups = self._runtime.groups
        sharded = {id(target) for group in groups for target, _ in group.store.targets}
        others = [p.grad for p in self.parameters() if id(p) not in sharded and p.grad is not None]
        norm = grad_norm.total_norm(groups, others, norm_type, self._settings.device)
        grads = [p.grad for group in groups for p, _ in group.store.targets if p.grad is not None]
        grad_norm.clip_by_norm(grads + others, norm, float(max_norm))
        dtypes = {group.store.dtype for group in groups if group.store.targets[0].parameter.requires_grad} | {
            grad.dtype for grad in others
        }
        return norm.to(dtypes.pop()) if len(dtypes) == 1 else norm

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None, None, None]:
        """Show whole parameters, in the dtype of the shards, in ``module`` and (``recurse``) all instances below it.

        Collective: all ranks. ``writeback`` keeps changes made inside; ``rank0_only``: the others go on showing their parts (not
        with ``writeback``); ``offload_to_cpu``: they are shown on the CPU; ``with_grads``: whole gradients beside them.
        """
        if writeback and rank0_only:
            raise _NotImplementedUsage(
                explain(
                    "summon_full_params cannot write back what only rank 0 has seen.",
                    expected="rank0_only=True with writeback=False, or rank0_only=False",
                    got="rank0_only=True, writeback=True",
                    where="summon_full_params(...)",
                    fix="pass writeback=False",
                )
            )
        instances = FullyShardedDataParallel.fsdp_modules(module)
        if not recurse:
            instances = [child for child in instances if child is module or child._unit.is_root]
        for instance in instances:
            instance._runtime.require_idle("summon_full_params")
            instance._runtime.rest()
        with full_parameters(
            [child._unit for child in instances],
            writeback=writeback,
            serve_only=rank0_only and not all(child._settings.mesh.is_first for child in instances),
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            yield

    # -- state dicts: which form

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the form of state dicts for all instances in ``module``, which need not be one; return what it was before."""
        kind = as_ours(state_dict_type, StateDictType, "state_dict_type")
        if kind is None or kind is StateDictType.LOCAL_STATE_DICT:
            raise UsageError(
                explain(
                    "This form of state dict is not available.",
                    expected="StateDictType.FULL_STATE_DICT or StateDictType.SHARDED_STATE_DICT",
                    got=str(kind),
                    where="set_state_dict_type",
                    fix="SHARDED_STATE_DICT keeps every rank's own part too, and can be loaded by any number of ranks",
                )
            )
        default = _default_settings(kind)
        model_config = as_ours(state_dict_config, StateDictConfig, "state_dict_config") or default.state_dict_config
        optim_config = (
            as_ours(optim_state_dict_config, OptimStateDictConfig, "optim_state_dict_config") or default.optim_state_dict_config
        )
        for name, given, wanted in (
            ("state_dict_config", model_config, default.state_dict_config),
            ("optim_state_dict_config", optim_config, default.optim_state_dict_config),
        ):
            if not isinstance(given, type(wanted)):
                raise UsageError(
                    explain(
                        f"{name} does not belong to the form of state dict.",
                        expected=f"a {type(wanted).__name__}, or None",
                        got=f"a {type(given).__name__}",
                        where=f"set_state_dict_type(..., {kind.name})",
                        fix=f"pass {type(wanted).__name__}(...)",
                    )
                )
        before = FullyShardedDataParallel.get_state_dict_type(module)
        for instance in FullyShardedDataParallel.fsdp_modules(module):
            instance._state_settings = StateDictSettings(kind, model_config, optim_config)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the form of state dicts of the instances in ``module``; raises UsageError where they differ or there is none."""
        found = [instance._state_settings for instance in FullyShardedDataParallel.fsdp_modules(module)]
        if not found or any(settings != found[0] for settings in found):
            raise UsageError(
                explain(
                    "There is no one form of state dict.",
                    expected="at least one FullyShardedDataParallel in the module, all of them with one form",
                    got=f"{len(found)} instances with {len({settings.state_dict_type for settings in found})} forms",
                    where=type(module).__name__,
                    fix="set one for all: FullyShardedDataParallel.set_state_dict_type(module, ...)",
                )
            )
        return found[0]

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """Set the form of state dicts inside of the context, see ``set_state_dict_type``."""
        instances = FullyShardedDataParallel.fsdp_modules(module)
        before = [instance._state_settings for instance in instances]
        FullyShardedDataParallel.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for instance, settings in zip(instances, before, strict=True):
                instance._state_settings = settings

    # -- state dicts: the model

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state under the names it had before wrapping, in the form that is set.

        FULL_STATE_DICT (default): whole tensors, copies; collective, one unit gathered at a time. SHARDED_STATE_DICT: this rank's
        part of each parameter, as boxes that view its shard; nothing is sent.
        """
        destination, prefix, keep_vars = _state_dict_arguments(*args, **kwargs)
        if not self._unit.lent:
            self._runtime.require_idle("state_dict")
            self._runtime.rest()
        first = len(destination)
        self._unit.in_state_dict = True
        try:
            super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        finally:
            self._unit.in_state_dict = False
        settings = self._state_settings
        config: Any = settings.state_dict_config
        keep = not getattr(config, "rank0_only", False) or self._settings.mesh.is_first
        own = list(destination)[first:]
        sharded = set() if self._unit.lent else {f"{prefix}{FSDP_WRAPPED_MODULE}.{name}" for name in self._sharded_names()}
        values = {clean_name(key): destination.pop(key) for key in own if key not in sharded}
        for key in own:
            destination.pop(key, None)
        base = clean_name(prefix)
        for name, exact in self._exact_buffers():
            if base + name in values:
                values[base + name] = exact
        if self._unit.lent:  # inside of summon_full_params the traversal has met whole parameters
            pass
        elif settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            values.update((base + name, value) for name, value in full_entries(self._unit, config.offload_to_cpu, keep))
        else:
            values.update((base + name, v) for name, v in sharded_entries(self._unit, self._settings.group, config.offload_to_cpu))
        if not keep:
            values = {}
        elif getattr(config, "offload_to_cpu", False):
            values = {
                k: v.cpu() if isinstance(v, torch.Tensor) and v.device.type not in ("cpu", "meta") else v for k, v in values.items()
            }
        for key in in_module_order(list(values), self._names_in_order(base)):
            destination[key] = values[key]
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            for key in [key for key in metadata if key.startswith(prefix)]:
                metadata.setdefault(clean_name(key), metadata[key])
        return destination

    def _sharded_names(self) -> set[str]:
        """The names under which the wrapped module's state dict holds, or misses, managed parameters in their sharded form.

        Activation checkpointing's wrapper takes itself out of the names at one time and not at another: both are here.
        """
        managed = {id(target) for group in self._unit.groups for target, _ in group.store.targets}
        raw = {
            f"{path}.{attribute}".lstrip(".")
            for path, child in self._fsdp_wrapped_module.named_modules(remove_duplicate=False)
            for attribute, parameter in child._parameters.items()
            if id(parameter) in managed
        }
        return raw | {without_checkpoint_wrapper(name) for name in raw}

    def _exact_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The names of buffers that are kept in another dtype than the user's model has them, with what they are in that."""
        cast = self._unit.buffers
        if cast is not None:
            for name, buffer in self._fsdp_wrapped_module.named_buffers(remove_duplicate=False):
                if (exact := cast.exact(buffer)) is not None:
                    yield clean_name(name), exact

    def _names_in_order(self, base: str) -> list[str]:
        """The keys of the wrapped module's state dict, as they came before anything was wrapped."""
        modules = [(clean_name(path), child) for path, child in self.named_modules(remove_duplicate=False)]
        order: dict[str, list[str]] = {}
        for path, child in modules:
            if isinstance(child, FullyShardedDataParallel):  # inner instances know what their modules had
                order.update((".".join(filter(None, (path, inner))), names) for inner, names in child._attribute_order.items())
        names = []
        for path, child in modules:
            if not isinstance(child, FullyShardedDataParallel):
                start = f"{base}{path}." if path else base
                attributes = dict.fromkeys((*order.get(path, ()), *child._parameters, *child._buffers, "_extra_state"))
                names += [start + attribute for attribute in attributes]
        return names

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict under the names the model had before wrapping: full, or sharded in any way; its values say which.

        With full values nothing is sent: every rank copies its part. Parameters are written in place, also with ``assign``.
        """
        self._runtime.require_idle("load_state_dict")
        self._runtime.rest()
        if not isinstance(state_dict, Mapping):
            raise _NoDict(
                explain(
                    "This is no state dict.",
                    expected="a dict from names to tensors, as state_dict() returns it",
                    got=f"a {type(state_dict).__name__}",
                    where="load_state_dict(state_dict)",
                    fix="pass the loaded dict, on every rank",
                )
            )
        try:
            return super().load_state_dict(self._without_ddp_prefix(state_dict), strict, assign)
        except RuntimeError as error:
            error.args = (str(error).replace(f"{FSDP_WRAPPED_MODULE}.", ""),)  # torch says where things are here
            raise

    def _without_ddp_prefix(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """What DistributedDataParallel saved has names that begin with ``module.``."""
        inner = self._fsdp_wrapped_module
        own = {*inner._modules, *inner._parameters, *inner._buffers}
        if not state_dict or "module" in own or not all(str(key).startswith("module.") for key in state_dict):
            return state_dict
        without = collections.OrderedDict(state_dict)
        if (metadata := getattr(state_dict, "_metadata", None)) is not None:
            setattr(without, "_metadata", metadata.copy())
        consume_prefix_in_state_dict_if_present(without, "module.")
        return without

    # -- state dicts: the optimizer

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any] | None = None, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return the optimizer's state keyed by parameter names, in the form set for ``model``.

        optim_state_dict: what ``optim.state_dict()`` gives, if it is there. Collective in the full form: one gather per flat
        parameter and state. In the sharded form tensors are this rank's boxes, which view the optimizer's own state.
        """
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        convert(optim)
        config: Any = settings.optim_state_dict_config
        full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        first = FullyShardedDataParallel.fsdp_modules(model)[0]._settings
        is_first = first.mesh.is_first if group is None else dist.get_rank(group) == 0
        return optim_state(
            model,
            optim,
            optim_state_dict,
            _named_units(model),
            full=full,
            to_cpu=bool(config.offload_to_cpu),
            keep=not (full and config.rank0_only and not is_first),
            process_group=first.group,
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the dict that ``optim.load_state_dict`` takes, from one keyed by parameter names, full or sharded, or by numbers.

        By numbers is what the optimizer of an unwrapped model, or of one in DistributedDataParallel, gives.
        The number of ranks, the wrapping and ``use_orig_params`` it was saved with do not matter. ``load_directly`` loads it, too.
        With full values, or boxes of the own shards, nothing is sent; other sharded values are gathered, collectively.
        """
        if not isinstance(optim_state_dict, Mapping) or not {"state", "param_groups"} <= optim_state_dict.keys():
            raise UsageError(
                explain(
                    "This is no optimizer state dict.",
                    expected="a dict with 'state' and 'param_groups'",
                    got=f"{sorted(optim_state_dict) if isinstance(optim_state_dict, Mapping) else type(optim_state_dict).__name__}",
                    where="optim_state_dict_to_load(model, optim, optim_state_dict)",
                    fix="pass what optim_state_dict(model, optim) returned, on every rank; note the order of the arguments",
                )
            )
        loadable = optim_state_to_load(model, optim, optim_state_dict, _named_units(model), _names_before(model))
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable


class AssertedStateError(StateError, AssertionError):
    """A call at the wrong moment, where torch asserts."""


class _NotImplementedUsage(UsageError, NotImplementedError):
    """A combination of arguments that cannot work; torch's type for it is NotImplementedError."""


class _NoDict(UsageError, TypeError):
    """Something else than a dict; torch's type for it is TypeError."""


def register_fsdp_forward_method(module: nn.Module, method_name: str, *, synced: bool | None = None) -> None:
    """Let ``module.method_name(...)`` run with whole parameters, as forward does: for ``generate``, ``encode`` and the like.

    module: a FullyShardedDataParallel; anything else is left as it is. method_name: of a method of the wrapped module.
    synced: ranks may call what is inside different numbers of times, as with ``generate`` until each has its end token; a rank that
    is done waits for the others, serving them. It costs one small reduction per round of calls and gives up prefetching. Default:
    exactly while gradients are off; with gradients, ranks have to make the same calls, as backward does.

    The method itself is called on all ranks the same number of times, and one that yields is asked for as many items on all ranks.
    Collective: each call of it, not the registration.
    """
    if not isinstance(module, nn.Module) or not isinstance(method_name, str) or not (synced is None or isinstance(synced, bool)):
        raise UsageError(
            explain(
                "register_fsdp_forward_method got something else than a module and a name.",
                expected="an nn.Module, the name of one of its methods, and synced=True, False or None",
                got=f"({type(module).__name__}, {method_name!r}, synced={synced!r})",
                where="register_fsdp_forward_method(module, method_name)",
                fix="register_fsdp_forward_method(model, 'generate')",
            )
        )
    if not isinstance(module, FullyShardedDataParallel):
        return
    inner = module.module
    if not callable(getattr(inner, method_name, None)) or hasattr(FullyShardedDataParallel, method_name):
        raise UsageError(
            explain(
                f"{method_name!r} is not a method that can be registered.",
                expected="a method that the wrapped module has and a FullyShardedDataParallel has not",
                got=f"{method_name!r} of a {type(inner).__name__}",
                where="register_fsdp_forward_method(module, method_name)",
                fix="check the name; forward needs no registration",
            )
        )
    module._forward_methods[method_name] = synced


def _no_module(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """The policy that chooses nothing by itself."""
    return False


def _own_dtype(module: nn.Module) -> torch.dtype:
    """The floating-point dtype of a module's own parameters and buffers."""
    tensors = (*module.parameters(), *module.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


def _slow_transformers(module: nn.Module) -> None:
    """Torch's transformer layers read their submodules' parameters by themselves in evaluation. Not if these are units."""
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer) and FullyShardedDataParallel.fsdp_modules(child):
            hooks.without_fast_path(child)
        if isinstance(child, nn.TransformerEncoder) and FullyShardedDataParallel.fsdp_modules(child):
            child.use_nested_tensor = False


# -- state dicts, in parts


def _default_settings(kind: StateDictType) -> StateDictSettings:
    if kind is StateDictType.FULL_STATE_DICT:
        return StateDictSettings(kind, FullStateDictConfig(), FullOptimStateDictConfig())
    return StateDictSettings(kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


def _state_dict_arguments(*args: Any, **kwargs: Any) -> tuple[Any, str, bool]:
    """Return (destination, prefix, keep_vars) from nn.Module.state_dict's arguments; positional ones are its older form."""
    given = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
    destination = given.get("destination")
    if destination is None:
        destination = collections.OrderedDict()
        setattr(destination, "_metadata", collections.OrderedDict())  # as nn.Module.state_dict has it
    return destination, given.get("prefix") or "", bool(given.get("keep_vars", False))


def _before_load(
    instance: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Take this unit's parameters out of what is loaded, and hand the rest on under the wrapped module's names."""
    self = typing.cast(FullyShardedDataParallel, instance)
    inner = f"{prefix}{FSDP_WRAPPED_MODULE}."
    for key in [key for key in state_dict if key.startswith(prefix)]:
        clean = prefix + clean_name(key[len(prefix) :])
        if clean != key:
            state_dict[clean] = state_dict.pop(key)
    if not self._unit.lent:
        load_unit(self._unit, state_dict, prefix, missing_keys, error_msgs)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
    # The sharded forms are registered in the modules, which will miss them.
    self._unit.in_state_dict = True  # until _after_load
    if self._unit.buffers is not None:
        self._unit.buffers.follow(1)
    self._loading = prefix, set() if self._unit.lent else {inner + name for name in self._sharded_names()}


def _after_load(instance: nn.Module, incompatible: Any) -> None:
    """What is reported are the names before wrapping, and nothing that only exists because of it.

    The outermost instance cleans the names: it still has to recognise sharded forms of its own that inner modules hold (ties).
    """
    self = typing.cast(FullyShardedDataParallel, instance)
    self._unit.in_state_dict = False
    if self._unit.buffers is not None:
        self._unit.buffers.follow(0)
    prefix, sharded = self._loading
    outermost = self._unit.is_root or not prefix
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [clean_name(key) if outermost and key.startswith(prefix) else key for key in keys if key not in sharded]
    self._loading = "", set()


def _names_before(model: nn.Module) -> list[str]:
    """The names of a model's parameters, in the order they had before anything was wrapped."""
    outermost = [(name, child) for name, child in model.named_modules() if isinstance(child, FullyShardedDataParallel)]
    if outermost and outermost[0][1] is model:
        return outermost[0][1]._names_in_order("")
    names = []
    for path, child in model.named_modules():
        if isinstance(child, FullyShardedDataParallel) and child.check_is_root():
            names += child._names_in_order(f"{clean_name(path)}.")
    return names


def _named_units(model: nn.Module) -> list[NamedUnit]:
    """The units in a model, which need not be one itself, with what their parameters' names begin with."""
    found = []
    for name, child in model.named_modules():
        if isinstance(child, FullyShardedDataParallel):
            prefix = clean_name(name)
            found.append(NamedUnit(child._unit, f"{prefix}." if prefix else ""))
    return found


def _on_root_only(call: str, label: str) -> str:
    return explain(
        f"{call} is for the root.",
        expected="a call on the outermost FullyShardedDataParallel",
        got=f"a call on {label}",
        where=call,
        fix="call it on the outermost instance, which acts on all below it",
    )
