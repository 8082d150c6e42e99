"""Types of the commands' arguments. Imports click, which is in the extra ``cli``; only the commands
import this module."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import torch

from .._header import dtype_of
from .._texts import parse_json, read_text

_FACTORS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class _Size(click.ParamType):
    """A number of bytes: 5GB, 256MB, 1.5GiB, 4096."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(value)
        nbytes = 0
        if found is not None and len(value) < 40:
            number, prefix, binary = found.groups()
            nbytes = int(float(number) * (1024 if binary else 1000) ** _FACTORS[prefix.lower()])
        if nbytes < 1 or (found is not None and found[3] and not found[2]):
            self.fail(f"{value!r} is not a size, such as 5GB, 256MB, 1.5GiB or 4096", param, ctx)
        return nbytes


class _Dtype(click.ParamType):
    """A dtype by torch's name."""

    name = "dtype"

    def convert(self, value: Any, param: Any, ctx: Any) -> torch.dtype:
        try:
            return value if isinstance(value, torch.dtype) else dtype_of(_SHORT.get(value, value))
        except ValueError:
            self.fail(f"{value!r} is not a dtype, such as bfloat16 or float32", param, ctx)


class _Pattern(click.ParamType):
    """A regular expression, as text."""

    name = "regex"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        return self.checked(str(value), param, ctx)

    def checked(self, pattern: str, param: Any, ctx: Any) -> str:
        """Return a pattern unchanged; fail unless it is valid."""
        try:
            re.compile(pattern)
        except re.error as error:
            self.fail(f"{pattern!r} is not a regular expression: {error}", param, ctx)
        return pattern


class _Rename(_Pattern):
    """A regular expression, and what takes the place of its matches."""

    name = "regex=>text"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:  # type: ignore[override]
        if isinstance(value, tuple):
            return value
        pattern, arrow, replacement = value.partition("=>")
        if not arrow or not pattern:
            self.fail(f"{value!r} is not of the form 'PATTERN=>REPLACEMENT'", param, ctx)
        return self.checked(pattern, param, ctx), replacement


SIZE, DTYPE, PATTERN, RENAME = _Size(), _Dtype(), _Pattern(), _Rename()


def names_in(path: Path) -> dict[str, str]:
    """Return the content of a file with new names of tensors, by their old ones. Raises
    click.UsageError for anything else."""
    content = _json_in(path)
    if not isinstance(content, dict) or not all(isinstance(new, str) for new in content.values()):
        raise click.UsageError(f'{path} has to hold an object of names: {{"old name": "new name"}}')
    return content


def list_in(path: Path) -> list[str]:
    """Return the content of a file with a list of names. Raises click.UsageError for anything
    else."""
    content = _json_in(path)
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise click.UsageError(f'{path} has to hold a list of names: ["first", "second"]')
    return content


def _json_in(path: Path) -> Any:
    try:
        return parse_json(read_text(path))
    except (ValueError, RecursionError, OSError, json.JSONDecodeError) as error:
        raise click.UsageError(f"{path} cannot be read as JSON: {error}") from error
