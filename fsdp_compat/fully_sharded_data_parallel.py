"""The flat front end: ``FullyShardedDataParallel``, which resolves arguments, builds units, and
hands every call on."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_patches, _torch_private
from ._engine import hooks, rendezvous
from ._engine.runtime import Runtime
from ._engine.unit import Unit
from ._flat import client_attributes as attributes
from ._flat import clipping, comm_hook, construction, conversion, copying, summon
from ._flat.flat_unit import FlatUnit, require_root
from ._flat.forward_methods import run_as_forward
from ._flat.settings import Arguments, Settings
from ._state import forms, model_state_dict
from ._state import optim_legacy_state_dict as legacy
from ._state import optim_state_dict as optim
from ._state.names import FSDP_WRAPPED_MODULE, clean_name
from ._state.optim_legacy_state_dict import OptimStateKeyType
from ._stores.registration import FLAT_PARAM, FlatParameter
from .api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    as_ours,
)
from .errors import (
    UsageError,
    ValueStateError,
    explain,
    require_bools,
    require_module,
    truth,
    wrong_type,
)
from .wrap import CustomPolicy, ModuleWrapPolicy

__all__ = [
    "FLAT_PARAM",
    "FlatParameter",
    "FullyShardedDataParallel",
    "OptimStateKeyType",
    "register_fsdp_forward_method",
]


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over the ranks of a process group.

    Every rank holds one part of each parameter; the parameters of a unit (this module, less what
    nested instances hold) are whole only while forward or backward need them. Gradients are
    averaged over the ranks. Make the optimizer after wrapping.

    With ``use_orig_params=True`` a Parameter may be assigned to an attribute between steps, on all
    ranks: its value is taken over, and its ``requires_grad``; the parameter object that was there
    stays, with gradient and optimizer state. What does not fit, a tied parameter, and any
    assignment with ``use_orig_params=False`` is refused; inside of summon_full_params both take the
    value.

    Optimizers that ``torch.distributed.optim._apply_optimizer_in_backward`` makes step when
    backward has reduced all gradients, and drop these; inside of no_sync they do not.

    Collective: construction, forward and backward are called on all ranks of the process group, in
    the same order.

    Args:
        module: the module to wrap; it becomes the child ``_fsdp_wrapped_module``.
        process_group: the ranks to shard over; default: all. For hybrid strategies a tuple (shard
            group, replica group).
        sharding_strategy: default FULL_SHARD.
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards, gradients and the optimizer
            on the CPU; where the CPU computes as well, the same copies are made.
        auto_wrap_policy: which submodules become units of their own, see ``fsdp_compat.wrap``;
            default: none.
        backward_prefetch: when backward gathers the next unit; None, for the least memory, also
            turns off prefetching in forward.
        mixed_precision: dtypes in which parameters compute and gradients travel; shards keep their
            own.
        ignored_modules: modules (with all below them) whose parameters stay as they are, unsharded
            and unsynchronised; not wrapped ones. With ``module`` itself among them nothing is
            sharded, which is warned of.
        param_init_fn: materialises one module of the meta device; default: ``to_empty`` and its
            ``reset_parameters``.
        device_id: where to compute and keep the shards; default: where the parameters are, or what
            the backend needs. With the process group "fake", ``"meta"`` simulates one rank of any
            number: layouts, plans and steps without values or memory.
        sync_module_states: overwrite parameters and buffers with those of the group's first rank
            before sharding.
        forward_prefetch: gather the next unit in forward even with ``backward_prefetch=None``.
        limit_all_gathers: two units at most are gathered at a time, whatever it is. On the CPU the
            gradients of one unit at a time collect or travel; with False, as always on devices with
            streams, those of one travel while the next one's collect.
        use_orig_params: the optimizer sees the module's own Parameter objects, as views of the
            shard, instead of FlatParameters.
        ignored_states: parameters, or modules, to ignore; not together with ``ignored_modules``.
        device_mesh: instead of ``process_group``: for hybrid strategies a 2-D mesh (replica, shard)
            or a 1-D one; otherwise a mesh whose first dimension is sharded over.
        allow_unused_units: ranks may run different units; costs one byte per unit and backward,
            prefetching, and that every strategy frees parameters after forward.
        keep_units_below: units with fewer elements, in whole parameters, stay gathered from forward
            to backward, as all do with SHARD_GRAD_OP: the gathers of many small units cost more
            time than their memory is worth.

    Raises:
        UsageError: an argument, or a combination of them, cannot work; on every rank, before
            anything is sent or changed.
    """

    _fsdp_wrapped_module: nn.Module
    _fsdp_model_unit: FlatUnit
    # Entry points of the wrapped module beside forward, see register_fsdp_forward_method.
    _forward_methods: dict[str, bool | None]

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup
        | tuple[dist.ProcessGroup, dist.ProcessGroup]
        | None = None,
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
        keep_units_below: int = 0,
    ) -> None:
        super().__init__()
        arguments = Arguments(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=as_ours(mixed_precision, MixedPrecision, "mixed_precision"),
            ignored_modules=None
            if ignored_modules is None
            else construction.listed(ignored_modules),
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=None if ignored_states is None else construction.listed(ignored_states),
            device_mesh=device_mesh,
            allow_unused_units=allow_unused_units,
            keep_units_below=keep_units_below,
        )
        plan = construction.plan(module, auto_wrap_policy, arguments)
        _torch_patches.patch_torch(construction.apply(plan, self._emptied(), self._new))

    @classmethod
    def _new(cls) -> FullyShardedDataParallel:
        """Return a wrapper without a module."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        return self._emptied()

    def _emptied(self) -> FullyShardedDataParallel:
        self._forward_methods = {}
        model_state_dict.follow_loading(self)
        return self

    @property
    def _unit(self) -> Unit:
        return self._fsdp_model_unit.unit

    @property
    def _settings(self) -> Settings:
        return self._fsdp_model_unit.settings

    @property
    def _runtime(self) -> Runtime:
        return self._fsdp_model_unit.runtime

    # -- as a module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def compute_device(self) -> torch.device:
        """Where forward and backward run."""
        return self._settings.device

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes it was made with."""
        return self._settings.mixed_precision

    # What else torch's class has, for those who ask: _client_attributes.py.
    sharding_strategy = property(attributes.sharding_strategy)
    process_group = property(attributes.process_group)
    rank = property(attributes.rank)
    world_size = property(attributes.world_size)
    cpu_offload = property(attributes.cpu_offload)
    backward_prefetch = property(attributes.backward_prefetch)
    forward_prefetch = property(attributes.forward_prefetch)
    limit_all_gathers = property(attributes.limit_all_gathers)
    params = property(attributes.params)
    training_state = property(attributes.training_state)
    _has_params = property(attributes.has_params)
    _is_root = property(attributes.is_root, attributes.ignore)
    _flat_param = property(attributes.flat_param)
    _handle = property(attributes.handle)
    _all_handles = property(attributes.all_handles)
    _exec_order_data = property(attributes.exec_order_data)
    _lazy_init = staticmethod(attributes.lazy_init)
    _root_pre_forward = staticmethod(attributes.root_pre_forward)

    def __getattr__(self, name: str) -> Any:
        """What this module does not have is looked up on the wrapped one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            found = getattr(super().__getattr__(FSDP_WRAPPED_MODULE), name)
        if name in self._forward_methods:
            return run_as_forward(self._unit, found, synced=self._forward_methods[name])
        return found

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped module, such as an nn.Sequential."""
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    @_torch_private.never_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with whole parameters. Collective."""
        unit = self._unit
        return unit.runtime.run(unit, unit.module, args, kwargs)  # type: ignore[union-attr]

    def __repr__(self) -> str:
        """As nn.Module's; the shapes that modules print of themselves are those of whole
        parameters."""
        with contextlib.ExitStack() as stack:
            for instance in FullyShardedDataParallel.fsdp_modules(self):
                stack.enter_context(instance._unit.view.described())
            return super().__repr__()

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """A second module with shards of its own, over the same process groups; like parameters,
        without gradients. Collective."""
        copy = typing.cast(FullyShardedDataParallel, copying.deepcopy_of(self, memo))
        _torch_patches.patch_torch([copy._fsdp_model_unit])
        return copy

    def __reduce_ex__(self, protocol: typing.SupportsIndex) -> Any:
        """This rank's part, for pickle. Process groups are found again by their names; loading is
        collective."""
        return copying.reduced(self)

    def __setstate__(self, state: Any) -> None:
        copying.restore(self, state)
        _torch_patches.patch_torch([self._fsdp_model_unit])

    def check_is_root(self) -> bool:
        """True if no other instance is around this one."""
        return self._unit.is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the instances in ``module``, itself included, the outer ones first; ``root_only``:
        only those that are roots."""
        require_module(module, "fsdp_modules")
        require_bools("fsdp_modules", root_only=root_only)
        found = [child for child in module.modules() if isinstance(child, FullyShardedDataParallel)]
        return [child for child in found if child._unit.is_root] if root_only else found

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FullyShardedDataParallel:
        """What ``half``, ``to`` and the like do. Before the first forward another dtype converts
        the shards; collective then."""
        if recurse:
            conversion.convert_as(self, fn)
        with (
            self._unit.buffers.uncast()
            if self._unit.buffers is not None
            else contextlib.nullcontext()
        ):
            super()._apply(fn, recurse)
        for child in self.modules():
            hooks.cast_again(child, construction.own_dtype)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on every submodule and on this one, with whole parameters, and keep what it
        changes. Collective."""
        if not callable(fn):
            raise wrong_type("fn", "a function of one module", fn, "apply")
        if self._unit.view.summoned:
            super().apply(fn)
            return self
        self._runtime.require_idle("apply", ValueStateError)
        with rendezvous.nested("apply", self._runtime.groups), self.summon_full_params(self):
            super().apply(fn)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's; inside of ``summon_full_params`` names are those of the model before
        wrapping."""
        if self._runtime.broken:  # an exception in backward has left units shown full
            self._runtime.rest()
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield clean_name(name) if self._unit.view.summoned else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As nn.Module's; inside of ``summon_full_params`` names are those of the model before
        wrapping."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean_name(name) if self._unit.view.summoned else name, buffer

    # -- state

    set_state_dict_type = staticmethod(forms.set_state_dict_type)
    get_state_dict_type = staticmethod(forms.get_state_dict_type)
    state_dict_type = staticmethod(forms.state_dict_type)
    optim_state_dict = staticmethod(optim.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(legacy.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(legacy.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(legacy.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(legacy.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(legacy.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(legacy.rekey_optim_state_dict)

    def state_dict(self, *args: Any, filter: Any = None, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state under the names it had before wrapping, in the form that is set.

        FULL_STATE_DICT (default): whole tensors, copies; collective, one unit gathered at a time.
        SHARDED_STATE_DICT: this rank's part of each parameter, as boxes that view its shard, and
        nothing is sent; of a model with a device mesh a DTensor, a copy, and collective.
        LOCAL_STATE_DICT: this rank's flat shards themselves; nothing is sent.

        Values that are views, which buffers are in every form, change when training goes on, as
        those of an unwrapped module's state dict do. ``offload_to_cpu=True`` in the configuration,
        ``copy.deepcopy``, ``clone()`` and pickling give values that do not.

        filter: what of it to return, a function of a name, or "trainable" for the parameters that
        require grad; the same on all ranks. Only that is gathered, and nothing in the dict is a
        view of a shard. A flat shard is returned if it holds any.
        """
        return model_state_dict.state_dict(self, *args, filter=filter, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict under the names the model had before wrapping: full, sharded in any
        way, or local, as its values say.

        With full values nothing is sent: every rank copies its part. Where
        ``FullStateDictConfig(rank0_only=True)`` is set, other ranks than the first may pass {} or
        None and get what the first one has, one unit at a time; this is collective then. Parameters
        are written in place, also with ``assign``. What is like a tensor
        (``torch.overrides.is_tensor_like``) and knows its shape and dtype is taken too: a lazy
        value is read when its parameter is loaded, on ranks that have a part of it.

        Raises CheckpointError, before anything changes, for what is missing, unknown or does not
        fit.
        """
        return model_state_dict.load_state_dict(self, state_dict, strict, assign)

    # -- training

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Collect gradients in backward without sending them; the next backward outside of the
        context reduces them all.

        They are kept whole, as long as they are not reduced. Called on the root.
        """
        require_root(self._unit, "no_sync()")
        self._runtime.require_idle("no_sync", ValueStateError)
        with self._runtime.no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Sum and average gradients with ``hook`` instead of the built-in way, in this instance and
        all below it.

        Where gradients are split over ranks: ``hook(state, grad, output)``, grad [ranks * S] the
        flat gradient of a unit in the dtype it is reduced in, output [S] this rank's part to fill;
        where they are not (NO_SHARD, one rank): ``hook(state, grad)``, which changes grad [S] in
        place. The hook divides as well; hybrid strategies average over the replicas afterwards. The
        hooks of ``torch.distributed.algorithms._comm_hooks.default_hooks`` fit.

        Called once, on the root, on all ranks, before the first backward.
        """
        comm_hook.register(self._fsdp_model_unit, state, hook)

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; return the
        norm before, 0-d, in the dtype that those of the gradients promote to.

        Collective: all ranks, on the root. One all-reduce per shard axis. Gradients of parameters
        that no unit manages (ignored ones) count once.
        """
        return clipping.clip_grad_norm(self, max_norm, norm_type)

    summon_full_params = staticmethod(summon.summon_full_params)


def register_fsdp_forward_method(
    module: nn.Module, method_name: str, *, synced: bool | None = None
) -> None:
    """Let ``module.method_name(...)`` run with whole parameters, as forward does: for ``generate``,
    ``encode`` and the like.

    module: a FullyShardedDataParallel; anything else is left as it is. method_name: of a method of
    the wrapped module. synced: ranks may call what is inside different numbers of times, as with
    ``generate`` until each has its end token; a rank that is done waits for the others, serving
    them. It costs one small reduction per round of calls and gives up prefetching. Default: exactly
    while gradients are off; with gradients, ranks have to make the same calls, as backward does.

    The method itself is called on all ranks the same number of times, and one that yields is asked
    for as many items on all ranks. Collective: each call of it, not the registration.
    """
    if not isinstance(module, nn.Module) or not isinstance(method_name, str):
        raise UsageError(
            explain(
                "register_fsdp_forward_method got something else than a module and a name.",
                expected="an nn.Module, and the name of one of its methods",
                got=f"({type(module).__name__}, {method_name!r})",
                where="register_fsdp_forward_method(module, method_name)",
                fix="register_fsdp_forward_method(model, 'generate')",
            )
        )
    if synced is not None:
        synced = truth("synced", synced, "register_fsdp_forward_method")
    if not isinstance(module, FullyShardedDataParallel):
        return
    inner = module.module
    if not callable(getattr(inner, method_name, None)) or hasattr(
        FullyShardedDataParallel, method_name
    ):
        raise UsageError(
            explain(
                f"{method_name!r} is not a method that can be registered.",
                expected="a method that the wrapped module has and a FullyShardedDataParallel has "
                "not",
                got=f"{method_name!r} of a {type(inner).__name__}",
                where="register_fsdp_forward_method(module, method_name)",
                fix="check the name; forward needs no registration",
            )
        )
    module._forward_methods[method_name] = synced
