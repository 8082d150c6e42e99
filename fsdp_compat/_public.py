"""The public names of the package."""

from fsdp_compat._front_ends.fully_shard.api import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    ShardPlacementResult,
)
from fsdp_compat._front_ends.fully_shard.fully_shard import fully_shard
from fsdp_compat._front_ends.fully_shard.handles import GradientReductionHandle, UnshardHandle
from fsdp_compat._front_ends.fully_shard.module import (
    FSDPModule,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    share_comm_ctx,
)
from fsdp_compat._plan import Plan, plan
from fsdp_compat._state.description import Description, UnitDescription, describe
from fsdp_compat._state.ema import ShardedEMA
from fsdp_compat._state.grad_norms import param_grad_norms
from fsdp_compat._state.whole_parameters import WholeParameterOptimizer
from fsdp_compat._torch_patches import undo_torch_patches
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

# last: it reads the names above
from fsdp_compat._install import install, uninstall  # isort: skip

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "Comm",
    "DataParallelMeshDims",
    "Description",
    "FSDPMeshInfo",
    "FSDPModule",
    "FlatParameter",
    "FsdpCompatError",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Plan",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedEMA",
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
    "WholeParameterOptimizer",
    "describe",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "install",
    "param_grad_norms",
    "plan",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "undo_torch_patches",
    "uninstall",
]
