"""Time of a training step on real processes: ours beside FSDP1, FSDP2 and DDP, over gloo on CPU.

    torchrun --nproc-per-node 2 tests/benchmarks/step.py    (fsdp_compat installed, or PYTHONPATH=.)
    ... step.py --communication-bound --strategy SHARD_GRAD_OP

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
    limit            ours only: "met" if all ratios that have a limit are within it:

                     FULL_SHARD      FSDP1 0.15, FSDP2 0.12, DDP 0.50 if communication-bound
                     SHARD_GRAD_OP   FSDP1 0.18, FSDP2 0.15
                     NO_SHARD        DDP 0.90
                     fully_shard     FSDP2 0.50

With --cpu-time they are times on the processor, those of gloo's threads with them, and not on the
clock: what a step costs, without how long it waits. They tell more where other programs keep the
processors busy."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import (
    DDP,
    FSDP2,
    FULLY_SHARD,
    OURS,
    PLAIN,
    Contender,
    Strategy,
    Timings,
    build,
    fsdp1_of,
    measure,
    require_rounds,
)
from torch import nn

# Of the ratios to FSDP1, FSDP2 and DDP. None: no limit.
Limits = tuple[float | None, float | None, float | None]
LIMITS: dict[Strategy, Limits] = {
    Strategy.FULL_SHARD: (0.15, 0.12, None),
    Strategy.SHARD_GRAD_OP: (0.18, 0.15, None),
    Strategy.NO_SHARD: (None, None, 0.9),
}
COMMUNICATION_BOUND_LIMITS: dict[Strategy, Limits] = {Strategy.FULL_SHARD: (0.15, 0.12, 0.5)}
FULLY_SHARD_LIMITS: Limits = (None, 0.5, None)
CHECKED_STEPS = 3
OPTIMIZERS = {
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
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def main() -> int:
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        print(
            f"start it on at least 2 processes: torchrun --nproc-per-node 2 {sys.argv[0]}",
            file=sys.stderr,
        )
        return 2
    warnings.simplefilter("ignore")  # torch's FSDP1 says in each construction that it is going away
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run(arguments)
    finally:
        dist.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategy",
        choices=[strategy.name for strategy in Strategy],
        default=Strategy.FULL_SHARD.name,
    )
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sequence")
    parser.add_argument(
        "--communication-bound",
        action="store_true",
        help="as --batch 1 --sequence 16: little to compute",
    )
    parser.add_argument(
        "--optimizer", choices=["none", *OPTIMIZERS], default="none", help="part of the timed step"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="time on the processor instead of the clock"
    )
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    require_rounds(parser, arguments.rounds)
    if arguments.communication_bound:
        vars(arguments).update(COMMUNICATION_BOUND)
    return arguments


def run(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)  # the same parameters on all ranks
    base = Transformer(
        arguments.vocabulary, arguments.sequence, arguments.dim, arguments.heads, arguments.blocks
    )
    torch.manual_seed(1 + dist.get_rank())
    data = torch.randint(arguments.vocabulary, (arguments.batch, arguments.sequence + 1))
    strategy = Strategy[arguments.strategy]
    contenders = build(base, Block, strategy, ddp=True)
    say(
        f"{sum(p.numel() for p in base.parameters()) / 1e6:.1f}M parameters in {arguments.blocks} "
        "blocks, "
        f"{arguments.batch} x {arguments.sequence} tokens per rank, {dist.get_world_size()} ranks, "
        f"{strategy.name}, "
        f"optimizer {arguments.optimizer}, {arguments.rounds} rounds, "
        f"{'CPU time' if arguments.cpu_time else 'wall clock'}"
    )
    check_losses(contenders, data)
    steps: dict[str, Callable[[], None]] = {}
    for contender in contenders:
        optimizer = (
            OPTIMIZERS[arguments.optimizer](contender.parameters)
            if arguments.optimizer in OPTIMIZERS
            else None
        )
        steps[contender.name] = functools.partial(step, contender, data, optimizer)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    limits = LIMITS[strategy]
    if arguments.communication_bound:
        limits = COMMUNICATION_BOUND_LIMITS.get(strategy, limits)
    timings = slowest_rank(measure(steps, arguments.rounds, clock=clock, before_each=dist.barrier))
    print_table(timings, limits)


def loss_of(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())


def step(contender: Contender, data: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    loss_of(contender.model, data).backward()
    if optimizer is not None:
        optimizer.step()
    contender.zero_grad()


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


def slowest_rank(timings: Timings) -> Timings:
    """Return, per contender and round, the time of the rank that took longest. Collective."""
    found: list[Timings | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, timings)
    ranks = [each.seconds for each in found if each is not None]
    return Timings(
        {
            name: [max(times) for times in zip(*(its[name] for its in ranks), strict=True)]
            for name in timings.seconds
        }
    )


def verdict_on(ratios: Sequence[float | None], limits: Limits) -> str:
    pairs = [
        (ratio, limit) for ratio, limit in zip(ratios, limits, strict=True) if limit is not None
    ]
    return (
        "met" if all(ratio is not None and ratio <= limit for ratio, limit in pairs) else "NOT MET"
    )


def print_table(timings: Timings, limits: Limits) -> None:
    say(
        f"\n{'':28} {'median':>10} {'minimum':>10} {'to plain':>9} {'to FSDP1':>9} {'to FSDP2':>9} "
        f"{'to DDP':>9}  limit"
    )
    for name in timings.seconds:
        others = [] if name == PLAIN else [fsdp1_of(name), FSDP2, DDP]
        ratios = [
            timings.above_plain_ratio(name, other) if other in timings.seconds else None
            for other in others
        ]
        verdict = ""
        if name.startswith(OURS):
            verdict = verdict_on(ratios, limits)
        if name == FULLY_SHARD:
            verdict = verdict_on(ratios, FULLY_SHARD_LIMITS)
        median, minimum = timings.median(name) * 1e3, timings.minimum(name) * 1e3
        say(
            f"{name:28} {median:7.1f} ms {minimum:7.1f} ms {timings.ratio(name, PLAIN):9.3f} "
            + " ".join(f"{'' if ratio is None else f'{ratio:.3f}':>9}" for ratio in ratios)
            + f"  {verdict}"
        )


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
