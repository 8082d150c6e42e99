"""Pairwise combinations contain every pair of values, and are fewer than the product."""

from __future__ import annotations

import collections
import itertools

import pytest

from tests.support.pairwise import pairs, pairwise, singles


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3, 4), (2, 3, 5, 2), (4, 4), (3,)])
def test_rows_contain_every_pair_of_values_or_every_value(sizes: tuple[int, ...]) -> None:
    values = [[f"{index}{letter}" for letter in "abcde"[:size]] for index, size in enumerate(sizes)]
    rows = pairs(*values)
    for index, each in enumerate(values):
        assert {row[index] for row in rows} == set(each)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        found = {(row[one], row[other]) for row in rows}
        assert found == set(itertools.product(values[one], values[other]))
    if len(sizes) > 2:
        assert len(rows) <= 1.5 * max(a * b for a, b in itertools.combinations(sizes, 2))
    rows = singles(*values)
    assert len(set(rows)) == len(rows) == max(sizes)
    for index, each in enumerate(values):
        uses = collections.Counter(row[index] for row in rows)
        assert uses.keys() == set(each) and max(uses.values()) <= min(uses.values()) + 1


def test_a_test_runs_with_the_pairs_of_its_decorators() -> None:
    @pairwise
    @pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 3)], ids=["small", "large"])
    @pytest.mark.parametrize("kind", [int, float])
    @pytest.mark.parametrize("negative", [False, True])
    def test(negative: bool, kind: type, low: int, high: int) -> None:
        pass

    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    names, rows = mark.args
    assert names == ["negative", "kind", "low", "high"]
    assert len(rows) == len(mark.kwargs["ids"]) == 4
    assert [False, int, 0, 1] in rows
    assert mark.kwargs["ids"][rows.index([False, int, 0, 1])] == "False-int-small"
