"""verify: each kind of damage is seen, named and located, and nothing else is taken for damage."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path

import pytest
import torch

from fsdp_compat._layout.box import Box
from fsdp_compat.checkpoint._blocks import FileFacts
from fsdp_compat.checkpoint._tools import threads, verification
from fsdp_compat.checkpoint._tools.archive import Archive, StoredPiece, of_memory
from fsdp_compat.checkpoint._tools.verification import Problem, Verification
from fsdp_compat.checkpoint.files import verify
from tests.checkpoint.tools.archives import archive, opens
from tests.support.checkpoints import flip

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def made(tmp_path: Path) -> Archive:
    """Three tensors over two ranks, and a checksum of each file."""
    made = archive(
        tmp_path / "checkpoint",
        {
            "wide": torch.arange(1200.0).reshape(12, 100),
            "half": torch.ones(7, 3, dtype=torch.bfloat16),
            "count": torch.tensor(5),
            "empty": torch.zeros(0, 4),
        },
    )
    for file in made.path.iterdir():
        content = file.read_bytes()
        made.checksums[file] = FileFacts(len(content), (zlib.crc32(content),))
    return made


def verified(monkeypatch: pytest.MonkeyPatch, made: Archive, **options: bool) -> Verification:
    opens(monkeypatch, made)
    monkeypatch.setattr(threads, "THREADS", 1)
    result = verify(made.path, **options)
    with monkeypatch.context() as few:
        few.setattr(threads, "THREADS", 3)
        few.setattr(verification, "AT_ONCE_NBYTES", 1024)
        assert result == verify(made.path, **options)
    json.dumps(result.as_json(), allow_nan=False)
    return result


def with_pieces(made: Archive, name: str, *pieces: StoredPiece) -> None:
    made.tensors[name] = dataclasses.replace(made.tensors[name], pieces=pieces)


def test_an_intact_checkpoint_has_no_problem(
    monkeypatch: pytest.MonkeyPatch, made: Archive
) -> None:
    result = verified(monkeypatch, made)
    assert result.problems == () and result.is_intact
    assert result.num_checksums == 2
    assert result.nbytes == 1200 * 4 + 21 * 2 + 8
    assert [(tensor.num_nan, tensor.num_inf) for tensor in result.tensors] == [(0, 0)] * 4


def test_missing_and_overlapping_parts_are_seen(
    monkeypatch: pytest.MonkeyPatch, made: Archive
) -> None:
    first, second = made.tensors["wide"].pieces
    with_pieces(made, "wide", second)
    result = verified(monkeypatch, made)
    expected = Problem("coverage", "model/wide", "600 of 1200 elements are missing")
    assert result.problems == (expected,)
    assert result.tensors[0].num_nan is None, "what was not there was not read"
    with_pieces(made, "wide", first, dataclasses.replace(second, box=Box((5, 0), (6, 100))))
    (problem,) = verified(monkeypatch, made).problems
    assert problem.kind == "coverage" and "[0:6, 0:100] and [5:11, 0:100] overlap" in problem.what


def test_one_changed_bit_is_seen_where_there_are_checksums(
    monkeypatch: pytest.MonkeyPatch, made: Archive
) -> None:
    flip(made.path / "rank1", 700)
    (problem,) = verified(monkeypatch, made).problems
    assert (problem.kind, problem.where) == ("checksum", "rank1")
    assert "block at byte 0" in problem.what
    assert verified(monkeypatch, made, quick=True).problems == (), "values were not read"
    made.checksums.clear()
    assert verified(monkeypatch, made).is_intact, "without checksums nobody can tell"


def test_replicas_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch, made: Archive) -> None:
    wide = made.tensors["wide"]
    same = torch.arange(600.0).reshape(6, 100)
    other = same.clone()
    other[2, 7:10] = -1.1  # in every byte
    equal_nan = torch.tensor([NAN, -0.0])
    box = wide.pieces[0].box
    copies = StoredPiece(box, same, 2), StoredPiece(box, other, 3)
    made.tensors["wide"] = dataclasses.replace(wide, copies=copies)
    alike = of_memory("nan", equal_nan)
    made.tensors["nan"] = dataclasses.replace(alike, copies=of_memory("", equal_nan.clone()).pieces)
    (problem,) = verified(monkeypatch, made).problems
    assert (problem.kind, problem.where) == ("copies", "model/wide")
    assert problem.what.startswith("3 of 600 elements in the copy of rank 3 differ")


def test_what_was_left_out_is_a_remark(monkeypatch: pytest.MonkeyPatch, made: Archive) -> None:
    made.left_out.append("rng: a pickle of numpy")
    result = verified(monkeypatch, made)
    assert result.is_intact and result.left_out == ("rng: a pickle of numpy",)


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, values: torch.Tensor, expected: tuple[int, int]
) -> None:
    made = archive(tmp_path / "checkpoint", {"fine": torch.ones(3), "odd": values})
    result = verified(monkeypatch, made)
    assert (result.tensors[1].num_nan, result.tensors[1].num_inf) == expected
    assert result.is_intact
    problems = verified(monkeypatch, made, finite=True).problems
    what = f"{expected[0]} NaN, {expected[1]} infinite"
    assert problems == ((Problem("not finite", "model/odd", what),) if any(expected) else ())
