"""What a run of the tests has shown, and what not."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.pairwise import COMBINATIONS
from tests.support.sampling import EXTENT

TESTS = Path(__file__).parents[1]


def shown(
    passed: Iterable[pytest.TestReport], skipped: Iterable[pytest.TestReport]
) -> Iterator[str]:
    """Yield lines: how many tests of each folder passed, what was skipped and why, and how much of
    all combinations was run. None for a run of a single folder."""
    counts = collections.Counter(_folder(report.nodeid) for report in passed)
    if len(counts) < 2:
        return
    yield "Passed, on processes of this machine that communicate over gloo:"
    for folder, number in sorted(counts.items()):
        yield f"{number:6}  {folder:12} {_topic(folder)}"
    reasons = collections.Counter(_reason(report) for report in skipped)
    if reasons:
        yield "Skipped, and so not shown:"
    for reason, number in sorted(reasons.items()):
        yield f"{number:6}  {reason}"
    run, possible = COMBINATIONS["run"], COMBINATIONS["possible"]
    if possible:
        yield f"Of {possible:,} combinations of settings {run:,} ran, with each value or any two."
    yield EXTENT


def _folder(nodeid: str) -> str:
    _, *folders, _ = nodeid.partition("::")[0].split("/")
    return folders[0] if folders else ""


def _topic(folder: str) -> str:
    source = (TESTS / folder / "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _reason(report: pytest.TestReport) -> str:
    *_, reason = report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
    return str(reason).removeprefix("Skipped: ")
