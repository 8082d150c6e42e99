"""Compare what compat_surface.py finds missing with the list of what is known to be:
`check_surface.py TOOL LIST`.

Both sides must agree: a name that is missing without being listed fails, and so does one that is
listed without being missing. The list has one name per line, as the tool writes it before the first
colon; lines that start with # are comments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def disagreements(findings: list[str], pending: set[str]) -> list[str]:
    reported = {line.partition(":")[0] for line in findings}
    new = [
        f"not in the list of pending names: {line}"
        for line in findings
        if line.partition(":")[0] not in pending
    ]
    gone = [
        f"no longer missing, take it off the list: {name}" for name in sorted(pending - reported)
    ]
    return new + gone


def main() -> int:
    tool, listed = sys.argv[1:]
    run = subprocess.run([sys.executable, tool], capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    if run.returncode not in (0, 1) or not lines or "compared" not in lines[-1]:
        print(run.stdout + run.stderr)
        return 1
    *findings, summary = lines
    pending = {line.strip() for line in Path(listed).read_text(encoding="utf-8").splitlines()} - {
        ""
    }
    problems = disagreements(findings, {name for name in pending if not name.startswith("#")})
    print(
        "\n".join([*problems, summary, f"{len(problems)} disagreements with {Path(listed).name}"])
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
