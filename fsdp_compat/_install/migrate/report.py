"""What the command prints."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Iterator, Sequence
from typing import TextIO

from .findings import Finding, Migrated

_COLOURS = {"+++": "1", "---": "1", "@@": "36", "+": "32", "-": "31"}


def is_coloured(stream: TextIO, no_color: bool) -> bool:
    """True on a terminal, unless --no-color or the environment variable NO_COLOR says otherwise."""
    return stream.isatty() and not no_color and not os.environ.get("NO_COLOR")


def diff(file: Migrated, coloured: bool) -> Iterator[str]:
    """Yield the lines of a unified diff."""
    path = file.path.lstrip("/")
    lines = difflib.unified_diff(
        _lines(file.before), _lines(file.after), f"a/{path}", f"b/{path}", lineterm=""
    )
    for line in lines:
        shown = line.rstrip("\r\n")
        yield _colour(shown) if coloured else shown
        if not line.endswith("\n") and line[:1] in "+- " and line[:3] not in ("+++", "---"):
            yield "\\ No newline at end of file"


def _lines(text: str) -> list[str]:
    """Split at line feeds only, as editors and patch do."""
    return list(io.StringIO(text.removeprefix("\ufeff"), newline="\n"))


def _colour(line: str) -> str:
    for start, code in _COLOURS.items():
        if line.startswith(start):
            return f"\033[{code}m{line}\033[0m"
    return line


def list_of(left: Sequence[Finding]) -> Iterator[str]:
    for finding in sorted(left):
        yield f"left: {finding}"


def advice(notes: Sequence[Finding]) -> Iterator[str]:
    """Yield each advice once, and below it the places that it is for."""
    for what, why, fix in sorted({(note.what, note.why, note.fix) for note in notes}):
        yield f"note: {what} — {why}; {fix}:"
        for note in sorted(notes):
            if (note.what, note.why, note.fix) == (what, why, fix):
                yield f"    {note.path}:{note.line}"


def summary(files: Sequence[Migrated], looked_at: int, left: int, written: bool) -> str:
    changed = sum(file.changed for file in files)
    done = "rewritten" if written else "to rewrite"
    places = f"{left} {'place' if left == 1 else 'places'} left alone"
    hint = "" if written or not changed else "; --write writes"
    counted = f"{looked_at} {'file' if looked_at == 1 else 'files'}"
    return f"{counted}, {changed} {done}, {places}{hint}"
