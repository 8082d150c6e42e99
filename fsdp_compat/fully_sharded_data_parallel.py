"""The wrapper ``FullyShardedDataParallel``, with torch's arguments and methods.

It delegates each call in one line."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_patches, _torch_private
from ._engine import hooks, rendezvous
from ._engine.runtime import Runtime, run_as_forward, runtime_of
from ._engine.state_store import FLAT_PARAM
from ._engine.unit import Unit
from ._features.description import describe_unit
from ._front_ends.flat import calls, construction, conversion, copies
from ._front_ends.flat.client_attributes import ClientAttributes
from ._front_ends.flat.flat_unit import flat_units_in, is_wrapper, require_root
from ._front_ends.fully_shard.fully_shard import not_registrable, register_forward_method
from ._front_ends.fully_shard.module import FSDPModule
from ._state import forms, model_loading, model_state
from ._state import optim_calls as optim
from ._state.optim_calls import OptimStateKeyType
from ._state.units import FSDP_WRAPPED_MODULE, clean_name
from ._stores.flat_cuts import ShardBlocks
from ._stores.flat_store import FlatParameter
from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .errors import (
    ValueStateError,
    require_bools,
    require_module,
    truth,
    with_arguments_checked,
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


class FullyShardedDataParallel(ClientAttributes):
    """Shard a module's parameters, gradients and optimizer state over a process group.

    Each rank holds one part of every parameter. A unit is the wrapped module without its nested
    FullyShardedDataParallel instances; its parameters are unsharded only while forward or backward
    need them. Gradients are averaged over the ranks. Create the optimizer after wrapping.

    With ``use_orig_params=True`` you may assign a Parameter to an attribute between steps, on all
    ranks: its value and ``requires_grad`` are copied into the existing parameter, which keeps its
    gradient and optimizer state. It is an error if the value does not fit, if the parameter is
    tied, or with ``use_orig_params=False``. Inside summon_full_params both settings accept the
    value.

    Optimizers created by ``torch.distributed.optim._apply_optimizer_in_backward`` step once
    backward has reduced all gradients, then free them. They do not step inside no_sync.

    Collective: all ranks of the process group run construction, forward and backward in the same
    order.

    Args:
        module: the module to wrap; it becomes the child ``_fsdp_wrapped_module``.
        process_group: the ranks to shard over; default: all. For hybrid strategies a tuple (shard
            group, replica group).
        sharding_strategy: default FULL_SHARD.
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards, gradients and optimizer state
            on the CPU. Copies are made even if the CPU is also the compute device.
        auto_wrap_policy: selects the submodules that become units of their own: a policy, see
            ``fsdp_compat.wrap``; "auto" for the blocks that the model repeats, such as its
            transformer layers; or one or more class names. Default: none.
        backward_prefetch: when backward gathers the next unit. None uses the least memory and also
            turns off prefetching in forward.
        mixed_precision: dtypes for computing with parameters and for reducing gradients; shards
            keep their own dtype.
        ignored_modules: modules whose parameters, including those of all their submodules, are
            neither sharded nor synchronized; wrapped modules are not allowed. If ``module`` itself
            is among them, nothing is sharded, and a warning says so.
        param_init_fn: initializes one module that is on the meta device; default: ``to_empty``,
            then the module's ``reset_parameters``.
        device_id: where to compute and keep the shards; default: the parameters' device, or the one
            that the backend needs. With the backend "fake", ``"meta"`` simulates one rank of any
            world size: layouts, plans and steps without values or memory.
        sync_module_states: overwrite parameters and buffers with those of the group's first rank
            before sharding.
        forward_prefetch: gather the next unit in forward even with ``backward_prefetch=None``.
        limit_all_gathers: on the CPU, True keeps one gradient buffer at a time, and False overlaps
            reducing one unit's gradients with computing the next unit's, as devices with streams
            always do. Besides the root, at most two units are gathered.
        use_orig_params: expose the module's own Parameter objects, as views of the shard, to the
            optimizer instead of FlatParameters. Needed to change ``requires_grad`` of some of a
            unit's parameters: with False a layer inside a unit has no parameters between steps, so
            that ``layer.requires_grad_()`` raises, and a loop over ``layer.parameters()`` is empty.
        ignored_states: parameters or modules to ignore; not together with ``ignored_modules``.
        device_mesh: replaces ``process_group``. For hybrid strategies a 2-D mesh (replica, shard)
            or a 1-D mesh; otherwise a mesh whose first dimension is sharded over.
        allow_unused_units: ranks may run different units. They vote once per backward, on the CPU
            if the process group has a backend for it. No unit is prefetched, and all are resharded
            after forward. In a backward that reaches units twice, or in another order than that of
            registration, they stay unsharded until its end. With NCCL and other backends without
            tags, a rank may call a unit at most once per forward, unless all ranks call it equally
            often.
        keep_units_below: units with fewer elements than this, counted unsharded, stay unsharded
            from forward to backward, as all units do with SHARD_GRAD_OP. Gathering many small units
            twice costs more time than their memory is worth.
        shard_blocks: how many consecutive elements of a parameter stay together on one rank: a
            number, a function of its name before wrapping and the parameter, or a ``ShardBlocks``.
            Optimizers that keep 8-bit states or statistics of blocks are then right on shards.
            With ``use_orig_params=True``, parts of parameters in blocks of whole rows have the
            shape (rows here, ...); others are 1-D. Default: shards are cut anywhere.

    Raises:
        UsageError: an argument, or a combination of arguments, cannot work. Raised on every rank,
            before anything is sent or changed."""

    _fsdp_wrapped_module: nn.Module
    # Methods of the wrapped module that run like forward, see register_fsdp_forward_method.
    _forward_methods: dict[str, bool | None]

    @with_arguments_checked
    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup
        | tuple[dist.ProcessGroup, dist.ProcessGroup]
        | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any]
        | ModuleWrapPolicy
        | CustomPolicy
        | str
        | Collection[str]
        | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        allow_unused_units: bool = False,
        keep_units_below: int = 0,
        shard_blocks: int | Callable[[str, nn.Parameter], int] | ShardBlocks | None = None,
    ) -> None:
        kwargs = {
            "allow_unused_units": allow_unused_units,
            "backward_prefetch": backward_prefetch,
            "cpu_offload": cpu_offload,
            "device_id": device_id,
            "device_mesh": device_mesh,
            "forward_prefetch": forward_prefetch,
            "ignored_modules": ignored_modules,
            "ignored_states": ignored_states,
            "keep_units_below": keep_units_below,
            "limit_all_gathers": limit_all_gathers,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "process_group": process_group,
            "shard_blocks": shard_blocks,
            "sharding_strategy": sharding_strategy,
            "sync_module_states": sync_module_states,
            "use_orig_params": use_orig_params,
        }
        super().__init__()
        plan = construction.plan(module, auto_wrap_policy, kwargs)
        construction.apply(plan, self._emptied(), self._new)
        _torch_patches.patch_torch(self)

    @classmethod
    def _new(cls) -> FullyShardedDataParallel:
        """Return a wrapper that has no module yet."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        return self._emptied()

    def _emptied(self) -> FullyShardedDataParallel:
        self._forward_methods = {}
        model_loading.follow_loading(self)
        return self

    @property
    def _unit(self) -> Unit:
        return self._fsdp_model_unit.unit

    @property
    def _runtime(self) -> Runtime:
        return self._fsdp_model_unit.runtime

    # -- nn.Module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        """Fall back to the attributes of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            value = getattr(super().__getattr__(FSDP_WRAPPED_MODULE), name)
        if name in self._forward_methods:
            unit, synced = self._unit, self._forward_methods[name]
            return run_as_forward(lambda: (runtime_of(unit), unit), value, synced=synced)
        return value

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped module, for example an nn.Sequential."""
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    @_torch_private.never_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the wrapped module's forward, run with unsharded parameters.

        It gets ``*args`` and ``**kwargs``.

        Collective: all ranks of the model's process group."""
        unit = self._fsdp_model_unit.unit
        return runtime_of(unit).run(unit, unit.module, args, kwargs)

    def extra_repr(self) -> str:
        """Return how the unit is sharded, for ``print(model)``; "" if construction has failed."""
        return str(describe_unit(self._fsdp_model_unit.unit_facts())) if is_wrapper(self) else ""

    def __repr__(self) -> str:
        """Like nn.Module's, with the shapes of the unsharded parameters."""
        with contextlib.ExitStack() as stack:
            for own in flat_units_in(self):
                stack.enter_context(own.unit.view.described())
            return super().__repr__()

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """Return a copy with its own shards over the same process groups, without gradients.

        Collective: all ranks of the model's process group."""
        copy = typing.cast(FullyShardedDataParallel, copies.deepcopy_of(self, memo))
        _torch_patches.patch_torch(copy)
        return copy

    def __reduce_ex__(self, protocol: typing.SupportsIndex) -> Any:
        """Pickle this rank's shards; unpickling finds the process groups by name.

        Collective: all ranks of the model's process group unpickle."""
        return copies.reduced(self)

    def __setstate__(self, state: Any) -> None:
        copies.restore(self, state)
        _torch_patches.patch_torch(self)

    def check_is_root(self) -> bool:
        """Return True if no other FullyShardedDataParallel instance contains this one."""
        return self._unit.is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return all FSDP instances in ``module``, itself included; with ``root_only`` only roots.

        Outer ones come first."""
        require_module(module, "fsdp_modules")
        require_bools("fsdp_modules", root_only=root_only)
        wrappers = [
            child for child in module.modules() if isinstance(child, FullyShardedDataParallel)
        ]
        return [each for each in wrappers if each._unit.is_root] if root_only else wrappers

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FullyShardedDataParallel:
        """Implement ``half``, ``to`` and the like. A new dtype converts the shards, which works
        only before the first forward and is collective."""
        if recurse:
            conversion.convert_as(self, fn)
        with (
            self._unit.buffers.uncast()
            if self._unit.buffers is not None
            else contextlib.nullcontext()
        ):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for child in self.modules():
            hooks.cast_again(child)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on every submodule and on this module, with full parameters.

        Changes are kept. Inside ``summon_full_params`` that context keeps or drops them. Otherwise
        as ``nn.Module.apply``.

        Collective: all ranks of the model's process group."""
        if not callable(fn):
            raise wrong_type("fn", "a function that takes one module", fn, "apply")
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
        """Yield names and parameters, as ``nn.Module.named_parameters``.

        Inside ``summon_full_params`` the names are those before wrapping."""
        runtime, view = self._runtime, self._unit.view
        if runtime.backward.has_raised:  # an exception in backward has left units unsharded
            runtime.reshard_all()
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield clean_name(name) if view.summoned else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers, as ``nn.Module.named_buffers``.

        Inside ``summon_full_params`` the names are those before wrapping."""
        view = self._unit.view
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean_name(name) if view.summoned else name, buffer

    # -- state

    set_state_dict_type = staticmethod(forms.set_state_dict_type)
    get_state_dict_type = staticmethod(forms.get_state_dict_type)
    state_dict_type = staticmethod(forms.state_dict_type)
    optim_state_dict = staticmethod(optim.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim.rekey_optim_state_dict)

    def state_dict(self, *args: Any, filter: Any = None, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state under the names before wrapping.

        Its form is the type that ``set_state_dict_type`` has set:

        - FULL_STATE_DICT (default): copies of the full tensors, gathered one unit at a time.
        - SHARDED_STATE_DICT: copies of this rank's part of each parameter, as a ShardedTensor;
          nothing is sent. With ``ShardedStateDictConfig(as_views=True)`` they are views of the flat
          shard. For a model with a device mesh a DTensor, always a copy.
        - LOCAL_STATE_DICT: this rank's flat shards themselves, as ShardedTensors; with
          ``use_orig_params=True`` also this rank's part of each parameter, a 1-D tensor of the same
          memory. Nothing is sent. Either loads without the other.

        Views change as training continues, as in the state dict of an unwrapped module; buffers are
        views in every type. Use ``offload_to_cpu=True`` in the configuration, ``copy.deepcopy``,
        ``clone()`` or pickling for values that do not change.

        Collective: all ranks of the model's process group, for FULL_STATE_DICT, and for
        SHARDED_STATE_DICT of a model with a device mesh.

        Args:
            *args: the arguments of ``nn.Module.state_dict``.
            filter: selects the entries to return: a function of the name, or "trainable" for the
                parameters that require grad; the same on all ranks. Only selected parameters are
                gathered, and no value is a view of a shard. A flat shard is returned if it holds
                any of them. Default: all entries.
            **kwargs: the keyword arguments of ``nn.Module.state_dict``.

        Returns:
            Parameters and buffers by name."""
        return model_state.state_dict(self, *args, filter=filter, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _torch_private.IncompatibleKeys:
        """Load a state dict with the names before wrapping, of any type.

        The values may be full, sharded in any way, or local; the type is recognized from the
        values. Loading full values sends nothing: every rank copies its part. With
        ``FullStateDictConfig(rank0_only=True)`` all ranks but the first may pass {} or None, and
        rank 0 broadcasts its values, one unit at a time. Tensor-like values
        (``torch.overrides.is_tensor_like``) that know their shape and dtype are accepted: a lazy
        value is read when its parameter is loaded, on the ranks that hold a part of it. Modules
        that load in their own way see their unit's parameters whole; what does not fit is known
        only after other units were loaded then.

        Collective: all ranks of the model's process group, with ``rank0_only=True``, for values
        that are sharded differently than the model, and if modules load in their own way.

        Args:
            state_dict: values by name.
            strict: whether missing and unknown keys are an error.
            assign: accepted; parameters are written in place all the same.

        Returns:
            The missing and the unexpected keys.

        Raises:
            CheckpointError: a key is missing or unknown, or a value does not fit. Raised before
                anything changes."""
        return model_loading.load_state_dict(self, state_dict, strict, assign)

    # -- training

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients in backward without reducing them. Call it on the root.

        The next backward outside the context reduces the sum. Until then the gradients take as much
        memory as the unsharded parameters, and ``.grad`` does not contain them."""
        require_root(self._unit.is_root, self._unit.label, "no_sync()")
        self._runtime.require_idle("no_sync", ValueStateError)
        with self._runtime.no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients with a function instead of the built-in reduction, in all units.

        The hook must also divide by the number of ranks. Hybrid strategies then average over the
        replicas. The hooks of ``torch.distributed.algorithms._comm_hooks.default_hooks`` work. Call
        it once, on the root, on all ranks, before the first backward.

        Args:
            state: passed to each call of the hook.
            hook: if gradients are sharded, ``hook(state, grad, output)``: grad [ranks * S] is a
                unit's flat gradient in the reduce dtype; the hook fills output [S] with this rank's
                part. If they are not (NO_SHARD, one rank), ``hook(state, grad)`` changes grad [S]
                in place."""
        calls.register_comm_hook(self._fsdp_model_unit, state, hook)

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``.

        Gradients of parameters outside all units (ignored parameters) count once. Call it on the
        root.

        Collective: all ranks of the model's process group. One all-reduce per shard axis.

        Args:
            max_norm: the largest norm, at least 0.
            norm_type: the p of the p-norm; ``inf`` for the largest absolute value.

        Returns:
            The norm before scaling, 0-d, in the dtype to which the gradients' dtypes promote."""
        return calls.clip_grad_norm(self, max_norm, norm_type)

    summon_full_params = staticmethod(calls.summon_full_params)


def register_fsdp_forward_method(
    module: nn.Module, method_name: str, *, synced: bool | None = None
) -> None:
    """Make a method run with unsharded parameters, as forward does.

    Meant for methods such as ``generate`` and ``encode``. All ranks must call the method the same
    number of times and, if it is a generator, consume the same number of items.

    Collective: all ranks of the model's process group, at each call of the method, not at its
    registration.

    Args:
        module: a FullyShardedDataParallel instance, or a module that ``fully_shard`` was applied
            to; other modules are left unchanged.
        method_name: the name of a method of the module.
        synced: allow ranks to call the inner units different numbers of times, for example in
            ``generate`` until each rank has its end token. A rank that is done keeps taking part in
            the others' all-gathers. This costs one small all-reduce per round of calls and turns
            off prefetching. Default: on if gradients are disabled; off for ``fully_shard``. With
            gradients, all ranks must make the same calls, because backward does."""
    where = "register_fsdp_forward_method"
    require_module(module, where)
    if not isinstance(method_name, str):
        raise wrong_type("method_name", "the name of a method of the module", method_name, where)
    if synced is not None:
        synced = truth("synced", synced, where)
    if isinstance(module, FSDPModule):
        register_forward_method(module, method_name, bool(synced))
    if not isinstance(module, FullyShardedDataParallel):
        return
    inner = module.module
    if not callable(getattr(inner, method_name, None)) or hasattr(
        FullyShardedDataParallel, method_name
    ):
        raise not_registrable(method_name, inner)
    module._forward_methods[method_name] = synced
