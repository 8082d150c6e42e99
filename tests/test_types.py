"""The types that a user's program sees, in an editor or in mypy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("typed_program.py")


def test_a_strict_program_has_types_and_no_errors(tmp_path: Path) -> None:
    options = ("--strict", "--warn-unreachable", "--follow-imports=silent", "--config-file=")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={tmp_path}", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "Success: no issues found in 1 source file\n", run.stdout + run.stderr
