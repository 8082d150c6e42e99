"""Accumulated gradients, clipping, an optimizer and a scheduler from before DDP."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

ACCUMULATE = 3


def main(folder):
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    # the optimizer comes first here
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)  # all of them
    scheduler = StepLR(optimizer, step_size=4, gamma=0.5)
    ddp_model = DistributedDataParallel(
        net,
        bucket_cap_mb=1,
        gradient_as_bucket_view=True,
    )
    data = torch.randn(24, 6, 8, generator=torch.Generator().manual_seed(rank))
    results = []
    for number, batch in enumerate(data):
        last = number % ACCUMULATE == ACCUMULATE - 1
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            loss = (ddp_model(batch) - 1).square().mean() / ACCUMULATE
            loss.backward()
        results.append(loss.item())
        if last:
            norm = clip_grad_norm_(ddp_model.parameters(), 0.1, norm_type=2.0)
            results.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return results
