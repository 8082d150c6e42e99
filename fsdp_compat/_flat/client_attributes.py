"""Attributes of torch's FSDP1 that programs and client libraries read, or set, on a wrapped model.

Accelerate, Lightning, verl, Composer and litgpt reach for a good part of what torch's class keeps
on its instances, and dynamo asks the modules. All of it is answered here, from the settings, the
unit and the runtime; the class binds each name in one line, and nothing of it runs in a step."""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._engine import dtypes
from .._engine.group import Group
from .._engine.module_attributes import MARKS
from .._engine.schedule import Prefetch
from .._engine.unit import Residency
from .._stores.flat_store import FlatStore
from .._stores.registration import FlatParameter
from ..api import BackwardPrefetch, CPUOffload, ShardingStrategy
from ..errors import StateError, explain
from . import conversion
from .flat_unit import FlatUnit, flat_unit_of, flat_units_in

__all__ = ["FlatParamHandle", "TrainingState", "mark"]


class TrainingState(enum.Enum):
    """What an instance is doing."""

    IDLE = enum.auto()
    FORWARD_BACKWARD = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


def mark(module: nn.Module, left_out: Collection[nn.Module]) -> None:
    """Mark the modules below a unit, but for those that are left out, as torch does. Before the
    unit is made.

    Dynamo asks for it, and so does transformers' generate, to keep ranks together. Dynamo refuses
    modules without original parameters; ours show whole parameters in forward either way.
    """
    for child in module.modules():
        if child not in left_out and MARKS[0] not in child.__dict__:
            attributes = dict(child.__dict__)
            child.__dict__.clear()
            child.__dict__.update(
                dict.fromkeys(MARKS, True), **attributes
            )  # in front, where a forward does not look


# -- what it was made with


def sharding_strategy(self: nn.Module) -> ShardingStrategy:
    """The strategy it was made with."""
    return flat_unit_of(self).settings.strategy


def process_group(self: nn.Module) -> dist.ProcessGroup:
    """The ranks over which one copy of the parameters is spread."""
    return flat_unit_of(self).settings.group


def rank(self: nn.Module) -> int:
    """The rank of this process in ``process_group``."""
    return dist.get_rank(flat_unit_of(self).settings.group)


def world_size(self: nn.Module) -> int:
    """The number of ranks in ``process_group``."""
    return dist.get_world_size(flat_unit_of(self).settings.group)


def cpu_offload(self: nn.Module) -> CPUOffload:
    """Whether shards, gradients and the optimizer are on the CPU."""
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


# -- what it holds and does


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
    """True if no other instance is around this one. Clients set it, to None, so that torch looks
    again: ours needs no such hint."""
    return flat_unit_of(self).unit.is_root


def exec_order_data(self: nn.Module) -> types.SimpleNamespace:
    """Where clients set how far to prefetch. It has no effect: two units at most are gathered at a
    time."""
    return self.__dict__.setdefault(
        "_prefetch_limits",
        types.SimpleNamespace(_forward_prefetch_limit=1, _backward_prefetch_limit=1),
    )


def ignore(self: nn.Module, value: Any) -> None:
    """The setter of what clients set to no effect."""


def lazy_init(state: nn.Module, module: nn.Module) -> nn.Module:
    """Torch's ``_lazy_init``: there is nothing left to initialise."""
    return state


def root_pre_forward(
    state: nn.Module,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Torch's ``_root_pre_forward``, which clients call before they use a part of the model:
    forward does all that by itself."""
    return args, kwargs


# -- handles


def flat_param(self: nn.Module) -> FlatParameter | None:
    """This rank's flat shard of the unit's trainable parameters, or of all if none is; None without
    parameters."""
    its = handle(self)
    return None if its is None else its.flat_param


def handle(self: nn.Module) -> FlatParamHandle | None:
    """The handle of ``_flat_param``."""
    handles = _handles(flat_unit_of(self))
    return next((its for its in handles if its.is_trainable), handles[0] if handles else None)


def all_handles(self: nn.Module) -> list[FlatParamHandle]:
    """The handles of this instance and of all below it."""
    return [its for each in flat_units_in(self) for its in _handles(each)]


# {store: its handle}. The handle holds neither the store nor the instance.
_kept: weakref.WeakKeyDictionary[FlatStore, FlatParamHandle] = weakref.WeakKeyDictionary()


def _handles(own: FlatUnit) -> list[FlatParamHandle]:
    found = []
    for store in own.stores:
        if store not in _kept:
            _kept[store] = FlatParamHandle(own, store)
        found.append(_kept[store])
    return found


class FlatParamHandle:
    """What clients take for torch's handle of a flat parameter: one for each group of a unit."""

    def __init__(self, own: FlatUnit, store: FlatStore) -> None:
        self._unit, self._store = weakref.ref(own), weakref.ref(store)
        self._stand_in: FlatParameter | None = (
            None  # with original parameters: made when it is asked for, and kept
        )

    @property
    def _owner(self) -> FlatUnit:
        owner = self._unit()
        if owner is None:
            raise self._gone()
        return owner

    def _gone(self) -> StateError:
        return StateError(
            explain(
                "The model of this handle is gone.",
                expected="a model that lives as long as its handles are used",
                got="a handle of one that was deleted",
                where="a handle of a FullyShardedDataParallel",
                fix="ask the model for its handles when they are needed",
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
        """The FlatParameter; with original parameters one object over the same memory, which the
        optimizer does not know."""
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
        """The dtype of the shard. To set it before the first forward converts all shards of the
        unit; collective."""
        return self._flat_store.dtype

    @_orig_param_dtype.setter
    @torch.no_grad()
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        own = self._owner
        handles = [its for its in _handles(own) if not dtypes.is_packed(its._flat_store.dtype)]
        given = [
            its._take_back() for its in handles
        ]  # clients have converted `flat_param.data` by then
        conversion.convert([own], {its._flat_store: dtype for its in handles})
        for its, data in zip(handles, given, strict=True):
            if data is not None:
                its._flat_store.shard.copy_(data)
            if its._stand_in is not None:
                its._stand_in.data = its._flat_store.shard.detach()

    def _take_back(self) -> torch.Tensor | None:
        """Let the flat parameter view the shard again; return the data that a client has given it
        instead, if it fits."""
        flat, shard = self._flat_store.flat_parameter, self._flat_store.shard.detach()
        flat = self._stand_in if flat is None else flat
        if flat is None or (flat.data_ptr() == shard.data_ptr() and flat.dtype == shard.dtype):
            return None
        data, flat.data = flat.data, shard
        return data if data.shape == shard.shape else None

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._group.precision.gather

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._group.precision.reduce

    @property
    def _offload_params(self) -> bool:
        return self._owner.settings.offload

    @property
    def _use_orig_params(self) -> bool:
        return self._flat_store.flat_parameter is None

    @property
    def device(self) -> torch.device:
        """Where parameters are computed with."""
        return self._owner.settings.device

    @property
    def uses_sharded_strategy(self) -> bool:
        return self._group.shard.ranks > 1

    def needs_unshard(self) -> bool:
        """True unless the unit's parameters are whole on this rank."""
        return self._owner.unit.residency is not Residency.UNSHARDED

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unit's whole parameters, unless its forward runs."""
        if free_unsharded_flat_param:
            self._owner.unit.reshard()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move this rank's shard, with its gradients, as ``Tensor.to`` moves a tensor. It has to be
        back before the model runs."""
        store = self._flat_store
        device = (
            torch.empty(0, dtype=store.dtype, device=store.shard.device).to(*args, **kwargs).device
        )
        conversion.move(self._owner, self._group, device)
        if self._stand_in is not None:
            self._stand_in.data = store.shard.detach()
