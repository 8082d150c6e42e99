"""examples/train_fully_shard.py gives the same losses on any number of ranks, however it is resumed
and in both formats of checkpoints."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples import train_fully_shard as example
from tests.support.ranks import run_ranks

SMALL = ["--dim", "16", "--layers", "1", "--batch", "12"]
Losses = list[tuple[int, float]]


def _train(arguments: list[str]) -> Losses:
    return list(example.train(example.parse_arguments(arguments), torch.device("cpu")))


def _main(arguments: list[str]) -> int:
    with (
        mock.patch.object(example, "init_distributed", lambda: torch.device("cpu")),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return example.main(arguments)


def trained(num_ranks: int, folder: Path, *arguments: str) -> Losses:
    """Train with SMALL sizes, and return the losses, which are the same on all ranks."""
    options = [*SMALL, "--folder", str(folder), *arguments]
    first, *others = run_ranks(num_ranks, _train, options)
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


@pytest.mark.parametrize("file_format", ["native", "dcp"])
def test_two_ranks_stop_and_three_resume_with_the_losses_of_one_process(
    tmp_path: Path, one_process: Losses, file_format: str
) -> None:
    begun = trained(2, tmp_path, "--steps", "4", "--format", file_format)
    assert_same(begun, one_process[:4])
    resumed = trained(3, tmp_path, "--steps", "8", "--format", file_format, "--resume")
    assert_same(resumed, one_process[4:])


def test_bf16_trains_too(tmp_path: Path, one_process: Losses) -> None:
    losses = [loss for _, loss in trained(2, tmp_path, "--steps", "8", "--bf16")]
    assert losses == pytest.approx([loss for _, loss in one_process], rel=0.02)


@pytest.mark.parametrize("file_format", ["native", "dcp"])
def test_resuming_without_a_checkpoint_says_so(tmp_path: Path, file_format: str) -> None:
    arguments = [*SMALL, "--folder", str(tmp_path), "--format", file_format, "--resume"]
    assert run_ranks(1, _main, arguments) == [1]


def test_the_whole_program(tmp_path: Path) -> None:
    arguments = [*SMALL, "--folder", str(tmp_path), "--steps", "2"]
    assert run_ranks(2, _main, arguments) == [0, 0]
    assert example.checkpoint.latest(tmp_path) == tmp_path / "step-00000002"
