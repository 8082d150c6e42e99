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
import gc
import os
import re
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as state_dicts
import torch.distributed.fsdp as torch_fsdp
from contenders import FSDP1, FSDP2, ORIGINAL, OURS, PLAIN, Strategy, makers
from torch import nn

from fsdp_compat import checkpoint

STEPS = 5


class Wide(nn.Linear):
    """A unit with one large parameter."""


class Small(nn.Module):
    """A unit with many small parameters."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(dim)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


CASES: dict[
    str, tuple[Callable[[], nn.Module], type[nn.Module], int]
] = {  # (model, what becomes a unit, width of its input)
    "units": (lambda: nn.Sequential(*(Wide(64, 64) for _ in range(1000))), Wide, 64),
    "parameters": (lambda: nn.Sequential(*(Small(100, 64) for _ in range(50))), Small, 64),
    "2 GB": (lambda: nn.Sequential(*(Wide(7168, 7168) for _ in range(10))), Wide, 7168),
}


def resident_gb(which: str = "VmRSS") -> float:
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1e6 if found else float("nan")


def timed(call: Callable[[], object]) -> float:
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def full_state_dict(name: str, model: nn.Module) -> object:
    if name.startswith(FSDP2):
        return state_dicts.get_model_state_dict(
            model, options=state_dicts.StateDictOptions(full_state_dict=True)
        )
    return model.state_dict()


def sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch's checkpoints hold."""
    if isinstance(model, torch_fsdp.FullyShardedDataParallel):
        type(model).set_state_dict_type(model, torch_fsdp.StateDictType.SHARDED_STATE_DICT)
    found, of_optimizer = state_dicts.get_state_dict(model, optimizer)
    return {"model": found, "optimizer": of_optimizer}


def save(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    if name.startswith(OURS):
        checkpoint.save(folder, model, optimizer, step=1)
    elif name != PLAIN:
        dcp.save(sharded_state(model, optimizer), checkpoint_id=folder)
    elif dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt"
        )


def load(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    if name.startswith(OURS):
        newest = checkpoint.latest(folder)
        assert newest is not None
        checkpoint.load(newest, model, optimizer)
    elif name != PLAIN:
        state = sharded_state(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        state_dicts.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    elif dist.get_rank() == 0:
        state = torch.load(folder / "plain.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(case: str, name: str, maker: Callable[[nn.Module], nn.Module], folder: Path) -> str:
    build, _, width = CASES[case]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident_gb()
    here = name != PLAIN or dist.get_rank() == 0
    torch.manual_seed(0)
    models = [build() if here else nn.Linear(1, 1)]
    seconds = {"wrap": timed(lambda: models.append(maker(models.pop())))}
    (model,) = models
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(4, width)

    def step() -> None:
        if here:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    seconds["first"] = timed(step)
    seconds["step"] = statistics.median(timed(step) for _ in range(STEPS))
    optimizer.zero_grad()
    seconds["full"] = timed(lambda: full_state_dict(name, model) if here else None)
    seconds["save"] = timed(lambda: save(name, model, optimizer, folder))
    drop_from_cache(folder)
    seconds["load"] = timed(lambda: load(name, model, optimizer, folder))
    seconds["peak"] = resident_gb("VmHWM") - before
    return f"{case:<12}{name:<28}" + "".join(f"{value:>9.3f}" for value in seconds.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--contender", action="append", help="default: all")
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; default: a temporary folder"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    places: list[Any] = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(places)
    if dist.get_rank() == 0:
        columns = ("wrap", "first", "step", "full", "save", "load", "peak")
        print(
            f"{'case':<12}{'contender':<28}" + "".join(f"{name:>9}" for name in columns), flush=True
        )
    names = [PLAIN, OURS, OURS + ORIGINAL, FSDP1, FSDP1 + ORIGINAL, FSDP2]
    for case in options.case or CASES:
        for name in options.contender or names:
            folder = Path(places[0]) / f"{case} {name}"
            line = run(
                case, name, makers(CASES[case][1], Strategy.FULL_SHARD, ddp=False)[name], folder
            )
            gc.collect()
            dist.barrier()
            if dist.get_rank() == 0:
                print(line, flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
