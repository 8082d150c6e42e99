"""Saves in which one process is killed. ``main`` prints the outcome of each, and the errors of
ranks that were waiting for a killed one.

Two ranks, forked from a process that has imported everything, load the newest checkpoint, check its
values, and save the next step: every value is the number of the step. One of them is killed before
its n-th operation on files, or in the middle of it if that is a write; then the other one is killed
too, as a launcher would do. Rank 0, which leads, is killed at every eighth of its operations, rank
1 at every 32nd; with FSDP_COMPAT_TEST_ALL=1 at each, and at every fourth."""

from __future__ import annotations

import datetime
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import checkpoint
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.forks import forked
from tests.support.sampling import at_most

NUM_OPERATIONS = 50  # a few more than a save takes, with the removal of leftovers
EVERY = at_most(8, of_all=1)
VICTIMS: list[dict[int, int]] = [  # of each save: the operation, by the rank
    *({}, {}),
    *({0: number} for number in range(0, NUM_OPERATIONS, EVERY)),
    *({1: number} for number in range(0, NUM_OPERATIONS, 4 * EVERY)),
    {},
]
OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "close", "rmdir", "unlink")


def _model(rank: int, store: str) -> tuple[FSDP, torch.optim.Optimizer]:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = FSDP(
        nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))),  # shards without padding
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def _load_and_save(rank: int, store: str, folder: str, step: int, deadly: int | None) -> None:
    model, optimizer = _model(rank, store)
    _load(folder, model, optimizer)
    Path(f"{store} loaded {rank}").touch()
    if step >= len(VICTIMS):
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter]["momentum_buffer"].fill_(step)
    done = 0

    def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done == deadly:
                if name == "write":
                    original(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return original(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name), name))
    checkpoint.save(folder, model, optimizer, extra=step, step=step, keep_last=2)


def _load(folder: str, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    path = checkpoint.latest(folder)
    if path is None:
        return
    step = checkpoint.load(path, model, optimizer).extra
    assert path.name == f"step-{step:08d}"
    values = set[float]()
    for parameter in model.parameters():
        values.update(parameter.unique().tolist())
        values.update(optimizer.state[parameter]["momentum_buffer"].unique().tolist())
    assert values == {float(step)}


def resumed(folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for step, victim in enumerate([*VICTIMS, {}]):  # the last pair of ranks only loads
            store = str(Path(scratch) / f"save {step}")
            ranks = [
                forked(_load_and_save, rank, store, folder, step, victim.get(rank))
                for rank in range(2)
            ]
            ended, first = os.wait()
            other = next(process for process in ranks if process != ended)
            if first:
                os.kill(other, signal.SIGKILL)
            second = os.waitpid(other, 0)[1]
            newest = checkpoint.latest(folder)
            found.append(
                {
                    "step": step,
                    "killed": bool(first or second),
                    "well": all(Path(f"{store} loaded {rank}").exists() for rank in range(2)),
                    "newest": newest and int(newest.name.removeprefix("step-")),
                    "left": [path.name for path in Path(folder).glob(".*")],
                }
            )
    return found


# -- errors of the other ranks; a case is (call, number of ranks, killed rank, the file operation
# before which it is killed)

CASES = [
    ("save", 2, 1, "open"),  # before it writes
    ("save", 2, 0, "rename"),  # all files are written
    ("save", 3, 0, "mkdir"),  # while the others wait for a directory
    ("async_save", 3, 1, "fsync"),
]


def _kill_before(operation: str) -> None:
    """Kill this process before an operation on a file of a checkpoint."""
    original = getattr(os, operation)

    def call(*args: Any, **kwargs: Any) -> Any:
        if operation != "open" or ".safetensors" in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, operation, call)


def _save_until_killed(
    rank: int, store: str, folder: str, case: tuple[str, int, int, str], results: int
) -> None:
    call, ranks, lost, operation = case
    limit = datetime.timedelta(minutes=10)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit
    )
    model = FSDP(nn.Linear(9, 9))
    checkpoint.save(folder, model, step=0)
    if rank == lost:
        _kill_before(operation)
    try:
        if call == "save":
            checkpoint.save(folder, model, step=1)
        else:
            checkpoint.async_save(folder, model, step=1).wait()
    except Exception as error:
        os.write(
            results, json.dumps([case, rank, type(error).__name__, str(error)]).encode() + b"\n"
        )


def survivors(folder: str) -> list[Any]:
    """Return the errors of the other ranks, by case."""
    reader, results = os.pipe()
    processes: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(CASES):  # all at once: they mostly wait
            arguments = (
                str(Path(scratch) / str(number)),
                str(Path(folder) / str(number)),
                case,
                results,
            )
            processes += [forked(_save_until_killed, rank, *arguments) for rank in range(case[1])]
        os.close(results)
        for process in processes:
            os.waitpid(process, 0)
    with os.fdopen(reader) as lines:
        return [json.loads(line) for line in lines]


def main(folder: str) -> None:
    print(json.dumps([resumed(f"{folder}/resumed"), survivors(f"{folder}/survivors")]))
