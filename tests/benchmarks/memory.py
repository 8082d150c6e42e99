"""Transient memory of a training step: the most that is alive beside parameters, gradients and
optimizer state, on CPU.

    torchrun --nproc-per-node 2 tests/benchmarks/memory.py    two ranks over gloo
    python tests/benchmarks/memory.py --fake 8                rank 0 of 8 on a fake process group
    ... memory.py --steps 200                                 does anything grow, does it vary?
                                             (fsdp_compat installed, or PYTHONPATH=.)

The model has 6 transformer blocks of 3.15 million parameters, each a unit, and a root of next to
nothing; the batch is one token. Every storage is followed (tests/support/live_bytes.py). A figure
is the most that was alive at once in forward and backward, after three steps to warm up, without
parameters, the gradients that the step left and AdamW's states; less the same of the unwrapped
model, whose row "plain" shows it: activations. It is divided by the elements of a block: bytes per
element, u. With several ranks it is that of the rank with most. What a backend allocates counts as
well: gloo's reduce_scatter_tensor, which FSDP1 and FSDP2 call, copies its whole input. "Pages kept"
is what ours keeps of freed blocks of shared memory when the step has ended. Nothing is mapped here,
as on several hosts.

A reduce buffer's element has the bytes of the second dtype of a row, that of a gathered unit and of
a gradient of autograd the bytes of the first. The largest parameter is a third of its unit. So by
sheer arithmetic, in bytes per element:

    two gathered units, a reduce buffer,    bf16/fp32  2*2 + 4 + 0.7 = 8.7     (limit)
    a gradient                              fp32       2*4 + 4 + 1.3 = 13.3    (limit)
    one gathered unit, a reduce buffer,     bf16/fp32    2 + 4 + 0.7 = 6.7     (limit)
    a gradient                              fp32         4 + 4 + 1.3 = 9.3     (limit)

Ours meets a row if it is within that limit, where there is one, and below FSDP2. FSDP2 knows no
setting against prefetching: its figure in those rows is that of the row with."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    FSDP1,
    FSDP2,
    FULLY_SHARD,
    ORIGINAL,
    OURS,
    PLAIN,
    Wrapping,
    wrap,
)
from measuring import Table, fake_ranks, gloo_ranks, highest, options, say
from step import Block, Transformer, loss_of
from torch import nn

import fsdp_compat
from tests.support.live_bytes import (
    LiveBytes,
    Peak,
    release_spare_pages,
    spare_pages_nbytes,
    tensors_alive,
)

CONTENDERS = (OURS, OURS + ORIGINAL, FSDP1, FSDP1 + ORIGINAL, FSDP2, FULLY_SHARD, PLAIN)
WARM_UP_STEPS = 3
VOCABULARY, SEQUENCE, HEADS = 8, 1, 8
# in bytes per element: the root, small gradients that are moved together, and the next digit of a
# limit
ROUNDING = 0.1

BF16, FP32 = torch.bfloat16, torch.float32
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16/fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "fp32": {},
    "bf16/bf16": {"param_dtype": BF16, "reduce_dtype": BF16},
}
# A strategy and what is gathered ahead, and limits in bytes per element by precision.
Limits = dict[str, float]
SCHEDULES: dict[str, tuple[dict[str, Any], Limits]] = {
    "FULL_SHARD, prefetch both ways": (
        {"forward_prefetch": True},
        {"bf16/fp32": 8.7, "fp32": 13.3},
    ),
    "FULL_SHARD, default": ({}, {"bf16/fp32": 8.7, "fp32": 13.3}),
    "FULL_SHARD, no prefetch": ({"backward_prefetch": None}, {"bf16/fp32": 6.7, "fp32": 9.3}),
    "SHARD_GRAD_OP": ({"strategy": "SHARD_GRAD_OP"}, {}),
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one contender held, in bytes; one of each per step."""

    peaks: list[Peak]
    left: list[int]  # after the step
    kept: list[int]  # likewise: pages of blocks that died, for the next ones


def main() -> int:
    arguments = parse_arguments()
    if not arguments.fake:
        os.environ.setdefault("FSDP_COMPAT_SAME_HOST", "counters")
    with fake_ranks(arguments.fake) if arguments.fake else gloo_ranks():
        missed = run(arguments)
    return int(missed > 0 and arguments.check)


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, check="a limit is not met")
    add = parser.add_argument
    add("--fake", type=int, metavar="RANKS", help="one process, on a fake group of so many ranks")
    add("--blocks", type=int, default=6)
    add("--dim", type=int, default=512)
    add("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    add("--steps", type=int, default=1, help="to look at; more than one: say how they differ")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> int:
    """Print the tables; return how many limits are not met."""
    u = sum(p.numel() for p in Block(arguments.dim, HEADS).parameters())
    ranks = f"{dist.get_world_size()} ranks{' (fake)' if arguments.fake else ''}"
    say(f"{arguments.blocks} units of u = {u:,} elements, {ranks}; bytes per u")
    return sum(print_table(arguments, precision, u) for precision in arguments.precisions)


def print_table(arguments: argparse.Namespace, precision: str, u: int) -> int:
    names, missed, activations = arguments.contenders, 0, 0.0
    table = Table({_short(name): "14.2f" for name in names} | {"limit": "7.1f"}, width=34)
    say("")
    table.head(precision, last="")
    for schedule, (settings, limits) in SCHEDULES.items():
        how = Wrapping((Block,), **settings, **PRECISIONS[precision])
        is_first = schedule == next(iter(SCHEDULES))
        found = {n: measure(n, arguments, how) for n in names if n != PLAIN or is_first}
        held = {n: most_of_ranks([peak.nbytes for peak in its.peaks]) for n, its in found.items()}
        activations = held.get(PLAIN, activations)
        peaks = {n: (nbytes - activations * (n != PLAIN)) / u for n, nbytes in held.items()}
        limit = limits.get(precision)
        over = [name for name in peaks if is_over(name, peaks, limit)]
        missed += len(over)
        cells = [*map(peaks.get, names), limit]
        table.row(f"  {schedule}", cells, "NOT MET" if over else "met")
        kept = {n: most_of_ranks(f.kept) / u for n, f in found.items() if n.startswith(OURS)}
        if any(kept.values()):
            table.row("    pages kept", [*map(kept.get, names), None])
        if arguments.steps > 1:
            print_steps(found)
    return missed


def is_over(name: str, peaks: dict[str, float], limit: float | None) -> bool:
    if not name.startswith((OURS, FULLY_SHARD)):
        return False
    is_over = name != FULLY_SHARD and limit is not None and peaks[name] > limit + ROUNDING
    return is_over or (FSDP2 in peaks and peaks[name] >= peaks[FSDP2])


def measure(name: str, arguments: argparse.Namespace, how: Wrapping) -> Figures:
    """Train alone in the process, and look at what is alive. Collective."""
    others = tensors_alive()  # FSDP1 never lets go of its parameters
    release_spare_pages()
    torch.manual_seed(0)
    base = Transformer(VOCABULARY, SEQUENCE, arguments.dim, HEADS, arguments.blocks)
    model = wrap(name, base, how)
    del base
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = torch.arange(SEQUENCE + 1)[None] % VOCABULARY
    figures = Figures([], [], [])
    for _ in range(WARM_UP_STEPS - 1):
        step(model, optimizer, data, lambda: None)

    def look() -> None:
        parameters = list(model.parameters())
        live.leave_out([*parameters, *(p.grad for p in parameters if p.grad is not None)])
        live.leave_out(
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        # parameters of fully_shard have storage objects of their own
        if isinstance(model, fsdp_compat.FSDPModule):
            runtime = model._get_fsdp_state().runtime
            live.leave_out(group.store.shard for group in runtime.groups)
        figures.peaks.append(live.peak())
        figures.left.append(live.now())
        figures.kept.append(spare_pages_nbytes())

    with LiveBytes() as live:
        live.leave_out(others)
        # the first, too, is to warm up: what it leaves as gradients, FSDP1 keeps for a while
        for _ in range(1 + arguments.steps):
            gc.collect()
            live.forget()
            step(model, optimizer, data, look)
    return Figures(figures.peaks[1:], figures.left[1:], figures.kept[1:])


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, look: Callable[[], None]
) -> None:
    loss_of(model, data).backward()
    look()
    optimizer.step()
    optimizer.zero_grad()


def print_steps(found: dict[str, Figures]) -> None:
    for name, its in found.items():
        peaks, left = {peak.nbytes for peak in its.peaks}, its.left
        say(
            f"    {name}: peaks of {len(left)} steps: {len(peaks)} value(s), {min(peaks):,} to "
            f"{max(peaks):,} bytes; "
            f"left after the first {left[0]:,}, after the last {left[-1]:,}"
        )


def most_of_ranks(nbytes: list[int]) -> float:
    """Return the most of all ranks and steps. Collective."""
    return highest(max(nbytes))


def _short(name: str) -> str:
    return name.replace(ORIGINAL, " original").replace("fully_shard of", "f_s of")


if __name__ == "__main__":
    raise SystemExit(main())
