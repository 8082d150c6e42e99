"""Listing: what a run's folder holds, of any format, and which checkpoint is the latest to use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

from fsdp_compat.checkpoint.files import convert, list_checkpoints
from tests.checkpoint.tools.program import run

UNFINISHED = f".step-00000004-{'0' * 32}"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 to 3, the last two damaged, an unfinished save, and other things."""
    folder = tmp_path / "run 7"
    folder.mkdir()
    made = tmp_path / "made" / "x.pt"
    made.parent.mkdir()
    torch.save({"w": torch.ones(4, 2)}, made)
    for step in (1, 2, 3):
        convert(made, folder / f"step-0000000{step}", to="native", world_size=2)
    (folder / "step-00000003" / "rank-00001.safetensors").unlink()
    (folder / "step-00000002").rename(folder / "step-00000005")
    (folder / UNFINISHED).mkdir()
    (folder / ".git").mkdir()
    (folder / f".removed-{'1' * 32}").mkdir()
    (folder / "logs").mkdir()
    (folder / "log.txt").write_text("step 1")
    return folder


def test_each_step_is_listed_with_what_is_wrong_and_the_latest_complete_one(runs: Path) -> None:
    found = list_checkpoints(runs)
    assert [(each.path.name, each.step) for each in found.checkpoints] == [
        ("step-00000001", 1),
        ("step-00000003", 3),
        (UNFINISHED, 4),
        ("step-00000005", 5),
    ]
    whole, missing, unfinished, renamed = found.checkpoints
    assert found.latest == whole.path
    files = [*whole.path.iterdir()]
    assert (whole.problem, whole.world_size) == ("", 2)
    assert whole.nbytes == sum(file.stat().st_size for file in files)
    assert "rank-00001.safetensors" in missing.problem and "killed" in unfinished.problem
    assert "step 2" in renamed.problem


def test_files_of_ranks_without_their_manifest_are_not_complete(runs: Path) -> None:
    (runs / "step-00000001" / "manifest.json").unlink()
    first, *_ = list_checkpoints(runs).checkpoints
    assert first.path.name == "step-00000001"
    assert first.problem.endswith(": a save that did not finish: no manifest.json")
    for command in ("inspect", "verify"):
        assert "manifest.json" in run(command, first.path).output


def test_the_command_prints_a_line_for_each_and_json(runs: Path) -> None:
    result = run("inspect", runs)
    assert (result.exit_code, result.stderr) == (0, "")
    head, first, *others = result.stdout.splitlines()
    assert head.split() == ["checkpoint", "step", "format", "ranks", "size", "complete"]
    assert first.startswith("step-00000001") and first.endswith("yes, latest")
    assert len(others) == 3 and all(" no: " in line for line in others)
    content = json.loads(run("inspect", runs, "--json").stdout)
    assert list(content) == ["path", "checkpoints", "latest"]
    assert list(content["checkpoints"][0]) == [
        *("path", "kind", "step", "world_size", "nbytes", "problem")
    ]


def test_other_formats_are_found_by_what_they_hold_and_numbered_by_their_names(
    tmp_path: Path,
) -> None:
    for number in (9, 10):
        torch.save({"w": torch.ones(2)}, tmp_path / f"epoch_{number}.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "best.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "best.pt").read_bytes()[:-9])
    made = [(each.path.name, each.step) for each in list_checkpoints(tmp_path).checkpoints]
    assert made == [("best.pt", None), ("torn.pt", None), ("epoch_9.pt", 9), ("epoch_10.pt", 10)]
    assert list_checkpoints(tmp_path).latest == tmp_path / "epoch_10.pt"
    assert run("inspect", tmp_path).stdout.splitlines()[-1].startswith("epoch_10.pt")


def test_a_checkpoint_is_listed_as_one_and_an_empty_folder_is_1(runs: Path, tmp_path: Path) -> None:
    (itself,) = list_checkpoints(runs / "step-00000001").checkpoints
    assert itself.path == runs / "step-00000001" and not itself.problem
    shards = tmp_path / "shards"
    torch.save({"w": torch.ones(600)}, tmp_path / "whole.pt")
    convert(tmp_path / "whole.pt", shards)
    (itself,) = list_checkpoints(shards).checkpoints
    assert itself.path == shards
    (tmp_path / "whole.pt").rename(shards / "other.pt")
    names = [each.path.name for each in list_checkpoints(shards).checkpoints]
    assert names == ["model.safetensors", "other.pt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run("inspect", empty)
    assert result.exit_code == 1 and "No checkpoint was recognised" in result.stderr
    assert "fsdp-compat inspect" not in result.stderr
    assert os.listdir(empty) == []


def test_a_runs_folder_is_answered_with_the_command_that_lists_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    result = run("verify", tmp_path)
    assert result.exit_code == 1 and f"fsdp-compat inspect {tmp_path}" in result.stderr
    (tmp_path / "checkpoint-500").rename(tmp_path / "step-00000500")
    assert "only saves that did not finish: step-00000500" in run("verify", tmp_path).stderr
    (tmp_path / "step-00000500" / "manifest.json").write_text("{x")
    assert "did not finish" not in run("verify", tmp_path).stderr
