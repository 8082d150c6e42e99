"""FullyShardedDataParallel with the API of torch.distributed.fsdp, on any device that
torch.distributed supports."""

from fsdp_compat.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_compat.errors import CheckpointError, FsdpCompatError, StateError, UsageError
from fsdp_compat.fully_sharded_data_parallel import (
    FlatParameter,
    FullyShardedDataParallel,
    OptimStateKeyType,
    register_fsdp_forward_method,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CheckpointError",
    "FlatParameter",
    "FsdpCompatError",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StateError",
    "UsageError",
    "register_fsdp_forward_method",
]
