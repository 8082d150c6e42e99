"""Transient memory of a training step: the most that is alive beside parameters, gradients and
optimizer state, on CPU.

    torchrun --nproc-per-node 2 tests/benchmarks/memory.py    two ranks over gloo
    python tests/benchmarks/memory.py --fake 8                rank 0 of 8 on a fake process group
    ... memory.py --steps 200                                 does anything grow, does it vary?
    ... memory.py --tensors                                   what the peak is made of
                                             (fsdp_compat installed, or PYTHONPATH=.)

The model has 6 transformer blocks of 3.15 million parameters, each a unit, and a root of next to
nothing; the batch is one token. Every storage is followed (tests/support/live_bytes.py): what
operations make, what is resized, what was there before, and its end. A contender's figure is the
most that was alive at once in forward and backward, after three steps to warm up, without the
storages of its parameters, of the gradients that the step left and of AdamW's states, each counted
once, whoever views it; less the same of the unwrapped model, whose row "plain" shows it:
activations. It is divided by the elements of a block: bytes per element, u. With several ranks it
is that of the rank with most. Blocks of memory that ranks share count where they were made. What a
backend allocates counts as well: gloo's reduce_scatter_tensor, which FSDP1 and FSDP2 call, copies
its whole input. What an allocator keeps of freed memory counts for nobody; "pages kept" is what
ours keeps of freed blocks, where blocks are used, when the step has ended. Nothing is mapped here,
as on several hosts: what ranks of one host share is measured by host_memory.py.

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
import copy
import dataclasses
import gc
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from contenders import FSDP1, FSDP2, FULLY_SHARD, ORIGINAL, OURS, PLAIN
from step import Block, Transformer, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compat
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.live_bytes import (
    LiveBytes,
    Peak,
    release_spare_pages,
    spare_pages_nbytes,
    tensors_alive,
)

CONTENDERS = (OURS, OURS + ORIGINAL, FSDP1, FSDP1 + ORIGINAL, FSDP2, FULLY_SHARD)
WARM_UP_STEPS = 3
VOCABULARY, SEQUENCE, HEADS = 8, 1, 8
# in bytes per element: the root, small gradients that are moved together, and the next digit of a
# limit
ROUNDING = 0.1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A strategy, and what is gathered ahead."""

    name: str
    strategy: str
    forward_prefetch: bool
    backward_prefetch: str | None
    limits: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # bytes per element, by precision


@dataclasses.dataclass(frozen=True)
class Precision:
    param: torch.dtype | None
    reduce: torch.dtype | None


PRECISIONS = {
    "bf16/fp32": Precision(torch.bfloat16, torch.float32),
    "fp32": Precision(None, None),
    "bf16/bf16": Precision(torch.bfloat16, torch.bfloat16),
}
SCHEDULES = [
    Schedule(
        "FULL_SHARD, prefetch both ways",
        "FULL_SHARD",
        True,
        "BACKWARD_PRE",
        {"bf16/fp32": 8.7, "fp32": 13.3},
    ),
    Schedule(
        "FULL_SHARD, default", "FULL_SHARD", False, "BACKWARD_PRE", {"bf16/fp32": 8.7, "fp32": 13.3}
    ),
    Schedule("FULL_SHARD, no prefetch", "FULL_SHARD", False, None, {"bf16/fp32": 6.7, "fp32": 9.3}),
    Schedule("SHARD_GRAD_OP", "SHARD_GRAD_OP", False, "BACKWARD_PRE"),
]


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one contender held, in bytes; one of each per step."""

    peaks: list[Peak]
    left: list[int]  # after the step
    kept: list[int]  # likewise: pages of blocks that died, for the next ones


def main() -> int:
    arguments = parse_arguments()
    warnings.simplefilter("ignore")  # torch's FSDP1 says in each construction that it is going away
    torch.set_num_threads(1)
    if arguments.fake:
        dist.init_process_group("fake", rank=0, world_size=arguments.fake, store=FakeStore())
    elif "RANK" in os.environ:
        os.environ.setdefault("FSDP_COMPAT_SAME_HOST", "counters")
        dist.init_process_group("gloo")
    else:
        print(
            f"start it on at least 2 processes: torchrun --nproc-per-node 2 {sys.argv[0]}, or with "
            "--fake 8",
            file=sys.stderr,
        )
        return 2
    try:
        return run(arguments)
    finally:
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fake",
        type=int,
        metavar="RANKS",
        help="one process, on a fake process group of so many ranks",
    )
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument(
        "--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS)
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=[*CONTENDERS, PLAIN], default=[*CONTENDERS, PLAIN]
    )
    parser.add_argument(
        "--steps", type=int, default=1, help="steps to look at; more than one: say how they differ"
    )
    parser.add_argument("--tensors", action="store_true", help="what each peak is made of")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a limit is not met")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> int:
    u = sum(p.numel() for p in Block(arguments.dim, HEADS).parameters())
    ranks = f"{dist.get_world_size()} ranks{' (fake)' if arguments.fake else ''}"
    say(f"{arguments.blocks} units of u = {u:,} elements, {ranks}; bytes per u")
    missed = 0
    for precision in arguments.precisions:
        say(
            f"\n{precision:34}"
            + "".join(f"{_short(name):>15}" for name in arguments.contenders)
            + f"{'limit':>8}"
        )
        activations = 0.0
        for schedule in SCHEDULES:
            found: dict[str, Figures] = {}
            for name in arguments.contenders:
                if name == PLAIN and schedule is not SCHEDULES[0]:
                    continue
                found[name] = measure(name, arguments, schedule, PRECISIONS[precision])
            peaks = {
                name: most_of_ranks(max(peak.nbytes for peak in its.peaks)) / u
                for name, its in found.items()
            }
            activations = peaks.get(PLAIN, activations)
            peaks = {
                name: peak - activations if name != PLAIN else peak for name, peak in peaks.items()
            }
            limit, verdict = schedule.limits.get(precision), ""
            for name in (name for name in peaks if name.startswith((OURS, FULLY_SHARD))):
                over = name != FULLY_SHARD and limit is not None and peaks[name] > limit + ROUNDING
                if over or (FSDP2 in peaks and peaks[name] >= peaks[FSDP2]):
                    verdict = "NOT MET"
                    missed += 1
            cells = "".join(
                f"{peaks[name]:15.2f}" if name in peaks else f"{'':15}"
                for name in arguments.contenders
            )
            say(f"  {schedule.name:32}{cells}{limit or '':>8}  {verdict or 'met'}")
            kept = {
                name: most_of_ranks(max(its.kept)) / u
                for name, its in found.items()
                if name.startswith(OURS)
            }
            if any(kept.values()):
                say(
                    f"    {'pages kept':30}"
                    + "".join(
                        f"{kept[name]:15.2f}" for name in arguments.contenders if name in kept
                    )
                )
            if arguments.steps > 1:
                print_steps(found)
            if arguments.tensors:
                print_tensors(found, u)
    return 1 if missed and arguments.check else 0


def measure(
    name: str, arguments: argparse.Namespace, schedule: Schedule, precision: Precision
) -> Figures:
    """Train alone in the process, and look at what is alive. Collective."""
    others = tensors_alive()  # FSDP1 never lets go of its parameters
    release_spare_pages()
    torch.manual_seed(0)
    base = Transformer(VOCABULARY, SEQUENCE, arguments.dim, HEADS, arguments.blocks)
    model = MAKERS[name](base, schedule, precision)
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
        if isinstance(
            model, fsdp_compat.FSDPModule
        ):  # parameters have storage objects of their own
            runtime = model._get_fsdp_state().runtime
            live.leave_out(group.store.shard for group in runtime.groups)
        figures.peaks.append(live.peak())
        figures.left.append(live.now())
        figures.kept.append(spare_pages_nbytes())

    with LiveBytes() as live:
        live.leave_out(others)
        for _ in range(
            1 + arguments.steps
        ):  # the first, too, is to warm up: what it leaves as gradients, FSDP1 keeps for a while
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


def print_tensors(found: dict[str, Figures], u: int) -> None:
    for name, its in found.items():
        say(f"    {name}")
        for held in its.peaks[-1].held:
            if held.nbytes >= ROUNDING * u:
                say(f"      {held.nbytes / u:6.2f}  {held.number} x {held.what}")


def most_of_ranks(nbytes: int) -> int:
    """Return the largest of all ranks. Collective."""
    value = torch.tensor(nbytes)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


def _short(name: str) -> str:
    return name.replace(ORIGINAL, " original").replace("fully_shard of", "f_s of")


# -- contenders


def _plain(base: nn.Module, schedule: Schedule, precision: Precision) -> nn.Module:
    return copy.deepcopy(base)


def _ours(
    base: nn.Module, schedule: Schedule, precision: Precision, use_orig_params: bool = False
) -> nn.Module:
    backward = (
        None
        if schedule.backward_prefetch is None
        else fsdp_compat.BackwardPrefetch[schedule.backward_prefetch]
    )
    return fsdp_compat.FullyShardedDataParallel(
        base,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=fsdp_compat.ShardingStrategy[schedule.strategy],
        mixed_precision=fsdp_compat.MixedPrecision(
            param_dtype=precision.param, reduce_dtype=precision.reduce
        ),
        forward_prefetch=schedule.forward_prefetch,
        backward_prefetch=backward,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def _fsdp1(
    base: nn.Module, schedule: Schedule, precision: Precision, use_orig_params: bool = False
) -> nn.Module:
    backward = (
        None
        if schedule.backward_prefetch is None
        else torch_fsdp.BackwardPrefetch[schedule.backward_prefetch]
    )
    return torch_fsdp.FullyShardedDataParallel(
        base,
        auto_wrap_policy=TorchModuleWrapPolicy({Block}),
        sharding_strategy=torch_fsdp.ShardingStrategy[schedule.strategy],
        mixed_precision=torch_fsdp.MixedPrecision(
            param_dtype=precision.param, reduce_dtype=precision.reduce
        ),
        forward_prefetch=schedule.forward_prefetch,
        backward_prefetch=backward,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def _fully_sharded(
    base: nn.Module, schedule: Schedule, precision: Precision, library: Any = torch_fsdp
) -> nn.Module:
    """library: with fully_shard and its MixedPrecisionPolicy."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = library.MixedPrecisionPolicy(
        param_dtype=precision.param, reduce_dtype=precision.reduce
    )
    blocks, root = (True, None) if schedule.strategy == "FULL_SHARD" else (False, False)
    units = [module for module in base.modules() if isinstance(module, Block)]
    for unit in units:
        library.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=blocks)
    model = library.fully_shard(base, mesh=mesh, mp_policy=policy, reshard_after_forward=root)
    if schedule.forward_prefetch:
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    return model


MAKERS: dict[str, Callable[[nn.Module, Schedule, Precision], nn.Module]] = {
    PLAIN: _plain,
    OURS: _ours,
    OURS + ORIGINAL: lambda *args: _ours(*args, use_orig_params=True),
    FSDP1: _fsdp1,
    FSDP1 + ORIGINAL: lambda *args: _fsdp1(*args, use_orig_params=True),
    FSDP2: _fully_sharded,
    FULLY_SHARD: lambda *args: _fully_sharded(*args, library=fsdp_compat),
}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
