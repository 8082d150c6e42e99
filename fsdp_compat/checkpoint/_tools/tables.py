"""What the commands print: tables on a terminal, the same without colours and folding elsewhere.

Names come from files, so they are untrusted. Only the commands import this module, and with it
rich."""

from __future__ import annotations

import collections
import io
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..._archive.header import dtype_name
from ..._text import count_of, nbytes_text, shown
from .difference import Difference
from .inspection import Facts, Inspection, TensorFacts, owner_of
from .run_listing import Listing
from .verification import Verification

_MAX_MODULES = 40
_NOTHING = "-"  # of what is None or empty
_FAR = 100_000  # columns where there is no terminal: nothing is folded


def is_terminal() -> bool:
    """Return whether people read what is printed to stdout."""
    return sys.stdout.isatty()


def _printed(*items: RenderableType | None) -> str:
    """Return lines and tables as they are printed to stdout, without those that are None."""
    terminal = is_terminal()
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=terminal,
        color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        width=None if terminal else _FAR,
        markup=False,
        highlight=False,
        emoji=False,
    )
    for item in items:
        if item is not None:
            console.print(item)
            console.print()
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().strip().split("\n"))


def _table(columns: str, rows: Iterable[Sequence[Any]], style: str = "") -> Table | None:
    """Return a table, or None without rows. columns: names as in JSON; they say how values look."""
    names, *cells = columns.split(), *rows
    frame = box.SIMPLE_HEAD if is_terminal() else None
    table = Table(box=frame, show_edge=False, pad_edge=False, style=style)
    for name, *values in zip(names, *cells, strict=True):
        are_numbers = all(value is None or isinstance(value, (int, float)) for value in values)
        table.add_column(name, justify="right" if are_numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(_text(*each)) for each in zip(names, row, strict=True)))
    return table if cells else None


def _records(records: Iterable[Facts], columns: str, style: str = "") -> Table | None:
    """Return a table of these fields of the records."""
    names = columns.split()
    return _table(columns, ([getattr(each, name) for name in names] for each in records), style)


def _lines(**facts: Any) -> Text:
    """Return a line for each that is known."""
    found = [(name, _text(name, value)) for name, value in facts.items()]
    return Text("\n".join(f"{name:14}  {text}" for name, text in found if text != _NOTHING))


def _text(name: str, value: Any) -> str:
    """Return the value of a field as people read it."""
    if name == "ranks":
        return ranks_text(value)
    if value is None or value in ((), ""):
        return _NOTHING
    if name in ("dtypes", "shapes"):
        return " / ".join(dict.fromkeys(_text(name[:-1], each) for each in value))
    if name == "shape":
        return " x ".join(map(str, value))
    if name.endswith("nbytes"):
        return nbytes_text(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and name != "step" else shown(str(value))


def of_inspection(found: Inspection, lists_all: bool, has_stats: bool) -> str:
    """Return the facts, and a line for each tensor and value, or else for each module."""
    if lists_all:
        columns = "minimum maximum mean" if has_stats else "nbytes ranks"
        tensors = _records(found.tensors, f"path dtype shape {columns}")
    else:
        columns = "module elements dtypes nbytes optimizer_nbytes ranks"
        tensors = _table(columns, _modules(found.tensors))
    totals = found.nbytes_by_section() | {"total": found.nbytes}
    numbers = collections.Counter(tensor.section for tensor in found.tensors)
    numbers["total"] = len(found.tensors)
    by_rank = sorted(nbytes for rank, nbytes in found.nbytes_by_rank().items() if rank is not None)
    return _printed(
        _lines(
            path=found.path,
            kind=found.kind,
            world_size=found.world_size,
            nbytes_by_rank=" to ".join(dict.fromkeys(map(nbytes_text, by_rank[:1] + by_rank[-1:]))),
            step=found.step,
            **{
                name: f"{count_of(numbers[name], 'tensor')}, {nbytes_text(nbytes)}"
                for name, nbytes in totals.items()
            },
        ),
        tensors,
        _table("second_name of", found.aliases.items()),
        _table("value is", found.values.items() if lists_all else ()),
        _table("left_out", ([reason] for reason in found.left_out), "yellow"),
        None if lists_all else "--all lists every tensor and other value, --include some of them",
    )


def _modules(tensors: Sequence[TensorFacts]) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each module, with the optimizer states of its parameters. Names have as many
    components as give few modules."""
    owners: list[list[str]] = []
    for tensor in tensors:
        name = owner_of(tensor.path)
        parts = ["optimizer, by number"] if name.isdecimal() else name.split(".")
        owners.append(parts[:-1] or parts)
    depth = max(map(len, owners), default=1)
    while depth > 1 and len({tuple(owner[:depth]) for owner in owners}) > _MAX_MODULES:
        depth -= 1
    found: dict[str, list[TensorFacts]] = {}
    for tensor, owner in zip(tensors, owners, strict=True):
        if tensor.section != "extra":
            found.setdefault(".".join(owner[:depth]), []).append(tensor)
    for name, inside in found.items():
        own = [tensor for tensor in inside if tensor.section == "model"]
        numel, nbytes = sum(math.prod(each.shape) for each in own), sum(x.nbytes for x in own)
        others = sum(tensor.nbytes for tensor in inside) - nbytes
        ranks = [rank for tensor in inside for rank in tensor.ranks]
        yield name, numel, [tensor.dtype for tensor in own], nbytes, others or None, ranks


def of_listing(found: Listing) -> str:
    """Return a line for each checkpoint."""
    return _printed(
        _records(found.checkpoints, "path step kind world_size nbytes problem"),
        _lines(latest=found.latest),
    )


def of_verification(found: Verification) -> str:
    """Return the facts, what is not finite, the problems and the verdict."""
    return _printed(
        _lines(
            path=found.path,
            kind=found.kind,
            tensors=f"{len(found.tensors):,}, {nbytes_text(found.nbytes)}"
            if found.tensors
            else None,
            checksums=f"{found.num_checksums:,} compared" if found.num_checksums else "none",
        ),
        _records(
            [each for each in found.tensors if each.num_nan or each.num_inf],
            "path dtype shape num_nan num_inf",
        ),
        _records(found.problems, "kind where what", "red"),
        _table("not_looked_at", ([reason] for reason in found.left_out), "yellow"),
        Text(_verdict(found), "bold red" if found.problems else "bold green"),
    )


def _verdict(found: Verification) -> str:
    if found.problems:
        return f"{count_of(len(found.problems), 'problem')} found: do not load this checkpoint"
    if any(tensor.num_nan is None for tensor in found.tensors):
        return "complete; values were not read"
    if not found.num_without_checksum:
        return "complete and undamaged"
    which = "this format has no checksums"
    if found.num_checksums:
        which = f"{count_of(found.num_without_checksum, 'tensor')} without a checksum"
    return f"complete; {which}, so changed values cannot be seen"


def of_difference(found: Difference) -> str:
    """Return the tables and the summary."""
    num_tensors, num_different = len(found.tensors), found.num_different
    summary = Text(
        f"{count_of(num_different, 'tensor')} different, {num_tensors - num_different:,} the same, "
        f"{len(found.missing):,} missing, {len(found.added):,} added; "
        f"{count_of(len(found.values), 'other value')} different",
        "bold yellow",
    )
    if found.is_same:
        summary = Text(f"{count_of(num_tensors, 'tensor')}, all the same", "bold green")
    return _printed(
        _table("missing", ([path] for path in found.missing)),
        _table("added", ([path] for path in found.added)),
        _records(found.different, "path dtypes shapes num_different max_absolute max_relative"),
        _records(found.values, "path one other"),
        summary,
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """Return numbers as intervals: "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
