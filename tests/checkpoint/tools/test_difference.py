"""diff: distances that were computed by hand, at every kind of number."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compat.checkpoint._tools import difference, threads
from fsdp_compat.checkpoint._tools.archive import of_memory
from fsdp_compat.checkpoint._tools.arithmetic import Distance, distance
from fsdp_compat.checkpoint._tools.difference import Difference, ValueDifference
from fsdp_compat.checkpoint.files import diff
from fsdp_compat.errors import UsageError
from tests.checkpoint.tools.archives import archive, opens
from tests.support.checkpoints import refused

NAN, INF = math.nan, math.inf
BIG = (1 << 63) - 1


def far(one: Any, other: Any, dtype: torch.dtype, rtol: float = 0.0, atol: float = 0.0) -> Distance:
    return distance(torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype), rtol, atol)


@pytest.mark.parametrize(
    ("one", "other", "dtype", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 5.0], torch.float32, Distance(2, 2.0, 0.4)),
        ([1.0, -3.0], [1.0, 1.0], torch.bfloat16, Distance(1, 4.0, 4 / 3)),
        ([0.0, 1.0], [-0.0, 1.0], torch.float32, Distance()),
        ([0.0], [1e-30], torch.float64, Distance(1, 1e-30, 1.0)),
        ([NAN, 1.0], [NAN, 1.0], torch.float16, Distance()),
        ([NAN, 1.0], [1.0, 1.0], torch.float32, Distance(1, INF, INF)),
        ([INF, -INF], [INF, -INF], torch.float32, Distance()),
        ([INF, 1.0], [-INF, 1.0], torch.float32, Distance(1, INF, INF)),
        ([INF], [NAN], torch.float32, Distance(1, INF, INF)),
        ([INF], [3.0], torch.float32, Distance(1, INF, INF)),
        ([3 + 4j, NAN + 1j], [0j, complex(1, NAN)], torch.complex64, Distance(1, 5.0, 1.0)),
        ([True, False], [True, True], torch.bool, Distance(1, 1.0, 1.0)),
        ([-128, 5], [127, 5], torch.int8, Distance(1, 255.0, 255 / 128)),
        ([0, 7], [255, 7], torch.uint8, Distance(1, 255.0, 1.0)),
        ([BIG], [BIG - 1], torch.int64, Distance(1, 1.0, 1 / BIG)),
        ([BIG], [-BIG - 1], torch.int64, Distance(1, 2.0**64, 2.0)),
        ([(1 << 64) - 1, 0], [(1 << 64) - 3, 1], torch.uint64, Distance(2, 2.0, 1.0)),
        ([(1 << 64) - 1], [1], torch.uint64, Distance(1, 2.0**64, 1.0)),
        ([65535], [1], torch.uint16, Distance(1, 65534.0, 65534 / 65535)),
        ([1.5, NAN], [1.75, NAN], torch.float8_e4m3fn, Distance(1, 0.25, 1 / 7)),
        ([], [], torch.float32, Distance()),
    ],
)
def test_distances_of_every_kind_of_number(
    one: Any, other: Any, dtype: torch.dtype, expected: Distance
) -> None:
    for sides in ((one, other), (other, one)):
        found = far(*sides, dtype)
        assert found.num_different == expected.num_different
        assert found.max_absolute == expected.max_absolute
        assert found.max_relative == pytest.approx(expected.max_relative, rel=1e-12)


def test_values_of_different_dtypes_are_compared_as_numbers() -> None:
    one = torch.tensor([1.0, 2.0, 3.0])
    assert distance(one, one.bfloat16(), 0, 0) == distance(one, one.long(), 0, 0) == Distance()
    third = torch.tensor([1 / 3])
    assert distance(third, third.bfloat16(), 0, 0).num_different == 1
    assert distance(third, third.bfloat16(), 0.004, 0).num_different == 0
    wide = torch.tensor([(1 << 64) - 1, 3], dtype=torch.uint64)
    assert distance(wide, torch.tensor([-1, 3]), 0, 0) == Distance(1, 2.0**64, 1.0)
    packed = torch.tensor([17, 17], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    other = torch.tensor([17, 18], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert distance(packed, packed.clone(), 0, 0) == Distance()
    assert distance(packed, other, 0, 0) == Distance(1, INF, INF), "bytes are all there is"


numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, NAN, INF])


@given(st.lists(st.tuples(numbers, numbers), max_size=6), numbers.map(abs))
def test_python_counts_the_same_elements(pairs: list[tuple[float, float]], atol: float) -> None:
    atol = atol if math.isfinite(atol) else 0.5

    def is_far(one: float, other: float) -> bool:
        if one == other or (math.isnan(one) and math.isnan(other)):
            return False
        bound = atol + 0.25 * max(abs(one), abs(other))
        return not (abs(one - other) <= bound and math.isfinite(one - other))

    found = far([a for a, _ in pairs], [b for _, b in pairs], torch.float32, 0.25, atol)
    assert found.num_different == sum(is_far(a, b) for a, b in pairs)


# -- of checkpoints


def compared(
    monkeypatch: pytest.MonkeyPatch, folder: Path, one: Any, other: Any, **options: Any
) -> Difference:
    """Compare tensors by name, also in several threads and slabs of few elements."""
    sides = [archive(folder / name, tensors) for name, tensors in (("a", one), ("b", other))]
    opens(monkeypatch, *sides)
    monkeypatch.setattr(threads, "THREADS", 1)
    found = diff(folder / "a", folder / "b", **options)
    with monkeypatch.context() as few:
        few.setattr(threads, "THREADS", 3)
        few.setattr(difference, "SLAB_NBYTES", 96 * 7)
        assert found == diff(folder / "a", folder / "b", **options)
    json.dumps(found.as_json(), allow_nan=False)
    return found


def test_what_is_different_is_listed_with_the_largest_distance_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    same = {"same": torch.tensor([NAN, 1.0]), "empty": torch.zeros(0, 3), "one": torch.tensor(True)}
    long = torch.zeros(400_000)
    changed = long.clone()
    changed[[0, 399_999]] = torch.tensor([0.5, -2.0])
    one = {**same, "near": torch.ones(3), "long": long, "lost": torch.ones(1)}
    other = {**same, "near": torch.ones(3) * 1.25, "long": changed, "new": torch.ones(1)}
    one["cut"], other["cut"] = torch.ones(4, 2), torch.ones(2, 4)
    one["kind"], other["kind"] = torch.ones(2), torch.ones(2).bfloat16()
    found = compared(monkeypatch, tmp_path, one, other)
    assert (found.missing, found.added) == (("model/lost",), ("model/new",))
    assert not found.is_same and len(found.tensors) == 7
    assert [(t.path, t.num_different, t.max_absolute, t.max_relative) for t in found.different] == [
        ("model/cut", None, None, None),
        ("model/long", 2, 2.0, 1.0),
        ("model/near", 3, 0.25, 0.2),
        ("model/kind", 0, 0.0, 0.0),
    ]
    assert found.different[0].shapes == ((4, 2), (2, 4))
    found = diff(
        tmp_path / "a", tmp_path / "b", atol=2, any_dtype=True, exclude=["^(cut|lost|new)$"]
    )
    assert found.is_same and len(found.tensors) == 6
    assert found.tensors[0].max_absolute == 2.0, "how far, also within the tolerance"
    assert diff(tmp_path / "a", tmp_path / "b", include=["same", "empty"]).is_same


def test_infinite_distances_are_text_in_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = compared(monkeypatch, tmp_path, {"a": torch.tensor([NAN])}, {"a": torch.ones(1)})
    (tensor,) = found.as_json()["tensors"]
    assert (tensor["max_absolute"], tensor["max_relative"]) == ("inf", "inf")


def test_further_names_of_tied_tensors_count_as_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weight = torch.ones(2, 2)
    one = archive(tmp_path / "a", {"embed": weight}, aliases={"head": "embed"})
    other = archive(tmp_path / "b", {"embed": weight, "head": weight})
    opens(monkeypatch, one, other)
    found = diff(one.path, other.path)
    assert found.is_same and [tensor.path for tensor in found.tensors] == [
        "model/embed",
        "model/head",
    ]
    assert len(diff(one.path, one.path).tensors) == 1, "one tensor, compared once"
    for name, missing in (("embed", ()), ("head", ()), ("else", ("model/embed", "model/head"))):
        third = archive(tmp_path / name, {name: weight})
        opens(monkeypatch, one, third)
        assert diff(one.path, third.path).missing == missing, "either name will do"


def test_values_that_are_not_tensors_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weight = {"w": torch.ones(2)}
    average = of_memory("", torch.zeros(2))
    one = archive(
        tmp_path / "a",
        weight,
        states={"w": {"step": 3.0, "exp_avg": average, "flag": 1, "none": None}},
        param_groups=[{"params": ["w"], "lr": 0.1, "betas": (0.9, 0.99), "decay": NAN}],
        extra={"epoch": 3, "note": "x" * 500, "nested": [{"seed": 1}, 2]},
    )
    other = archive(
        tmp_path / "b",
        weight,
        states={"w": {"step": of_memory("", torch.tensor(3.0)), "exp_avg": average}},
        param_groups=[{"params": ["w"], "lr": 0.2, "betas": [0.9, 0.99], "decay": NAN}],
        extra={"epoch": 4, "note": "x" * 500, "nested": [{"seed": 1}, 2.0]},
    )
    opens(monkeypatch, one, other)
    found = diff(one.path, other.path)
    assert found.values == (
        ValueDifference("optimizer/w/flag", "1", None),
        ValueDifference("optimizer/param_groups/0/lr", "0.1", "0.2"),
        ValueDifference("extra/epoch", "3", "4"),
    )
    assert found.missing == found.added == (), "a number equals a tensor that holds it"
    assert diff(one.path, other.path, weights=True).is_same
    assert len(diff(one.path, other.path, rtol=0.5).values) == 1


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for name, value, text in (
        ("rtol", -1.0, "at least 0"),
        ("atol", NAN, "at least 0"),
        ("rtol", "1", "at least 0"),
        ("include", ["("], "expected: regular expressions"),
    ):
        with refused(UsageError, name, text):
            diff(tmp_path, tmp_path, **{name: value})
