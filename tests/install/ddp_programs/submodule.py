"""Only the trained part of a model is wrapped, under one of two conditions."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 4).requires_grad_(False)
        if dist.get_world_size() > 1:
            self.encoder = parallel.DistributedDataParallel(self.encoder, static_graph=True)
        else:
            self.encoder = parallel.DistributedDataParallel(self.encoder)

    def forward(self, x):
        return self.head(self.encoder(x))


def main(folder):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.encoder.parameters(), lr=0.02)
    losses = []
    for step in range(8):
        seed = 2 * step + dist.get_rank()
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
