"""A loop, and nothing else."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(folder):
    rank = dist.get_rank()
    torch.manual_seed(rank)  # rank 0's weights count
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(12, 6, 8, generator=torch.Generator().manual_seed(rank))
    losses = []
    for batch in data:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
