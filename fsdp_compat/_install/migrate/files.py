"""The files that a migration reads and writes."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SKIPPED = {"__pycache__", "build", "env", "node_modules", "site-packages", "venv"}


@dataclass(frozen=True)
class Text:
    """A file's text as it stands there, line ends included, and how it was encoded."""

    text: str
    encoding: str


def python_files(paths: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each file once, with True if it is Python source. Of directories, yield those alone."""
    seen: set[str] = set()
    for path in paths:
        found = _below(path) if os.path.isdir(path) else iter([path])
        for file in found:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file, file.endswith((".py", ".pyi"))


def _below(directory: str) -> Iterator[str]:
    """Yield the Python files of a directory and of those in it, in the order of their names."""
    seen = {os.path.realpath(directory)}
    for folder, folders, files in os.walk(directory, followlinks=True):
        kept = []
        for name in sorted(folders):
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            if _is_skipped(path, name) or real in seen:
                continue
            seen.add(real)
            kept.append(name)
        folders[:] = kept
        yield from (
            os.path.join(folder, name)
            for name in sorted(files)
            if name.endswith(".py") and os.path.isfile(os.path.join(folder, name))
        )


def _is_skipped(path: str, name: str) -> bool:
    is_environment = os.path.exists(os.path.join(path, "pyvenv.cfg"))
    return name.startswith(".") or name in SKIPPED or is_environment


def read(path: str) -> Text:
    """Raises SyntaxError or UnicodeDecodeError if the file is not text in its encoding."""
    data = Path(path).read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return Text(data.decode(encoding), encoding)


def write(path: str, text: Text) -> None:
    """Replace a file at once, with its permissions. A link stays a link."""
    target = os.path.realpath(path)
    data = text.text.encode(text.encoding)
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".migrate-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, os.stat(target).st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
