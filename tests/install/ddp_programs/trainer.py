"""A class that holds the model, and saves snapshots now and then."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model: torch.nn.Module, rank: int, save_every: int, path: str) -> None:
        self.rank = rank
        self.save_every = save_every
        self.path = path
        self.epochs_run = 0
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.model = DDP(self.model, device_ids=None)
        if os.path.exists(path):
            self._load_snapshot()

    def _load_snapshot(self):
        snapshot = torch.load(self.path)
        self.model.module.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _run_batch(self, source):
        self.optimizer.zero_grad()
        loss = (self.model(source) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, max_epochs):
        losses = []
        for epoch in range(self.epochs_run, max_epochs):
            seed = 2 * epoch + self.rank
            losses.append(
                self._run_batch(torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)))
            )
            if self.rank == 0 and epoch % self.save_every == 0:
                snapshot = {"MODEL_STATE": self.model.module.state_dict()}
                snapshot["OPTIMIZER_STATE"] = self.optimizer.state_dict()
                snapshot["EPOCHS_RUN"] = epoch + 1
                torch.save(snapshot, self.path)
        dist.barrier()
        return losses


def main(folder):
    path = os.path.join(folder, "snapshot.pt")
    found = []
    for epochs in (5, 9):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        found += Trainer(net, dist.get_rank(), save_every=2, path=path).train(epochs)
    return found
