"""plot: the numbers that are drawn, and that anything can be drawn."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from fsdp_compat.checkpoint._tools import plots
from fsdp_compat.checkpoint._tools.archive import Archive, StoredTensor
from fsdp_compat.checkpoint._tools.reading import Files
from fsdp_compat.errors import CheckpointError, UsageError
from tests.checkpoint.tools.archives import archive, opens
from tests.support.sampling import sample

NAN, INF = math.nan, math.inf
PNG = b"\x89PNG\r\n\x1a\n"
ODD = {
    "$\\frac{$": torch.tensor([NAN, INF, -INF]),
    "\x1b[2J\n漢": torch.zeros(0, 3),
    "int": torch.tensor(5),
    "flag": torch.tensor([True, False]),
    "complex": torch.tensor([3 + 4j, 1j]),
    "half": torch.tensor([1e-8, 60000.0], dtype=torch.float16),
    "wide": torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64),
    "constant": torch.full((7, 5), 2.5),
    "a" * 5000: torch.ones(3).to(torch.float8_e5m2),
}


def ignored(nbytes: int) -> None:
    return None


def histogram(made: Archive, name: str) -> plots.Histogram:
    with Files() as files:
        return plots.histogram_of(made.tensors[name], files, 1 << 20, ignored)


def test_a_histogram_counts_every_element_once(tmp_path: Path) -> None:
    values = torch.cat([torch.arange(100.0).repeat(700), torch.tensor([NAN, NAN, INF])])
    made = archive(tmp_path / "c", {"values": values, **ODD})
    found = histogram(made, "values")
    assert found == plots.Histogram(0.0, 99.0, (700,) * 100, 2, 1), "in several slabs"
    assert histogram(made, "constant").counts[50] == 35
    found = histogram(made, "wide")
    assert (found.counts[0], sum(found.counts), found.counts[-1]) == (1, 2, 1)
    assert histogram(made, "complex").highest == 5.0, "magnitudes"
    assert histogram(made, "$\\frac{$").counts == () and histogram(made, "$\\frac{$").num_inf == 2


def test_norms_are_euclidean_over_all_slabs(tmp_path: Path) -> None:
    made = archive(tmp_path / "c", {"values": torch.full((90_000,), 2.0), **ODD})

    def norm(tensor: StoredTensor) -> float:
        with Files() as files:
            return plots.norm_of(tensor, files, 1 << 20, 1, ignored)

    assert norm(made.tensors["values"]) == pytest.approx(600.0)
    assert norm(made.tensors["complex"]) == pytest.approx(math.sqrt(26))
    assert norm(made.tensors["\x1b[2J\n漢"]) == 0.0
    assert math.isnan(norm(made.tensors["$\\frac{$"])) or math.isinf(
        norm(made.tensors["$\\frac{$"])
    )


def test_bytes_are_summed_by_rank_or_else_by_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = archive(tmp_path / "c", {"w": torch.ones(3, 2), "b": torch.ones(1)})
    opens(monkeypatch, made)
    by_rank, unit = plots._bytes_by_place(plots.inspection_of(made))
    assert unit == "rank" and {rank: of["model"] for rank, of in by_rank.items()} == {
        "0": 20,
        "1": 8,
    }
    for name, tensor in made.tensors.items():
        pieces = tuple(dataclasses.replace(piece, holder=None) for piece in tensor.pieces)
        made.tensors[name] = dataclasses.replace(tensor, pieces=pieces)
    by_file, unit = plots._bytes_by_place(plots.inspection_of(made))
    assert unit == "file" and list(by_file) == ["rank0", "rank1"]


def test_every_tensor_and_name_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = archive(tmp_path / "$_{$[1m", ODD, aliases={"further": "int"})
    empty = archive(tmp_path / "empty", {})
    opens(monkeypatch, made, empty)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = list(ODD)
        for name in (*sample(names, 0, 1, 2, 6, 8), "further", "model/int"):
            assert plots.plot(made.path, histogram=name).startswith(PNG)
        assert plots.plot(made.path).startswith(PNG)
        assert plots.plot(empty.path).startswith(PNG)
        assert plots.plot(made.path, beside=made.path, workers=2).startswith(PNG)


def test_hundreds_of_tensors_and_ranks_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = archive(tmp_path / "c", {f"layers.{i}.weight": torch.ones(2, 2) for i in range(300)})
    for number, (name, tensor) in enumerate(made.tensors.items()):
        pieces = tuple(dataclasses.replace(piece, holder=number) for piece in tensor.pieces)
        made.tensors[name] = dataclasses.replace(tensor, pieces=pieces)
    opens(monkeypatch, made)
    assert plots.plot(made.path).startswith(PNG)
    assert plots.plot(made.path, beside=made.path).startswith(PNG)


def test_what_cannot_be_drawn_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    made = archive(tmp_path / "c", {"layers.0.weight": torch.ones(2), "packed": packed})
    other = archive(tmp_path / "d", {"else": torch.ones(2)})
    opens(monkeypatch, made, other)
    with pytest.raises(UsageError, match="such as 'layers\\.0"):
        plots.plot(made.path, histogram="layer.0.weight")
    with pytest.raises(UsageError, match="cannot be counted"):
        plots.plot(made.path, histogram="packed")
    with pytest.raises(CheckpointError, match="no tensor in common"):
        plots.plot(made.path, beside=other.path)
