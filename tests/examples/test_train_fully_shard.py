"""examples/train_fully_shard.py gives the same losses on any number of ranks, however it is resumed
and in both formats of checkpoints."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples import train_fully_shard as example
from tests.support.ranks import run_ranks

SMALL = ["--dim", "16", "--layers", "1", "--batch", "12"]
Losses = list[tuple[int, float]]


def _train(arguments: list[str], num_steps: int | None = None) -> Losses:
    """Train, and leave off after some steps."""
    steps = example.train(example.parse_arguments(arguments), torch.device("cpu"))
    return list(itertools.islice(steps, num_steps))


def trained(num_ranks: int, folder: Path, *arguments: str, num_steps: int | None = None) -> Losses:
    """Train with SMALL sizes, and return the losses, which are the same on all ranks."""
    options = [*SMALL, "--folder", str(folder), *arguments]
    first, *others = run_ranks(num_ranks, _train, options, num_steps)
    assert all(losses == first for losses in others)
    return first


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of eight steps in one process, which all other runs must reproduce."""
    return trained(1, tmp_path_factory.mktemp("one"), "--steps", "8")


def assert_same(actual: Losses, expected: Losses) -> None:
    """Compare up to rounding, which AdamW amplifies from step to step."""
    assert [step for step, _ in actual] == [step for step, _ in expected]
    assert [loss for _, loss in actual] == pytest.approx([loss for _, loss in expected], rel=1e-5)


def test_two_ranks_stop_and_three_resume_with_the_losses_of_one_process(
    tmp_path: Path, one_process: Losses
) -> None:
    command = ["--steps", "8", "--format", "dcp", "--save-every", "2", "--resume"]
    begun = trained(2, tmp_path, *command, num_steps=5)
    assert_same(begun, one_process[:5])
    resumed = trained(3, tmp_path, *command)
    assert_same(resumed, one_process[4:])


def test_bf16_trains_too(tmp_path: Path, one_process: Losses) -> None:
    losses = [loss for _, loss in trained(2, tmp_path, "--steps", "8", "--bf16")]
    assert losses == pytest.approx([loss for _, loss in one_process], rel=0.02)


def _main(arguments: list[str]) -> str:
    output = io.StringIO()
    with (
        mock.patch.object(example, "init_distributed", lambda: torch.device("cpu")),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(output),
    ):
        example.main(arguments)
    return output.getvalue()


def test_one_command_starts_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    command = [*SMALL, "--folder", str(tmp_path), "--format", "native", "--resume"]
    path = tmp_path / "step-00000002"
    first, second = run_ranks(2, _main, [*command, "--steps", "2"])
    assert second == ""
    assert re.match(r"unit +strategy", first) and "\nstep 2: loss 2." in first
    assert re.search(
        rf"\n\d{{12}} reversed: \d{{12}}\ndone: steps 1-2 on 2 ranks; saved {path}\n$", first
    )
    ended, *_ = run_ranks(3, _main, [*command, "--steps", "2"])
    assert "\nresumed from step 2 (saved by 2 ranks) on 3 ranks\n" in ended and "done" not in ended
