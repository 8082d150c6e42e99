"""DistributedDataParallel around, beside and inside sharded modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import UsageError, fully_shard
from tests.support.parity import local
from tests.support.ranks import on_ranks


def _sharded(kind: str) -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Linear(4, 4)
    if kind == "fully_shard":
        return fully_shard(inner)
    return FSDP(inner, use_orig_params=kind == "original")


@pytest.mark.parametrize("kind", ["flat", "original", "fully_shard"])
@on_ranks(2)
def test_ddp_refuses_sharded_parameters_unless_it_ignores_them(kind: str) -> None:
    x = torch.full((2, 4), float(dist.get_rank()))
    sharded = _sharded(kind)
    before = [local(p).clone() for p in sharded.parameters()]
    model = nn.Sequential(sharded, nn.Linear(4, 2))
    for module in (sharded, model):
        with pytest.raises(UsageError, match="DistributedDataParallel cannot synchronize"):
            DDP(module)
    assert all(map(torch.equal, before, map(local, sharded.parameters())))

    names = [f"0.{name}" for name, _ in sharded.named_parameters()]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DDP(model)
    for _ in range(2):
        ddp(x).sum().backward()
    grads: list[Any] = [None, None]
    assert model[1].weight.grad is not None
    dist.all_gather_object(grads, model[1].weight.grad)
    assert torch.equal(*grads)
    assert all(p.grad is not None for p in sharded.parameters() if local(p).numel())
