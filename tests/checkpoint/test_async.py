"""checkpoint.async_save: what is saved is what was there at the call, whatever training does while
it is written."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import checkpoint
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.corpus.content import take_step
from tests.support.checkpoints import before_writes, no_more_than, refused, state_of, toy
from tests.support.memory import allocated_nbytes
from tests.support.odd_model import assert_same, make_model, make_optimizer, shard, train
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_training_goes_on_and_the_values_of_the_call_are_saved(
    tmp_path: Path, use_orig_params: bool
) -> None:
    model = shard(make_model(), ("FULL_SHARD", use_orig_params, "blocks"))
    optimizer = make_optimizer("Adam", model)
    train(model, optimizer, range(2))
    expected = state_of(model, optimizer)
    extra = {"seen": torch.arange(3), "list": [1]}
    go = threading.Event()
    with before_writes(lambda: go.wait(30)):
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
    assert_same(state_of(model, optimizer), expected)
    assert train(model, optimizer, range(2, 4)) == losses


@on_ranks(1)
def test_a_relative_folder_is_that_of_the_call(tmp_path: Path) -> None:
    model, go = toy()[0], threading.Event()
    with before_writes(lambda: go.wait(30)), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        saving = checkpoint.async_save("run", model, step=1)
        (tmp_path / "other").mkdir()
        patch.chdir(tmp_path / "other")
        go.set()
        assert saving.wait() == tmp_path / "run" / "step-00000001"
    assert checkpoint.latest(tmp_path / "run") == saving.wait()


@on_ranks(2)
def test_one_save_runs_at_a_time_and_its_copy_is_freed_with_it(tmp_path: Path) -> None:
    model, optimizer = toy()
    checkpoint.async_save(tmp_path, model, optimizer, step=0).wait()
    before = allocated_nbytes()
    saves = []
    save = functools.partial(checkpoint.async_save, tmp_path, model, optimizer)
    for step in range(1, 5):
        saves.append(save(step, step=step, keep_last=2))
        assert sum(not save.done() for save in saves) <= 1  # each waits for the one before
        take_step(optimizer)
    assert [save.wait().name for save in saves] == [f"step-{step:08d}" for step in range(1, 5)]
    del saves
    assert allocated_nbytes() == before
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", "step-00000004"}
    saving = save(step=9)
    checkpoint.save(tmp_path, model, optimizer, step=10)  # beside the other
    saving.wait()
    assert checkpoint.load(tmp_path / "step-00000004", model, optimizer).extra == 4


def _until_done(saving: checkpoint.AsyncSave) -> None:
    while not saving.done():
        threading.Event().wait(0.01)


@on_ranks(2)
def test_a_failure_without_wait_is_raised_once_by_the_next_call_on_all_ranks(
    tmp_path: Path,
) -> None:
    model, _ = toy()
    good = checkpoint.save(tmp_path, model, step=0)
    first = dist.get_rank() == 0

    def fails() -> checkpoint.AsyncSave:
        with no_more_than(1000) if not first else contextlib.nullcontext():
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


@on_ranks(2)
def test_a_slow_rank_that_lives_is_waited_for(tmp_path: Path) -> None:
    model, _ = toy()
    slow = dist.get_rank() == 1
    began = time.monotonic()
    waits = iter([1.5])  # seconds: longer than several looks at whether it lives
    with before_writes(lambda: time.sleep(next(waits, 0)) if slow else None):
        path = checkpoint.save(tmp_path, model, step=1)
    assert time.monotonic() - began > 1
    assert path == checkpoint.latest(tmp_path)
