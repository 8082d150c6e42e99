"""Rank 0 saves, all ranks resume."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save_checkpoint(model, optimizer, epoch, path):
    # one file, written once
    if dist.get_rank() == 0:
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),  # moments
                "epoch": epoch,
            },
            path,
        )
    dist.barrier()


def load_checkpoint(model, optimizer, path):
    checkpoint = torch.load(path, map_location="cpu")
    model.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"]


def run(path, epochs):
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = DDP(net, find_unused_parameters=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    first = 0
    if os.path.exists(path):
        first = load_checkpoint(model, optimizer, path) + 1
    losses = []
    for epoch in range(first, epochs):
        seed = 2 * epoch + dist.get_rank()
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save_checkpoint(model, optimizer, epochs - 1, path)
    return losses


def main(folder):
    path = os.path.join(folder, "checkpoint.pt")
    return run(path, 5) + run(path, 9)
