"""A gradient scaler, clipping, groups of parameters, and frozen and unused ones."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.spare = nn.Linear(16, 16)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def train(model, optimizer, scaler, batch):
    with autocast("cpu", dtype=torch.bfloat16, enabled=False):
        loss = (model(batch) - 1).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def main(folder):
    torch.manual_seed(0)
    model: DDP = DDP(Net(), find_unused_parameters=True)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    groups = [
        {"params": [each for name, each in named if name.endswith("bias")], "weight_decay": 0.0},
        {"params": [each for name, each in named if not name.endswith("bias")]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        train(model, optimizer, scaler, torch.randn(6, 8, generator=generator)) for _ in range(10)
    ]
