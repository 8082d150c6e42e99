"""Step time and peak memory on one CUDA device: ours beside FSDP1 and FSDP2.

    python tests/benchmarks/gpu.py           (fsdp_compat installed, or PYTHONPATH=.)
        rank 0 of 8
    python tests/benchmarks/gpu.py --bandwidth 25 --cases short
        transfers of 25 instead of 100 GB/s, one case
    python tests/benchmarks/gpu.py --world-size 1
        one rank on NCCL: nothing is sharded
    python tests/benchmarks/gpu.py --cases short --profile FILE
        a trace of ours, and how much of the transfers it hides
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
turns, as in contenders.py, by events of the device. The columns:

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
import copy
import dataclasses
import functools
import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from contenders import (
    FSDP1,
    FSDP2,
    ORIGINAL,
    OURS,
    PLAIN,
    Contender,
    Timings,
    fsdp1_of,
    measure,
    require_rounds,
)
from step import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compat
from fsdp_compat.wrap import ModuleWrapPolicy

PROFILED_STEPS = 3
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


class Transformer(nn.Module):
    """From tokens [1, rows + 1] to a loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.blocks = nn.Sequential(*(Block(sizes.dim, sizes.heads) for _ in range(sizes.blocks)))
        self.norm, self.head = (
            nn.LayerNorm(sizes.dim),
            nn.Linear(sizes.dim, sizes.vocabulary, bias=False),
        )

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.tokens(data[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())


class Pieces(nn.Module):
    """A unit of many small matrices, one after the other."""

    def __init__(self, dim: int, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class ManyPieces(nn.Module):
    """From vectors [rows, dim] to a loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Pieces(sizes.dim, sizes.pieces) for _ in range(sizes.blocks)))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.blocks(data).float().pow(2).mean()


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


# -- the contenders


def make_contenders(base: nn.Module, device: torch.device) -> list[Contender]:
    """Return the contenders, each around its own copy of ``base``."""
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        PLAIN: lambda module: module.to(device, torch.bfloat16)
    }
    for original in (False, True):
        suffix = ORIGINAL if original else ""
        makers[OURS + suffix] = functools.partial(_ours, device=device, use_orig_params=original)
        makers[FSDP1 + suffix] = functools.partial(_fsdp1, device=device, use_orig_params=original)
    makers[FSDP2] = functools.partial(_fsdp2, device=device)
    found = []
    for name, make in makers.items():
        model = make(copy.deepcopy(base))
        found.append(Contender(name, model, tuple(model.parameters())))
    return found


def _ours(module: nn.Module, device: torch.device, use_orig_params: bool) -> nn.Module:
    return fsdp_compat.FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block, Pieces}),
        mixed_precision=fsdp_compat.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
        use_orig_params=use_orig_params,
        device_id=device,
    )


def _fsdp1(module: nn.Module, device: torch.device, use_orig_params: bool) -> nn.Module:
    return torch_fsdp.FullyShardedDataParallel(
        module,
        auto_wrap_policy=TorchModuleWrapPolicy({Block, Pieces}),
        mixed_precision=torch_fsdp.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
        use_orig_params=use_orig_params,
        device_id=device,
    )


def _fsdp2(module: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module.to(device)
    for unit in [child for child in module.modules() if isinstance(child, (Block, Pieces))]:
        torch_fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy)
    return torch_fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)


# -- running


def main() -> int:
    arguments = parse_arguments()
    warnings.simplefilter("ignore")  # torch's FSDP1 says in each construction that it is going away
    device: Device = Cpu() if arguments.device == "cpu" else Cuda(arguments.bandwidth * 1e9)
    if arguments.world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=arguments.world_size, store=FakeStore())
    else:
        dist.init_process_group(device.backend, rank=0, world_size=1, store=dist.HashStore())
    missed = 0
    try:
        network = Network(device)
        with network.standing_in() if arguments.world_size > 1 else contextlib.nullcontext():
            for case in arguments.cases:
                missed += run(case, arguments, device, network)
    finally:
        dist.destroy_process_group()
    return 1 if missed and arguments.check else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--world-size",
        type=int,
        default=8,
        help="1: one rank on NCCL; more: the first of so many on a fake group",
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=100.0,
        help="GB per second that a rank sends, of the transfers stood in for",
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--profile", metavar="FILE", help="trace a few steps of ours instead of timing all"
    )
    parser.add_argument("--check", action="store_true", help="exit status 1 if a goal is not met")
    arguments = parser.parse_args()
    require_rounds(parser, arguments.rounds)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --small tries the script")
    if arguments.profile and len(arguments.cases) > 1:
        parser.error("--profile needs one of --cases")
    return arguments


def run(case: str, arguments: argparse.Namespace, device: Device, network: Network) -> int:
    """Print the table of a case; return how many goals were missed."""
    sizes = (SMALL_CASES if arguments.small else CASES)[case]
    torch.manual_seed(0)
    base = ManyPieces(sizes) if sizes.pieces else Transformer(sizes)
    if sizes.pieces:
        data = torch.randn(sizes.rows, sizes.dim, device=device.device)
    else:
        data = torch.randint(sizes.vocabulary, (1, sizes.rows + 1), device=device.device)
    contenders = make_contenders(base, device.device)
    steps = {
        its.name: functools.partial(
            step, its, data.bfloat16() if its.name == PLAIN and sizes.pieces else data
        )
        for its in contenders
    }
    where = torch.cuda.get_device_name() if device.device.type == "cuda" else "CPU"
    group = (
        f"rank 0 of {arguments.world_size}, {arguments.bandwidth:g} GB/s"
        if arguments.world_size > 1
        else "one rank"
    )
    print(
        f"\n{case}: {sum(p.numel() for p in base.parameters()) / 1e6:.1f}M parameters in "
        f"{sizes.blocks} blocks, {sizes.rows} rows, "
        f"{group}, {where}, torch {torch.__version__}, {arguments.rounds} rounds"
    )
    if arguments.profile:
        print_overlap(steps[OURS], arguments.profile, device)
        return 0
    timings = measure(steps, arguments.rounds, clock=device.clock)
    peaks = {name: device.peak_nbytes(step) for name, step in steps.items()}
    sent = {name: network.sent_by(step) for name, step in steps.items()}
    return print_table(timings, peaks, sent, sizes)


def step(contender: Contender, data: torch.Tensor) -> None:
    contender.model(data).backward()
    contender.zero_grad()


def print_table(
    timings: Timings, peaks: dict[str, int | None], sent: dict[str, float], sizes: Sizes
) -> int:
    missed = 0
    print(
        f"\n{'':28} {'median':>10} {'minimum':>10} {'to FSDP1':>9} {'to FSDP2':>9} {'sent':>9} "
        f"{'peak':>9}  goal"
    )
    for name in timings.seconds:
        ratios = [timings.ratio(name, other) for other in (fsdp1_of(name), FSDP2)]
        peak, verdict = peaks[name], ""
        if name.startswith(OURS):
            others = [its for its in (peaks[fsdp1_of(name)], peaks[FSDP2]) if its is not None]
            missing = [] if max(ratios) <= sizes.goal else ["time"]
            missing += [] if peak is None or peak < min(others) else ["peak"]
            verdict = f"NOT MET: {', '.join(missing)}" if missing else "met"
            missed += bool(missing)
        shown = "-" if peak is None else f"{peak / 1e9:.2f} GB"
        print(
            f"{name:28} {timings.median(name) * 1e3:7.2f} ms {timings.minimum(name) * 1e3:7.2f} ms "
            f"{ratios[0]:9.3f} {ratios[1]:9.3f} {sent[name] / 1e6:6.1f} MB {shown:>9}  {verdict}"
        )
    return missed


# -- a trace


def print_overlap(run: Callable[[], None], file: str, device: Device) -> None:
    """Trace a few steps into ``file``, and print how much of the transfers ran while something else
    did."""
    for _ in range(PROFILED_STEPS):
        run()
    device.clock()
    activities = [ProfilerActivity.CPU] + (
        [ProfilerActivity.CUDA] if device.device.type == "cuda" else []
    )
    with profile(activities=activities) as trace:
        for _ in range(PROFILED_STEPS):
            run()
        device.clock()
    trace.export_chrome_trace(file)
    on_device = [
        event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    spans = {True: [], False: []}  # type: dict[bool, list[tuple[float, float]]]
    for event in on_device:
        spans["spin_kernel" in event.name or "nccl" in event.name.lower()].append(
            (event.time_range.start, event.time_range.end)
        )
    transferring, computing = _union(spans[True]), _union(spans[False])
    total = sum(end - start for start, end in transferring)
    hidden = sum(
        max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
        for one, other in itertools.product(transferring, computing)
    )
    print(f"written to {file}; transfers {total / PROFILED_STEPS / 1e3:.2f} ms per step", end="")
    print(f", {hidden / total:.0%} of it while something was computed" if total else "")


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return intervals that do not overlap and cover the same."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
