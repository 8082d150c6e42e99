"""Ranks, or programs, that end before their saves do; and bytes that no rank writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_compat import checkpoint
from fsdp_compat.checkpoint._ranks import processes
from fsdp_compat.errors import StateError
from tests.support.checkpoints import before_writes, toy
from tests.support.programs import launch
from tests.support.ranks import on_ranks


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@on_ranks(2, group_timeout=3600)
def test_a_rank_that_is_interrupted_in_a_save_does_not_leave_others_waiting(tmp_path: Path) -> None:
    model, optimizer = toy()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    module = "fsdp_compat.checkpoint._save."
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.save(tmp_path, model, step=1),
        lambda: checkpoint.async_save(tmp_path, model, optimizer, step=1).wait(),
    ]
    for place, each in (
        (f"{module}take_snapshot", calls[0]),
        ("fsdp_compat._archive.blocks.BlockWriter.write", calls[0]),
        (f"{module}Snapshot.detach", calls[1]),
    ):
        expected, told = (
            (KeyboardInterrupt, "") if rank == 1 else (StateError, "rank 1 .*left with")
        )
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(place, _interrupt)
            with pytest.raises(expected, match=told) as raised:
                each()
        assert rank == 1 or "KeyboardInterrupt" in str(raised.value)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    if rank == 1:  # it has done its part, and the others go on without it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes.Members, "ended_here", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(tmp_path, model, step=1)
        store.set("interrupted", "1")
    else:
        with before_writes(lambda: store.get("interrupted")):
            checkpoint.save(tmp_path, model, step=1)
    dist.barrier()
    assert checkpoint.save(tmp_path, model, optimizer, step=2) == checkpoint.latest(tmp_path)
    assert checkpoint.load(tmp_path / "step-00000001", model).extra is None


PROGRAM = """
import datetime, os, resource, select, signal, sys
import torch, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel as FSDP, checkpoint
from fsdp_compat.checkpoint._ranks import mailbox
from tests.support.checkpoints import before_writes

what, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
if what != "fails":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = FSDP(torch.nn.Linear(2000, 2000))
    if what != "saves":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    saving = checkpoint.async_save(folder, model, step=1)
    try:
        saving.wait() if what == "waits_for_a_full_disk" else None
    except RuntimeError:
        pass
    if what == "saves":
        dist.destroy_process_group()
else:
    mailbox.EXIT_S = 1.0
    store = dist.FileStore(folder + "-store", 2)
    limit = datetime.timedelta(hours=1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    model = FSDP(torch.nn.Linear(20, 20))
    if rank == 0:
        store.set("process", str(os.getpid()))
    else:
        first = os.pidfd_open(int(store.get("process")))
        waiting = before_writes(lambda: select.select([first], [], []))  # for its end
        waiting.__enter__()
    saving = checkpoint.async_save(folder, model, step=1)
    if rank == 0:
        raise ArithmeticError("training has failed")
    saving.wait()
"""
NOT_SAVED = "The checkpoint could not be saved"
NOT_AWAITED = "an async_save failed, and its wait() was not called"


def test_programs_end_when_their_saves_are_complete_or_have_failed(tmp_path: Path) -> None:
    """A failure of which the program was not told is printed once. A process whose training has
    failed ends while others are still writing."""
    whats = ("saves", "ignores_a_full_disk", "waits_for_a_full_disk", "fails", "fails")
    arguments = [(what, tmp_path / what, n - 3) for n, what in enumerate(whats)]
    saves, ignores, waits, first, second = launch(PROGRAM, arguments, tmp_path)
    assert saves.code == 0 and "Error" not in saves.err, saves.err
    path = checkpoint.latest(tmp_path / "saves")
    assert path is not None
    assert (path / "rank-00000.safetensors").stat().st_size > 4 * 2000 * 2000
    for program, times in ((ignores, 1), (waits, 0)):
        assert program.code == 0, program.err
        assert program.err.count(NOT_SAVED) == program.err.count(NOT_AWAITED) == times, program.err
    assert (first.code, second.code) == (1, 1), first.err + second.err
    assert "ArithmeticError: training has failed" in first.err
    assert NOT_AWAITED in first.err
    assert "StateError: A rank did not finish checkpoint.async_save" in second.err
    assert "its program has failed" in second.err
