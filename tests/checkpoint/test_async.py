"""checkpoint.async_save: what is saved is what was there at the call, whatever training does while
it is written."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import StateError, checkpoint
from fsdp_compat.checkpoint import _blocks as blocks
from fsdp_compat.checkpoint import _processes as processes
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.test_native import (
    ORIGINAL,
    PLAIN,
    _no_more_than,
    assert_state,
    build,
    whole_state,
)
from tests.support.checkpoints import refused
from tests.support.memory import allocated_nbytes
from tests.support.odd_model import Config, train
from tests.support.programs import run_programs
from tests.support.ranks import on_ranks


@contextlib.contextmanager
def _writing(wait: Callable[[], object]) -> Iterator[None]:
    """Files are not written before ``wait`` returns."""
    write = blocks.BlockWriter.write

    def write_when_told(self: Any, data: memoryview) -> None:
        wait()
        write(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.BlockWriter, "write", write_when_told)
        yield


@pytest.mark.parametrize("config", [PLAIN, ORIGINAL], ids=["flat", "original"])
@on_ranks(2)
def test_training_goes_on_and_the_values_of_the_call_are_saved(
    tmp_path: Path, config: Config
) -> None:
    model, optimizer = build(config)
    train(model, optimizer, range(2))
    expected = whole_state(model, optimizer)
    extra = {"seen": torch.arange(3), "list": [1]}
    go = threading.Event()
    with _writing(lambda: go.wait(30)):
        saving = checkpoint.async_save(tmp_path, model, optimizer, extra, step=2)
        extra["seen"] += 1
        # collectives of training and of the save do not meet
        losses = train(model, optimizer, range(2, 4))
        assert not saving.done()
        assert checkpoint.latest(tmp_path) is None
        with pytest.raises(TimeoutError, match="still being written"):
            saving.wait(timeout=0.01)
        go.set()
        path = saving.wait()
    assert saving.done()
    assert saving.result() == path == checkpoint.latest(tmp_path)
    loaded = checkpoint.load(path, model, optimizer)
    assert torch.equal(loaded.extra["seen"], torch.arange(3))
    assert_state(model, optimizer, expected)
    assert train(model, optimizer, range(2, 4)) == losses


@on_ranks(1)
def test_a_relative_folder_is_that_of_the_call(tmp_path: Path) -> None:
    model, go = build(PLAIN)[0], threading.Event()
    with _writing(lambda: go.wait(30)), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        saving = checkpoint.async_save("run", model, step=1)
        (tmp_path / "other").mkdir()
        patch.chdir(tmp_path / "other")
        go.set()
        assert saving.wait() == tmp_path / "run" / "step-00000001"
    assert checkpoint.latest(tmp_path / "run") == saving.wait()


@on_ranks(2)
def test_one_save_runs_at_a_time_and_its_copy_is_freed_with_it(tmp_path: Path) -> None:
    model, optimizer = build(PLAIN)
    train(model, optimizer, range(1))
    checkpoint.async_save(tmp_path, model, optimizer, step=0).wait()
    before = allocated_nbytes()
    saves = []
    save = functools.partial(checkpoint.async_save, tmp_path, model, optimizer)
    for step in range(1, 5):
        saves.append(save(step, step=step, keep_last=2))
        assert sum(not save.done() for save in saves) <= 1  # each waits for the one before
        train(model, optimizer, range(step, step + 1))
    assert [save.wait().name for save in saves] == [f"step-{step:08d}" for step in range(1, 5)]
    del saves
    assert allocated_nbytes() == before
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", "step-00000004"}
    saving = save(step=9)
    checkpoint.save(tmp_path, model, optimizer, step=10)  # beside the other
    saving.wait()
    assert checkpoint.load(tmp_path / "step-00000004", model, optimizer).extra == 4


@on_ranks(1)
def test_a_save_that_ends_before_the_call_that_starts_it_is_not_in_progress(tmp_path: Path) -> None:
    model, _ = build(PLAIN)
    start = threading.Thread.start

    def start_and_end(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "fsdp_compat save":
            thread.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_end)
        saving = checkpoint.async_save(tmp_path, model, step=1)
    assert saving.done()
    saving.wait()
    reference = weakref.ref(saving)
    del saving
    gc.collect()
    assert reference() is None, "a save that has ended is held as if it were under way"


def _until_done(saving: checkpoint.AsyncSave) -> None:
    while not saving.done():
        threading.Event().wait(0.01)


@on_ranks(2)
def test_a_failure_without_wait_is_raised_once_by_the_next_call_on_all_ranks(
    tmp_path: Path,
) -> None:
    model, _ = build(PLAIN)
    good = checkpoint.save(tmp_path, model, step=0)
    first = dist.get_rank() == 0

    def fails() -> checkpoint.AsyncSave:
        with _no_more_than(1000) if not first else contextlib.nullcontext():
            saving = checkpoint.async_save(tmp_path, model, step=1)
            if first:
                _until_done(saving)  # the other rank may not know yet
            dist.barrier()
            _until_done(saving) if not first else None
        return saving

    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.async_save(tmp_path, model, step=2),
        lambda: checkpoint.save(tmp_path, model, step=2),
        lambda: checkpoint.load(good, model),
    ]
    for call in calls:
        saving = fails()
        with refused(CheckpointError, "earlier async_save failed", "rank 1: OSError"):
            call()
        assert checkpoint.latest(tmp_path) == good
        checkpoint.load(good, model)  # it was told once
    for failed in (saving, fails()):
        with refused(CheckpointError, "rank 1: OSError"):
            failed.wait()
    assert checkpoint.async_save(tmp_path, model, step=2).wait().name == "step-00000002"
    saving = fails()
    if first:  # one rank was told, the other one was not
        with refused(CheckpointError, "rank 1: OSError"):
            saving.wait()
    with refused(CheckpointError, "earlier async_save failed"):
        checkpoint.save(tmp_path, model, step=3)
    checkpoint.save(tmp_path, model, step=3)


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@on_ranks(2, group_timeout=3600)
def test_a_rank_that_is_interrupted_in_a_save_does_not_leave_others_waiting(tmp_path: Path) -> None:
    model, optimizer = build(PLAIN)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    module = "fsdp_compat.checkpoint._save."
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.save(tmp_path, model, step=1),
        lambda: checkpoint.async_save(tmp_path, model, optimizer, step=1).wait(),
    ]
    for place, each in (
        *((f"{module}take_snapshot", call) for call in calls),
        *((f"{module}Snapshot.drop_common", call) for call in calls),
        ("fsdp_compat.checkpoint._blocks.BlockWriter.write", calls[0]),
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
        with _writing(lambda: store.get("interrupted")):
            checkpoint.save(tmp_path, model, step=1)
    dist.barrier()
    assert checkpoint.save(tmp_path, model, optimizer, step=2) == checkpoint.latest(tmp_path)
    assert checkpoint.load(tmp_path / "step-00000001", model).extra is None


@on_ranks(2)
def test_a_slow_rank_that_lives_is_waited_for(tmp_path: Path) -> None:
    model, _ = build(PLAIN)
    store = dist.distributed_c10d._get_default_store()
    ended_here, looks = processes.Members.ended_here, []

    def looked(self: processes.Members) -> list[int]:
        looks.append(ended_here(self))
        if len(looks) == 3:
            store.set("looked", "1")
        return looks[-1]

    slow = dist.get_rank() == 1
    with (
        _writing(lambda: store.get("looked") if slow else None),
        pytest.MonkeyPatch.context() as patch,
    ):
        if not slow:
            patch.setattr(processes.Members, "ended_here", looked)
        path = checkpoint.save(tmp_path, model, step=1)
    assert path == checkpoint.latest(tmp_path)
    assert slow or looks[:3] == [[], [], []]


# --- the end of a program -------------------------------------------------------------------------

PROGRAM = """
import datetime, os, resource, select, signal, sys
import torch, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel as FSDP, checkpoint
from fsdp_compat.checkpoint import _blocks as blocks, _mailbox as mailbox

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
    model, write = FSDP(torch.nn.Linear(20, 20)), blocks.BlockWriter.write
    if rank == 0:
        store.set("process", str(os.getpid()))
    else:
        first = os.pidfd_open(int(store.get("process")))

        def write_when_the_first_has_ended(self, data):
            select.select([first], [], [])
            write(self, data)

        blocks.BlockWriter.write = write_when_the_first_has_ended
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
    saves, ignores, waits, first, second = run_programs(PROGRAM, arguments, tmp_path)
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
