"""The commands of ``fsdp-compat`` that work on checkpoints: arguments, output and exit status.

Arguments are parsed by click rather than typer, which builds on it: the commands share many options
(a decorator each), all they need is in click, and it depends on nothing. Tables are rich's, in
`tables`. Both are in the extra ``cli``; nothing but ``__main__`` imports this module."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ...errors import FsdpCompatError, UsageError, explain
from .._publishing import published
from . import tables
from .arguments import DTYPE, PATTERN, RENAME, SIZE, list_in, names_in
from .convert import FORMATS, convert
from .difference import diff
from .display import shown
from .inspection import inspect
from .verification import verify
from .work import MEMORY

STATUS = """\b
Exit status:
  0    everything is fine
  1    verify found a problem, or diff a difference
  2    wrong arguments, or a package is missing
  3    the checkpoint is damaged (but see 1), refused or unreadable, or the target exists
  130  interrupted by Ctrl-C; nothing is left under the target's name
  141  the output was closed early, as by head"""

_INTERRUPTED, _BROKEN_PIPE = 130, 141
_SUFFIXES = [suffix for each in FORMATS.values() for suffix in each.suffixes]

_F = TypeVar("_F", bound=Callable[..., Any])


class _Commands(click.Group):
    """Turns errors into one message and an exit status. Bugs keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names have any characters
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except FsdpCompatError as error:
            _say(str(error))
            ctx.exit(2 if isinstance(error, UsageError) else 3)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(_BROKEN_PIPE)
        except OSError as error:
            _say(_of_system(error))
            ctx.exit(3)
        except KeyboardInterrupt:
            _say("Interrupted. No target was written; the command can be run again.")
            ctx.exit(_INTERRUPTED)


def _of_system(error: OSError) -> str:
    if isinstance(error, FileExistsError):
        what, expected = "The target exists already.", "a path at which there is nothing"
        fix = "choose another name, or remove it first"
    else:
        what, expected = "A file cannot be read or written.", "files that can, and room on the disk"
        fix = "check the path, its permissions and the disk"
    where = str(error.filename or "the command")
    return explain(what, expected=expected, got=error.strerror or str(error), where=where, fix=fix)


def _say(message: str) -> None:
    """Print to stderr. Content of files may be quoted in it."""
    for line in message.splitlines():
        click.echo(shown(line), err=True)


def run(arguments: list[str], program: str) -> int:
    """Run a command and return its exit status. program: how the user called it."""
    try:
        commands.main(arguments, prog_name=program)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0


@click.group(cls=_Commands, epilog=STATUS, context_settings={"max_content_width": 100})
def commands() -> None:
    """Look into, check, compare and convert checkpoints, in one process without a GPU."""


# -- options that several commands have


def _epilog(*examples: str) -> str:
    title = "Example:" if len(examples) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  fsdp-compat {line}" for line in examples), "", STATUS])


def _options(*decorators: Callable[[Any], Any]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


_existing = click.Path(exists=True, path_type=Path)
_source = click.argument("source", type=_existing)
_target = click.argument("target", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
_shapes = click.option(
    "--shapes",
    type=_existing,
    help="Where flat files of FSDP1 (LOCAL_STATE_DICT) get shapes from: whole tensors of the same "
    "model, or the JSON that `fsdp-compat shapes` writes.",
)
_ignored = click.option(
    "--ignore-class",
    "ignored",
    multiple=True,
    metavar="NAME",
    help="Leave out objects of this class in torch.save files: package.module.Class. Repeatable.",
)
_keep_module = click.option(
    "--keep-module",
    is_flag=True,
    help="Keep a 'module.' that all names begin with. Default: remove it, as it is usually the "
    "prefix that DistributedDataParallel adds. Native checkpoints always keep it.",
)
_memory = click.option(
    "--memory",
    type=SIZE,
    default=MEMORY,
    metavar="SIZE",
    help="Values in memory at a time, for example 256MB (the default) or 2GiB.",
)
_workers = click.option(
    "--workers", type=click.IntRange(min=1), default=1, metavar="N", help="Number of threads."
)
_include = click.option(
    "--include",
    type=PATTERN,
    multiple=True,
    metavar="REGEX",
    help="Only names in which this is found. Repeatable: any of them.",
)
_exclude = click.option(
    "--exclude",
    type=PATTERN,
    multiple=True,
    metavar="REGEX",
    help="Leave out tensors whose names match. Repeatable.",
)
_reading = _options(_shapes, _ignored, _keep_module, _memory, _workers)
_writing = _options(
    click.option(
        "--dtype", type=DTYPE, metavar="DTYPE", help="Convert floating-point weights: bfloat16."
    ),
    click.option(
        "--rename",
        type=RENAME,
        multiple=True,
        metavar="'REGEX=>TEXT'",
        help="Replace matches in names, as Python's re.sub does. Repeatable, in this order.",
    ),
    click.option(
        "--rename-file",
        type=_existing,
        metavar="JSON",
        help='New names by old ones: {"old name": "new name"}.',
    ),
    _include,
    _exclude,
    click.option(
        "--optimizer/--no-optimizer",
        default=None,
        help="Require the optimizer state, or leave it out. Default: write it if the format can "
        "hold it.",
    ),
    click.option(
        "--optimizer-names",
        "optimizer_names",
        type=_existing,
        metavar="JSON",
        help="Names for numbered parameters of the optimizer, as a list in the order of the "
        "numbers. A native target needs names.",
    ),
)
_cutting = _options(
    click.option(
        "--unit",
        type=PATTERN,
        metavar="REGEX",
        help="Parameters whose names have the same match share a unit: 'layers\\.\\d+'.",
    ),
    click.option("--step", type=click.IntRange(min=0), help="Step that the target records."),
)


def _progress() -> bool:
    """Return whether to draw a bar: on a terminal only."""
    return sys.stderr.isatty() and _has("tqdm")


def _print(report: tables.Report) -> None:
    sys.stdout.write(report.text())


def _print_json(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")


# -- looking


@commands.command(
    "inspect", epilog=_epilog("inspect runs/7/step-00001200", "inspect model.safetensors --json")
)
@_source
@_json
@_shapes
@_ignored
@_keep_module
def inspect_command(source: Path, as_json: bool, **reading: Any) -> None:
    """Show what a checkpoint is and holds: tensors with dtype, shape and size, the ranks that wrote
    them, and totals. No values are read."""
    found = inspect(source, **reading)
    if as_json:
        _print_json(found.as_json())
    else:
        _print(tables.of_inspection(found))


@commands.command(
    "verify", epilog=_epilog("verify runs/7/step-00001200", "verify checkpoint-1000 --finite")
)
@_source
@click.option("--quick", is_flag=True, help="Read no values: no checksums, no NaN counts.")
@click.option("--finite", is_flag=True, help="Count NaN and infinite values as problems.")
@_json
@_reading
@click.pass_context
def verify_command(
    ctx: click.Context,
    source: Path,
    quick: bool,
    finite: bool,
    as_json: bool,
    **reading: Any,
) -> None:
    """Check that every element of every tensor is there exactly once, that files have their lengths
    and checksums, and that replicas are equal; count NaN and infinite values. Values of files
    without checksums, such as safetensors, can have changed unnoticed: the last line says so."""
    found = verify(source, values=not quick, finite=finite, progress=_progress(), **reading)
    if as_json:
        _print_json(found.as_json())
    else:
        _print(tables.of_verification(found))
    ctx.exit(0 if found.is_intact else 1)


@commands.command(
    "diff",
    epilog=_epilog(
        "diff runs/7/step-00001100 runs/7/step-00001200",
        "diff full.pt exported --no-optimizer --rtol 1e-2 --any-dtype",
    ),
)
@click.argument("one", type=_existing)
@click.argument("other", type=_existing)
@click.option("--rtol", type=float, default=0.0, help="Tolerance relative to the larger value.")
@click.option("--atol", type=float, default=0.0, help="Absolute tolerance.")
@click.option("--any-dtype", is_flag=True, help="Compare values only: dtypes may differ.")
@_include
@_exclude
@click.option("--optimizer/--no-optimizer", default=True, help="Compare the optimizer's state.")
@click.option("--all", "shows_all", is_flag=True, help="List tensors that are the same, too.")
@_json
@_reading
@click.pass_context
def diff_command(
    ctx: click.Context, any_dtype: bool, shows_all: bool, as_json: bool, **given: Any
) -> None:
    """Compare two checkpoints, of any two formats: tensors that only one has, other shapes and
    dtypes, and how far values are apart, the largest distance first. NaN equals NaN."""
    found = diff(dtypes=not any_dtype, progress=_progress(), **given)
    if as_json:
        _print_json(found.as_json())
    else:
        _print(tables.of_difference(found, shows_all))
    ctx.exit(0 if found.is_same else 1)


# -- writing


@commands.command(
    "convert",
    epilog=_epilog(
        "convert runs/7/step-00001200 exported",
        "convert checkpoint-1000 model.pt --dtype bfloat16 --no-optimizer",
        "convert sharded adapter --include '\\.lora_' --rename '^base_model\\.=>'",
    ),
)
@_source
@_target
@click.option(
    "--to",
    type=click.Choice(tuple(FORMATS)),
    help="Format of the target. Default: by its suffix (.safetensors, .pt, .pth, .bin), otherwise "
    "a directory of safetensors files with an index, as Hugging Face has it.",
)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks to split the files for.",
)
@_cutting
@click.option(
    "--max-file-size",
    type=SIZE,
    default="5GB",
    metavar="SIZE",
    help="Largest size of one safetensors file.",
)
@_writing
@_reading
def convert_command(source: Path, target: Path, max_file_size: int, **given: Any) -> None:
    """Write a checkpoint in another format, with other names or dtypes, or a part of it. The target
    must not exist; it appears once it is complete."""
    _convert(source, target, max_file_nbytes=max_file_size, **given)


@commands.command(
    "merge", epilog=_epilog("merge fsdp_checkpoint model.safetensors", "merge dcp model.pt")
)
@_source
@_target
@_writing
@_reading
def merge_command(source: Path, target: Path, **given: Any) -> None:
    """Write a checkpoint of many files as one. Its format is that of TARGET's suffix: .safetensors,
    or .pt, .pth and .bin for torch.load."""
    if target.suffix.lower() not in _SUFFIXES:
        raise click.UsageError(
            f"{str(target)!r} does not say which format to write: end it in {', '.join(_SUFFIXES)}"
        )
    _convert(source, target, **given)


@commands.command(
    "reshard",
    epilog=_epilog("reshard runs/7/step-00001200 two-ranks --world-size 2 --unit 'layers\\.\\d+'"),
)
@_source
@_target
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    required=True,
    help="Number of ranks that the target is cut for.",
)
@click.option(
    "--to",
    type=click.Choice(("native", "dcp")),
    help="Format of the target: of fsdp_compat.checkpoint, or of torch.distributed.checkpoint. "
    "Default: dcp if SOURCE is one, otherwise native.",
)
@_cutting
@_writing
@_reading
def reshard_command(source: Path, target: Path, to: str | None, **given: Any) -> None:
    """Write a checkpoint as another number of ranks would have saved it."""
    to = to or ("dcp" if (source / ".metadata").is_file() else "native")
    _convert(source, target, to=to, **given)


def _convert(source: Path, target: Path, **given: Any) -> None:
    pairs, file = given.pop("rename"), given.pop("rename_file")
    if pairs and file is not None:
        raise click.UsageError("--rename and --rename-file exclude each other")
    _require_free(target)
    rename = pairs or (None if file is None else names_in(file))
    listed = given.pop("optimizer_names")
    names = None if listed is None else list_in(listed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        path = convert(
            source,
            target,
            rename=rename or None,
            optimizer_names=names,
            progress=_progress(),
            **given,
        )
    for warning in caught:  # what the target does not hold
        _say(f"note: {warning.message}")
    click.echo(shown(str(path)))


# -- shapes


@commands.command(
    "shapes", epilog=_epilog("shapes my.module:make_model -o model.json", "shapes train:build")
)
@click.argument("factory", metavar="MODULE:FUNCTION")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The file to write. Default: stdout."
)
def shapes_command(factory: str, output: Path | None) -> None:
    """Write the shapes of a model's parameters and buffers as JSON, for --shapes. FUNCTION takes no
    arguments and returns the model, which is made on the meta device: without memory."""
    from .shapes import shapes_from_callable

    if output is not None:
        _require_free(output)
    text = json.dumps(shapes_from_callable(factory).as_json(), indent=1) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        _write(output, text.encode(), "shapes")


def _write(target: Path, content: bytes, command: str) -> None:
    """Write a small file, which appears under its name once it is complete; print the name."""
    with published(target, command) as path, open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    click.echo(shown(str(target)))


def _require_free(target: Path) -> None:
    """Raise FileExistsError, before any work, if something stands at ``target`` already."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


def _has(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules says that it cannot be imported
        return False
