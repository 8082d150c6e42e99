"""Memory of a step and what the host asks of the device, with NCCL on the CUDA build of torch,
without a GPU.

    FOLDER/bin/python tests/benchmarks/cuda_build.py

FOLDER is an environment that tests/support/fakecuda/build.py made: torch's own allocator, streams
and ProcessGroupNCCL are at work, and fakecuda counts their calls. Nothing is timed.

The model is that of memory.py: 6 transformer blocks, each a unit, and a batch of one token; two
ranks, AdamW. All figures are those of the first rank, in steps after three to warm up:

    allocated, reserved    the allocator's peaks, in MB, with parameters and optimizer state
    temporary              the most that forward and backward allocate beside the gradients that
                           they leave, in bytes per parameter of a block
    host waits, ...        per step. copies: to the device, to the host, within the device"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
from collections.abc import Iterable
from typing import Any

import cuda_build  # itself, for the ranks
import torch
import torch.distributed as dist
from contenders import (
    FSDP1,
    FSDP2,
    FULL_SHARD,
    FULLY_SHARD,
    ORIGINAL,
    OURS,
    SHARD_GRAD_OP,
    Wrapping,
    wrap,
)
from memory import HEADS, PRECISIONS, SEQUENCE, VOCABULARY, WARM_UP_STEPS
from step import Block, Transformer, loss_of
from torch import nn

from tests.support import fakecuda
from tests.support.order import Allocate, Free, Happening
from tests.support.parity import local
from tests.support.ranks import close_pool, run_ranks

# FSDP1 last, as it never frees its parameters: each setting has new processes.
CONTENDERS = (OURS + ORIGINAL, FULLY_SHARD, FSDP2, FSDP1 + ORIGINAL)
COUNTED_STEPS = 2
COLUMNS = (
    *("allocated", "reserved", "temporary", "host waits", "events created", "recorded", "waited"),
    *("kernels", "copies", "collectives"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--strategies", nargs="+", default=[FULL_SHARD, SHARD_GRAD_OP])
    add("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    add("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    add("--blocks", type=int, default=6)
    add("--dim", type=int, default=512)
    arguments = parser.parse_args()
    if not fakecuda.is_used():
        parser.error(fakecuda.WHY)
    print(f"| setting | contender | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    settings = itertools.product(arguments.strategies, arguments.precisions, (False, True))
    for strategy, precision, offloads in settings:
        how = {"strategy": strategy, "offloads": offloads, **PRECISIONS[precision]}
        close_pool()
        for name in arguments.contenders:
            measured = cuda_build.measure, name, how, arguments.blocks, arguments.dim
            with contextlib.redirect_stdout(None):  # what the ranks print
                cells = run_ranks(2, *measured, backend="cpu:gloo,cuda:nccl", timeout=300)[0]
            setting = f"{strategy}, {precision}{', offload' if offloads else ''}"
            print(f"| {setting} | {name} | {' | '.join(cells)} |", flush=True)


def measure(name: str, how: dict[str, Any], blocks: int, dim: int) -> list[str]:
    """Return the cells of a row. Collective."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = Transformer(VOCABULARY, SEQUENCE, dim, HEADS, blocks)
    model = wrap(name, model, Wrapping((Block,), device=device, **how))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = (torch.arange(SEQUENCE + 1)[None] % VOCABULARY).pin_memory()

    def backward() -> None:
        loss_of(model, data.to(device, non_blocking=True)).backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(WARM_UP_STEPS + COUNTED_STEPS):
        if step == WARM_UP_STEPS:
            gc.collect()
            fakecuda.reset_counts()
            torch.cuda.reset_peak_memory_stats()
        backward()
        update()
    counts = fakecuda.counts()
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    with fakecuda.watching() as recording:
        backward()
    temporary = temporary_nbytes(recording.happenings, model)
    per_block = temporary / sum(p.numel() for p in Block(dim, HEADS).parameters())

    def per_step(*names: str) -> str:
        number = sum(n for name, n in counts.items() if name.startswith(names)) / COUNTED_STEPS
        return f"{number:g}"

    copies = " / ".join(per_step(f"copies {way}") for way in ("HtoD", "DtoH", "DtoD"))
    events = [per_step(what) for what in ("events created", "events recorded", "stream waits")]
    memory = [*(f"{peak / 1e6:.1f}" for peak in peaks), f"{per_block:.2f}"]
    return [*memory, per_step("host waits"), *events, per_step("kernels"), copies, per_step("nccl")]


def temporary_nbytes(happenings: Iterable[Happening], model: nn.Module) -> int:
    """Return the most that was allocated at once, without the gradients that there are now."""
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    kept = {grad.untyped_storage().data_ptr() for grad in grads}
    of_allocations = [each for each in happenings if isinstance(each, Allocate | Free)]
    last = {each.range[0]: each for each in of_allocations if isinstance(each, Allocate)}
    alive: dict[int, int] = {}
    most = 0
    for each in of_allocations:
        begin, end = each.range
        if isinstance(each, Free):
            alive.pop(begin, None)
        elif not (begin in kept and last[begin] is each):
            alive[begin] = end - begin
            most = max(most, sum(alive.values()))
    return most


if __name__ == "__main__":
    main()
