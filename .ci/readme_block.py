"""Print one of the commands in README.md: `readme_block.py README.md "Two commands" 1`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def commands(text: str, heading: str) -> list[str]:
    """Return the ```sh blocks below ``## heading``. Each must be one line, ready to paste."""
    sections = re.split(r"^## +(.*?) *$", text, flags=re.MULTILINE)
    bodies = [
        body for title, body in zip(sections[1::2], sections[2::2], strict=True) if title == heading
    ]
    if len(bodies) != 1:
        raise SystemExit(f"README.md: expected one section '## {heading}', got {len(bodies)}")
    blocks = re.findall(r"^```sh\n(.*?)^```$", bodies[0], flags=re.MULTILINE | re.DOTALL)
    for block in blocks:
        if block.count("\n") != 1:
            raise SystemExit(f"README.md, '## {heading}': expected one line, got:\n{block}")
    return blocks


if __name__ == "__main__":
    path, heading, number = sys.argv[1:]
    print(commands(Path(path).read_text(encoding="utf-8"), heading)[int(number) - 1], end="")
