"""inspect: what a run's folder holds, of any format, and which checkpoint is the latest to use; and
what a checkpoint holds: statistics, and the modules of a summary."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

from fsdp_compat.checkpoint.files import convert, inspect, list_checkpoints
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
    assert run("inspect", tmp_path).stdout.splitlines()[-1].endswith("epoch_10.pt")


def test_a_folder_is_listed_or_said_to_hold_nothing(runs: Path, tmp_path: Path) -> None:
    head, first, *others, _, latest = run("inspect", runs).stdout.splitlines()
    assert head.split() == ["path", "step", "kind", "world_size", "nbytes", "problem"]
    assert "step-00000001" in first and first.endswith(" -")
    assert len(others) == 3 and not any(line.endswith(" -") for line in others)
    assert latest.startswith("latest ") and latest.endswith("step-00000001")
    content = json.loads(run("inspect", runs, "--json").stdout)
    assert list(content) == ["path", "checkpoints", "latest"]
    assert list(content["checkpoints"][0]) == [
        *("path", "kind", "step", "world_size", "nbytes", "problem")
    ]
    (itself,) = list_checkpoints(runs / "step-00000001").checkpoints
    assert itself.path == runs / "step-00000001" and not itself.problem
    (itself.path / "manifest.json").unlink()
    first, *_ = list_checkpoints(runs).checkpoints
    assert first.problem.endswith(": a save that did not finish: no manifest.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "No checkpoint was recognised" in run("inspect", empty).stderr
    (empty / "checkpoint-500").mkdir()
    assert f"fsdp-compat inspect {empty}" in run("verify", empty).stderr
    (empty / "checkpoint-500").rename(empty / "step-00000500")
    assert "only saves that did not finish: step-00000500" in run("verify", empty).stderr
    (empty / "step-00000500" / "manifest.json").write_text("{x")
    assert "did not finish" not in run("verify", empty).stderr


def test_statistics_are_those_of_all_values(tmp_path: Path) -> None:
    tensors = {
        "large": torch.arange(-1_500_000.0, 1_500_001.0),  # read in several parts
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "count": torch.tensor([3, 4]),
        "flag": torch.tensor([True, False]),
        "nan": torch.tensor([1.0, math.nan]),
        "inf": torch.tensor([-math.inf, 1.0]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "empty": torch.ones(0),
    }
    torch.save(tensors, tmp_path / "x.pt")
    found = inspect(tmp_path / "x.pt", stats=True)
    content = json.loads(json.dumps(found.as_json(), allow_nan=False))["tensors"]
    numbers = {
        each["path"].removeprefix("model/"): (each["minimum"], each["maximum"], each["mean"])
        for each in content
    }
    assert numbers["large"] == (-1_500_000.0, 1_500_000.0, 0.0)
    assert numbers["half"] == (-2.0, 1.5, -0.25) and numbers["count"] == (3.0, 4.0, 3.5)
    assert numbers["flag"] == (0.0, 1.0, 0.5) and numbers["nan"] == ("nan", "nan", "nan")
    assert numbers["inf"] == ("-inf", 1.0, "-inf")
    assert numbers["complex"] == numbers["empty"] == (None, None, None)


def test_a_summary_is_as_deep_as_forty_lines_allow(tmp_path: Path) -> None:
    names = [f"layers.{layer}.{part}.weight" for layer in range(30) for part in ("up", "down")]
    tensors = {name: torch.ones(2, 3) for name in ("embed.weight", *names)}
    states = {name: {"exp_avg": torch.ones(2)} for name in tensors}
    optimizer = {"state": states, "param_groups": [{"params": [*tensors]}]}
    torch.save({"model": tensors, "optimizer": optimizer}, tmp_path / "x.pt")
    rows = [line.split() for line in run("inspect", tmp_path / "x.pt").stdout.splitlines()]
    modules = [row[0] for row in rows if row[1:3] in (["12", "float32"], ["6", "float32"])]
    assert modules == ["embed", *(f"layers.{layer}" for layer in range(30))]
    assert ["layers.7", "12", "float32", "48", "B", "16", "B"] in rows
