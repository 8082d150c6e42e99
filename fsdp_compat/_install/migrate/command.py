"""The command ``migrate``: arguments, exit codes, and one file after the other."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence

from . import files, report
from .findings import Finding, Migrated

DESCRIPTION = """Rewrite Python source: imports of torch.distributed.fsdp become imports of
fsdp_compat, and DistributedDataParallel becomes FullyShardedDataParallel, with the optimizer,
clipping, saving and loading that belong to it. Only what is certain is rewritten; the rest is
listed, with the reason and what to do. Without --write, nothing is written."""

EPILOG = """Exit status: 0; 1 with --check if anything is left to rewrite or was left alone; 2 if
the arguments are wrong, or libcst is missing."""

# A file without any of these is not parsed.
_USES = re.compile(
    r"torch\.distributed\.fsdp|distributed\s+import\b.*fsdp|\.fsdp\.\w|dist\w*\.fsdp\b|_composable\b"
)
_WORDS = ("fsdp", "DistributedDataParallel", "_composable")
# Files that may save a model that another file wraps; looked at if one does.
_ON_SOME_RANKS = re.compile(r"rank|main|master|\.module\.state_dict", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a directory")
    parser.add_argument("--write", action="store_true", help="write the files")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 if anything is left to rewrite or was left alone",
    )
    parser.add_argument("--no-color", action="store_true", help="no colours, even on a terminal")


def migrate(given: argparse.Namespace, refuse: Callable[[str], object]) -> int:
    """Migrate ``given.paths`` and return the exit status. refuse: ends with a message."""
    for path in given.paths:
        if not os.path.exists(path):
            refuse(f"migrate: there is no file or directory {path!r} in {os.getcwd()}")
    try:
        missing = importlib.util.find_spec("libcst") is None
    except ValueError:  # sys.modules says that it cannot be imported
        missing = True
    if missing:
        refuse("migrate needs libcst: pip install 'fsdp_compat[migrate]', or: pip install libcst")
    looked_at = 0
    done: list[Migrated] = []
    others: list[str] = []
    for path, is_python in files.python_files(given.paths):
        if not is_python:
            why = "this is not a Python file"
            done.append(_left(path, why, "migrate it by hand, or export it first"))
            continue
        looked_at += 1
        file = _migrated(path, given.write, others)
        if file is not None:
            done.append(file)
    if any(file.wraps for file in done):
        done += [file for path in others if (file := _migrated(path, given.write, None))]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # sources have any characters
    try:
        return _print(done, looked_at, given)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def is_of_interest(text: str) -> bool:
    """True if a text names torch's FSDP, or DDP; without a look at its meaning."""
    if not any(word in text for word in _WORDS):
        return False
    return "DistributedDataParallel" in text or _USES.search(text) is not None


def _migrated(path: str, write: bool, others: list[str] | None) -> Migrated | None:
    """Return the result for a file; None if nothing in it matters.

    others: gets the files that matter only if a model is wrapped elsewhere. None: this is one."""
    try:
        text = files.read(path)
        if others is not None and not is_of_interest(text.text):
            if ".state_dict(" in text.text and _ON_SOME_RANKS.search(text.text):
                others.append(path)
            return None
        from .rewriting import rewrite

        file = rewrite(text.text, path)
        if file.changed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(file.after, path, "exec", dont_inherit=True)
        if file.changed and write:
            files.write(path, files.Text(file.after, text.encoding))
    except OSError as error:
        return _left(path, f"the file cannot be read or written: {error.strerror}", "check it")
    except (SyntaxError, UnicodeError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        line = (error.lineno if isinstance(error, SyntaxError) else None) or 1
        return _left(path, f"it does not parse: {reason}", "mend the file and run again", line)
    return file


def _left(path: str, why: str, fix: str, line: int = 1) -> Migrated:
    return Migrated(path, "", "", left=[Finding(path, line, "the file", why, fix)])


def _print(done: Sequence[Migrated], looked_at: int, given: argparse.Namespace) -> int:
    coloured = report.is_coloured(sys.stdout, given.no_color)
    left = [finding for file in done for finding in file.left]
    if any(file.wraps for file in done):
        left += [finding for file in done for finding in file.suspects]
    notes = [finding for file in done for finding in file.notes]
    changed = [file for file in done if file.changed]
    for file in changed:
        for line in report.diff(file, coloured):
            print(line)
    for line in (*report.advice(notes), *report.list_of(left)):
        print(line)
    print(report.summary(done, looked_at, len(left), given.write), flush=True)
    unfinished = left or (changed and not given.write)
    return 1 if given.check and unfinished else 0
