"""Parts of torch that compare classes of FSDP work with ours after ``install()``."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compat
from tests.support.parity import assert_close
from tests.support.ranks import run_ranks

DIM, MICROBATCHES = 8, 4


def _stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2))) for _ in range(2)]


def _pipelines() -> None:
    """Two stages, each sharded over two ranks; the gradients are the unsharded model's."""
    fsdp_compat.install()
    try:
        from torch.distributed.fsdp import FSDPModule, fully_shard
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
        stage, replica = mesh.get_coordinate() or ()
        plain = nn.Sequential(*_stages())
        model = _stages()[stage]
        for layer in model:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        assert isinstance(model, FSDPModule)
        schedule = ScheduleGPipe(
            PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("pipeline")),
            MICROBATCHES,
            loss_fn=lambda output, target: (output - target).pow(2).mean(),
        )
        batches = [torch.randn(8, DIM) for _ in range(2)]
        for step in range(2):
            if stage == 0:
                schedule.step(batches[replica])
            else:
                schedule.step(target=torch.zeros(8, DIM))
            plain.zero_grad()
            for batch in batches:
                (plain(batch).pow(2).mean() / 2).backward()
            expected = dict(plain[stage].named_parameters())
            for name, p in model.named_parameters():
                assert p.grad is not None
                wanted = expected[name].grad
                assert wanted is not None
                assert_close(p.grad.full_tensor(), wanted, f"gradient of {name} in step {step}")
                p.grad = None
    finally:
        fsdp_compat.uninstall()


def test_pipelining_trains_sharded_stages() -> None:
    run_ranks(4, _pipelines)
