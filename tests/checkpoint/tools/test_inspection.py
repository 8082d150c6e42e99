"""inspect: the selection of tensors, statistics of their values, and the modules of a summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from fsdp_compat.checkpoint._tools import inspection, tables, threads
from fsdp_compat.checkpoint._tools.archive import of_memory
from fsdp_compat.checkpoint._tools.inspection import modules_of
from fsdp_compat.checkpoint.files import inspect
from tests.checkpoint.tools.archives import archive, opens


def inspected(
    monkeypatch: pytest.MonkeyPatch, path: Path, tensors: dict[str, torch.Tensor], **given: Any
) -> Any:
    """Return what ``inspect`` finds with tensors, and a state for each."""
    states = {name: {"exp_avg": of_memory("", torch.ones(2))} for name in tensors}
    made = archive(path, tensors, states=states, extra={"epoch": 3})
    opens(monkeypatch, made)
    return inspect(path, **given)


def test_patterns_select_parameters_with_their_states_and_other_values_by_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensors = {"a.w": torch.ones(4), "b.w": torch.ones(4)}
    found = inspected(monkeypatch, tmp_path / "a", tensors, include=["^a"])
    assert [each.path for each in found.tensors] == ["model/a.w", "optimizer/a.w/exp_avg"]
    assert found.values == {}
    found = inspected(monkeypatch, tmp_path / "b", tensors, exclude=["^[ab]"])
    assert found.tensors == () and list(found.values) == ["extra/epoch"]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_statistics_are_those_of_all_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_threads: int
) -> None:
    large = torch.arange(-300_000.0, 300_001.0)  # read in several parts
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
    monkeypatch.setattr(threads, "THREADS", num_threads)
    monkeypatch.setattr(inspection, "SLAB_NBYTES", 1 << 20)
    found = inspected(monkeypatch, tmp_path / "a", tensors, stats=True)
    content = json.loads(json.dumps(found.as_json(), allow_nan=False))["tensors"]
    numbers = {
        each["path"].removeprefix("model/"): (each["minimum"], each["maximum"], each["mean"])
        for each in content
    }
    assert numbers["large"] == (-300_000.0, 300_000.0, 0.0)
    assert numbers["half"] == (-2.0, 1.5, -0.25) and numbers["count"] == (3.0, 4.0, 3.5)
    assert numbers["flag"] == (0.0, 1.0, 0.5) and numbers["nan"] == ("nan", "nan", "nan")
    assert numbers["inf"] == ("-inf", 1.0, "-inf")
    assert numbers["complex"] == numbers["empty"] == (None, None, None)
    assert numbers["optimizer/large/exp_avg"] == (1.0, 1.0, 1.0)


def test_a_summary_is_as_deep_as_forty_lines_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [f"layers.{layer}.{part}.weight" for layer in range(30) for part in ("up", "down")]
    tensors = {name: torch.ones(2, 3) for name in ("embed.weight", *names)}
    found = inspected(monkeypatch, tmp_path / "a", tensors)
    modules = modules_of(found.tensors)
    assert list(modules) == ["embed", *(f"layers.{layer}" for layer in range(30))]
    assert [tensor.path for tensor in modules["layers.7"]] == [
        *("model/layers.7.up.weight", "model/layers.7.down.weight"),
        *("optimizer/layers.7.up.weight/exp_avg", "optimizer/layers.7.down.weight/exp_avg"),
    ]
    lines = tables.of_inspection(found, lists_all=False, has_stats=False).splitlines()
    assert ["layers.7", "12", "float32", "48", "B", "16", "B", "0-1"] in map(str.split, lines)
    numbered = archive(
        tmp_path / "b", {"w": torch.ones(2)}, states={"0": {"m": of_memory("", torch.ones(1))}}
    )
    opens(monkeypatch, numbered)
    assert list(modules_of(inspect(numbered.path).tensors)) == ["w", "optimizer, by number"]
