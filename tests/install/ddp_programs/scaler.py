"""A gradient scaler, with clipping of unscaled gradients."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, optimizer, scaler, batch):
    with autocast("cpu", dtype=torch.bfloat16, enabled=False):
        loss = (model(batch) - 1).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


def main(folder):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        train(model, optimizer, scaler, torch.randn(6, 8, generator=generator)) for _ in range(10)
    ]
