"""The class under its full name, fixed batch norms, and a test of the type."""

import torch
import torch.distributed
import torch.nn as tnn


def main(folder):
    torch.manual_seed(0)
    net = tnn.Sequential(tnn.Linear(8, 16), tnn.BatchNorm1d(16), tnn.ReLU(), tnn.Linear(16, 4))
    net.eval()
    wrapped = torch.nn.parallel.DistributedDataParallel(net, static_graph=True)
    assert isinstance(wrapped, tnn.parallel.DistributedDataParallel)
    optimizer = torch.optim.SGD(wrapped.module.parameters(), lr=0.1)
    losses = []
    for step in range(8):
        seed = 2 * step + torch.distributed.get_rank()
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        loss = wrapped(batch).square().mean()
        loss.backward()
        optimizer.step()
        wrapped.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(wrapped.module(torch.ones(1, 8)).sum().item())
        losses.append(wrapped.module.forward(torch.ones(1, 8)).sum().item())
    return losses
