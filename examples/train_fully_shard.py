"""Train a small transformer with fully_shard, save it in two formats, and resume on any number of
processes.

    torchrun --nproc-per-node 2 examples/train_fully_shard.py --folder runs/a
    torchrun --nproc-per-node 4 examples/train_fully_shard.py --folder runs/a --resume --steps 300
    python examples/train_fully_shard.py --folder runs/b       # one process, the same losses

It learns to reverse sequences of digits, on CPU with gloo, or on GPUs with nccl, one per process.
The loss does not depend on the number of processes. --resume goes on from the newest checkpoint if
there is one, so that one command line serves torchrun --max-restarts. Checkpoints are written by
fsdp_compat.checkpoint (--format native) or torch.distributed.checkpoint (--format dcp). Parameters
are DTensors, so torch's own functions save, clip and step them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import TransformerEncoderLayer as Layer

from fsdp_compat import MixedPrecisionPolicy, checkpoint, describe, fully_shard

DIGITS, LENGTH = 10, 12


class Reverser(nn.Module):
    """Digits [batch, length] to logits [batch, length, 10]."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, dim)
        self.positions = nn.Parameter(torch.empty(LENGTH, dim))
        self.blocks = nn.ModuleList(
            Layer(dim, nhead=4, dim_feedforward=4 * dim, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, DIGITS)
        nn.init.normal_(self.positions, std=0.1)

    def forward(self, digits: Tensor) -> Tensor:
        x = self.embedding(digits) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def draw_batch(step: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one step for all ranks: they depend on the step alone."""
    digits = torch.randint(DIGITS, (batch, LENGTH), generator=torch.Generator().manual_seed(step))
    return digits, digits.flip(1)


# --- sharding -------------------------------------------------------------------------------------


def sharded_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the model, the same on any number of ranks: inner modules are sharded first."""
    torch.manual_seed(args.seed)
    model = Reverser(args.dim, args.layers).to(device)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if args.bf16 else None, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard([model.embedding, model.head], mp_policy=policy)  # one all-gather for both
    fully_shard(model, mp_policy=policy)
    return model


# --- checkpoints ----------------------------------------------------------------------------------

Progress = dict[str, int]  # the step that a checkpoint was saved after, and the ranks that saved it


def save(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Path:
    """Save model, optimizer and progress. Collective."""
    step = progress["step"]
    if args.format == "native":
        return checkpoint.save(args.folder, model, optimizer, progress, step=step, keep_last=2)
    parameters, states = get_state_dict(model, optimizer)
    folder = args.folder / f"dcp-{step:08}"
    dcp.save({"model": parameters, "optimizer": states, **progress}, checkpoint_id=folder)
    return folder


def load(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Load the newest checkpoint, if there is one, and return its progress. Collective."""
    nothing = {"step": 0, "ranks": 0}
    if args.format == "native":
        return checkpoint.resume(args.folder, model, optimizer, default=nothing)
    complete = sorted(args.folder.glob("dcp-*/.metadata"))  # written last
    if not complete:
        return nothing
    parameters, states = get_state_dict(model, optimizer)
    loaded = {"model": parameters, "optimizer": states, **nothing}
    dcp.load(loaded, checkpoint_id=complete[-1].parent)
    set_state_dict(
        model, optimizer, model_state_dict=parameters, optim_state_dict=loaded["optimizer"]
    )
    return {name: loaded[name] for name in nothing}


# --- training -------------------------------------------------------------------------------------


def say(*words: object) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> float:
    """Take a step on this rank's part of a batch; return the loss of all ranks. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device
    inputs, targets = (each.tensor_split(ranks)[rank].to(device) for each in batch)
    logits = model(inputs).float()
    # Gradients are averaged over ranks, so each loss is a share of the whole batch.
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss * ranks / batch[1].numel()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    return mean.item()


def train(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[int, float]]:
    """Train up to ``args.steps``, and yield (step, loss over all ranks)."""
    ranks = dist.get_world_size()
    model = sharded_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after sharding
    say(describe(model))
    begun, saved_by = load(args, model, optimizer).values() if args.resume else (0, 0)
    if begun:
        say(f"resumed from step {begun} (saved by {saved_by} ranks) on {ranks} ranks")
    for step in range(begun + 1, args.steps + 1):
        yield step, train_step(model, optimizer, draw_batch(step, args.batch))
        if step == args.steps or step % args.save_every == 0:
            path = save(args, model, optimizer, {"step": step, "ranks": ranks})
    say(reversal(model, device))
    if begun < args.steps:
        say(f"done: steps {begun + 1}-{args.steps} on {ranks} ranks; saved {path}")


@torch.no_grad()
def reversal(model: nn.Module, device: torch.device) -> str:
    """Return what the model makes of a new sequence. Collective."""
    digits, _ = draw_batch(step=0, batch=1)
    found = model(digits.to(device)).argmax(-1)
    shown = ["".join(map(str, each[0].tolist())) for each in (digits, found)]
    return f"{shown[0]} reversed: {shown[1]}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer with fully_shard.")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint, if any")
    parser.add_argument("--format", choices=("native", "dcp"), default="native")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    numbers = {"steps": 200, "save-every": 50, "batch": 64, "dim": 64, "layers": 2, "seed": 0}
    for option, default in numbers.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args(arguments)


def init_distributed() -> torch.device:
    """Create the default process group, of torchrun's processes or of this one alone; return this
    rank's device."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    device = init_distributed()
    try:
        for step, loss in train(args, device):
            if step % 20 == 0 or step == args.steps:
                say(f"step {step}: loss {loss:.6f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
