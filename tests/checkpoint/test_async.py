"""checkpoint.async_save: what is saved is what was there at the call, whatever training does while it is written."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import checkpoint
from fsdp_compat.checkpoint import _blocks as blocks
from tests.checkpoint.test_native import ORIGINAL, PLAIN, build, whole_state
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
        losses = train(model, optimizer, range(2, 4))  # collectives of training and of the save do not meet
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
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step-00000003", "step-00000004"]
    saving = checkpoint.async_save(folder, model, optimizer, step=9)
    checkpoint.save(folder, model, optimizer, step=10)  # beside the other
    saving.wait()
    assert checkpoint.load(Path(folder) / "step-00000004", model, optimizer) == 4


def test_one_save_is_under_way_at_a_time_and_its_copy_goes_with_it(tmp_path: Path) -> None:
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
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Error" not in ran.stderr, ran.stderr
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert (path / "rank-00000.safetensors").stat().st_size > 4 * 2000 * 2000
