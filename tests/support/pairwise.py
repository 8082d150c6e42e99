"""Fewer combinations than the product: any two values still occur together. Put it on top of the
other decorators:

    @pairwise
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @both_forms
    def test_training(strategy: str, num_ranks: int, use_orig_params: bool) -> None: ...

Where a case costs much, ``each_value`` has the fewest rows that contain every value; with
FSDP_COMPAT_TEST_ALL=1 it is ``pairwise``."""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from tests.support.sampling import TEST_ALL

Test = TypeVar("Test", bound=Callable[..., None])


def pairs(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each sequence, such that any two values of two sequences are in
    some row. The same arguments give the same rows.

    Greedy: each row is the one with the most pairs that no earlier row has.
    """
    size = min(2, len(values))
    covers = {row: set(itertools.combinations(enumerate(row), size)) for row in _rows(values)}
    missing = {pair for covered in covers.values() for pair in covered}
    rows = []
    while missing:
        best = max(covers, key=lambda row: len(covers[row] & missing))
        missing -= covers[best]
        rows.append(best)
    return [
        tuple(each[index] for each, index in zip(values, row, strict=True)) for row in sorted(rows)
    ]


def singles(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return as many rows as the longest sequence has values, such that every value is in some row.
    The same arguments give the same rows.

    Greedy: each row has as many new values as possible, then as many new pairs, then values that
    few rows have.
    """
    missing = {(place, index) for place, each in enumerate(values) for index in range(len(each))}
    seen: set[tuple[Any, ...]] = set()
    uses: collections.Counter[tuple[int, int]] = collections.Counter()
    rows: list[tuple[int, ...]] = []

    def gain(row: tuple[int, ...]) -> tuple[int, int, int]:
        new = sum(each in missing for each in enumerate(row))
        new_pairs = set(itertools.combinations(enumerate(row), 2)) - seen
        return new, len(new_pairs), -sum(uses[each] for each in enumerate(row))

    while missing:
        best = max(_rows(values), key=gain)
        missing.difference_update(enumerate(best))
        uses.update(enumerate(best))
        seen.update(itertools.combinations(enumerate(best), 2))
        rows.append(best)
    return [
        tuple(each[index] for each, index in zip(values, row, strict=True)) for row in sorted(rows)
    ]


def _rows(values: Sequence[Sequence[Any]]) -> Iterator[tuple[int, ...]]:
    """Indices of the product."""
    return itertools.product(*(range(len(each)) for each in values))


def pairwise(test: Test) -> Test:
    """Replace the product of a test's ``parametrize`` decorators by its ``pairs``."""
    return _thinned(test, pairs)


def each_value(test: Test) -> Test:
    """Replace the product of a test's ``parametrize`` decorators by its ``singles``."""
    return _thinned(test, pairs if TEST_ALL else singles)


def _thinned(test: Test, chosen: Callable[..., list[tuple[Any, ...]]]) -> Test:
    marks: list[pytest.Mark] = test.pytestmark  # type: ignore[attr-defined]
    factors = [mark for mark in marks if mark.name == "parametrize"]
    names = [name for mark in factors for name in _names(mark)]
    values = [_cases(mark) for mark in factors]
    rows = chosen(*values)
    replaced = pytest.mark.parametrize(
        names,
        [[value for _, case in row for value in case] for row in rows],
        ids=["-".join(label for label, _ in row) for row in rows],
    ).mark
    test.pytestmark = [*(mark for mark in marks if mark not in factors), replaced]  # type: ignore[attr-defined]
    return test


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return names.replace(" ", "").split(",") if isinstance(names, str) else list(names)


def _cases(mark: pytest.Mark) -> list[tuple[str, tuple[Any, ...]]]:
    """Return (label, values) of each case of one decorator."""
    names, ids = _names(mark), mark.kwargs.get("ids")
    cases = []
    for index, case in enumerate(mark.args[1]):
        values = (case,) if len(names) == 1 else tuple(case)
        given = ids(case) if callable(ids) else ids[index] if ids is not None else None
        labels = (_label(name, value, index) for name, value in zip(names, values, strict=True))
        cases.append((given or "-".join(labels), values))
    return cases


def _label(name: str, value: object, index: int) -> str:
    """Return pytest's label for a value."""
    if value is None or isinstance(value, str | int | float | enum.Enum):
        return str(value)
    return getattr(value, "__name__", f"{name}{index}")
