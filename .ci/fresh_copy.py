"""Copy a checkout as a clean one would look, without what .gitignore names: `fresh_copy.py FROM
TO`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def ignored_patterns(checkout: Path) -> list[str]:
    lines = (checkout / ".gitignore").read_text(encoding="utf-8").splitlines()
    return [".git", *(line for line in lines if line and not line.startswith("#"))]


if __name__ == "__main__":
    checkout, target = map(Path, sys.argv[1:])
    shutil.copytree(checkout, target, ignore=shutil.ignore_patterns(*ignored_patterns(checkout)))
