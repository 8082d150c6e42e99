"""verify: each kind of damage is seen, named and located, and nothing else is taken for damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compat.checkpoint.files import convert, verify
from tests.checkpoint.tools.content import save_boxes
from tests.support.checkpoints import flip

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """Four tensors over two ranks, and a checksum of each file."""
    tensors = {
        "wide": torch.arange(1200.0).reshape(12, 100),
        "half": torch.ones(7, 3, dtype=torch.bfloat16),
        "count": torch.tensor(5),
        "empty": torch.zeros(0, 4),
    }
    torch.save(tensors, tmp_path / "x.pt")
    return convert(tmp_path / "x.pt", tmp_path / "native", to="native", world_size=2)


def problems_of(path: Path, **options: bool) -> list[tuple[str, str, str]]:
    result = verify(path, **options)
    assert result.is_intact == (not result.problems)
    json.dumps(result.as_json(), allow_nan=False)
    return [(problem.kind, problem.where, problem.what) for problem in result.problems]


def test_an_intact_checkpoint_has_no_problem(native: Path) -> None:
    result = verify(native)
    assert result.problems == () and result.is_intact
    assert (result.num_checksums, result.num_without_checksum) == (2, 0)
    assert result.nbytes == 1200 * 4 + 21 * 2 + 8
    assert [(tensor.num_nan, tensor.num_inf) for tensor in result.tensors] == [(0, 0)] * 4


def test_missing_and_overlapping_parts_are_seen(tmp_path: Path) -> None:
    first, second = torch.ones(6, 100), torch.ones(6, 100)
    ((kind, where, what),) = problems_of(
        save_boxes(tmp_path / "missing", [("wide", (6, 0), second)])
    )
    assert (kind, where) == ("file", "missing")
    assert "'wide', of shape [12, 100]: 600 of 1200 elements are missing" in what
    parts = [("wide", (0, 0), first), ("wide", (5, 0), second)]
    ((_, _, what),) = problems_of(save_boxes(tmp_path / "overlap", parts))
    assert "[0:6, 0:100] and [5:11, 0:100] overlap" in what


def test_values_are_not_read_on_demand(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(600)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", (tmp_path / "x.pt").read_bytes().index(b"\0\0\x80?" * 100) + 200)
    assert [kind for kind, *_ in problems_of(tmp_path / "x.pt")] == ["checksum"]
    assert problems_of(tmp_path / "x.pt", quick=True) == []


def test_replicas_that_differ_are_seen(tmp_path: Path) -> None:
    same = torch.arange(600_000.0).reshape(6000, 100)
    other = same.clone()
    other[2000, 7:10] = -1.1
    alike = torch.tensor([NAN, -0.0])
    for rank, values in enumerate((same, same, other)):
        torch.save({"wide": values, "nan": alike}, tmp_path / f"rank_{rank}.pt")
    ((kind, where, what),) = problems_of(tmp_path)
    assert (kind, where) == ("copies", "model/wide")
    assert what.startswith("3 of 600000 elements in the copy of rank 2 differ")


def test_what_was_left_out_is_a_remark(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "meta": torch.empty(2, device="meta")}, tmp_path / "x.pt")
    result = verify(tmp_path / "x.pt")
    assert result.is_intact and not result.left_out
    torch.save({"cpu": torch.zeros(5)}, tmp_path / "random_states_0.pkl")
    (tmp_path / "x.pt").rename(tmp_path / "pytorch_model_fsdp.bin")
    result = verify(tmp_path)
    assert result.is_intact and result.left_out[0].startswith("random_states_0.pkl: ")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([1.0, NAN, INF, -INF, NAN, 0.0]), (2, 2)),
        (torch.tensor([NAN, INF, 1.0], dtype=torch.bfloat16), (1, 1)),
        (torch.tensor([1.0, NAN], dtype=torch.float64), (1, 0)),
        (torch.tensor([INF, 1.0]).to(torch.float8_e5m2), (0, 1)),
        (torch.tensor([NAN, 1.0]).to(torch.float8_e4m3fn), (1, 0)),
        (torch.tensor([complex(NAN, INF), 1j]), (1, 1)),  # one element is both
        (torch.tensor([[True], [False]]), (0, 0)),
        (torch.tensor(INF), (0, 1)),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), (0, 0)),
        (torch.full((700_000,), NAN), (700_000, 0)),  # in several slabs
    ],
)
def test_what_is_not_finite_is_counted_and_damage_only_on_demand(
    tmp_path: Path, values: torch.Tensor, expected: tuple[int, int]
) -> None:
    path: Any = tmp_path / "x.pt"
    torch.save({"fine": torch.ones(3), "odd": values}, path)
    result = verify(path)
    assert (result.tensors[1].num_nan, result.tensors[1].num_inf) == expected
    assert result.is_intact
    what = f"{expected[0]} NaN, {expected[1]} infinite"
    assert problems_of(path, finite=True) == (
        [("not finite", "model/odd", what)] if any(expected) else []
    )
