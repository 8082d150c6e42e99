"""Groups of parameters, frozen ones, and ones that no loss depends on."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.spare = nn.Linear(16, 16)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def main(folder):
    torch.manual_seed(0)
    net = Net()
    model: DDP = DDP(net, find_unused_parameters=True)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    groups = [
        {"params": [each for name, each in named if name.endswith("bias")], "weight_decay": 0.0},
        {"params": [each for name, each in named if not name.endswith("bias")]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
    losses = []
    for step in range(8):
        seed = 2 * step + dist.get_rank()
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses
