"""Saves in which one rank is killed: ``python -m tests.support.survivors FOLDER`` prints the errors
of the other ranks, by case.

A case is (call, number of ranks, killed rank, the file operation before which it is killed). Ranks
are forked from a process that has imported everything. The time limit of their process group is far
longer than this program takes."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import checkpoint
from tests.support.forks import forked

CASES = [
    ("save", 2, 1, "open"),  # before it writes
    ("save", 2, 0, "rename"),  # all files are written
    ("save", 3, 2, "fsync"),
    ("save", 3, 0, "mkdir"),  # while the others wait for a directory
    ("async_save", 2, 0, "fsync"),
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


def _save(
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


def main(folder: str) -> None:
    torch.set_num_threads(1)
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
            processes += [forked(_save, rank, *arguments) for rank in range(case[1])]
        os.close(results)
        for process in processes:
            os.waitpid(process, 0)
    with os.fdopen(reader) as lines:
        print(json.dumps([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main(sys.argv[1])
