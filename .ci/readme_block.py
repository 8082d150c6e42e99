"""Print the one fenced sh block of a section of README.md: `readme_block.py README.md "Quick
start"`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def sh_block(text: str, heading: str) -> str:
    """Return the commands of the only ```sh block below ``## heading``; any other number of blocks
    is an error."""
    sections = re.split(r"^## +(.*?) *$", text, flags=re.MULTILINE)
    bodies = [
        body for title, body in zip(sections[1::2], sections[2::2], strict=True) if title == heading
    ]
    if len(bodies) != 1:
        raise SystemExit(f"README.md: expected one section '## {heading}', found {len(bodies)}")
    blocks = re.findall(r"^```sh\n(.*?)^```$", bodies[0], flags=re.MULTILINE | re.DOTALL)
    if len(blocks) != 1 or bodies[0].count("```sh") != 1:
        raise SystemExit(
            f"README.md, '## {heading}': expected exactly one fenced sh block, found {len(blocks)}"
        )
    return blocks[0]


if __name__ == "__main__":
    print(sh_block(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2]), end="")
