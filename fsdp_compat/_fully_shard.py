"""The names of torch.distributed.fsdp._fully_shard, and those of its private modules that programs
import."""

from ._front_ends.fully_shard.fully_shard import fully_shard
from ._front_ends.fully_shard.handles import GradientReductionHandle, UnshardHandle
from ._front_ends.fully_shard.module import (
    FSDPModule,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    share_comm_ctx,
)
from ._front_ends.fully_shard.policies import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    ShardPlacementResult,
)
from .fully_sharded_data_parallel import register_fsdp_forward_method

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
