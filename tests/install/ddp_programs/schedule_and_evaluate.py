"""A scheduler, evaluation between epochs, and the best model saved at the end."""

import os
from itertools import count

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR


@torch.no_grad()
def evaluate(model, batch):
    model.eval()
    loss = (model(batch) - 1).square().mean()
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main(folder):
    rank = dist.get_rank()
    master_process = rank == 0
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 4))
    model = DDP(model, None, None)
    raw_model = model.module if hasattr(model, "module") else model
    optimizer = optim.RMSprop(params=model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    draws = torch.Generator().manual_seed(rank)
    held_out = torch.randn(6, 8, generator=draws)
    losses = []
    for _ in range(4):
        for _, batch in zip(range(3), count(), strict=False):
            loss = (model(torch.randn(6, 8, generator=draws)) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        losses.append(evaluate(model, held_out))
    path = os.path.join(folder, "best.pt")
    if master_process:
        torch.save({"model": raw_model.state_dict(), "schedule": scheduler.state_dict()}, path)
    dist.barrier()
    again = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 4))
    again.load_state_dict(torch.load(path)["model"])  # a model that is not wrapped
    losses.append(evaluate(again, held_out))
    return losses
