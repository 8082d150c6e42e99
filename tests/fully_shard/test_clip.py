"""torch's clip_grad_norm_ where only some modules are tensor-parallel: their gradients are DTensors
of another mesh than the others'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compat import fully_shard
from tests.support.models import DIM, Stack
from tests.support.parity import seeded
from tests.support.ranks import run_ranks

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def parallel(mesh: Any) -> Any:
    model: Any = seeded(Stack)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def check(norm_type: float, foreach: bool | None) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"].get_local_rank()
    plain, model = seeded(Stack), parallel(mesh)
    batch = torch.randn(4 * mesh["dp"].size(), DIM, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # the second step shows whether the first has scaled
        norms = []
        for each, own in ((plain, batch), (model, batch[4 * dp : 4 * dp + 4])):
            optimizer = torch.optim.SGD(each.parameters(), 0.5)
            each(own).square().mean().backward()
            norms.append(
                nn.utils.clip_grad_norm_(each.parameters(), 0.1, norm_type, foreach=foreach)
            )
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[1], norms[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_norm_is_that_of_the_unsharded_model(ranks: int) -> None:
    run_ranks(ranks, check, 2.0, None)
    run_ranks(ranks, check, float("inf"), False)
