"""How each contender is made of one model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp_compat
from fsdp_compat.wrap import ModuleWrapPolicy

CPU = torch.device("cpu")
PLAIN, DDP, OURS, FSDP1, FSDP2 = "plain", "DDP", "ours", "FSDP1", "FSDP2"
FULLY_SHARD = "fully_shard of ours"
ORIGINAL = ", original parameters"  # suffix: use_orig_params=True
ALL = (PLAIN, DDP, OURS, OURS + ORIGINAL, FSDP1, FSDP1 + ORIGINAL, FSDP2, FULLY_SHARD)

# By the names that ours and FSDP1 give them. FSDP2: SHARD_GRAD_OP is reshard_after_forward=False.
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"
STRATEGIES = (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)
HYBRID_SHARD = "HYBRID_SHARD"


def has_contender(name: str, strategy: str) -> bool:
    """FSDP2 has no NO_SHARD."""
    return strategy != NO_SHARD or name not in (FSDP2, FULLY_SHARD)


def fsdp1_of(name: str) -> str:
    """Return the name of the FSDP1 that a contender is compared with: the one of the same
    use_orig_params."""
    return FSDP1 + ORIGINAL if name.endswith(ORIGINAL) else FSDP1


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """What all contenders are asked to do."""

    units: tuple[type[nn.Module], ...]  # what is left over belongs to the root
    strategy: str = FULL_SHARD
    device: torch.device = CPU
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    forward_prefetch: bool = False
    backward_prefetch: str | None = "BACKWARD_PRE"
    offloads: bool = False
    ranks_per_node: int = 1  # for HYBRID_SHARD
    # of fully_shard with FULL_SHARD; None is its own choice: no, as backward begins with the root
    reshards_root: bool | None = None

    def mesh(self) -> DeviceMesh:
        ranks = dist.get_world_size()
        if self.strategy != HYBRID_SHARD:
            return init_device_mesh(self.device.type, (ranks,), mesh_dim_names=("shard",))
        shape = (ranks // self.ranks_per_node, self.ranks_per_node)
        names = ("replicate", "shard")
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)


def wrap(name: str, model: nn.Module, how: Wrapping) -> nn.Module:
    """Return the model as a contender has it. Collective: all ranks."""
    if name == PLAIN:
        return model.to(how.device)
    if name == DDP:
        return DistributedDataParallel(model.to(how.device))
    library = torch_fsdp if name.startswith("FSDP") else fsdp_compat
    if name in (FSDP2, FULLY_SHARD):
        return _fully_sharded(library, model, how)
    return _flat(library, model, how, name.endswith(ORIGINAL))


def _flat(library: Any, model: nn.Module, how: Wrapping, use_orig_params: bool) -> nn.Module:
    policy = TorchModuleWrapPolicy if library is torch_fsdp else ModuleWrapPolicy
    dtypes = {"param_dtype": how.param_dtype, "reduce_dtype": how.reduce_dtype}
    prefetch = how.backward_prefetch and library.BackwardPrefetch[how.backward_prefetch]
    wrapped: nn.Module = library.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy(set(how.units)),
        sharding_strategy=library.ShardingStrategy[how.strategy],
        device_id=how.device,
        device_mesh=how.mesh() if how.strategy == HYBRID_SHARD else None,
        mixed_precision=library.MixedPrecision(**dtypes) if any(dtypes.values()) else None,
        cpu_offload=library.CPUOffload(offload_params=True) if how.offloads else None,
        forward_prefetch=how.forward_prefetch,
        backward_prefetch=prefetch,
        use_orig_params=use_orig_params,
    )
    return wrapped


def _fully_sharded(library: Any, model: nn.Module, how: Wrapping) -> nn.Module:
    options: dict[str, Any] = {
        "mesh": how.mesh(),
        "mp_policy": library.MixedPrecisionPolicy(how.param_dtype, how.reduce_dtype),
    }
    if how.offloads:
        options["offload_policy"] = library.CPUOffloadPolicy()
    else:
        model.to(how.device)
    reshards = how.strategy != SHARD_GRAD_OP
    units: list[Any] = [module for module in model.modules() if isinstance(module, how.units)]
    for unit in units:
        library.fully_shard(unit, reshard_after_forward=reshards, **options)
    of_root = how.reshards_root if reshards else False
    wrapped: nn.Module = library.fully_shard(model, reshard_after_forward=of_root, **options)
    if how.forward_prefetch:
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    return wrapped


@dataclasses.dataclass(frozen=True)
class Contender:
    """A wrapped copy of the model, and what an optimizer would hold of it."""

    name: str
    model: nn.Module
    parameters: tuple[nn.Parameter, ...]

    def zero_grad(self) -> None:
        """As an optimizer does it: from its own list, without walking over the modules."""
        for parameter in self.parameters:
            parameter.grad = None


def build(
    base: nn.Module, how: Wrapping, names: Sequence[str] = ALL, *, without: Sequence[str] = ()
) -> list[Contender]:
    """Return contenders, each around its own copy of ``base``. Collective."""
    found = []
    for name in names:
        if name not in without and has_contender(name, how.strategy):
            model = wrap(name, copy.deepcopy(base), how)
            found.append(Contender(name, model, tuple(model.parameters())))
    return found
