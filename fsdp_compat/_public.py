"""The public names of the package."""

from fsdp_compat._features.description import Description, UnitDescription, describe
from fsdp_compat._front_ends.fully_shard.fully_shard import fully_shard
from fsdp_compat._front_ends.fully_shard.handles import UnshardHandle
from fsdp_compat._front_ends.fully_shard.module import FSDPModule, share_comm_ctx
from fsdp_compat._front_ends.fully_shard.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fsdp_compat._plan import Plan, plan
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
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler

# last: it reads the names above
from fsdp_compat._install import install, uninstall  # isort: skip

# No modules: `import *` would put `optim` and `checkpoint` over the user's, which are torch's.
__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "DataParallelMeshDims",
    "Description",
    "FSDPModule",
    "FlatParameter",
    "FsdpCompatError",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Plan",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StateError",
    "UnitDescription",
    "UnshardHandle",
    "UsageError",
    "describe",
    "fully_shard",
    "install",
    "plan",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
]
