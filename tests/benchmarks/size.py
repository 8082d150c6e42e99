"""Many units, many small parameters, and a model of 2 GB: construction, training, state dicts and
checkpoints on two ranks.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/size.py
    torchrun --standalone --nproc-per-node 2 tests/benchmarks/size.py --case units --contender ours
                                             (fsdp_compat installed, or PYTHONPATH=.)

Seconds on rank 0, each phase once but for the steps, of which the median of five is shown after a
first one; AdamW throughout. One contender after the other in one set of processes. The unwrapped
model runs on rank 0 alone. Files are synced to the disk by ours only, and are not in the page cache
when they are loaded.

    wrap    from the unwrapped model to one that is ready for its first forward
    first   the first step: forward, backward, optimizer
    step    a later one
    full    a full state dict of the model, on all ranks
    save    a sharded checkpoint of model and optimizer: ours natively, torch's through
            torch.distributed.checkpoint
    load    reading it into the model and the optimizer
    peak    growth of rank 0's resident memory over what it was before the model was built, GB, over
            all phases"""

from __future__ import annotations

import argparse
import functools
import gc
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as state_dicts
from checkpoint import Call, Row, dcp_calls, made_by_first_rank, ours_calls
from contenders import FSDP1, FSDP2, ORIGINAL, OURS, PLAIN, Wrapping, wrap
from host import Scales
from pages import drop_pages, memory_nbytes, restart_peak
from runs import Table, first_rank_alone, gloo_ranks, options
from torch import nn

STEPS = 5
CONTENDERS = (PLAIN, OURS, OURS + ORIGINAL, FSDP1, FSDP1 + ORIGINAL, FSDP2)
COLUMNS = ("wrap", "first", "step", "full", "save", "load", "peak")


class Wide(nn.Linear):
    """A unit with one large parameter."""


# model, what becomes a unit, width of its input
CASES: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], int]] = {
    "units": (lambda: nn.Sequential(*(Wide(64, 64) for _ in range(1000))), Wide, 64),
    "parameters": (lambda: nn.Sequential(*(Scales(100, 64) for _ in range(50))), Scales, 64),
    "2 GB": (lambda: nn.Sequential(*(Wide(7168, 7168) for _ in range(10))), Wide, 7168),
}


def timed(call: Callable[[], object]) -> float:
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def full_state_dict(name: str, model: nn.Module) -> object:
    if name == FSDP2:
        whole = state_dicts.StateDictOptions(full_state_dict=True)
        return state_dicts.get_model_state_dict(model, options=whole)
    return model.state_dict()


def calls_of(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Call, Call]:
    """Return what saves and what loads."""
    if name != PLAIN:
        calls = (ours_calls if name.startswith(OURS) else dcp_calls)(model, optimizer)
        return calls[Row.SHARDED_SAVE], calls[Row.SHARDED_LOAD]

    def save(folder: Path) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "plain.pt")

    def load(folder: Path) -> None:
        state = torch.load(folder / "plain.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, load


def run(case: str, name: str, folder: Path) -> list[float]:
    """Return the figures of COLUMNS. Collective."""
    build, unit, width = CASES[case]
    before = restart_peak()
    is_here = name != PLAIN or dist.get_rank() == 0
    torch.manual_seed(0)
    models = [build() if is_here else nn.Linear(1, 1)]
    found = [timed(lambda: models.append(wrap(name, models.pop(), Wrapping((unit,)))))]
    (model,) = models
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def timed_here(call: Callable[[], object]) -> float:
        return timed(call if is_here else lambda: None)

    found.append(timed_here(step))
    found.append(statistics.median(timed_here(step) for _ in range(STEPS)))
    optimizer.zero_grad()
    save, load = calls_of(name, model, optimizer)
    found.append(timed_here(lambda: full_state_dict(name, model)))
    found.append(timed_here(lambda: save(folder)))
    first_rank_alone(lambda: drop_pages(folder))
    found.append(timed_here(lambda: load(folder)))
    return [*found, (memory_nbytes() - before) / 1e9]


def main() -> None:
    parser = options(__doc__)
    add = parser.add_argument
    add("--case", choices=list(CASES), action="append", help="default: all")
    add("--contender", choices=CONTENDERS, action="append", help="default: all")
    add("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    with gloo_ranks():
        run_all(parser.parse_args())


def run_all(arguments: argparse.Namespace) -> None:
    parent = made_by_first_rank(arguments.folder)
    table = Table(dict.fromkeys(COLUMNS, "8.3f"), width=39)
    table.head(f"{'case':12}contender", last="")
    for case in arguments.case or CASES:
        for name in arguments.contender or CONTENDERS:
            folder = parent / f"{case} {name}"
            first_rank_alone(folder.mkdir)
            table.row(f"{case:12}{name}", run(case, name, folder))
            gc.collect()
            first_rank_alone(functools.partial(shutil.rmtree, folder))
    first_rank_alone(functools.partial(shutil.rmtree, parent))


if __name__ == "__main__":
    main()
