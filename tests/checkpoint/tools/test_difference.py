"""diff: distances that were computed by hand, at every kind of number."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compat.checkpoint.files import diff

NAN, INF = math.nan, math.inf
BIG = (1 << 63) - 1

Distance = tuple[int, float, float]  # elements, and the largest absolute and relative one
SAME: Distance = (0, 0.0, 0.0)


def compared(folder: Path, one: Any, other: Any, **options: Any) -> Any:
    """Compare two torch.save files."""
    for name, values in (("a.pt", one), ("b.pt", other)):
        torch.save(values, folder / name)
    found = diff(folder / "a.pt", folder / "b.pt", **options)
    json.dumps(found.as_json(), allow_nan=False)
    return found


def distance(one: torch.Tensor, other: torch.Tensor, **options: Any) -> Distance:
    with tempfile.TemporaryDirectory() as folder:
        (found,) = compared(Path(folder), {"w": one}, {"w": other}, **options).tensors
    return found.num_different, found.max_absolute, found.max_relative


@pytest.mark.parametrize(
    ("one", "other", "dtype", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 5.0], torch.float32, (2, 2.0, 0.4)),
        ([0.0, 1.0], [-0.0, 1.0], torch.float32, SAME),
        ([0.0], [1e-30], torch.float64, (1, 1e-30, 1.0)),
        ([NAN, 1.0], [1.0, 1.0], torch.float32, (1, INF, INF)),
        ([INF, -INF], [INF, -INF], torch.float32, SAME),
        ([INF, 1.0], [-INF, 1.0], torch.float32, (1, INF, INF)),
        ([INF], [3.0], torch.float32, (1, INF, INF)),
        ([3 + 4j, NAN + 1j], [0j, complex(1, NAN)], torch.complex64, (1, 5.0, 1.0)),
        ([True, False], [True, True], torch.bool, (1, 1.0, 1.0)),
        ([-128, 5], [127, 5], torch.int8, (1, 255.0, 255 / 128)),
        ([BIG], [-BIG - 1], torch.int64, (1, 2.0**64, 2.0)),
        ([(1 << 64) - 1, 0], [(1 << 64) - 3, 1], torch.uint64, (2, 2.0, 1.0)),
        ([65535], [1], torch.uint16, (1, 65534.0, 65534 / 65535)),
        ([1.5, NAN], [1.75, NAN], torch.float8_e4m3fn, (1, 0.25, 1 / 7)),
        ([], [], torch.float32, SAME),
    ],
)
def test_distances_of_every_kind_of_number(
    one: Any, other: Any, dtype: torch.dtype, expected: Distance
) -> None:
    for sides in ((one, other), (other, one)):
        found = distance(*(torch.tensor(side, dtype=dtype) for side in sides))
        assert found[:2] == expected[:2]
        assert found[2] == pytest.approx(expected[2], rel=1e-12)


def test_values_of_different_dtypes_are_compared_as_numbers() -> None:
    one = torch.tensor([1.0, 2.0, 3.0])
    assert distance(one, one.bfloat16()) == distance(one, one.long()) == SAME
    third = torch.tensor([1 / 3])
    assert distance(third, third.bfloat16())[0] == 1
    assert distance(third, third.bfloat16(), rtol=0.004)[0] == 0
    wide = torch.tensor([(1 << 64) - 1, 3], dtype=torch.uint64)
    assert distance(wide, torch.tensor([-1, 3])) == (1, 2.0**64, 1.0)
    packed = torch.tensor([17, 17], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    other = torch.tensor([17, 18], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert distance(packed, packed.clone()) == SAME
    assert distance(packed, other) == (1, INF, INF), "bytes are all there is"


def test_what_is_different_is_listed_with_the_largest_distance_first(tmp_path: Path) -> None:
    same = {"same": torch.tensor([NAN, 1.0]), "empty": torch.zeros(0, 3), "one": torch.tensor(True)}
    long = torch.zeros(400_000)
    changed = long.clone()
    changed[[0, 399_999]] = torch.tensor([0.5, -2.0])
    one = {**same, "near": torch.ones(3), "long": long, "lost": torch.ones(1)}
    other = {**same, "near": torch.ones(3) * 1.25, "long": changed, "new": torch.ones(1)}
    one["cut"], other["cut"] = torch.ones(4, 2), torch.ones(2, 4)
    one["kind"], other["kind"] = torch.ones(2), torch.ones(2).bfloat16()
    found = compared(tmp_path, one, other)
    assert (found.missing, found.added) == (("model/lost",), ("model/new",))
    assert not found.is_same and len(found.tensors) == 7
    assert [(t.path, t.num_different, t.max_absolute, t.max_relative) for t in found.different] == [
        ("model/cut", None, None, None),
        ("model/long", 2, 2.0, 1.0),
        ("model/near", 3, 0.25, 0.2),
        ("model/kind", 0, 0.0, 0.0),
    ]
    assert found.different[0].shapes == ((4, 2), (2, 4))
    sides = tmp_path / "a.pt", tmp_path / "b.pt"
    found = diff(*sides, atol=2, any_dtype=True, exclude=["^(cut|lost|new)$"])
    assert found.is_same and len(found.tensors) == 6
    assert found.tensors[0].max_absolute == 2.0, "how far, also within the tolerance"
    assert diff(*sides, include=["same", "empty"]).is_same


def test_further_names_of_tied_tensors_count_as_there(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    tied = {"embed": weight, "head": weight}
    found = compared(tmp_path, tied, {"embed": weight.clone(), "head": weight.clone()})
    paths = ["model/embed", "model/head"]
    assert found.is_same and [tensor.path for tensor in found.tensors] == paths
    for name, missing in (("embed", ()), ("head", ()), ("else", tuple(paths))):
        found = compared(tmp_path, tied, {name: weight})
        assert found.missing == missing, "either name will do"


def test_values_that_are_not_tensors_are_compared(tmp_path: Path) -> None:
    def saved(state: dict[str, Any], lr: float, betas: Any, epoch: int, last: Any) -> Any:
        group = {"params": ["w"], "lr": lr, "betas": betas, "decay": NAN}
        optimizer = {"state": {"w": {"m": torch.zeros(2), **state}}, "param_groups": [group]}
        extra = {"epoch": epoch, "note": "x" * 500, "nested": [{"seed": 1}, last]}
        return {"model": {"w": torch.ones(2)}, "optimizer": optimizer, **extra}

    one = saved({"step": 3.0, "flag": 1, "none": None}, 0.1, (0.9, 0.99), 3, 2)
    other = saved({"step": torch.tensor(3.0)}, 0.2, [0.9, 0.99], 4, 2.0)
    found = compared(tmp_path, one, other)
    assert [(value.path, value.one, value.other) for value in found.values] == [
        ("optimizer/w/flag", "1", None),
        ("optimizer/param_groups/0/lr", "0.1", "0.2"),
        ("extra/epoch", "3", "4"),
    ]
    assert found.missing == found.added == (), "a number equals a tensor that holds it"
    assert compared(tmp_path, one, other, weights=True).is_same
    assert len(compared(tmp_path, one, other, rtol=0.5).values) == 1
