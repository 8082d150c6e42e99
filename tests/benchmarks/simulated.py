"""Step time and memory on simulated H100s: ours beside FSDP1 and FSDP2. No GPU is needed.

    PYTHONPATH=. python tests/benchmarks/simulated.py
    PYTHONPATH=. python tests/benchmarks/simulated.py --ranks 64 --strategies FULL_SHARD
    PYTHONPATH=. python tests/benchmarks/simulated.py --all-cases --check

The host code of each contender is the real one: it trains on the emulated device of
tests/support/emulated, which records its operations, events, waits and allocations, and on process
groups with the semantics of NCCL (one stream per group). The model is small and stands for a large
one (simulated_models.py). The cost model (tests/support/cost_model.py) gives each operation a time,
and the recorded program is played (tests/support/emulated/play.py): 2 steps of 3, after 2 that are
not recorded. Figures are the same on every machine and in every run; they are not measurements.

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
that a matrix product takes. Not simulated: the host's own time beyond 5 us for an operation and
2 us for an event, computation of the host (the optimizer's step with --offload), and
fragmentation."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from contenders import (
    FSDP1,
    FSDP2,
    FULLY_SHARD,
    HYBRID_SHARD,
    ORIGINAL,
    OURS,
    STRATEGIES,
    Wrapping,
    has_contender,
    wrap,
)
from measuring import Table, options
from simulated_models import (
    MODELS,
    RECOMPUTES,
    Model,
    call_block,
    keep_some,
    recompute_block,
)
from torch import nn

from tests.support import emulated
from tests.support.cost_model import H100, Machine, Work
from tests.support.emulated import nccl
from tests.support.emulated.play import Played, play
from tests.support.order import (
    DeviceSync,
    EventSync,
    Happening,
    Op,
    StreamSync,
    find_unordered,
)

CONTENDERS = (OURS, OURS + ORIGINAL, FULLY_SHARD, FSDP1, FSDP2)
EVERY_STRATEGY = (*STRATEGIES, HYBRID_SHARD)
WARM_UP_STEPS, STEPS = 2, 3
HOST_S, EVENT_S = 5e-6, 2e-6  # of the host, for an operation, and for a record or a wait
TIME_LIMIT = 1.002
ROW_LIMIT_S = 900.0  # also if the process of a row has died
MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
SYNCS = (EventSync, StreamSync, DeviceSync)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3, foreach=True),
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
}
COLUMNS = {
    **{"step": "8.2f", "to FSDP1": "9.3f", "to FSDP2": "9.3f", "kernels": "8.2f"},
    **{"exposed": "8.2f", "reserved": "9.1f", "active": "7.1f", "syncs": "6g"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One table."""

    model_name: str
    strategy: str
    ranks: int
    is_mixed: bool  # bf16, gradients are summed in fp32
    offloads: bool
    recompute: str
    microbatches: int
    optimizer: str

    @property
    def title(self) -> str:
        model = MODELS[self.model_name]()
        precision = "bf16, summed in fp32" if self.is_mixed else "fp32"
        parts = [f"{self.ranks} ranks", self.strategy, precision, model.description]
        if self.recompute != "none":
            parts.append(f"recomputation: {self.recompute}")
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches, each reduced")
        if self.offloads:
            parts.append("offloaded to the host")
        unit = model.block_numel * model.bytes_scale / 1e9
        return f"{', '.join(parts)} (1 byte per parameter of a block: {unit:.3f} GB)"

    def wrapping(self, block: type[nn.Module]) -> Wrapping:
        return Wrapping(
            (block,),
            self.strategy,
            torch.device(emulated.NAME, 0),
            param_dtype=torch.bfloat16 if self.is_mixed else None,
            reduce_dtype=torch.float32 if self.is_mixed else None,
            offloads=self.offloads,
            ranks_per_node=H100.ranks_per_node,
            reshards_root=True,
        )


@dataclasses.dataclass(frozen=True)
class Row:
    step: float  # seconds, as all times
    kernels: float
    exposed: float
    reserved: float  # bytes per parameter of a block, as active
    active: float
    syncs: float
    unordered: int  # accesses of the same bytes that no wait orders


# -- recording


def record(name: str, case: Case) -> tuple[Sequence[Happening], Sequence[int]]:
    """Train; return what was recorded, and where each step ends."""
    with nccl.group_of(case.ranks):
        model = MODELS[case.model_name]()
        torch.manual_seed(0)
        built = model.build()
        if case.recompute == "some":
            for module in built.modules():
                if isinstance(module, model.block):
                    keep_some(module)
        wrapped = wrap(name, built, case.wrapping(model.block))
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
        return recording.happenings, ends


def training_step(wrapped: nn.Module, model: Model, case: Case) -> Callable[[], None]:
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](parameters)
    inputs = model.inputs().to(emulated.NAME)
    through = recompute_block if case.recompute == "blocks" else call_block

    def step() -> None:
        for _ in range(case.microbatches):
            wrapped(inputs, through).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.current_stream().synchronize()  # a loop that reads its loss

    return step


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
            is_sum = op.name == nccl.ALL_REDUCE
            cost = machine.all_reduce if is_sum else machine.all_gather
            return cost(scale * op.nbytes, op.ranks)
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


def simulate(name: str, case: Case, tflops: float) -> Row:
    program, ends = record(name, case)
    model = MODELS[case.model_name]()
    machine = dataclasses.replace(H100, flops=tflops * 1e12)
    costs = Costs(machine, model, 2 if case.is_mixed else 4)
    played = play(program, costs, enqueue_s=HOST_S, event_s=EVENT_S, marks=ends)
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


# -- processes


def rows_of(jobs: Sequence[tuple[str, Case]], tflops: float) -> Iterator[Row | str]:
    """Simulate each in a process of its own, in order; yield a reason where that failed. A process
    is forked before anything has trained, as autograd's threads do not survive a fork."""
    context = multiprocessing.get_context("fork")
    with context.Pool(2, maxtasksperchild=1) as pool:
        rows = pool.imap(functools.partial(row_of, tflops), jobs)
        for _ in jobs:
            yield rows.next(timeout=ROW_LIMIT_S)


def row_of(tflops: float, job: tuple[str, Case]) -> Row | str:
    try:
        return simulate(*job, tflops)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- printing


def print_table(case: Case, rows: dict[str, Row | str]) -> bool:
    """Print the rows of a case; return whether a limit is not met."""
    print(f"\n{case.title}")
    table, missed = Table(COLUMNS), False
    table.head()
    for name, row in rows.items():
        if isinstance(row, str):
            print(f"{name:28}  {row}")
            missed = missed or is_ours(name)
            continue
        verdict = verdict_of(name, row, rows)
        missed = missed or verdict.startswith("NOT")
        ratios = [ratio(row, rows.get(peer)) for peer in (FSDP1, FSDP2)]
        times = [row.kernels * 1e3, row.exposed * 1e3]
        cells = [row.step * 1e3, *ratios, *times, row.reserved, row.active, row.syncs]
        table.row(name, cells, verdict)
    return missed


def is_ours(name: str) -> bool:
    return name.startswith(OURS) or name == FULLY_SHARD


def ratio(row: Row, peer: Row | str | None) -> float | None:
    return row.step / peer.step if isinstance(peer, Row) else None


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


# -- options


def main() -> int:
    arguments = parse_arguments()
    warnings.simplefilter("ignore")
    nccl.use()
    missed = False
    for case in cases(arguments):
        names = [name for name in CONTENDERS if has_contender(name, case.strategy)]
        found = rows_of([(name, case) for name in names], arguments.tflops)
        missed = print_table(case, dict(zip(names, found, strict=True))) or missed
    return int(missed and arguments.check)


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    more = arguments.all_cases
    for is_mixed, recompute, microbatches, ranks, strategy in itertools.product(
        (True, False) if more else (True,),
        ("none", "blocks") if more else (arguments.recompute,),
        (1, 2) if more else (1,),
        arguments.ranks,
        arguments.strategies,
    ):
        if strategy != HYBRID_SHARD or ranks > H100.ranks_per_node:  # there is more than one node
            how = is_mixed, arguments.offload, recompute, microbatches, arguments.optimizer
            yield Case(arguments.model, strategy, ranks, *how)


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, check="a limit is not met")

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    add = parser.add_argument
    add("--model", choices=MODELS, default="blocks")
    add("--ranks", type=numbers, default=[8, 64])
    add("--strategies", nargs="+", choices=EVERY_STRATEGY, default=list(EVERY_STRATEGY))
    add("--recompute", choices=RECOMPUTES, default="none")
    add("--offload", action="store_true", help="parameters live on the host")
    add("--optimizer", choices=OPTIMIZERS, default="sgd")
    add("--tflops", type=float, default=H100.flops / 1e12, help="that are reached")
    every = "bf16 and fp32, blocks recomputed or not, one and two microbatches"
    add("--all-cases", action="store_true", help=every)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
