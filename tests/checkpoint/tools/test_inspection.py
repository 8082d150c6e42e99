"""inspect: the selection of tensors, statistics of their values, and the modules of a summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from fsdp_compat.checkpoint.files import inspect
from tests.checkpoint.tools.program import run


def saved(path: Path, tensors: dict[str, torch.Tensor], **extra: Any) -> Path:
    """Save tensors, and a state of the optimizer for each."""
    states = {name: {"exp_avg": torch.ones(2)} for name in tensors}
    optimizer = {"state": states, "param_groups": [{"params": [*tensors]}]}
    torch.save({"model": tensors, "optimizer": optimizer, **extra}, path)
    return path


def test_patterns_select_parameters_with_their_states_and_other_values_by_path(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path / "x.pt", {"a.w": torch.ones(4), "b.w": torch.ones(4)}, epoch=3)
    found = inspect(path, include=["^a"])
    assert [each.path for each in found.tensors] == ["model/a.w", "optimizer/a.w/exp_avg"]
    assert found.values == {}
    found = inspect(path, exclude=["^[ab]", "param_groups"])
    assert found.tensors == () and found.values["extra/epoch"] == "3"


def test_statistics_are_those_of_all_values(tmp_path: Path) -> None:
    large = torch.arange(-1_500_000.0, 1_500_001.0)  # read in several parts
    tensors = {
        "large": large,
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "count": torch.tensor([3, 4]),
        "flag": torch.tensor([True, False]),
        "nan": torch.tensor([1.0, math.nan]),
        "inf": torch.tensor([-math.inf, 1.0]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "empty": torch.ones(0),
    }
    found = inspect(saved(tmp_path / "x.pt", tensors), stats=True)
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
    assert numbers["optimizer/large/exp_avg"] == (1.0, 1.0, 1.0)


def test_a_summary_is_as_deep_as_forty_lines_allow(tmp_path: Path) -> None:
    names = [f"layers.{layer}.{part}.weight" for layer in range(30) for part in ("up", "down")]
    tensors = {name: torch.ones(2, 3) for name in ("embed.weight", *names)}
    lines = run("inspect", saved(tmp_path / "x.pt", tensors)).stdout.splitlines()
    rows = [line.split() for line in lines]
    modules = [row[0] for row in rows if row[1:3] in (["12", "float32"], ["6", "float32"])]
    assert modules == ["embed", *(f"layers.{layer}" for layer in range(30))]
    assert ["layers.7", "12", "float32", "48", "B", "16", "B"] in rows
    numbered = {"state": {0: {"m": torch.ones(1)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": numbered}, tmp_path / "y.pt")
    text = run("inspect", tmp_path / "y.pt").stdout
    assert "\noptimizer, by number " in text and "\nw " in text
