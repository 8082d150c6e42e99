"""The commands of ``fsdp-compat`` that work on checkpoints: arguments and output. The functions of
`checkpoint.files` have the same arguments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from inspect import getdoc
from pathlib import Path
from typing import Any

import torch

from ..._archive.archive import Unrecognised
from ..._archive.header import dtype_of
from ..._archive.texts import parse_json, read_text
from ..._text import shown
from ...errors import FsdpCompatError, UsageError
from .._folder.directory import steps_in
from .convert import FORMATS, convert
from .difference import diff
from .inspection import Facts, inspect
from .run_listing import list_checkpoints
from .verification import verify

_PREFIXES = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_Wrong = argparse.ArgumentTypeError
_Argument = tuple[str, dict[str, Any]]  # what ``ArgumentParser.add_argument`` takes


# -- types of arguments


def existing(value: str) -> Path:
    if not os.path.lexists(value):
        raise _Wrong(f"{value!r} does not exist")
    return Path(value)


def regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise _Wrong(f"{value!r} is not a regular expression: {error}") from error
    return value


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


# -- arguments


def _flag(name: str, help: str) -> _Argument:
    return name, {"help": help, "action": "store_true"}


def _value(name: str, help: str, type: Callable[[str], Any], **settings: Any) -> _Argument:
    return name, {"help": help, "type": type, **settings}


def _several(name: str, help: str, type: Callable[[str], Any], metavar: str) -> _Argument:
    settings = {"type": type, "metavar": metavar, "action": "append", "default": []}
    return name, {"help": f"{help}; repeatable", **settings}


_PATH = _value("path", "a checkpoint, or a run's folder: the newest in it", existing)
_JSON = _flag("--json", "print JSON instead of tables")
_READING = [
    _value(
        "--shapes",
        "where flat files of FSDP1 (LOCAL_STATE_DICT) get shapes from: a file of "
        "torch.save(model.state_dict(), path), of the same model before wrapping",
        existing,
        metavar="PATH",
    ),
    _several(
        "--ignore-class",
        "leave out objects of this class in torch.save files: package.module.Class",
        str,
        "NAME",
    ),
    _flag(
        "--keep-module",
        "keep a 'module.' that all names begin with; by default it is removed, as the prefix that "
        "DistributedDataParallel adds. Native checkpoints always keep it",
    ),
]
_SELECTION = [
    _several("--include", "only tensors whose names match", regex, "REGEX"),
    _several("--exclude", "leave out tensors whose names match", regex, "REGEX"),
]
_WEIGHTS = _flag("--weights", "the model alone: no optimizer state and no other values")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, as `__main__` uses it. work: called with the arguments by their names."""

    arguments: Sequence[_Argument]
    examples: Sequence[str]
    work: Callable[..., int]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = getdoc(self.work)
        parser.epilog = "\n".join(f"fsdp-compat {example}" for example in self.examples)
        for name, settings in self.arguments:
            parser.add_argument(name, **settings)

    def main(self, given: argparse.Namespace) -> int:
        return self.work(**vars(given))


def _command(
    *arguments: _Argument, examples: Sequence[str]
) -> Callable[[Callable[..., int]], Command]:
    return functools.partial(Command, arguments, examples)


# -- output


def _progress() -> bool:
    """Return whether to show progress: on a terminal only."""
    return sys.stderr.isatty()


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
    _value("path", "a checkpoint, or a run's folder", existing),
    _flag("--all", "list every tensor and every other value"),
    *_SELECTION,
    _flag("--stats", "also read the values, for the smallest, the largest and the mean"),
    _JSON,
    *_READING,
    examples=(
        "inspect runs/7",
        "inspect runs/7/step-00001200",
        r"inspect model.safetensors --include '^layers\.0\.' --stats",
    ),
)
def inspect_command(path: Path, all: bool, json: bool, **given: Any) -> int:
    """Show what a checkpoint is and holds: totals, and a line for each module, or, with --all,
    --stats or a pattern, for each tensor. Of a run's folder, list the checkpoints: step, format,
    size, whether each is complete, and which is the latest. No values are read without --stats."""
    tables = _tables(json)
    with contextlib.suppress(*[Unrecognised] if path.is_dir() else []):
        if not steps_in(path):
            found = inspect(path, progress=_progress(), **given)
            lists_all = all or bool(given["stats"] or given["include"] or given["exclude"])
            _print(found, tables and tables.of_inspection(found, lists_all, given["stats"]))
            return 0
    run = list_checkpoints(path, ignore_class=given["ignore_class"], progress=_progress())
    _print(run, tables and tables.of_listing(run))
    return 0


@_command(
    _PATH,
    _flag("--quick", "read no values: no checksums, no NaN counts"),
    _flag("--finite", "count NaN and infinite values as problems"),
    _JSON,
    *_READING,
    examples=("verify runs/7/step-00001200", "verify checkpoint-1000 --finite"),
)
def verify_command(path: Path, json: bool, **given: Any) -> int:
    """Check that every element of every tensor is there exactly once, that files have their lengths
    and checksums, and that replicas are equal; count NaN and infinite values. Values of files
    without checksums, such as safetensors, can have changed unnoticed: the last line says so."""
    tables = _tables(json)
    found = verify(path, progress=_progress(), **given)
    _print(found, tables and tables.of_verification(found))
    return 0 if found.is_intact else 1


@_command(
    _PATH,
    _value("other", "the same, of any format", existing),
    _value("--rtol", "tolerance relative to the larger value", float, default=0.0),
    _value("--atol", "absolute tolerance", float, default=0.0),
    _flag("--any-dtype", "compare values only: dtypes may differ"),
    *_SELECTION,
    _WEIGHTS,
    _JSON,
    *_READING,
    examples=(
        "diff runs/7/step-00001100 runs/7/step-00001200",
        "diff full.pt exported --weights --rtol 1e-2 --any-dtype",
    ),
)
def diff_command(path: Path, other: Path, json: bool, **given: Any) -> int:
    """Compare two checkpoints, of any two formats: tensors that only one has, other shapes and
    dtypes, and how far values are apart, the largest distance first. NaN equals NaN."""
    tables = _tables(json)
    found = diff(path, other, progress=_progress(), **given)
    _print(found, tables and tables.of_difference(found))
    return 0 if found.is_same else 1


@_command(
    _PATH,
    _value("target", "the file or directory to write, which must not exist", Path),
    _value(
        "--to",
        "format of the target; default: by suffix (.safetensors; .pt, .pth, .bin or .ckpt for "
        "torch.load), with --world-size dcp or native, or else a directory of safetensors files "
        "with an index, as Hugging Face has it",
        str,
        choices=tuple(FORMATS),
    ),
    _value("--world-size", "ranks to split the files for (dcp, native)", int, metavar="N"),
    _value(
        "--unit",
        r"parameters whose names have the same match share a unit: 'layers\.\d+' (native)",
        regex,
        metavar="REGEX",
    ),
    _value("--step", "step that the target records (native)", int),
    _value("--dtype", "convert floating-point weights: bfloat16", dtype),
    _several(
        "--rename",
        "replace matches in names, as Python's re.sub does, in this order",
        replacement,
        "'REGEX=>TEXT'",
    ),
    *_SELECTION,
    _WEIGHTS,
    _flag("--as-saved", "keep nested values and all names as they were saved (.pt)"),
    _value(
        "--optimizer-names",
        "JSON file: names for numbered parameters of the optimizer, as a list in the order of the "
        "numbers. A native target needs names",
        json_file,
        metavar="FILE",
    ),
    _value(
        "--max-file-size",
        "largest size of one safetensors file; default: 5GB",
        size,
        default="5GB",
        metavar="SIZE",
    ),
    *_READING,
    examples=(
        "convert runs/7/step-00001200 exported",
        "convert checkpoint-1000 model.pt --dtype bfloat16 --weights",
        "convert dcp everything.pt --as-saved",
        r"convert sharded adapter --include '\.lora_' --rename '^base_model\.=>'",
        r"convert runs/7/step-00001200 two-ranks --world-size 2 --unit 'layers\.\d+'",
    ),
)
def convert_command(path: Path, target: Path, **given: Any) -> int:
    """Write a checkpoint in another format, as one file, for another number of ranks, with other
    names or dtypes, or a part of it. The target must not exist; it appears once it is complete."""
    print(shown(str(convert(path, target, progress=_progress(), **given))))
    return 0
