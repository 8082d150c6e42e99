"""Blocks in a ModuleList, clipping, generation, and a checkpoint, all in one function."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, dim), nn.Linear(dim, 16)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(layers)])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens[:, -1:]).argmax(-1)], dim=1)
        return tokens


def main(folder):
    rank, path = dist.get_rank(), os.path.join(folder, "checkpoint.pt")
    results = []
    for first, last in ((0, 4), (4, 8)):
        torch.manual_seed(first + rank)
        net = Net(8, layers=3)
        model = DDP(net.to("cpu"), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        if os.path.exists(path):
            state = torch.load(path, map_location="cpu")
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(first, last):
            draws = torch.Generator().manual_seed(2 * step + rank)
            tokens = torch.randint(16, (6, 5), generator=draws)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            results += [loss.item(), norm.item()]
        if rank == 0:
            # read by the second round
            state = {"model": model.module.state_dict()}
            state["optimizer"] = optimizer.state_dict()
            torch.save(state, path)
        dist.barrier()
        text = model.module.generate(torch.tensor([[1], [2]]), 5)
        results += text.flatten().tolist()
    return results
