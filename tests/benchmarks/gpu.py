"""Step time and peak memory on one CUDA device: ours beside FSDP1 and FSDP2.

    python tests/benchmarks/gpu.py           (fsdp_compat installed, or PYTHONPATH=.)
        rank 0 of 8
    python tests/benchmarks/gpu.py --bandwidth 25 --cases short
        transfers of 25 instead of 100 GB/s, one case
    python tests/benchmarks/gpu.py --world-size 1
        one rank on NCCL: nothing is sharded
    python tests/benchmarks/gpu.py --device cpu --small
        a trial of this script without a GPU: its figures mean nothing

With several ranks the process is rank 0 of a fake process group: allocations, copies, hooks and
streams are real, transfers are not. In place of each all-gather and reduce-scatter the device
sleeps, for all contenders alike, as long as the bytes take at the given bandwidth: on the stream on
which NCCL would run (its own, or the current one of a call that is not asynchronous), after what it
would wait for, one transfer of the group at a time. What is gathered from other ranks is whatever
lies in memory.

Parameters are in fp32, computed with in bf16, gradients are summed in fp32. The cases:

    long     a transformer of 1.0 billion parameters in 19 blocks, one sequence of 4096 tokens per
             rank
    short    the same, one sequence of 256 tokens: there is little to compute for what is sent
    small    24 blocks of 192 parameters each, 0.15 billion in all, 256 rows: the cost of handling
             parameters

A block is a unit. A step is forward, backward and gradients set to None. Contenders are timed in
turns, as in measuring.py, by events of the device. The columns:

    median, minimum   milliseconds of a step
    to FSDP1, FSDP2   step / the other's step in the same round, median. FSDP1 with the same
                      use_orig_params
    sent              MB that a step's transfers stand for
    peak              GB that a step holds at most above what is held between steps (parameters)
    goal              ours only: "met" if not slower than either (at short sequences 5 % faster),
                      and with a peak below both"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    DDP,
    FSDP1,
    FSDP2,
    FULLY_SHARD,
    OURS,
    PLAIN,
    Contender,
    Wrapping,
    build,
    fsdp1_of,
)
from measuring import Table, Timings, fake_ranks, group, measure, options
from step import Block, Transformer, loss_of
from torch import nn

CALIBRATION_CYCLES = 100_000_000
SHORT_GOAL = 0.95


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a case."""

    dim: int
    blocks: int
    rows: int  # tokens of the sequence
    goal: float  # the most that ours may take, to either
    heads: int = 16
    vocabulary: int = 16384
    pieces: int = 0  # parameters of a block beside biases; 0: it is one of a transformer


CASES = {
    "long": Sizes(2048, 19, 4096, 1.0),
    "short": Sizes(2048, 19, 256, SHORT_GOAL),
    "small": Sizes(256, 24, 256, 1.0, pieces=96),
}
SMALL_CASES = {
    "long": Sizes(64, 3, 32, 1.0, 4, 64),
    "short": Sizes(64, 3, 4, SHORT_GOAL, 4, 64),
    "small": Sizes(16, 3, 4, 1.0, pieces=6),
}


class Pieces(nn.Module):
    """A unit of many small matrices, one after the other."""

    def __init__(self, dim: int, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def build_model(sizes: Sizes) -> nn.Module:
    if sizes.pieces:
        return nn.Sequential(*(Pieces(sizes.dim, sizes.pieces) for _ in range(sizes.blocks)))
    return Transformer(sizes.vocabulary, sizes.rows, sizes.dim, sizes.heads, sizes.blocks)


# -- a device


class Cuda:
    """The first CUDA device."""

    def __init__(self, bandwidth: float) -> None:
        """bandwidth: of the transfers that are stood in for, in bytes per second."""
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.backend, self._bandwidth = "nccl", bandwidth
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()
        self._cycles_per_s = self._calibrate()
        self._stream, self._last = torch.cuda.Stream(), torch.cuda.Event()
        self._last.record()

    def _calibrate(self) -> float:
        torch.cuda._sleep(CALIBRATION_CYCLES)
        before = self.clock()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        return CALIBRATION_CYCLES / (self.clock() - before)

    def clock(self) -> float:
        """Seconds of the device, when all that was enqueued has been done."""
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        return self._start.elapsed_time(now) / 1e3

    def peak_nbytes(self, step: Callable[[], None]) -> int | None:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def transfer(self, nbytes: float, asynchronous: bool, tensors: Tensors) -> dist.Work:
        """Sleep on the stream on which a transfer would run."""
        current = torch.cuda.current_stream()
        where = self._stream if asynchronous else current
        where.wait_stream(current)
        where.wait_event(self._last)  # one at a time: they have one communicator
        with torch.cuda.stream(where):
            torch.cuda._sleep(int(nbytes / self._bandwidth * self._cycles_per_s))
            self._last = torch.cuda.Event()
            self._last.record()
        return Transfer(self._last, tensors)


class Transfer(dist.Work):
    """One under way. ``keep``: its tensors, which NCCL's works keep until they have been waited
    for, too."""

    def __init__(self, event: torch.cuda.Event, keep: object) -> None:
        super().__init__()
        self._event, self._keep = event, keep

    def wait(self, *_: object) -> bool:
        torch.cuda.current_stream().wait_event(self._event)
        self._keep = None
        return True


class Cpu:
    """To see that the script runs."""

    device, backend = torch.device("cpu"), "gloo"

    def clock(self) -> float:
        return time.perf_counter()

    def peak_nbytes(self, step: Callable[[], None]) -> int | None:
        step()
        return None

    def transfer(self, nbytes: float, asynchronous: bool, tensors: Tensors) -> dist.Work:
        return Nothing()


class Nothing(dist.Work):
    """A transfer that has ended."""

    def wait(self, *_: object) -> bool:
        return True


Device = Cuda | Cpu
Tensors = tuple[torch.Tensor, torch.Tensor]

# Torch renamed them in 2.13, and kept the older ones, which ours calls.
COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "reduce_scatter_single",
)


class Network:
    """Stands in for the transfers of a process group that makes none."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.nbytes = 0.0  # that this rank has sent

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside of it, all-gathers and reduce-scatters of tensors are transfers of the device,
        whoever calls them."""

        def collective(
            group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, options: Any
        ) -> dist.Work:
            nbytes = max(output.nbytes, source.nbytes) * (group.size() - 1) / group.size()
            self.nbytes += nbytes
            return self._device.transfer(nbytes, options.asyncOp, (output, source))

        methods = {
            name: getattr(dist.ProcessGroup, name)
            for name in COLLECTIVES
            if name in dir(dist.ProcessGroup)
        }
        try:
            for name in methods:
                setattr(dist.ProcessGroup, name, collective)
            yield
        finally:
            for name, method in methods.items():
                setattr(dist.ProcessGroup, name, method)

    def sent_by(self, step: Callable[[], None]) -> float:
        before = self.nbytes
        step()
        return self.nbytes - before


# -- running


def main() -> int:
    arguments = parse_arguments()
    device: Device = Cpu() if arguments.device == "cpu" else Cuda(arguments.bandwidth * 1e9)
    ranks, missed = arguments.world_size, 0
    one = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    network = Network(device)
    with (
        fake_ranks(ranks) if ranks > 1 else group(device.backend, **one),
        network.standing_in() if ranks > 1 else contextlib.nullcontext(),
    ):
        for case in arguments.cases:
            missed += run(case, arguments, device, network)
    return int(missed > 0 and arguments.check)


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, rounds=25, check="a goal is not met")
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda")
    ranks = "1: one rank on NCCL; more: the first of so many on a fake group"
    add("--world-size", type=int, default=8, help=ranks)
    sent = "GB per second that a rank sends, of the transfers stood in for"
    add("--bandwidth", type=float, default=100.0, help=sent)
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    add("--small", action="store_true", help="tiny models")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --small tries the script")
    return arguments


def run(case: str, arguments: argparse.Namespace, device: Device, network: Network) -> int:
    """Print the table of a case; return how many goals were missed."""
    sizes = (SMALL_CASES if arguments.small else CASES)[case]
    torch.manual_seed(0)
    base = build_model(sizes)
    data = torch.randint(sizes.vocabulary, (1, sizes.rows + 1), device=device.device)
    if sizes.pieces:
        data = torch.randn(sizes.rows, sizes.dim, device=device.device)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    how = Wrapping((Block, Pieces), device=device.device, **dtypes)
    contenders = build(base, how, without=[PLAIN, DDP, FULLY_SHARD])
    plain = build_model(sizes).to(device.device, torch.bfloat16)
    contenders.append(Contender(PLAIN, plain, tuple(plain.parameters())))
    steps = {its.name: functools.partial(step, its, data) for its in contenders}
    where = torch.cuda.get_device_name() if device.device.type == "cuda" else "CPU"
    ranks = f"rank 0 of {arguments.world_size}, {arguments.bandwidth:g} GB/s"
    print(
        f"\n{case}: {sum(p.numel() for p in base.parameters()) / 1e6:.1f}M parameters in "
        f"{sizes.blocks} blocks, {sizes.rows} rows, "
        f"{ranks if arguments.world_size > 1 else 'one rank'}, {where}, "
        f"torch {torch.__version__}, {arguments.rounds} rounds\n"
    )
    timings = measure(steps, arguments.rounds, clock=device.clock)
    peaks = {name: device.peak_nbytes(step) for name, step in steps.items()}
    sent = {name: network.sent_by(step) for name, step in steps.items()}
    return print_table(timings, peaks, sent, sizes.goal)


def step(contender: Contender, data: torch.Tensor) -> None:
    if not data.is_floating_point():
        loss = loss_of(contender.model, data)
    else:
        loss = contender.model(data.to(contender.parameters[0].dtype)).float().pow(2).mean()
    loss.backward()
    contender.zero_grad()


def print_table(
    timings: Timings, peaks: dict[str, int | None], sent: dict[str, float], goal: float
) -> int:
    """Return how many goals were missed. goal: the most that ours may take, to either."""
    columns = {"median": "7.2f ms", "minimum": "7.2f ms", "to FSDP1": "9.3f", "to FSDP2": "9.3f"}
    table, missed = Table(columns | {"sent": "6.1f MB", "peak": "6.2f GB"}), 0
    table.head(last="goal")
    for name in timings.seconds:
        ratios, peak, verdict = timings.ratios(name, FSDP1, FSDP2), peaks[name], ""
        if name.startswith(OURS):
            missing = [] if max(filter(None, ratios.values())) <= goal else ["time"]
            others = [its for its in (peaks[fsdp1_of(name)], peaks[FSDP2]) if its is not None]
            missing += [] if peak is None or peak < min(others) else ["peak"]
            verdict = f"NOT MET: {', '.join(missing)}" if missing else "met"
            missed += bool(missing)
        times = timings.median(name) * 1e3, timings.minimum(name) * 1e3
        shown = "-" if peak is None else peak / 1e9
        table.row(name, [*times, *ratios.values(), sent[name] / 1e6, shown], verdict)
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
