"""Time of a training step on real processes: ours beside FSDP1, FSDP2 and DDP, over gloo on CPU,
or over NCCL, with a GPU for each process.

    torchrun --nproc-per-node 2 tests/benchmarks/step.py    (fsdp_compat installed, or PYTHONPATH=.)
    ... step.py --communication-bound --strategy SHARD_GRAD_OP
    ... step.py --nccl --dim 2048 --heads 16 --blocks 19 --sequence 4096

The model is a transformer, by default of 23 million parameters in 6 blocks; each block is a unit,
embedding and head belong to the root. A step is forward, backward and gradients set to None, with
--optimizer also the update. Before anything is timed, every contender trains a few steps from the
same start, each rank on data of its own: all have to get the same losses. A step takes as long as
its slowest rank. The columns:

    median, minimum  milliseconds of a step
    to plain         step / step of the unwrapped model in the same round, which sends nothing:
                     median of the rounds
    to FSDP1         (step - plain) / (FSDP1's step - plain), paired by round, median: the cost of
                     being distributed. FSDP1 with the same use_orig_params
    to FSDP2         the same to FSDP2, and to DDP, where they take part
    limit            ours only: "met" if all ratios that have a limit (LIMITS) are within it

With --cpu-time they are times on the processor, those of gloo's threads with them, and not on the
clock: what a step costs, without how long it waits. They tell more where other programs keep the
processors busy."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import (
    CPU,
    DDP,
    FSDP1,
    FSDP2,
    FULLY_SHARD,
    OURS,
    PLAIN,
    STRATEGIES,
    Contender,
    Wrapping,
    build,
)
from measuring import (
    Limits,
    Table,
    Timings,
    gloo_ranks,
    group,
    measure_ranks,
    options,
    say,
    verdict_on,
)
from torch import nn

LIMITS: dict[str, Limits] = {
    "FULL_SHARD": {FSDP1: 0.15, FSDP2: 0.12},
    "SHARD_GRAD_OP": {FSDP1: 0.18, FSDP2: 0.15},
    "NO_SHARD": {DDP: 0.9},
}
COMMUNICATION_BOUND_LIMITS: dict[str, Limits] = {"FULL_SHARD": {DDP: 0.5}}  # besides
FULLY_SHARD_LIMITS: Limits = {FSDP2: 0.5}
CHECKED_STEPS = 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-5),
}
COMMUNICATION_BOUND = {"batch": 1, "sequence": 16}


class Block(nn.Module):
    """Causal self-attention and a feed-forward part, each behind a norm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(
            batch, length, 3, self.num_heads, dim // self.num_heads
        )
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """From tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(
        self, vocabulary: int, max_length: int, dim: int, num_heads: int, num_blocks: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(max_length, dim)
        self.blocks = nn.Sequential(*[Block(dim, num_heads) for _ in range(num_blocks)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    arguments = parse_arguments()
    if arguments.nccl:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with group("nccl") if arguments.nccl else gloo_ranks():
        run(arguments, torch.device("cuda", torch.cuda.current_device()) if arguments.nccl else CPU)


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, rounds=15, has_clock=True)
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="FULL_SHARD")
    add("--blocks", type=int, default=6)
    add("--dim", type=int, default=512)
    add("--heads", type=int, default=8)
    add("--vocabulary", type=int, default=4096)
    add("--batch", type=int, default=2, help="sequences per rank")
    add("--sequence", type=int, default=128, help="tokens of a sequence")
    little = "as --batch 1 --sequence 16: little to compute"
    add("--communication-bound", action="store_true", help=little)
    add("--optimizer", choices=OPTIMIZERS, default="none", help="part of the timed step")
    add("--nccl", action="store_true", help="on GPUs")
    arguments = parser.parse_args()
    if arguments.communication_bound:
        vars(arguments).update(COMMUNICATION_BOUND)
    return arguments


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)  # the same parameters on all ranks
    base = Transformer(
        arguments.vocabulary, arguments.sequence, arguments.dim, arguments.heads, arguments.blocks
    )
    torch.manual_seed(1 + dist.get_rank())
    data = torch.randint(arguments.vocabulary, (arguments.batch, arguments.sequence + 1)).to(device)
    contenders = build(base, Wrapping((Block,), arguments.strategy, device))
    say(
        f"{sum(p.numel() for p in base.parameters()) / 1e6:.1f}M parameters in {arguments.blocks} "
        f"blocks, {arguments.batch} x {arguments.sequence} tokens per rank, "
        f"{dist.get_world_size()} ranks, {arguments.strategy}, optimizer {arguments.optimizer}, "
        f"{arguments.rounds} rounds, {'CPU time' if arguments.cpu_time else 'wall clock'}"
    )
    check_losses(contenders, data)
    steps: dict[str, Callable[[], None]] = {}
    for contender in contenders:
        make = OPTIMIZERS[arguments.optimizer]
        optimizer = None if make is None else make(contender.parameters)
        steps[contender.name] = functools.partial(step, contender, data, optimizer)
    limits = LIMITS[arguments.strategy]
    if arguments.communication_bound:
        limits = {**limits, **COMMUNICATION_BOUND_LIMITS.get(arguments.strategy, {})}
    print_table(measure_ranks(steps, arguments.rounds, cpu_time=arguments.cpu_time), limits)


def loss_of(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())


def step(contender: Contender, data: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    loss_of(contender.model, data).backward()
    if optimizer is not None:
        optimizer.step()
    contender.zero_grad()
    if data.is_cuda:
        torch.cuda.synchronize()


def check_losses(contenders: Sequence[Contender], data: torch.Tensor) -> None:
    """Raise unless all contenders get the same losses in a few steps of SGD, on this rank; the
    unwrapped model in its first."""
    losses = {}
    for contender in contenders:
        optimizer, losses[contender.name] = torch.optim.SGD(contender.parameters, lr=0.1), []
        for _ in range(CHECKED_STEPS):
            loss = loss_of(contender.model, data)
            loss.backward()
            optimizer.step()
            contender.zero_grad()
            losses[contender.name].append(loss.item())
    rights = {name: its for name, its in losses.items() if name != PLAIN}
    right = torch.tensor(next(iter(rights.values())))
    for name, its in rights.items():
        torch.testing.assert_close(
            torch.tensor(its),
            right,
            rtol=1e-4,
            atol=0,
            msg=lambda m, name=name: f"losses of {name}: {m}",
        )
    # What the unwrapped model learns next, it learns from the data of one rank.
    torch.testing.assert_close(losses[PLAIN][0], right[0].item(), rtol=1e-5, atol=0)
    assert len({round(loss, 3) for loss in right.tolist()}) == CHECKED_STEPS, (
        f"nothing was learned: {right.tolist()}"
    )
    say(
        f"losses of all contenders are equal: {', '.join(f'{loss:.4f}' for loss in right.tolist())}"
    )


def print_table(timings: Timings, limits: Limits) -> None:
    peers = (FSDP1, FSDP2, DDP)
    columns = {"median": "7.1f ms", "minimum": "7.1f ms", "to plain": "9.3f"}
    table = Table(columns | {f"to {peer}": "9.3f" for peer in peers})
    say("")
    table.head()
    for name in timings.seconds:
        ratios = timings.ratios(name, *peers, above_plain=True)
        verdict = ""
        if name.startswith(OURS):
            verdict = verdict_on(ratios, limits)
        if name == FULLY_SHARD:
            verdict = verdict_on(ratios, FULLY_SHARD_LIMITS)
        shown = [None] * len(peers) if name == PLAIN else ratios.values()
        times = timings.median(name) * 1e3, timings.minimum(name) * 1e3
        table.row(name, [*times, timings.ratio(name, PLAIN), *shown], verdict)


if __name__ == "__main__":
    main()
