"""Train a small transformer with fully_shard, save it in two formats, and resume on any number of
processes.

    torchrun --nproc-per-node 2 examples/train_fully_shard.py --folder runs/a
    torchrun --nproc-per-node 4 examples/train_fully_shard.py --folder runs/a --resume --steps 80
    python examples/train_fully_shard.py --folder runs/b       # one process, the same losses

It learns to reverse sequences of digits, on CPU with gloo, or on GPUs with nccl, one per process.
The loss does not depend on the number of processes. Checkpoints are written by
fsdp_compat.checkpoint (--format native) or torch.distributed.checkpoint (--format dcp). Parameters
are DTensors, so torch's own functions save, clip and step them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import TransformerEncoderLayer as Layer

from fsdp_compat import MixedPrecisionPolicy, checkpoint, fully_shard

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


def save(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Save model, optimizer and step. Collective."""
    if args.format == "native":
        checkpoint.save(args.folder, model, optimizer, {"step": step}, step=step, keep_last=2)
        return
    parameters, states = get_state_dict(model, optimizer)
    dcp.save(
        {"model": parameters, "optimizer": states, "step": step},
        checkpoint_id=args.folder / f"dcp-{step:08}",
    )


def load(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, and return the step it was saved after. Collective."""
    if args.format == "native":
        newest = checkpoint.latest(args.folder)
        if newest is None:
            raise FileNotFoundError(f"--resume: no checkpoint in {args.folder}")
        return checkpoint.load(newest, model, optimizer)["step"]
    folders = sorted(args.folder.glob("dcp-*"))
    if not folders:
        raise FileNotFoundError(f"--resume: no dcp checkpoint in {args.folder}")
    parameters, states = get_state_dict(model, optimizer)
    loaded = {"model": parameters, "optimizer": states, "step": 0}
    dcp.load(loaded, checkpoint_id=folders[-1])
    set_state_dict(
        model, optimizer, model_state_dict=parameters, optim_state_dict=loaded["optimizer"]
    )
    return loaded["step"]


# --- training -------------------------------------------------------------------------------------


def train(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[int, float]]:
    """Train up to ``args.steps``, and yield (step, loss over all ranks)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = sharded_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after sharding
    start = load(args, model, optimizer) if args.resume else 0
    for step in range(start + 1, args.steps + 1):
        inputs, targets = (part.to(device)[rank::ranks] for part in draw_batch(step, args.batch))
        logits = model(inputs).float()
        # Gradients are averaged over ranks, so each loss is a share of the whole batch.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss * ranks / (args.batch * LENGTH)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        yield step, mean.item()
    save(args, model, optimizer, args.steps)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer with fully_shard.")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--format", choices=("native", "dcp"), default="native")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    for option, default in (("steps", 60), ("batch", 64), ("dim", 64), ("layers", 2), ("seed", 0)):
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


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device = init_distributed()
    try:
        for step, loss in train(args, device):
            if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps):
                print(f"step {step}: loss {loss:.6f}", flush=True)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
