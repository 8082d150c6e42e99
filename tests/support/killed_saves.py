"""Saves of which one process is killed: ``python -m tests.support.killed_saves FOLDER NUM_SAVES``
prints what became of each.

Every save is of two ranks, forked from a process that has imported everything. One of them is
killed with SIGKILL before the n-th thing that it does with files, n from 0 on, or in the middle of
it if that is a write; the other one is killed at its death, as a launcher would. Then a third
process loads the newest checkpoint. Every parameter of a model is the step that it is saved at.
Nobody is killed in the first two saves and in the last one."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import checkpoint
from fsdp_compat.wrap import ModuleWrapPolicy

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "close", "rmdir", "unlink")


def _model(rank: int, ranks: int, store: str, value: float) -> tuple[FSDP, torch.optim.Optimizer]:
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    model = FSDP(
        nn.Sequential(*(nn.Linear(9, 9) for _ in range(6))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(torch.ones(1, 9)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter]["momentum_buffer"].fill_(value)
    return model, optimizer


def _save(rank: int, store: str, folder: str, step: int, deadly: int | None) -> None:
    model, optimizer = _model(rank, 2, store, float(step))
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


def _load(store: str, folder: str, results: int) -> None:
    path = checkpoint.latest(folder)
    if path is None:
        os.write(results, b"null")
        return
    model, optimizer = _model(0, 1, store, -1.0)
    step = checkpoint.load(path, model, optimizer)
    tensors = [*model.state_dict().values()]
    tensors += [
        entry["momentum_buffer"]
        for entry in FSDP.optim_state_dict(model, optimizer)["state"].values()
    ]
    values = {value for tensor in tensors for value in tensor.unique().tolist()}
    assert path.name == f"step-{step:08d}"
    assert values == {float(step)}
    os.write(results, json.dumps(step).encode())


def _forked(function: Callable[..., None], *args: Any) -> int:
    process = os.fork()
    if process:
        return process
    try:
        function(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(folder: str, num_saves: int) -> None:
    torch.set_num_threads(1)
    warm = nn.Parameter(
        torch.ones(1)
    )  # what a first step imports takes longer than everything else
    warm.grad = torch.ones(1)
    torch.optim.SGD([warm], lr=0.0, momentum=0.9).step()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for step in range(num_saves):
            victim = step % 2
            deadly = None if step in (0, 1, num_saves - 1) else (step - 2) // 2
            store = str(Path(scratch) / f"save {step}")
            ranks = [
                _forked(_save, rank, store, folder, step, deadly if rank == victim else None)
                for rank in range(2)
            ]
            ended, first = os.wait()
            other = next(process for process in ranks if process != ended)
            if first:
                os.kill(other, signal.SIGKILL)
            second = os.waitpid(other, 0)[1]
            reader, writer = os.pipe()
            loader = _forked(_load, str(Path(scratch) / f"load {step}"), folder, writer)
            os.close(writer)
            with os.fdopen(reader) as results:
                text = results.read()
            loaded = os.waitpid(loader, 0)[1] == 0
            facts = {
                "step": step,
                "killed": bool(first or second),
                "loads": json.loads(text or "null"),
                "well": loaded,
            }
            found.append(
                {
                    **facts,
                    "left": [
                        path.name for path in Path(folder).iterdir() if path.name.startswith(".")
                    ],
                }
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
