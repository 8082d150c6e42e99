"""Memory of a host in a training step: what all ranks hold together, shared pages once, on CPU.

    PYTHONPATH=. python tests/benchmarks/host_memory.py                  2 ranks over gloo
    PYTHONPATH=. python tests/benchmarks/host_memory.py --ranks 4 --strategy SHARD_GRAD_OP

The model is a transformer of 349 MB by default; each block is a unit; the batch is one short
sequence. Every contender runs in processes of its own. Their proportional set sizes (PSS: a page
that n processes map counts 1/n for each) are added up every 10 ms, less those of processes that
have only imported everything and connected. The columns, in MB:

    wrapped     the model is wrapped, and nothing has run
    peak        the most in six steps: forward, backward, gradients set to None
    forward     between the forward and the backward of the last step

``ours, FSDP_COMPAT_SAME_HOST=counters`` copies what ``ours`` maps."""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import time
import typing

import torch
import torch.distributed as dist
from contenders import FSDP1, FSDP2, FULLY_SHARD, OURS, Wrapping, wrap
from measuring import Table, group, options
from step import Block, Transformer, loss_of

COPIED = f"{OURS}, FSDP_COMPAT_SAME_HOST=counters"
CONTENDERS = OURS, COPIED, FULLY_SHARD, FSDP1, FSDP2
NUM_STEPS, SAMPLE_S, SEQUENCE, MEGA = 6, 0.01, 16, 1e6


class Figures(typing.NamedTuple):
    """Bytes beyond those of idle processes."""

    wrapped: float
    peak: float
    forward: float


def main() -> None:
    parser = options(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP"], default="FULL_SHARD")
    add("--dim", type=int, default=768)
    add("--blocks", type=int, default=12)
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments = parser.parse_args()
    print(f"{arguments.ranks} ranks, {arguments.strategy}, dim {arguments.dim}, ", end="")
    print(f"{arguments.blocks} blocks; MB of all ranks together")
    table = Table(dict.fromkeys(Figures._fields, "9.0f"), width=42)
    table.head(last="")
    for name in arguments.contenders:
        table.row(name, [value / MEGA for value in figures_of(name, arguments)])


def figures_of(name: str, arguments: argparse.Namespace) -> Figures:
    """Run one contender."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(arguments.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, rank, store.port, name, arguments))
        process.start()
        pipes.append(ours)
        processes.append(process)
    pids = [typing.cast(int, process.pid) for process in processes]
    try:
        idle = at_rest(pipes, pids)
        wrapped = at_rest(pipes, pids)
        peak = 0.0
        while not all(pipe.poll() for pipe in pipes):
            peak = max(peak, total(pids))
            time.sleep(SAMPLE_S)
        forward = at_rest(pipes, pids)
    finally:
        for process in processes:
            process.join()
    return Figures(wrapped - idle, max(peak, forward) - idle, forward - idle)


def at_rest(pipes: list[multiprocessing.connection.Connection], pids: list[int]) -> float:
    """Return what the processes hold when all have come to the next point; let them go on."""
    for pipe in pipes:
        pipe.recv()
    found = total(pids)
    for pipe in pipes:
        pipe.send("go on")
    return found


def total(pids: list[int]) -> float:
    """Return the bytes that processes hold together."""
    found = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            [line] = [line for line in file if line.startswith("Pss:")]
        found += int(line.split()[1]) << 10
    return float(found)


def run(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    port: int,
    name: str,
    arguments: argparse.Namespace,
) -> None:
    """One rank: come to each of the points, and wait there."""
    if name == COPIED:
        os.environ["FSDP_COMPAT_SAME_HOST"] = "counters"
        name = OURS
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with group("gloo", store=store, rank=rank, world_size=arguments.ranks):
        train(pipe, name, arguments)


def train(
    pipe: multiprocessing.connection.Connection, name: str, arguments: argparse.Namespace
) -> None:
    def rest() -> None:
        dist.barrier()
        pipe.send("here")
        pipe.recv()

    rest()
    torch.manual_seed(0)
    base = Transformer(64, SEQUENCE, arguments.dim, 8, arguments.blocks)
    model = wrap(name, base, Wrapping((Block,), arguments.strategy))
    del base
    parameters = list(model.parameters())
    data = torch.randint(64, (1, SEQUENCE + 1))
    rest()
    for step in range(NUM_STEPS):
        loss = loss_of(model, data)
        if step == NUM_STEPS - 1:
            rest()
        loss.backward()
        for parameter in parameters:
            parameter.grad = None
    dist.barrier()


if __name__ == "__main__":
    main()
