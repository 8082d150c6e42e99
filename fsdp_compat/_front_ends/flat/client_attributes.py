"""Attributes of torch's FSDP1 that programs and client libraries read or set on a wrapped model.
None of them is used during a step. Who reads the private ones: ``_install/contents.py``."""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._stores.flat_store import FlatParameter
from ...api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from .flat_param_handle import FlatParamHandle, handle_of, handles_in, handles_of, reading
from .flat_unit import FlatUnit
from .settings import PREFETCHES


class TrainingState(enum.Enum):
    """What a wrapped model is doing."""

    IDLE = enum.auto()
    FORWARD_BACKWARD = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


_PREFETCHES = {its: given for given, its in PREFETCHES.items()}


def _setting(name: str, doc: str) -> Any:
    return reading(f"_fsdp_model_unit.settings.{name}", doc)


class ClientAttributes(nn.Module):
    """The attributes of a wrapped model that are computed from its unit and its settings."""

    _fsdp_model_unit: FlatUnit

    # -- constructor arguments

    mixed_precision: MixedPrecision = _setting("mixed_precision", "The unit's dtypes.")
    sharding_strategy: ShardingStrategy = _setting("strategy", "How the unit is sharded.")
    forward_prefetch: bool = _setting("forward_prefetch", "As given to the constructor.")
    limit_all_gathers: bool = _setting("limit_all_gathers", "As given to the constructor.")
    compute_device: torch.device = _setting("device", "The device of forward and backward.")
    process_group: dist.ProcessGroup = _setting(
        "group", "The ranks over which one copy of the parameters is sharded."
    )

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next unit."""
        return _PREFETCHES[self._fsdp_model_unit.settings.runtime.backward_prefetch]

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards, gradients and optimizer state are on the CPU."""
        return CPUOffload(offload_params=self._fsdp_model_unit.settings.offload)

    @property
    def rank(self) -> int:
        """The rank of this process in ``process_group``."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        return dist.get_world_size(self.process_group)

    # -- parameters and state

    @property
    def params(self) -> list[FlatParameter]:
        """This rank's flat shards of the unit."""
        return [handle.flat_param for handle in handles_of(self._fsdp_model_unit)]

    @property
    def training_state(self) -> TrainingState:
        """What the model is doing."""
        own = self._fsdp_model_unit
        if own.unit.summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if own.runtime.runs else TrainingState.IDLE

    _state_dict_type: StateDictType = reading("_fsdp_model_unit.form.state_dict_type")

    @property
    def _has_params(self) -> bool:
        return bool(self._fsdp_model_unit.unit.groups)

    @property
    def _is_root(self) -> bool:
        """True if no other FullyShardedDataParallel instance contains this one. Clients set it to
        None to make torch determine it again; here that has no effect."""
        return self._fsdp_model_unit.unit.is_root

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        pass

    @property
    def _flat_param(self) -> FlatParameter | None:
        handle = self._handle
        return None if handle is None else handle.flat_param

    @property
    def _handle(self) -> FlatParamHandle | None:
        return handle_of(self._fsdp_model_unit)

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        """The handles of all units in the model."""
        return handles_in(self)
