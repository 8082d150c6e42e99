"""Step time and memory on simulated H100s: ours beside FSDP1 and FSDP2. No GPU is needed.

    PYTHONPATH=. python tests/benchmarks/simulated.py
    PYTHONPATH=. python tests/benchmarks/simulated.py --ranks 64 --strategies FULL_SHARD --fp32
    PYTHONPATH=. python tests/benchmarks/simulated.py --all-cases --check
    PYTHONPATH=. python tests/benchmarks/simulated.py --ranks 8 --strategies FULL_SHARD --memory \\
        --picture step.svg

The host code of each contender is the real one: it trains on the emulated device of
tests/support/emulated, which records its operations, events, waits and allocations, and on process
groups with the semantics of NCCL (one stream per group). The model is small and stands for a large
one (simulated_models.py). The cost model of the package gives each operation a time, and the
recorded program is played (tests/support/emulated/play.py): 2 steps of 3, after 2 that are not
recorded. Figures are the same on every machine and in every run; they are not measurements.

Each row is made in a process of its own. The columns:

    step              milliseconds of a step
    to FSDP1, FSDP2   step / the other's
    kernels           milliseconds that all kernels would take if they ran alone
    exposed           milliseconds of a step in which no kernel runs
    reserved          bytes that an allocator with a pool for each stream reserves for the step, per
                      parameter of a block
    active            bytes that are allocated at once, in the same unit
    syncs             times that the host waits for the device in a step, besides the end of the
                      loop's step
    limit             ours only: "met" if a step takes at most 1.002 of the fastest and reserves no
                      more than the smallest of the peers (fully_shard: FSDP2), and waits order all
                      accesses of the same bytes

Kernels share the bandwidth of the memory, and the multiprocessors: a copy takes a quarter of those
that a matrix product takes (--contention has other assumptions). Not simulated: the host's own
time beyond --host-us and --event-us for each call, computation of the host (the optimizer's step
with --offload), and fragmentation."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from contenders import FSDP1, FSDP2, FULLY_SHARD, OURS
from simulated_models import (
    CONTENDERS,
    HYBRID_SHARD,
    MODELS,
    RECOMPUTES,
    STRATEGIES,
    Model,
    Wrapping,
    call_block,
    has_contender,
    keep_some,
    recompute_block,
    wrap,
)
from timeline import Lane, Picture, write_picture
from torch import nn

from fsdp_compat._cost_model import CONTENTION, H100, Machine, Work
from tests.support import emulated
from tests.support.emulated import nccl
from tests.support.emulated.order import (
    DeviceSync,
    EventSync,
    Happening,
    Op,
    StreamSync,
    find_unordered,
)
from tests.support.emulated.play import Played, play

WARM_UP_STEPS, STEPS = 2, 3
TIME_LIMIT = 1.002
MEMORY_POINTS = 24
MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
SYNCS = (EventSync, StreamSync, DeviceSync)
ROW = "{:28}{:>9}{:>10}{:>10}{:>9}{:>9}{:>10}{:>8}{:>7}  {}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One table."""

    model_name: str
    wrapping: Wrapping
    recompute: str
    microbatches: int
    reduces_each: bool
    optimizer: str

    @property
    def title(self) -> str:
        wrapping, model = self.wrapping, MODELS[self.model_name]()
        parts = [
            f"{wrapping.ranks} ranks",
            wrapping.strategy,
            "bf16, summed in fp32" if wrapping.is_mixed else "fp32",
            model.description,
        ]
        if self.recompute != "none":
            parts.append(f"recomputation: {self.recompute}")
        if self.microbatches > 1:
            parts.append(
                f"{self.microbatches} microbatches, "
                + ("each reduced" if self.reduces_each else "reduced once")
            )
        if wrapping.offloads:
            parts.append("offloaded to the host")
        unit = model.block_numel * model.bytes_scale / 1e9
        return f"{', '.join(parts)} (1 byte per parameter of a block: {unit:.3f} GB)"


@dataclasses.dataclass(frozen=True)
class Row:
    step: float  # seconds, as all times
    kernels: float
    exposed: float
    reserved: float  # bytes per parameter of a block, as active
    active: float
    syncs: float
    unordered: int  # accesses of the same bytes that no wait orders
    lanes: tuple[Lane, ...]  # of the last step
    memory: tuple[tuple[float, float], ...]  # of the last step: (seconds, bytes)


# -- recording


def record(name: str, case: Case) -> tuple[Sequence[Happening], Sequence[int], int]:
    """Train; return what was recorded, where each step ends, and the stream that computes."""
    with nccl.group_of(case.wrapping.ranks):
        model = MODELS[case.model_name]()
        torch.manual_seed(0)
        built = model.build()
        if case.recompute == "some":
            for module in built.modules():
                if isinstance(module, model.block):
                    keep_some(module)
        wrapped = wrap(name, built, model.block, case.wrapping)
        step = training_step(wrapped, model, case)
        for _ in range(WARM_UP_STEPS):
            step()
        gc.collect()  # what warming up has left must not be freed while this is recorded
        gc.disable()
        ends = []
        with nccl.recording() as recording:
            for _ in range(STEPS):
                step()
                ends.append(len(recording.happenings))
        return recording.happenings, ends, torch.accelerator.current_stream().stream_id


def training_step(wrapped: nn.Module, model: Model, case: Case) -> Callable[[], None]:
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, fused=True)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-3, foreach=True)
    inputs = model.inputs().to(emulated.NAME)
    through = recompute_block if case.recompute == "blocks" else call_block

    def step() -> None:
        for number in range(case.microbatches):
            with reducing(wrapped, case.reduces_each or number == case.microbatches - 1):
                wrapped(inputs, through).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.current_stream().synchronize()  # a loop that reads its loss

    return step


@contextlib.contextmanager
def reducing(wrapped: nn.Module, reduces: bool) -> Iterator[None]:
    if reduces or not hasattr(wrapped, "no_sync"):
        if hasattr(wrapped, "set_requires_gradient_sync"):
            wrapped.set_requires_gradient_sync(reduces)
        yield
    else:
        with wrapped.no_sync():
            yield


# -- costs


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the operations of a model would take at the size that it stands for."""

    machine: Machine
    model: Model
    itemsize: int  # of what is computed with

    def __call__(self, op: Op) -> Work:
        machine, scale = self.machine, self.model.bytes_scale
        reads, writes = ([end - begin for begin, end in ranges] for ranges in (op.reads, op.writes))
        if isinstance(op, nccl.Collective):
            of_kind = {
                nccl.ALL_GATHER: machine.all_gather,
                nccl.REDUCE_SCATTER: machine.reduce_scatter,
                nccl.ALL_REDUCE: machine.all_reduce,
            }
            return of_kind[op.name](scale * op.nbytes, op.ranks)
        if isinstance(op, nccl.HostCopy):
            return machine.copy(scale * max(*reads, *writes, 0), to_host=op.to_host)
        flops = self.model.flops_scale * self._flops(op.name, reads, writes)
        return machine.kernel(scale * (sum(reads) + sum(writes)), flops)

    def _flops(self, name: str, reads: Sequence[int], writes: Sequence[int]) -> float:
        if name in MATRIX_PRODUCTS and len(reads) > 1:
            # [m, k] times [k, n] is [m, n]; what else is read is a bias, and smaller.
            sizes = [*sorted(reads)[-2:], sum(writes)]
            left, right, out = (size / self.itemsize for size in sizes)
            return 2 * (left * right * out) ** 0.5
        if name.startswith(ATTENTION):
            # Two products of [length, dim] and [dim, length], half of which is masked; backward has
            # five. The length that a sequence has here is divided by what every dimension is.
            length = self.model.length / self.model.bytes_scale**0.5
            forward = 2 * length * max(writes) / self.itemsize
            return forward * (2.5 if name.endswith("_backward") else 1)
        return 0.0


# -- playing


def simulate(name: str, case: Case, options: argparse.Namespace) -> Row:
    program, ends, computing = record(name, case)
    model = MODELS[case.model_name]()
    machine = dataclasses.replace(
        H100, contention=CONTENTION[options.contention], flops=options.tflops * 1e12
    )
    costs = Costs(machine, model, 2 if case.wrapping.is_mixed else 4)
    played = play(
        program,
        costs,
        enqueue_s=options.host_us * 1e-6,
        event_s=options.event_us * 1e-6,
        marks=ends,
    )
    first, last = played.marks[0], played.marks[-1]
    measured = program[ends[0] : ends[-1]]
    kernels = [
        costs(happening).seconds
        for happening in measured
        if isinstance(happening, Op) and not is_transfer(happening)
    ]
    syncs = sum(isinstance(happening, SYNCS) for happening in measured)
    steps = STEPS - 1
    return Row(
        step=(last - first) / steps,
        kernels=sum(kernels) / steps,
        exposed=idle(played, first, last) / steps,
        reserved=played.reserved / model.block_numel,
        active=played.active / model.block_numel,
        syncs=syncs / steps - 1,
        unordered=len(find_unordered(program)) if is_ours(name) else 0,
        lanes=lanes_of(played, computing, played.marks[-2], last),
        memory=memory_of(played, played.marks[-2], last, model.bytes_scale),
    )


def is_transfer(op: Op) -> bool:
    return isinstance(op, (nccl.Collective, nccl.HostCopy))


def idle(played: Played, begin: float, end: float) -> float:
    """Return the time between two in which no kernel runs."""
    busy, until = 0.0, begin
    for ran in sorted(played.ran, key=lambda ran: ran.start):
        if not is_transfer(ran.op):
            start, stop = max(ran.start, until), min(ran.end, end)
            busy += max(0.0, stop - start)
            until = max(until, stop)
    return end - begin - busy


def lanes_of(played: Played, computing: int, begin: float, end: float) -> tuple[Lane, ...]:
    """Return a lane for each stream, the computing one first."""
    streams: dict[int, Lane] = {computing: Lane("compute", [])}
    for ran in played.ran:
        if begin <= ran.start < end:
            lane = streams.setdefault(ran.op.stream, Lane(f"stream {len(streams)}", []))
            lane.blocks.append((kind_of(ran.op), ran.op.name, ran.start - begin, ran.end - begin))
    for stream, lane in streams.items():
        kinds = {kind for kind, *_ in lane.blocks}
        if stream != computing:
            name = kinds.pop() if len(kinds) == 1 else " and ".join(sorted(kinds)[:2])
            streams[stream] = lane._replace(name=name)
    host = [
        ("the host waits", "", max(since, begin) - begin, min(until, end) - begin)
        for since, until in played.waited
        if until > begin and since < end
    ]
    return (*streams.values(), Lane("host waits", host))


def kind_of(op: Op) -> str:
    if isinstance(op, nccl.Collective):
        return op.name.replace("_", "-")
    if isinstance(op, nccl.HostCopy):
        return "copy to host" if op.to_host else "copy from host"
    return (
        "matrix product" if op.name in MATRIX_PRODUCTS or ATTENTION in op.name else "other kernel"
    )


def memory_of(
    played: Played, begin: float, end: float, scale: float
) -> tuple[tuple[float, float], ...]:
    """Return the bytes in use over a step, above the least of all steps."""
    least = min(memory.nbytes for memory in played.memory)
    return tuple(
        (memory.time - begin, scale * (memory.nbytes - least))
        for memory in played.memory
        if begin <= memory.time <= end
    )


# -- processes


def rows_of(jobs: Sequence[tuple[str, Case]], options: argparse.Namespace) -> Iterator[Row | str]:
    """Simulate each in a process of its own, in order; yield a reason where that failed. A process
    is forked before anything has trained, as autograd's threads do not survive a fork."""
    context = multiprocessing.get_context("fork")
    left, running = deque(jobs), deque[tuple[multiprocessing.process.BaseProcess, Connection]]()
    while left or running:
        while left and len(running) < options.jobs:
            name, case = left.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=send_row, args=(sender, name, case, options))
            process.start()
            sender.close()
            running.append((process, receiver))
        process, receiver = running.popleft()
        try:
            row: Row | str = receiver.recv()
        except EOFError:
            process.join()
            row = f"the process ended with {process.exitcode}"
        process.join()
        yield row


def send_row(sender: Connection, name: str, case: Case, options: argparse.Namespace) -> None:
    try:
        row: Row | str = simulate(name, case, options)
    except Exception as error:
        if options.traceback:
            raise
        first = str(error).strip().partition("\n")[0]
        row = f"{type(error).__name__}: {first}"
    sender.send(row)
    sender.close()
    os._exit(0)  # without destroying what belongs to the parent


# -- printing


def print_table(case: Case, rows: dict[str, Row | str]) -> bool:
    """Print the rows of a case; return whether a limit is not met."""
    print(f"\n{case.title}")
    heads = ("step", "to FSDP1", "to FSDP2", "kernels", "exposed", "reserved", "active", "syncs")
    print(ROW.format("", *heads, "limit"))
    missed = False
    for name, row in rows.items():
        if isinstance(row, str):
            print(f"{name:28}  {row}")
            missed = missed or is_ours(name)
            continue
        verdict = verdict_of(name, row, rows)
        missed = missed or verdict.startswith("NOT")
        columns = (
            f"{row.step * 1e3:.2f}",
            *(ratio(row, rows.get(peer)) for peer in (FSDP1, FSDP2)),
            f"{row.kernels * 1e3:.2f}",
            f"{row.exposed * 1e3:.2f}",
            f"{row.reserved:.1f}",
            f"{row.active:.1f}",
            f"{row.syncs:g}",
        )
        print(ROW.format(name, *columns, verdict).rstrip(), flush=True)
    return missed


def is_ours(name: str) -> bool:
    return name.startswith(OURS) or name == FULLY_SHARD


def ratio(row: Row, peer: Row | str | None) -> str:
    return f"{row.step / peer.step:.3f}" if isinstance(peer, Row) else ""


def verdict_of(name: str, row: Row, rows: dict[str, Row | str]) -> str:
    names = (FSDP2,) if name == FULLY_SHARD else (FSDP1, FSDP2)
    peers = [peer for peer in map(rows.get, names) if isinstance(peer, Row)]
    if not is_ours(name) or not peers:
        return ""
    found = []
    if row.step > TIME_LIMIT * min(peer.step for peer in peers):
        found.append("time")
    if row.reserved > min(peer.reserved for peer in peers):
        found.append("memory")
    if row.unordered:
        found.append(f"order ({row.unordered} accesses without a wait)")
    return f"NOT MET: {' and '.join(found)}" if found else "met"


def print_memory(rows: dict[str, Row | str]) -> None:
    """Print the bytes in use at points of a step that are equally far apart."""
    print(f"\nmemory in use at {MEMORY_POINTS} points of a step, GB")
    for name, row in rows.items():
        if isinstance(row, Row):
            points = [row.step * (number + 0.5) / MEMORY_POINTS for number in range(MEMORY_POINTS)]
            found = " ".join(f"{at(row.memory, point) / 1e9:4.1f}" for point in points)
            print(f"{name:28}{found}")


def at(memory: Sequence[tuple[float, float]], time: float) -> float:
    return next((nbytes for when, nbytes in reversed(memory) if when <= time), 0.0)


# -- options


def main() -> int:
    options = parse_arguments()
    warnings.simplefilter("ignore")
    nccl.use()
    missed = False
    for case in cases(options):
        names = [name for name in options.contenders if has_contender(name, case.wrapping.strategy)]
        found = rows_of([(name, case) for name in names], options)
        rows = dict(zip(names, found, strict=True))
        missed = print_table(case, rows) or missed
        if options.memory:
            print_memory(rows)
        if options.picture:
            shown = [(name, row) for name, row in rows.items() if isinstance(row, Row)]
            pictures = [Picture(name, row.step, row.lanes, row.memory) for name, row in shown]
            options.picture.write_text(write_picture(case.title, pictures), encoding="utf-8")
    return 1 if missed and options.check else 0


def cases(options: argparse.Namespace) -> Iterator[Case]:
    all_of = options.all_cases
    for is_mixed, recompute, accumulate, ranks, strategy in itertools.product(
        (True, False) if all_of else (not options.fp32,),
        ("none", "blocks") if all_of else (options.recompute,),
        (1, 2) if all_of else (options.accumulate,),
        options.ranks,
        options.strategies,
    ):
        if strategy == HYBRID_SHARD and ranks <= H100.ranks_per_node:
            continue  # there is one node
        wrapping = Wrapping(strategy, ranks, H100.ranks_per_node, is_mixed, options.offload)
        yield Case(
            options.model,
            wrapping,
            recompute,
            accumulate,
            not options.no_sync,
            options.optimizer,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            found = [name.strip() for name in text.split(";" if ";" in text else ",")]
            if unknown := set(found) - set(allowed):
                raise argparse.ArgumentTypeError(f"{unknown} not in {', '.join(allowed)}")
            return found

        return parse

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--model", choices=MODELS, default="blocks")
    parser.add_argument("--ranks", type=numbers, default=[8, 64])
    parser.add_argument("--strategies", type=names(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--contenders", type=names(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--fp32", action="store_true", help="default: bf16, summed in fp32")
    parser.add_argument("--recompute", choices=RECOMPUTES, default="none")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    parser.add_argument("--no-sync", action="store_true", help="reduce only the last microbatch")
    parser.add_argument("--offload", action="store_true", help="parameters live on the host")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--contention", choices=CONTENTION, default="sm")
    parser.add_argument("--tflops", type=float, default=H100.flops / 1e12, help="that are reached")
    parser.add_argument("--host-us", type=float, default=5.0, help="host time of an operation")
    parser.add_argument("--event-us", type=float, default=2.0, help="of a record or a wait")
    parser.add_argument(
        "--all-cases",
        action="store_true",
        help="bf16 and fp32, blocks recomputed or not, one and two microbatches",
    )
    parser.add_argument("--memory", action="store_true", help="print memory over time")
    parser.add_argument("--picture", type=Path, help="an SVG file for the last table's timeline")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a limit is not met")
    parser.add_argument("--jobs", type=int, default=2, help="rows that are simulated at once")
    parser.add_argument("--traceback", action="store_true", help="of rows that fail")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
