"""The commands of ``fsdp-compat`` that work on checkpoints: arguments and output. The functions of
`checkpoint.files` have the same arguments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import inspect as inspect_module
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._archive.archive import Unrecognised
from ..._archive.header import dtype_of
from ..._archive.texts import parse_json, read_text
from ..._text import shown
from ...errors import FsdpCompatError, UsageError
from .._folder.directory import steps_in
from .convert import convert
from .difference import diff
from .inspection import Facts, inspect
from .run_listing import list_checkpoints
from .verification import verify

_PREFIXES = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_Wrong = argparse.ArgumentTypeError


# -- values of arguments


def existing(value: str) -> Path:
    if not os.path.lexists(value):
        raise _Wrong(f"{value!r} does not exist")
    return Path(value)


def size(value: str) -> int:
    """Return a number of bytes: 5GB, 256MB, 1.5GiB, 4096."""
    found, nbytes = _SIZE.fullmatch(value), 0
    if found is not None:
        number, prefix, binary = found.groups(default="")
        nbytes = int(float(number) * (1024 if binary else 1000) ** _PREFIXES.index(prefix.lower()))
    if nbytes < 1:
        raise _Wrong(f"{value!r} is not a size, such as 5GB, 256MB, 1.5GiB or 4096")
    return nbytes


def dtype(value: str) -> torch.dtype:
    try:
        return dtype_of(_SHORT.get(value, value))
    except ValueError as error:
        raise _Wrong(f"{value!r} is not a dtype, such as bfloat16 or float32") from error


def replacement(value: str) -> tuple[str, str]:
    pattern, arrow, text = value.partition("=>")
    if not arrow or not pattern:
        raise _Wrong(f"{value!r} is not of the form 'REGEX=>TEXT'")
    return pattern, text


def json_file(value: str) -> Any:
    try:
        return parse_json(read_text(Path(value)))
    except (ValueError, RecursionError, OSError, FsdpCompatError) as error:
        raise _Wrong(f"{value} cannot be read as JSON: {error}") from error


# By name of an argument: what the text becomes, and how it is shown; default: str, and its name.
_VALUES: dict[str, tuple[Callable[[str], Any], str | None]] = {
    **{"path": (existing, None), "other": (existing, None), "target": (Path, None)},
    **{"include": (str, "REGEX"), "exclude": (str, "REGEX"), "unit": (str, "REGEX")},
    **{"rtol": (float, "NUMBER"), "atol": (float, "NUMBER"), "step": (int, "N")},
    **{"world_size": (int, "N"), "max_file_size": (size, "SIZE"), "dtype": (dtype, None)},
    **{"rename": (replacement, "'REGEX=>TEXT'"), "optimizer_names": (json_file, "JSON_FILE")},
    **{"shapes": (existing, None), "ignore_class": (str, "CLASS")},
}
_JSON = "print JSON instead of tables"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, as `__main__` uses it: a function of `checkpoint.files`, whose arguments and their
    texts it has, and what to do with the result."""

    function: Callable[..., Any]
    examples: Sequence[str]
    flags: dict[str, str]  # more arguments, which say how the result is shown
    work: Callable[..., int]  # called with all arguments by their names

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = inspect_module.getdoc(self.work)
        parser.epilog = "\n".join(f"fsdp-compat {example}" for example in self.examples)
        texts = _texts_of(self.function)
        for name, each in inspect_module.signature(self.function).parameters.items():
            settings: dict[str, Any] = {"help": texts.get(name)}
            kind, metavar = _VALUES.get(name, (str, None))
            if each.default is False:
                settings["action"] = "store_true"
            else:
                settings |= {"type": kind, "metavar": metavar, "default": each.default}
            if each.default == () or name == "rename":
                settings |= {"action": "append", "default": []}
                settings["help"] = f"{settings['help']} Repeatable."
            option = name if each.default is each.empty else f"--{name.replace('_', '-')}"
            if name != "progress":
                parser.add_argument(option, **settings)
        for name, text in self.flags.items():
            parser.add_argument(f"--{name}", help=text, action="store_true")

    def main(self, given: argparse.Namespace) -> int:
        return self.work(**vars(given))


def _texts_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return what its docstring, or the one that it points to, says of each argument."""
    found = {}
    doc = inspect_module.getdoc(function) or ""
    for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", doc, flags=re.MULTILINE):
        is_elsewhere = text.startswith("as for ``inspect``")
        text = _texts_of(inspect)[name] if is_elsewhere else " ".join(text.split())
        found[name] = text.replace("``", "")
    return found


def _command(
    function: Callable[..., Any], *examples: str, **flags: str
) -> Callable[[Callable[..., int]], Command]:
    return functools.partial(Command, function, examples, flags)


# -- output


def _tables(as_json: bool) -> Any:
    """Return what makes tables, or None for JSON. Raises UsageError without rich."""
    try:
        return None if as_json else importlib.import_module(".tables", __package__)
    except ImportError as error:
        raise UsageError.of(
            "Tables need the package rich.",
            expected="rich, or --json",
            got="rich is not installed",
            where="fsdp-compat",
            fix="pip install rich",
        ) from error


def _print(found: Facts, text: str | None) -> None:
    """Print a result, without a text as JSON."""
    sys.stdout.write(text or json.dumps(found.as_json(), allow_nan=False) + "\n")


# -- commands


@_command(
    inspect,
    "inspect runs/7",
    "inspect runs/7/step-00001200",
    r"inspect model.safetensors --include '^layers\.0\.' --stats",
    all="list every tensor and every other value",
    json=_JSON,
)
def inspect_command(path: Path, all: bool, json: bool, **given: Any) -> int:
    """Show what a checkpoint is and holds: totals, and a line for each module, or, with --all,
    --stats or a pattern, for each tensor. Of a run's folder, list the checkpoints: step, format,
    size, whether each is complete, and which is the latest. No values are read without --stats."""
    tables, progress = _tables(json), sys.stderr.isatty()
    with contextlib.suppress(*[Unrecognised] if path.is_dir() else []):
        if not steps_in(path):
            found = inspect(path, progress=progress, **given)
            lists_all = all or bool(given["stats"] or given["include"] or given["exclude"])
            _print(found, tables and tables.of_inspection(found, lists_all, given["stats"]))
            return 0
    run = list_checkpoints(path, ignore_class=given["ignore_class"], progress=progress)
    _print(run, tables and tables.of_listing(run))
    return 0


@_command(verify, "verify runs/7/step-00001200", "verify checkpoint-1000 --finite", json=_JSON)
def verify_command(json: bool, **given: Any) -> int:
    """Check that every element of every tensor is there exactly once, that files have their lengths
    and checksums, and that replicas are equal; count NaN and infinite values. Values of files
    without checksums, such as safetensors, can have changed unnoticed: the last line says so."""
    tables = _tables(json)
    found = verify(progress=sys.stderr.isatty(), **given)
    _print(found, tables and tables.of_verification(found))
    return 0 if found.is_intact else 1


@_command(
    diff,
    "diff runs/7/step-00001100 runs/7/step-00001200",
    "diff full.pt exported --weights --rtol 1e-2 --any-dtype",
    json=_JSON,
)
def diff_command(json: bool, **given: Any) -> int:
    """Compare two checkpoints, of any two formats: tensors that only one has, other shapes and
    dtypes, and how far values are apart, the largest distance first. NaN equals NaN."""
    tables = _tables(json)
    found = diff(progress=sys.stderr.isatty(), **given)
    _print(found, tables and tables.of_difference(found))
    return 0 if found.is_same else 1


@_command(
    convert,
    "convert runs/7/step-00001200 exported",
    "convert checkpoint-1000 model.pt --dtype bfloat16 --weights",
    "convert dcp everything.pt --as-saved",
    r"convert sharded adapter --include '\.lora_' --rename '^base_model\.=>'",
    r"convert runs/7/step-00001200 two-ranks --world-size 2 --unit 'layers\.\d+'",
)
def convert_command(**given: Any) -> int:
    """Write a checkpoint in another format, as one file, for another number of ranks, with other
    names or dtypes, or a part of it. The target must not exist; it appears once it is complete."""
    print(shown(str(convert(progress=sys.stderr.isatty(), **given))))
    return 0
