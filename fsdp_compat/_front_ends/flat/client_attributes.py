"""Attributes of torch's FSDP1 that client libraries read or set on a wrapped model.

Accelerate, Lightning, verl, Composer and litgpt use many private attributes of torch's class, and
dynamo reads marks on modules. This module computes them all from the settings, the unit and the
runtime. FullyShardedDataParallel binds each name in one line; none of it runs during a step."""

from __future__ import annotations

import enum
import types
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._engine import dtypes
from ..._engine.group import Group
from ..._engine.schedule import Prefetch
from ..._engine.unit import Residency
from ..._stores.flat_store import FlatStore
from ..._stores.registration import FlatParameter
from ...api import BackwardPrefetch, CPUOffload, ShardingStrategy
from ...errors import StateError, explain
from . import conversion
from .flat_unit import FlatUnit, flat_unit_of, flat_units_in

__all__ = ["FlatParamHandle", "TrainingState"]


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


def _handles(own: FlatUnit) -> list[FlatParamHandle]:
    for store in own.stores:
        if store not in _handle_of:
            _handle_of[store] = FlatParamHandle(own, store)
    return [_handle_of[store] for store in own.stores]


class FlatParamHandle:
    """Stands for torch's handle of a flat parameter: one for each parameter group of a unit."""

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
        return StateError(
            explain(
                "The model of this handle has been garbage-collected.",
                expected="a model that lives as long as its handles are used",
                got="a handle of a deleted model",
                where="a handle of a FullyShardedDataParallel",
                fix="keep the model, and get its handles from it when you need them",
            )
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
            self._stand_in = FlatParameter(store.shard.detach())
            self._stand_in._fqns = store.layout.names
        flat = self._stand_in
        if flat.requires_grad is not self.is_trainable:
            flat.requires_grad_(self.is_trainable)
        return flat

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
                each._flat_store.shard.copy_(data)
            if each._stand_in is not None:
                each._stand_in.data = each._flat_store.shard.detach()

    def _restore_data(self) -> torch.Tensor | None:
        """Make the flat parameter view the shard again. Return the data that a client assigned to
        it meanwhile, if it has the shard's shape."""
        flat, shard = self._flat_store.flat_parameter, self._flat_store.shard.detach()
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

    def needs_unshard(self) -> bool:
        """True unless the unit's parameters are unsharded."""
        return self._owner.unit.residency is not Residency.UNSHARDED

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unit's unsharded parameters, unless its forward is running."""
        if free_unsharded_flat_param:
            self._owner.unit.reshard()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move this rank's shard and its gradients as ``Tensor.to`` would. Move it back before the
        model runs."""
        store = self._flat_store
        empty = torch.empty(0, dtype=store.dtype, device=store.shard.device)
        device = empty.to(*args, **kwargs).device
        conversion.move(self._owner, self._group, device)
        if self._stand_in is not None:
            self._stand_in.data = store.shard.detach()
