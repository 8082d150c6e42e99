"""The command ``migrate``: arguments, files, the order of the steps, output, exit status."""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import os
import re
import shutil
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._progress import elapsing
from .._text import count_of
from .fsdp_imports import rewrite_fsdp_imports
from .new_imports import Imports
from .source import Finding, Source
from .uses import Uses
from .wrap_calls import wrap_models

DESCRIPTION = """Rewrite Python source: imports of torch.distributed.fsdp become imports of
fsdp_compat, and DistributedDataParallel becomes FullyShardedDataParallel, with what the same
function does with the model. The rest is listed, with the reason and what to do."""

EPILOG = """fsdp-compat migrate src/ train.py
fsdp-compat migrate src/ --write"""

_SKIPPED = {"__pycache__", "build", "env", "node_modules", "site-packages", "venv"}
_OF_FSDP = re.compile(
    r"torch\.distributed\.fsdp|distributed\s+import\b.*fsdp|\.fsdp\.\w|dist\w*\.fsdp\b|_composable\b"
)


@dataclass
class Migrated:
    """The result for one file. ``left`` needs a person; ``notes`` are advice."""

    path: str
    before: str
    after: str
    left: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    wraps: int = 0  # DistributedDataParallel(...) that became FullyShardedDataParallel(...)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a directory")
    parser.add_argument("--write", action="store_true", help="write the files, not only a diff")
    text = "exit with 1 also if files can be rewritten, not only if places are left alone"
    parser.add_argument("--check", action="store_true", help=text)


def main(given: argparse.Namespace) -> int:
    """Migrate ``given.paths`` and return the exit status."""
    for path in given.paths:
        if not os.path.exists(path):
            text = f"migrate: there is no file or directory {path!r} in {os.getcwd()}"
            print(text, file=sys.stderr)
            return 2
    with elapsing(sys.stderr.isatty(), "migrating"):
        done = {path: _migrated(path, False) for path in python_files(given.paths)}
        if any(file.wraps for file in done.values()):
            for path, file in done.items():
                done[path] = file if file.wraps or file.left else _migrated(path, True)
    if given.write:
        done = {path: _written(file) for path, file in done.items()}
    return _print(list(done.values()), given)


def _migrated(path: str, wraps_elsewhere: bool) -> Migrated:
    """Migrate one file; what prevents it is a finding."""
    if not path.endswith((".py", ".pyi")):
        return _left(path, "this is not a Python file; migrate it by hand, or export it first")
    try:
        text, _ = read(path)
        if is_of_interest(text, wraps_elsewhere):
            return rewrite(text, path, wraps_elsewhere)
        return Migrated(path, text, text)
    except OSError as error:
        return _left(path, f"the file cannot be read: {error.strerror}")
    except (SyntaxError, UnicodeError, ValueError) as error:
        reason, line = getattr(error, "msg", error), getattr(error, "lineno", 1) or 1
        return _left(path, f"it does not parse: {reason}; mend the file and run again", line)


def _left(path: str, why: str, line: int = 1) -> Migrated:
    return Migrated(path, "", "", left=[Finding(path, line, "the file", why)])


def _written(file: Migrated) -> Migrated:
    try:
        if file.before != file.after:
            _write(file.path, file.after)
    except OSError as error:
        return _left(file.path, f"the file cannot be written: {error.strerror}")
    return file


def _print(done: Sequence[Migrated], given: argparse.Namespace) -> int:
    changed = [file for file in done if file.before != file.after]
    left = sorted(finding for file in done for finding in file.left)
    notes = sorted(finding for file in done for finding in file.notes)
    lines = [line for file in changed for line in _diff(file)]
    lines += [f"note: {finding}" for finding in notes] + [f"left: {finding}" for finding in left]
    hint = "; --write writes" if changed and not given.write else ""
    is_done = "rewritten" if given.write else "to rewrite"
    lines.append(
        f"{count_of(len(done), 'file')}, {len(changed)} {is_done}, "
        f"{count_of(len(left), 'place')} left alone{hint}"
    )
    print("\n".join(lines), flush=True)
    return 1 if left or (given.check and changed and not given.write) else 0


def _diff(file: Migrated) -> Iterator[str]:
    """Yield the lines of a unified diff. Lines end at line feeds only, as for editors and patch."""
    before, after = (list(io.StringIO(t, newline="\n")) for t in (file.before, file.after))
    path = file.path.lstrip("/")
    for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm=""):
        yield line.rstrip("\r\n")
        if not line.endswith("\n") and line[:1] in "+- " and line[:3] not in ("+++", "---"):
            yield "\\ No newline at end of file"


# -- one text in, one text out


def is_of_interest(text: str, wraps_elsewhere: bool = False) -> bool:
    """True if a text names torch's FSDP or DDP, or may save a model that another file wraps."""
    words = ("state_dict(", ".module", "GradScaler") if wraps_elsewhere else ()
    is_named = any(word in text for word in ("DistributedDataParallel", *words))
    return is_named or _OF_FSDP.search(text) is not None


def rewrite(text: str, path: str, wraps_elsewhere: bool = False) -> Migrated:
    """Migrate the text of one file. wraps_elsewhere: another file wraps a model that this one may
    save. Raises SyntaxError if it is not Python, ValueError if it cannot be handled."""
    try:
        source = Source(text, path)
        imports = Imports(source)
        rewrite_fsdp_imports(source, imports)
        models = wrap_models(source, imports)
        if models or wraps_elsewhere:
            Uses(source, imports, models).rewrite()
        imports.write()
        after = source.result()
        ast.parse(after)
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None
    return Migrated(path, text, after, sorted(set(source.left)), source.notes, len(models))


# -- files


def python_files(paths: Sequence[str]) -> Iterable[str]:
    """Return each file once: those that are named, and the Python files of directories."""
    found = [file for path in paths for file in (_below(path) if os.path.isdir(path) else [path])]
    return {os.path.realpath(file): file for file in reversed(found)}.values()


def _below(directory: str) -> Iterator[str]:
    """Yield the Python files of a directory and of those in it, in the order of their names."""
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in sorted(folders) if not _is_skipped(folder, name)]
        paths = [os.path.join(folder, name) for name in sorted(files) if name.endswith(".py")]
        yield from filter(os.path.isfile, paths)


def _is_skipped(folder: str, name: str) -> bool:
    is_environment = os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
    return name.startswith(".") or name in _SKIPPED or is_environment


def read(path: str) -> tuple[str, str]:
    """Return the text of a file, line ends included, and its encoding. Raises SyntaxError or
    UnicodeDecodeError if it is not text in that encoding."""
    data = Path(path).read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def _write(path: str, text: str) -> None:
    """Replace the text of a file at once, in its encoding. Permissions and links stay."""
    target = Path(path).resolve()
    temporary = target.with_name(f".migrate-{os.getpid()}-{target.name}")
    try:
        temporary.write_bytes(text.encode(read(path)[1]))
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
