"""checkpoint.async_save: what is saved is what was there at the call, whatever training does while
it is written."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import StateError, checkpoint
from fsdp_compat.checkpoint import _blocks as blocks
from fsdp_compat.checkpoint import _processes as processes
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.test_native import ORIGINAL, PLAIN, _no_more_than, build, whole_state
from tests.support.memory import allocated_nbytes
from tests.support.odd_model import Config, assert_same, assert_same_optim, train
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


class _Held:
    """Files are not written before ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._write = blocks.BlockWriter.write

    def __enter__(self) -> threading.Event:
        original, go = self._write, self.go

        def write(self: Any, data: memoryview) -> None:
            assert go.wait(30)
            original(self, data)

        blocks.BlockWriter.write = write  # type: ignore[method-assign]
        return self.go

    def __exit__(self, *error: object) -> None:
        self.go.set()
        blocks.BlockWriter.write = self._write  # type: ignore[method-assign]


def _trains_on(folder: str, config: Config) -> None:
    model, optimizer = build(config)
    train(model, optimizer, range(2))
    expected = whole_state(model, optimizer)
    extra = {"seen": torch.arange(3), "list": [1]}
    with _Held() as go:
        saving = checkpoint.async_save(folder, model, optimizer, extra, step=2)
        extra["seen"] += 1
        losses = train(
            model, optimizer, range(2, 4)
        )  # collectives of training and of the save do not meet
        assert not saving.done()
        assert checkpoint.latest(folder) is None
        with pytest.raises(TimeoutError, match="still being written"):
            saving.wait(timeout=0.01)
        go.set()
        path = saving.wait()
    assert saving.done()
    assert saving.result() == path == checkpoint.latest(folder)
    loaded = checkpoint.load(path, model, optimizer)
    assert torch.equal(loaded["seen"], torch.arange(3))
    found = whole_state(model, optimizer)
    assert_same(found["model"], expected["model"])
    assert_same_optim(found["optim"], expected["optim"])
    assert train(model, optimizer, range(2, 4)) == losses


def test_training_goes_on_and_the_values_of_the_call_are_saved(tmp_path: Path) -> None:
    run_ranks(3, _trains_on, str(tmp_path / "flat"), PLAIN)
    run_ranks(2, _trains_on, str(tmp_path / "original"), ORIGINAL)


def _several(folder: str) -> None:
    model, optimizer = build(PLAIN)
    train(model, optimizer, range(1))
    checkpoint.async_save(folder, model, optimizer, step=0).wait()
    before = allocated_nbytes()
    saves = []
    for step in range(1, 5):
        saves.append(checkpoint.async_save(folder, model, optimizer, step, step=step, keep_last=2))
        assert sum(not save.done() for save in saves) <= 1  # each waits for the one before
        train(model, optimizer, range(step, step + 1))
    assert [save.wait().name for save in saves] == [f"step-{step:08d}" for step in range(1, 5)]
    del saves
    assert allocated_nbytes() == before
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]
    saving = checkpoint.async_save(folder, model, optimizer, step=9)
    checkpoint.save(folder, model, optimizer, step=10)  # beside the other
    saving.wait()
    assert checkpoint.load(Path(folder) / "step-00000004", model, optimizer) == 4


def test_one_save_runs_at_a_time_and_its_copy_is_freed_with_it(tmp_path: Path) -> None:
    run_ranks(2, _several, str(tmp_path))


PROGRAM = """
import torch, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel as FSDP, checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checkpoint.async_save({folder!r}, FSDP(torch.nn.Linear(2000, 2000)), step=1)
dist.destroy_process_group()
"""


def test_a_program_ends_when_its_last_save_is_complete(tmp_path: Path) -> None:
    program = PROGRAM.format(folder=str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Error" not in ran.stderr, ran.stderr
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert (path / "rank-00000.safetensors").stat().st_size > 4 * 2000 * 2000


def _ends_at_once(folder: str) -> None:
    """The thread has ended before the call that starts it returns."""
    model, _ = build(PLAIN)
    start = threading.Thread.start

    def start_and_end(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "fsdp_compat save":
            thread.join()

    threading.Thread.start = start_and_end  # type: ignore[method-assign]
    try:
        saving = checkpoint.async_save(folder, model, step=1)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    assert saving.done()
    saving.wait()
    reference = weakref.ref(saving)
    del saving
    gc.collect()
    assert reference() is None, "a save that has ended is held as if it were under way"


def test_a_save_that_ends_immediately_is_not_in_progress(tmp_path: Path) -> None:
    run_ranks(1, _ends_at_once, str(tmp_path))


def _until_done(saving: checkpoint.AsyncSave) -> None:
    while not saving.done():
        threading.Event().wait(0.01)


def _nobody_waits(folder: str) -> None:
    model, _ = build(PLAIN)
    good = checkpoint.save(folder, model, step=0)
    first = dist.get_rank() == 0

    def fails() -> checkpoint.AsyncSave:
        with _no_more_than(1000) if not first else contextlib.nullcontext():
            saving = checkpoint.async_save(folder, model, step=1)
            if first:
                _until_done(saving)  # the other rank may not know yet
            dist.barrier()
            _until_done(saving) if not first else None
        return saving

    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.async_save(folder, model, step=2),
        lambda: checkpoint.save(folder, model, step=2),
        lambda: checkpoint.load(good, model),
    ]
    for call in calls:
        saving = fails()
        with pytest.raises(
            CheckpointError, match=r"earlier async_save failed(.|\n)*rank 1: OSError"
        ):
            call()
        assert checkpoint.latest(folder) == good
        checkpoint.load(good, model)  # it was told once
    with pytest.raises(CheckpointError, match="rank 1: OSError"):
        saving.wait()
    saving = fails()
    with pytest.raises(CheckpointError, match="rank 1: OSError"):
        saving.wait()
    assert checkpoint.async_save(folder, model, step=2).wait().name == "step-00000002"
    saving = fails()
    if first:  # one rank was told, the other one was not
        with pytest.raises(CheckpointError, match="rank 1: OSError"):
            saving.wait()
    with pytest.raises(CheckpointError, match="earlier async_save failed"):
        checkpoint.save(folder, model, step=3)
    checkpoint.save(folder, model, step=3)


def test_a_failure_without_wait_is_raised_once_by_the_next_call_on_all_ranks(
    tmp_path: Path,
) -> None:
    run_ranks(2, _nobody_waits, str(tmp_path))


FULL_DISK = """
import resource, signal, sys
import torch, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel as FSDP, checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = FSDP(torch.nn.Linear(2000, 2000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
saving = checkpoint.async_save({folder!r}, model, step=1)
try:
    saving.wait() if {waits} else None
except checkpoint_error as error:
    pass
"""


@pytest.mark.parametrize("waits", [False, True])
def test_an_unreported_failure_is_printed_once_when_the_program_ends(
    waits: bool, tmp_path: Path
) -> None:
    program = FULL_DISK.format(folder=str(tmp_path), waits=waits).replace(
        "checkpoint_error", "RuntimeError"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("The checkpoint could not be saved") == (0 if waits else 1), ran.stderr
    assert ("an async_save failed, and its wait() was not called" in ran.stderr) == (not waits)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Any:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield original
    finally:
        setattr(owner, name, original)


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def _interrupted(folder: str) -> None:
    model, optimizer = build(PLAIN)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    left = "rank 1 .*left with KeyboardInterrupt"
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.save(folder, model, step=1),
        lambda: checkpoint.async_save(folder, model, optimizer, step=1).wait(),
    ]
    for place in (
        "fsdp_compat.checkpoint._save_job.take_snapshot",
        "fsdp_compat.checkpoint._save_job.Snapshot.take_common",
    ):
        owner, _, name = place.rpartition(".")
        for call in calls:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr(f"{owner}.{name}", _interrupt)
                with (
                    pytest.raises(KeyboardInterrupt)
                    if rank == 1
                    else pytest.raises(StateError, match=left)
                ):
                    call()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(blocks.BlockWriter, "write", _interrupt)
        with (
            pytest.raises(KeyboardInterrupt) if rank == 1 else pytest.raises(StateError, match=left)
        ):
            calls[0]()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("fsdp_compat.checkpoint._save_job.Snapshot.detach", _interrupt)
        with (
            pytest.raises(KeyboardInterrupt) if rank == 1 else pytest.raises(StateError, match=left)
        ):
            calls[1]()
    dist.barrier()
    assert list(Path(folder).iterdir()) == []
    write = blocks.BlockWriter.write

    def write_when_told(self: Any, data: memoryview) -> None:
        store.get("interrupted")
        write(self, data)

    if rank == 1:  # it has done its part, and the others go on without it
        with (
            _replaced(processes.Members, "ended_here", _interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            checkpoint.save(folder, model, step=1)
        store.set("interrupted", "1")
    else:
        with _replaced(blocks.BlockWriter, "write", write_when_told):
            checkpoint.save(folder, model, step=1)
    dist.barrier()
    assert checkpoint.save(folder, model, optimizer, step=2) == checkpoint.latest(folder)
    assert checkpoint.load(Path(folder) / "step-00000001", model) is None


def test_a_rank_that_is_interrupted_in_a_save_does_not_leave_others_waiting(tmp_path: Path) -> None:
    run_ranks(2, _interrupted, str(tmp_path), timeout=100, group_timeout=3600)


def _slow(folder: str) -> None:
    model, _ = build(PLAIN)
    store, write = dist.distributed_c10d._get_default_store(), blocks.BlockWriter.write
    ended_here, looks = processes.Members.ended_here, []

    def looked(self: processes.Members) -> list[int]:
        looks.append(ended_here(self))
        if len(looks) == 3:
            store.set("looked", "1")
        return looks[-1]

    def write_when_told(self: Any, data: memoryview) -> None:
        store.get("looked")
        write(self, data)

    slow = dist.get_rank() == 1
    replaced = (
        (blocks.BlockWriter, "write", write_when_told)
        if slow
        else (processes.Members, "ended_here", looked)
    )
    with _replaced(*replaced):
        path = checkpoint.save(folder, model, step=1)
    assert path == checkpoint.latest(folder)
    assert slow or looks[:3] == [[], [], []]


def test_a_slow_rank_that_lives_is_waited_for(tmp_path: Path) -> None:
    run_ranks(2, _slow, str(tmp_path))


TRAINING_FAILS = """
import datetime, sys
import torch, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel as FSDP, checkpoint
from fsdp_compat.checkpoint import _blocks as blocks, _mailbox as mailbox
rank, mailbox.EXIT_S = int(sys.argv[1]), 1.0
store = dist.FileStore({store!r}, 2)
limit = datetime.timedelta(hours=1)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
model, write = FSDP(torch.nn.Linear(20, 20)), blocks.BlockWriter.write
if rank == 1:
    blocks.BlockWriter.write = lambda self, data: (sys.stdin.readline(), write(self, data))
saving = checkpoint.async_save({folder!r}, model, step=1)
if rank == 0:
    raise ArithmeticError("training has failed")
saving.wait()
"""


def test_a_process_whose_training_has_failed_ends_while_others_are_still_writing(
    tmp_path: Path,
) -> None:
    program = TRAINING_FAILS.format(store=str(tmp_path / "store"), folder=str(tmp_path / "saves"))
    pipes: Any = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], **pipes) for rank in range(2)
    ]
    try:
        _, first = ranks[0].communicate(timeout=200)
        _, second = ranks[1].communicate("go on\n" * 10, timeout=200)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [1, 1], first + second
    assert "ArithmeticError: training has failed" in first
    assert "an async_save failed, and its wait() was not called" in first
    assert "StateError: A rank did not finish the save" in second
    assert "its program has failed" in second
