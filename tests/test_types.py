"""The types that a user's program sees, in an editor or in mypy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_readme import PROGRAMS, resuming

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("typed_program.py")


@pytest.mark.slow  # mypy reads torch
def test_strict_programs_and_those_of_the_readme_have_types_and_no_errors(tmp_path: Path) -> None:
    files = [PROGRAM]
    for number, program in enumerate(PROGRAMS):
        files.append(tmp_path / f"readme_{number}.py")
        files[-1].write_text(program + resuming(program))
    options = ("--strict", "--warn-unreachable", "--follow-imports=silent", "--config-file=")
    torchs_own = "--untyped-calls-exclude=torch"  # backward() is untyped
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, torchs_own, f"--cache-dir={tmp_path}", *files],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "Success: no issues found in 3 source files\n", run.stdout + run.stderr
