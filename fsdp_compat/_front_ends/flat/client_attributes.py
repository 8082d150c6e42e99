"""Attributes of torch's FSDP1 that client libraries read or set on a wrapped model.

Accelerate, Lightning, verl, Composer and litgpt use many private attributes of torch's class, and
dynamo reads marks on modules. This module computes them all from the settings, the unit and the
runtime. FullyShardedDataParallel binds each name in one line; none of it runs during a step."""

from __future__ import annotations

import contextlib
import enum
import types
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._engine import dtypes, rendezvous
from ..._engine.gathering import Prefetch
from ..._engine.group import Group
from ..._engine.unit import Residency
from ..._state.summon import Options, full_parameters
from ..._stores.flat_parameter import FlatParameter
from ..._stores.flat_store import FlatStore
from ...api import BackwardPrefetch, CPUOffload, ShardingStrategy, StateDictType
from ...errors import StateError
from . import conversion
from .flat_unit import FlatUnit, flat_unit_of, flat_units_in


class TrainingState(enum.Enum):
    """What a wrapped model is doing."""

    IDLE = enum.auto()
    FORWARD_BACKWARD = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


# -- constructor arguments


def sharding_strategy(self: nn.Module) -> ShardingStrategy:
    """The argument of that name."""
    return flat_unit_of(self).settings.strategy


def process_group(self: nn.Module) -> dist.ProcessGroup:
    """The ranks over which one copy of the parameters is sharded."""
    return flat_unit_of(self).settings.group


def rank(self: nn.Module) -> int:
    """The rank of this process in ``process_group``."""
    return dist.get_rank(flat_unit_of(self).settings.group)


def world_size(self: nn.Module) -> int:
    """The number of ranks in ``process_group``."""
    return dist.get_world_size(flat_unit_of(self).settings.group)


def cpu_offload(self: nn.Module) -> CPUOffload:
    """Whether shards, gradients and optimizer state are on the CPU."""
    return CPUOffload(offload_params=flat_unit_of(self).settings.offload)


def backward_prefetch(self: nn.Module) -> BackwardPrefetch | None:
    """When backward gathers the next unit."""
    return _PREFETCHES[flat_unit_of(self).settings.runtime.backward_prefetch]


_PREFETCHES = {
    Prefetch.NONE: None,
    Prefetch.PRE: BackwardPrefetch.BACKWARD_PRE,
    Prefetch.POST: BackwardPrefetch.BACKWARD_POST,
}


def forward_prefetch(self: nn.Module) -> bool:
    """The argument of that name."""
    return flat_unit_of(self).settings.forward_prefetch


def limit_all_gathers(self: nn.Module) -> bool:
    """The argument of that name."""
    return flat_unit_of(self).settings.limit_all_gathers


# -- parameters and state


def has_params(self: nn.Module) -> bool:
    """True if the unit has parameters of its own."""
    return bool(flat_unit_of(self).unit.groups)


def params(self: nn.Module) -> list[FlatParameter]:
    """This rank's flat shards of the unit."""
    return [handle.flat_param for handle in _handles(flat_unit_of(self))]


def training_state(self: nn.Module) -> TrainingState:
    """What the model is doing."""
    if flat_unit_of(self).unit.summoned:
        return TrainingState.SUMMON_FULL_PARAMS
    return TrainingState.FORWARD_BACKWARD if flat_unit_of(self).runtime.runs else TrainingState.IDLE


def is_root(self: nn.Module) -> bool:
    """True if no other FullyShardedDataParallel instance contains this one. Clients set it to None
    to make torch determine it again; here that has no effect."""
    return flat_unit_of(self).unit.is_root


def state_dict_type(self: nn.Module) -> StateDictType:
    """The state dict type that is set."""
    return flat_unit_of(self).form.state_dict_type


def exec_order_data(self: nn.Module) -> types.SimpleNamespace:
    """Prefetch limits that clients set. They have no effect: at most two units are gathered at a
    time."""
    return self.__dict__.setdefault(
        "_prefetch_limits",
        types.SimpleNamespace(_forward_prefetch_limit=1, _backward_prefetch_limit=1),
    )


def ignore(self: nn.Module, value: Any) -> None:
    """Setter of an attribute that clients set, without effect."""


def lazy_init(state: nn.Module, module: nn.Module) -> nn.Module:
    """Torch's ``_lazy_init``; nothing is left to initialize here."""
    return state


def root_pre_forward(
    state: nn.Module,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Torch's ``_root_pre_forward``, which clients call before they run a part of the model. It
    does nothing here: forward needs no preparation."""
    return args, kwargs


# -- handles


def flat_param(self: nn.Module) -> FlatParameter | None:
    """This rank's flat shard of the unit's trainable parameters, or of its frozen ones if none is
    trainable; None for a unit without parameters."""
    first = handle(self)
    return None if first is None else first.flat_param


def handle(self: nn.Module) -> FlatParamHandle | None:
    """The handle of ``_flat_param``."""
    handles = _handles(flat_unit_of(self))
    return next((each for each in handles if each.is_trainable), handles[0] if handles else None)


def all_handles(self: nn.Module) -> list[FlatParamHandle]:
    """The handles of all units in the model."""
    return [each for unit in flat_units_in(self) for each in _handles(unit)]


# The handles made so far. A handle refers to its store and its unit only weakly.
_handle_of: weakref.WeakKeyDictionary[FlatStore, FlatParamHandle] = weakref.WeakKeyDictionary()

# What ``FlatParamHandle.unshard`` has to undo.
_shown: weakref.WeakKeyDictionary[FlatUnit, contextlib.ExitStack] = weakref.WeakKeyDictionary()

# Attributes of torch's handle that have no meaning here.
_INSTEAD = {
    "_all_gather_flat_param": "call unshard()",
    "_alloc_padded_unsharded_flat_param": "call unshard()",
    "_use_sharded_views": "move the shard with flat_param_to(device)",
    "_use_unsharded_views": "open FullyShardedDataParallel.summon_full_params(module)",
    "_use_unsharded_flat_param": "call unshard()",
    "_training_state": "read module.training_state",
    "pre_unshard": "call unshard()",
    "post_unshard": "call unshard()",
    "post_reshard": "call reshard()",
    "sharded_grad": "read flat_param.grad",
    "shard": "wrap the module in FullyShardedDataParallel",
}


def _handles(own: FlatUnit) -> list[FlatParamHandle]:
    for store in own.stores:
        if store not in _handle_of:
            _handle_of[store] = FlatParamHandle(own, store)
    return [_handle_of[store] for store in own.stores]


class FlatParamHandle:
    """Stands for torch's handle of a flat parameter: one for each parameter group of a unit.

    Only clients call its methods, so that replacing one changes nothing in training.
    """

    def __init__(self, own: FlatUnit, store: FlatStore) -> None:
        self._unit, self._store = weakref.ref(own), weakref.ref(store)
        # With use_orig_params=True: created on first use, then kept.
        self._stand_in: FlatParameter | None = None

    @property
    def _owner(self) -> FlatUnit:
        owner = self._unit()
        if owner is None:
            raise self._gone()
        return owner

    def _gone(self) -> StateError:
        return StateError.of(
            "The model of this handle has been garbage-collected.",
            expected="a model that lives as long as its handles are used",
            got="a handle of a deleted model",
            where="a handle of a FullyShardedDataParallel",
            fix="keep the model, and get its handles from it when you need them",
        )

    @property
    def _flat_store(self) -> FlatStore:
        store = self._store()
        if store is None:
            raise self._gone()
        return store

    @property
    def _group(self) -> Group:
        return next(group for group in self._owner.unit.groups if group.store is self._flat_store)

    @property
    def is_trainable(self) -> bool:
        return any(
            sharded_param.requires_grad for sharded_param, _ in self._flat_store.sharded_params
        )

    @property
    def flat_param(self) -> FlatParameter:
        """The FlatParameter. With use_orig_params=True, an object over the same memory that the
        optimizer does not hold."""
        store = self._flat_store
        if store.flat_parameter is not None:
            return store.flat_parameter
        if self._stand_in is None:
            self._stand_in = FlatParameter(self._memory)
            self._stand_in.describe(store.layout, store.rank)
        flat = self._stand_in
        if flat.requires_grad is not self.is_trainable:
            flat.requires_grad_(self.is_trainable)
        return flat

    @property
    def _memory(self) -> torch.Tensor:
        """What the flat parameter views: the shard; with use_orig_params=True without the padding
        at its end, which belongs to no parameter."""
        store = self._flat_store
        if store.flat_parameter is not None:
            return store.shard.detach()
        parts = [
            store.layout.part_in_shard(index, store.rank).stop
            for index in range(len(store.layout.params))
            if store.layout.part(index, store.rank)
        ]
        return store.shard.detach()[: max(parts, default=0)]

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the shard. Setting it before the first forward converts all shards of the
        unit; collective."""
        return self._flat_store.dtype

    @_orig_param_dtype.setter
    @torch.no_grad()
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        own = self._owner
        handles = [each for each in _handles(own) if not dtypes.is_packed(each._flat_store.dtype)]
        # Clients have already converted `flat_param.data` by now.
        converted = [each._restore_data() for each in handles]
        conversion.convert([own], {each._flat_store: dtype for each in handles})
        for each, data in zip(handles, converted, strict=True):
            if data is not None:
                each._memory.copy_(data)
            if each._stand_in is not None:
                each._stand_in.data = each._memory

    def _restore_data(self) -> torch.Tensor | None:
        """Make the flat parameter view the shard again. Return the data that a client assigned to
        it meanwhile, if it has the shard's shape."""
        flat, shard = self._flat_store.flat_parameter, self._memory
        flat = self._stand_in if flat is None else flat
        if flat is None or (flat.data_ptr() == shard.data_ptr() and flat.dtype == shard.dtype):
            return None
        data, flat.data = flat.data, shard
        return data if data.shape == shard.shape else None

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._group.gather_dtype

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._group.reduce_dtype

    @property
    def _offload_params(self) -> bool:
        return self._owner.settings.offload

    @property
    def _use_orig_params(self) -> bool:
        return self._flat_store.flat_parameter is None

    @property
    def device(self) -> torch.device:
        """The device that computes with the parameters."""
        return self._owner.settings.device

    @property
    def uses_sharded_strategy(self) -> bool:
        return self._group.shard.ranks > 1

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` has the size of one of several shards."""
        return self.uses_sharded_strategy and tensor.shape == self.flat_param.shape

    def needs_unshard(self) -> bool:
        """True unless the unit's parameters are unsharded."""
        unit = self._owner.unit
        return unit.residency is not Residency.UNSHARDED and not unit.summoned

    def unshard(self) -> None:
        """Unshard the unit's parameters, until ``reshard``: in forward and backward as these do,
        between them as summon_full_params(writeback=False) does. Collective."""
        own = self._owner
        if not self.needs_unshard():
            return
        if own.runtime.runs:
            own.unit.unshard()
            own.unit.wait_for_unshard()
            return
        own.runtime.rest([own.unit])
        rendezvous.require_all_ranks("unshard", own.unit.groups)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                full_parameters([own.unit], Options(False, False, False, False, False))
            )
            _shown[own] = stack.pop_all()

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unit's unsharded parameters, unless its forward is running."""
        if free_unsharded_flat_param:
            if (shown := _shown.pop(self._owner, None)) is not None:
                shown.close()
            self._owner.unit.reshard()

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor:
        """The unsharded parameters one after the other, in the memory that modules compute with;
        empty unless forward or backward have unsharded them."""
        group = self._group
        if self._owner.unit.residency is Residency.UNSHARDED:
            return group.memory.all_gather_output.detach()
        return torch.empty(0, dtype=group.gather_dtype, device=group.device)

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move this rank's shard and its gradients as ``Tensor.to`` would. Move it back before the
        model runs."""
        store = self._flat_store
        empty = torch.empty(0, dtype=store.dtype, device=store.shard.device)
        device = empty.to(*args, **kwargs).device
        conversion.move(self._owner, self._group, device)
        if self._stand_in is not None:
            self._stand_in.data = self._memory

    def __getattr__(self, name: str) -> Any:
        instead = _INSTEAD.get(name, "use public methods of FullyShardedDataParallel")
        raise AttributeError(
            f"fsdp_compat's handle of a flat parameter has no {name!r}. To do: {instead}."
        )
