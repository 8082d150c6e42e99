"""The commands of ``fsdp-compat`` that work on checkpoints: arguments, output and exit status.

click and rich (`tables`) are in the extra ``cli``; nothing but ``__main__`` imports this module."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from ...errors import FsdpCompatError, UsageError, explain
from .._header import dtype_of
from .._publishing import published, write_text
from .._texts import parse_json, read_text
from . import tables
from .convert import FORMATS, convert
from .difference import diff
from .inspection import Facts, inspect
from .listing import list_checkpoints
from .shapes import shapes_from_callable
from .tables import shown
from .verification import verify

_FOUND = "\n  1    verify found a problem, or diff a difference"
STATUS = f"""\b
Exit status:
  0    everything is fine{_FOUND}
  2    wrong arguments, the target exists, or a package is missing
  3    the checkpoint is damaged (but see 1), refused or unreadable
  130  interrupted by Ctrl-C; nothing is left under the target's name
  141  the output was closed early, as by head"""

_SUFFIXES = [suffix for each in FORMATS.values() for suffix in each.suffixes]
_PREFIXES = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class _Commands(click.Group):
    """Turns errors into one message and an exit status. Bugs keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names have any characters
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", UserWarning)
                warnings.showwarning = lambda warning, *_, **__: _note(str(warning))
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except FsdpCompatError as error:
            status, message = 2 if isinstance(error, UsageError) else 3, str(error)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status, message = 141, ""
        except OSError as error:
            status, message = 3, _of_system(error)
        except KeyboardInterrupt:
            message = "Interrupted. No target was written; the command can be run again."
            status = 130
        _say(message)
        ctx.exit(status)


def _note(warning: str) -> None:
    """Print the first line of a warning."""
    _say(f"note: {warning.splitlines()[0]}")


def _of_system(error: OSError) -> str:
    return explain(
        "A file cannot be read or written.",
        expected="access to it, and free disk space",
        got=error.strerror or str(error),
        where=str(error.filename or "the command"),
        fix="check the path, its permissions and the disk",
    )


def _say(message: str) -> None:
    """Print to stderr. Content of files may be quoted in it."""
    for line in message.splitlines():
        click.echo(shown(line), err=True)


@click.group(cls=_Commands, epilog=STATUS, context_settings={"max_content_width": 100})
def commands() -> None:
    """Look into, check, compare and convert checkpoints, in one process without a GPU."""


def _epilog(*examples: str, compares: bool = False) -> str:
    lines = (f"  fsdp-compat {example}" for example in examples)
    status = STATUS if compares else STATUS.replace(_FOUND, "").replace(" (but see 1)", "")
    return "\n".join(["\b", "Examples:", *lines, "", status])


# -- types of arguments; --help shows their names


def regex(value: str) -> str:
    """A pattern."""
    try:
        re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"{value!r} is no regular expression: {error}") from error
    return value


def size(value: str | int) -> int:
    """A number of bytes: 5GB, 256MB, 1.5GiB, 4096."""
    found, nbytes = _SIZE.fullmatch(str(value)), 0
    if found is not None:
        number, prefix, binary = found.groups(default="")
        nbytes = int(float(number) * (1024 if binary else 1000) ** _PREFIXES.index(prefix.lower()))
    if nbytes < 1:
        raise click.BadParameter(f"{value!r} is not a size, such as 5GB, 256MB, 1.5GiB or 4096")
    return nbytes


def dtype(value: str) -> torch.dtype:
    try:
        return dtype_of(_SHORT.get(value, value))
    except ValueError as error:
        text = f"{value!r} is not a dtype, such as bfloat16 or float32"
        raise click.BadParameter(text) from error


def _replacement(value: str) -> tuple[str, str]:
    pattern, arrow, text = value.partition("=>")
    if not arrow or not pattern:
        raise click.BadParameter(f"{value!r} is not of the form 'PATTERN=>REPLACEMENT'")
    return pattern, text


def json_file(path: str) -> Any:
    try:
        return parse_json(read_text(Path(path)))
    except (ValueError, RecursionError, OSError, FsdpCompatError) as error:
        raise click.BadParameter(f"{path} cannot be read as JSON: {error}") from error


# -- parameters that several commands have


def _option(
    names: str, help: str, type: Any = None, *, is_repeatable: bool = False, **settings: Any
) -> click.Option:
    """Return an option; without a type it is a flag."""
    return click.Option(
        names.split(),
        help=f"{help} Repeatable." if is_repeatable else help,
        type=type,
        is_flag=type is None,
        multiple=is_repeatable,
        **settings,
    )


_EXISTING = click.Path(exists=True, path_type=Path)
_COUNT = click.IntRange(min=1)
_SOURCE = click.Argument(["source"], type=_EXISTING)
_TARGET = click.Argument(["target"], type=Path)
_AS_JSON = _option("--json as_json", "Print JSON instead of tables.")
_IGNORE = _option(
    "--ignore-class ignored",
    "Leave out objects of this class in torch.save files: package.module.Class.",
    str,
    is_repeatable=True,
    metavar="NAME",
)
_WEIGHTS = _option("--weights", "The model alone: no optimizer state and no other values.")
_OPENING = [
    _option(
        "--shapes",
        "Where flat files of FSDP1 (LOCAL_STATE_DICT) get shapes from: whole tensors of the same "
        "model, or the JSON that `fsdp-compat shapes` writes.",
        _EXISTING,
    ),
    _IGNORE,
    _option(
        "--keep-module",
        "Keep a 'module.' that all names begin with. Default: remove it, as it is usually the "
        "prefix that DistributedDataParallel adds. Native checkpoints always keep it.",
    ),
]
_READING = [
    *_OPENING,
    _option(
        "--memory", "Values in memory at a time: 256MiB (default), 2GB.", size, default="256MiB"
    ),
    _option(
        "--workers",
        "Number of threads. Default: 4, or the number of processors.",
        _COUNT,
        default=min(4, os.cpu_count() or 1),
        metavar="N",
    ),
]
_SELECTION = [
    _option("--include", "Only tensors whose names match.", regex, is_repeatable=True),
    _option("--exclude", "Leave out tensors whose names match.", regex, is_repeatable=True),
]
_CONVERTING = [
    _SOURCE,
    _TARGET,
    _option("--dtype", "Convert floating-point weights: bfloat16.", dtype),
    _option(
        "--rename",
        "Replace matches in names, as Python's re.sub does, in this order.",
        _replacement,
        is_repeatable=True,
        metavar="'REGEX=>TEXT'",
    ),
    *_SELECTION,
    _WEIGHTS,
    _option(
        "--optimizer-names",
        "Names for numbered parameters of the optimizer, as a list in the order of the numbers. A "
        "native target needs names.",
        json_file,
    ),
    *_READING,
]
_CUTTING = [
    _option(
        "--unit", "Parameters whose names have the same match share a unit: 'layers\\.\\d+'.", regex
    ),
    _option("--step", "Step that the target records.", click.IntRange(min=0)),
]


def _progress() -> bool:
    """Return whether to draw a bar: on a terminal only."""
    return sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None


def _show(found: Facts, as_json: bool, text: Callable[[], str], is_fine: bool = True) -> None:
    """Print a result and end, with status 0 or 1."""
    sys.stdout.write(json.dumps(found.as_json(), allow_nan=False) + "\n" if as_json else text())
    click.get_current_context().exit(0 if is_fine else 1)


# -- looking


@commands.command(
    "inspect",
    params=[
        _SOURCE,
        _option("--all lists_all", "List every tensor and every other value."),
        *_SELECTION,
        _option("--stats", "Also read the values, for the smallest, the largest and the mean."),
        _AS_JSON,
        *_READING,
    ],
    epilog=_epilog(
        "inspect runs/7/step-00001200",
        "inspect model.safetensors --include '^layers\\.0\\.' --stats",
    ),
)
def inspect_command(source: Path, lists_all: bool, as_json: bool, **given: Any) -> None:
    """Show what a checkpoint is and holds: totals, and a line for each module, or, with --all,
    --stats or a pattern, for each tensor. No values are read without --stats."""
    found = inspect(source, progress=_progress(), **given)
    lists_all = lists_all or bool(given["stats"] or given["include"] or given["exclude"])
    _show(found, as_json, lambda: tables.of_inspection(found, lists_all, given["stats"]))


@commands.command(
    "list",
    params=[
        click.Argument(["folder"], type=click.Path(exists=True, file_okay=False, path_type=Path)),
        _AS_JSON,
        _IGNORE,
    ],
    epilog=_epilog("list runs/7"),
)
def list_command(folder: Path, as_json: bool, ignored: tuple[str, ...]) -> None:
    """List the checkpoints in a run's folder: step, format, size, whether each is complete, and
    which is the latest. No values are read."""
    found = list_checkpoints(folder, ignored, progress=_progress())
    _show(found, as_json, lambda: tables.of_listing(found))


@commands.command(
    "verify",
    params=[
        _SOURCE,
        _option("--quick", "Read no values: no checksums, no NaN counts."),
        _option("--finite", "Count NaN and infinite values as problems."),
        _AS_JSON,
        *_READING,
    ],
    epilog=_epilog("verify runs/7/step-00001200", "verify checkpoint-1000 --finite", compares=True),
)
def verify_command(source: Path, quick: bool, as_json: bool, **given: Any) -> None:
    """Check that every element of every tensor is there exactly once, that files have their lengths
    and checksums, and that replicas are equal; count NaN and infinite values. Values of files
    without checksums, such as safetensors, can have changed unnoticed: the last line says so."""
    found = verify(source, values=not quick, progress=_progress(), **given)
    _show(found, as_json, lambda: tables.of_verification(found), found.is_intact)


@commands.command(
    "diff",
    params=[
        click.Argument(["one"], type=_EXISTING),
        click.Argument(["other"], type=_EXISTING),
        _option("--rtol", "Tolerance relative to the larger value.", float, default=0.0),
        _option("--atol", "Absolute tolerance.", float, default=0.0),
        _option("--any-dtype", "Compare values only: dtypes may differ."),
        *_SELECTION,
        _WEIGHTS,
        _AS_JSON,
        *_READING,
    ],
    epilog=_epilog(
        "diff runs/7/step-00001100 runs/7/step-00001200",
        "diff full.pt exported --weights --rtol 1e-2 --any-dtype",
        compares=True,
    ),
)
def diff_command(any_dtype: bool, as_json: bool, **given: Any) -> None:
    """Compare two checkpoints, of any two formats: tensors that only one has, other shapes and
    dtypes, and how far values are apart, the largest distance first. NaN equals NaN."""
    found = diff(dtypes=not any_dtype, progress=_progress(), **given)
    _show(found, as_json, lambda: tables.of_difference(found), found.is_same)


# -- writing


@commands.command(
    "convert",
    params=[
        _option(
            "--to",
            "Format of the target. Default: by suffix (.safetensors, .pt, .pth, .bin, .ckpt) or "
            "else a directory of safetensors files with an index, as Hugging Face has it.",
            click.Choice(tuple(FORMATS)),
        ),
        _option("--world-size", "Ranks to split the files for.", _COUNT, metavar="N"),
        *_CUTTING,
        _option(
            "--max-file-size max_file_nbytes",
            "Largest size of one safetensors file.",
            size,
            default="5GB",
        ),
        *_CONVERTING,
    ],
    epilog=_epilog(
        "convert runs/7/step-00001200 exported",
        "convert checkpoint-1000 model.pt --dtype bfloat16 --weights",
        "convert sharded adapter --include '\\.lora_' --rename '^base_model\\.=>'",
    ),
)
def convert_command(**given: Any) -> None:
    """Write a checkpoint in another format, with other names or dtypes, or a part of it. The target
    must not exist; it appears once it is complete."""
    _convert(**given)


@commands.command(
    "merge",
    params=[
        _option("--as-saved", "Keep nested values and all names as they were saved: .pt only."),
        *_CONVERTING,
    ],
    epilog=_epilog(
        "merge fsdp_checkpoint model.safetensors",
        "merge dcp model.pt --weights",
        "merge dcp everything.pt --as-saved",
    ),
)
def merge_command(target: Path, **given: Any) -> None:
    """Write a checkpoint of many files as one. Its format is that of TARGET's suffix: .safetensors,
    or .pt, .pth, .bin and .ckpt for torch.load."""
    if target.suffix.lower() not in _SUFFIXES:
        raise click.UsageError(
            f"{str(target)!r} does not say which format to write: end it in {', '.join(_SUFFIXES)}"
        )
    _convert(target=target, **given)


@commands.command(
    "reshard",
    params=[
        _option(
            "--world-size", "Ranks to split the files for.", _COUNT, metavar="N", required=True
        ),
        *_CUTTING,
        *_CONVERTING,
    ],
    epilog=_epilog("reshard runs/7/step-00001200 two-ranks --world-size 2 --unit 'layers\\.\\d+'"),
)
def reshard_command(source: Path, **given: Any) -> None:
    """Write a checkpoint as another number of ranks would have saved it: for
    torch.distributed.checkpoint if SOURCE is of it, otherwise for fsdp_compat.checkpoint."""
    to = "dcp" if (source / ".metadata").is_file() else "native"
    _convert(source=source, to=to, **given)


def _convert(**given: Any) -> None:
    path = convert(progress=_progress(), **given)
    click.echo(shown(str(path)))


@commands.command(
    "shapes",
    params=[
        click.Argument(["factory"], metavar="MODULE:FUNCTION"),
        _option("-o --output", "The file to write.", Path, metavar="PATH", required=True),
    ],
    epilog=_epilog("shapes my.module:make_model -o model.json"),
)
def shapes_command(factory: str, output: Path) -> None:
    """Write the shapes of a model's parameters as JSON, for --shapes. FUNCTION takes no
    arguments and returns the model, which is made on the meta device: without memory."""
    with published(output) as path:
        write_text(path, shapes_from_callable(factory).as_text())
    click.echo(shown(str(output)))
