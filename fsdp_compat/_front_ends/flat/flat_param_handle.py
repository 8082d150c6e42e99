"""The handle of a flat parameter in torch's FSDP1, through which clients read, cast and move
parameters: ``_install/contents.py`` says who. Training never calls it, so replacing its methods has
no effect."""

from __future__ import annotations

import operator
import weakref
from typing import Any, TypeVar

import torch
from torch import nn

from ..._engine import dtypes
from ..._engine.group import Group
from ..._engine.unit import Residency
from ..._stores.flat_store import FlatParameter, FlatStore
from ...errors import StateError
from . import conversion
from .flat_unit import FlatUnit, flat_units_in

_T = TypeVar("_T")

# The handles made so far. A handle refers to its store and its unit only weakly.
_made: weakref.WeakKeyDictionary[FlatStore, FlatParamHandle] = weakref.WeakKeyDictionary()

# Attributes of torch's handle that have no meaning here.
_INSTEAD = {
    "_training_state": "read module.training_state",
    "_use_sharded_views": "move the shard with flat_param_to(device)",
    "sharded_grad": "read flat_param.grad",
}


def handles_of(own: FlatUnit) -> list[FlatParamHandle]:
    """Return the handles of a unit, one for each of its parameter groups."""
    for store in own.stores:
        if store not in _made:
            _made[store] = FlatParamHandle(own, store)
    return [_made[store] for store in own.stores]


def handles_in(module: nn.Module) -> list[FlatParamHandle]:
    """Return the handles of all units in a module."""
    return [handle for own in flat_units_in(module) for handle in handles_of(own)]


def handle_of(own: FlatUnit) -> FlatParamHandle | None:
    """Return the handle of the trainable parameters, else of the frozen ones, else None."""
    handles = handles_of(own)
    return next((each for each in handles if each.is_trainable), handles[0] if handles else None)


def _alive(reference: weakref.ref[_T]) -> _T:
    found = reference()
    if found is None:
        raise StateError.of(
            "The model of this handle has been garbage-collected.",
            expected="a model that lives as long as its handles are used",
            got="a handle of a deleted model",
            where="a handle of a FullyShardedDataParallel",
            fix="keep the model, and get its handles from it when you need them",
        )
    return found


def reading(path: str, doc: str | None = None) -> Any:
    """Return a property that reads an attribute, given by a dotted path."""
    return property(operator.attrgetter(path), doc=doc)


class FlatParamHandle:
    """Replaces torch's handle of a flat parameter."""

    def __init__(self, own: FlatUnit, store: FlatStore) -> None:
        self._unit, self._store = weakref.ref(own), weakref.ref(store)
        # With use_orig_params=True: created on first use, then kept.
        self._stand_in: FlatParameter | None = None

    @property
    def _owner(self) -> FlatUnit:
        return _alive(self._unit)

    @property
    def _flat_store(self) -> FlatStore:
        return _alive(self._store)

    @property
    def _group(self) -> Group:
        return next(group for group in self._owner.unit.groups if group.store is self._flat_store)

    @property
    def is_trainable(self) -> bool:
        return any(param.requires_grad for param, _ in self._flat_store.sharded_params)

    @property
    def flat_param(self) -> FlatParameter:
        """The FlatParameter; with use_orig_params=True a stand-in that no optimizer holds."""
        store = self._flat_store
        if store.flat_parameter is not None:
            return store.flat_parameter
        if self._stand_in is None:
            self._stand_in = FlatParameter(self._memory)
            self._stand_in.set_layout(store.layout, store.rank)
        flat = self._stand_in
        if flat.requires_grad is not self.is_trainable:
            flat.requires_grad_(self.is_trainable)
        return flat

    @property
    def _memory(self) -> torch.Tensor:
        """What the flat parameter views: the shard; with use_orig_params=True without padding."""
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
        """The dtype of the shard. Setting it before the first forward converts it; collective."""
        return self._flat_store.dtype

    @_orig_param_dtype.setter
    @torch.no_grad()
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        own = self._owner
        handles = [each for each in handles_of(own) if not dtypes.is_packed(each._flat_store.dtype)]
        # Clients have already converted `flat_param.data` by now.
        converted = [each._restore_data() for each in handles]
        conversion.convert([own], {each._flat_store: dtype for each in handles})
        for each, data in zip(handles, converted, strict=True):
            if data is not None:
                each._memory.copy_(data)
            if each._stand_in is not None:
                each._stand_in.data = each._memory

    def _restore_data(self) -> torch.Tensor | None:
        """View the shard again. Return the data of its shape that a client assigned, or None."""
        flat, shard = self._flat_store.flat_parameter, self._memory
        flat = self._stand_in if flat is None else flat
        if flat is None or (flat.data_ptr() == shard.data_ptr() and flat.dtype == shard.dtype):
            return None
        data, flat.data = flat.data, shard
        return data if data.shape == shard.shape else None

    _offload_params: bool = reading("_owner.settings.offload")

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unit's unsharded parameters, unless its forward is running."""
        if free_unsharded_flat_param:
            self._owner.unit.reshard()

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor:
        """The memory modules compute with; empty unless forward or backward unsharded it."""
        group = self._group
        if self._owner.unit.residency is Residency.UNSHARDED:
            return group.memory.all_gather_output.detach()
        return torch.empty(0, dtype=group.gather_dtype, device=group.device)

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move the shard and gradients like ``Tensor.to``. Move back before the model runs."""
        store = self._flat_store
        empty = torch.empty(0, dtype=store.dtype, device=store.shard.device)
        device = empty.to(*args, **kwargs).device
        conversion.move(self._owner, self._group, device)
        if self._stand_in is not None:
            self._stand_in.data = self._memory

    def __getattr__(self, name: str) -> Any:
        instead = _INSTEAD.get(name, "open FullyShardedDataParallel.summon_full_params(module)")
        raise AttributeError(
            f"fsdp_compat's handle of a flat parameter has no {name!r}. To do: {instead}."
        )
