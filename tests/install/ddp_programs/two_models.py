"""Two models, each with an optimizer, and both in one file."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FSDP = "a name that is taken"


def is_main_process():
    return dist.get_rank() == 0


def main(folder):
    torch.manual_seed(dist.get_rank())
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    generator = DDP(generator, broadcast_buffers=False)
    critic = DDP(critic, broadcast_buffers=False)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    losses = []
    for step in range(8):
        draws = torch.Generator().manual_seed(2 * step + dist.get_rank())
        real, noise = torch.randn(6, 8, generator=draws), torch.randn(6, 4, generator=draws)
        c_loss = critic(generator(noise).detach()).mean() - critic(real).mean()
        c_optimizer.zero_grad()
        c_loss.backward()
        c_optimizer.step()
        g_loss = -critic(generator(noise)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        losses += [c_loss.item(), g_loss.item()]
    path = os.path.join(folder, "two.pt")
    if is_main_process():
        with open(path, "wb") as file:
            torch.save([generator.state_dict(), critic.state_dict()], file)
    dist.barrier()
    states = torch.load(path)
    losses += [sum(value.double().sum().item() for value in state.values()) for state in states]
    return losses
