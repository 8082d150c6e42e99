"""Start a program of ``tests/clients/programs`` on two ranks, and read its results."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, python
from tests.support.time_limit import limit_s

PROGRAMS = Path(__file__).parent / "programs"

CLIENTS = ("accelerate", "datasets", "lightning", "peft", "transformers", "trl")
OURS = ("fsdp_compat.FullyShardedDataParallel", "fsdp_compat.FSDPModule")


def needs(extra: str, *packages: str) -> pytest.MarkDecorator:
    """Skip a test without these packages of an extra of setup.cfg."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"needs the extra {extra!r}: {', '.join(missing)}"
    return pytest.mark.skipif(bool(missing), reason=reason)


TORCHRUN = (*("-m", "torch.distributed.run", "--standalone"), "--nproc-per-node", "2")
INSTALLED = ("-m", "fsdp_compat", "run")


def start(*command: str | Path) -> str:
    """Run Python with a command, and return what it prints."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
    options = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return python(
        "-W", "ignore", *command, timeout=limit_s(600), PYTHONPATH=paths, **options
    ).stdout


def results(
    folder: Path, program: str, cases: Sequence[str], *before: str
) -> dict[str, dict[str, Any]]:
    """Run some cases of a program. before: what stands before the program, such as INSTALLED."""
    path = PROGRAMS / f"{program}.py"
    printed = start(*(before or TORCHRUN), path, folder, *cases)
    lines = [line.partition("RESULT ")[2] for line in printed.splitlines() if "RESULT {" in line]
    found = {each.pop("case"): each for each in map(json.loads, lines)}
    assert list(found) == list(cases), printed[-3000:]
    return found


def assert_losses(
    case: str,
    result: Mapping[str, Any],
    expected: Sequence[float],
    *,
    keys: Sequence[str] = ("losses", "resumed"),
    rel: float = 1e-6,
) -> None:
    """The losses are the expected ones, and those after resuming are their last ones."""
    assert result["module"] in OURS, case
    for key in keys:
        found = result[key]
        assert found == pytest.approx(expected[len(expected) - len(found) :], rel=rel), (case, key)
