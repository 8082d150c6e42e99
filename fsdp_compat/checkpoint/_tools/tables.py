"""What the commands print: tables on a terminal, the same without colours and folding elsewhere.

Names come from files, so they are untrusted. Only the commands import this module, and with it
rich."""

from __future__ import annotations

import collections
import io
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..._archive.header import dtype_name
from ..._text import count_of, nbytes_text, shown
from .difference import Difference
from .inspection import Inspection, TensorFacts
from .run_listing import Listing
from .verification import TensorCheck, Verification

_MAX_MODULES = 40
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


def _table(titles: str, rows: Iterable[Sequence[str]], style: str = "") -> Table | None:
    """Return a table, or None without rows. titles: between bars; those of numbers end with ">"."""
    rows, has_head = list(rows), bool(titles.strip(" |"))
    frame = box.SIMPLE_HEAD if has_head and is_terminal() else None
    table = Table(
        box=frame,
        show_header=has_head,
        show_edge=False,
        pad_edge=False,
        collapse_padding=frame is not None,
        style=style,
    )
    for title in titles.split("|"):
        text, sign, _ = title.strip().partition(">")
        table.add_column(Text(text), justify="right" if sign else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    return table if rows else None


def of_inspection(found: Inspection, lists_all: bool, has_stats: bool) -> str:
    """Return the facts, and a line for each tensor and value, or else for each module."""
    values = hint = None
    if has_stats:
        titles = "tensor | dtype | shape | min> | max> | mean>"
        numbers = ((each.minimum, each.maximum, each.mean) for each in found.tensors)
        texts = (["-" if it is None else f"{it:.4g}" for it in three] for three in numbers)
        rows = [(*_head(each), *more) for each, more in zip(found.tensors, texts, strict=True)]
    elif lists_all:
        titles = "tensor | dtype | shape | size> | ranks"
        rows = [
            (*_head(each), nbytes_text(each.nbytes), ranks_text(each.ranks))
            for each in found.tensors
        ]
    else:
        titles = "module | elements> | dtypes | size> | optimizer> | ranks"
        rows = list(itertools.starmap(_row_of_module, _modules_of(found.tensors).items()))
        hint = "--all lists every tensor and other value, --include REGEX some of them"
    if lists_all:
        values = _table("other value |", found.values.items())
    return _printed(
        _table("|", _facts_of_inspection(found)),
        _table(titles, rows),
        _table("second name | of", found.aliases.items()),
        values,
        _table("left out", ([reason] for reason in found.left_out), "yellow"),
        hint,
    )


def _facts_of_inspection(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "path", str(found.path)
    yield "kind", found.kind
    if found.world_size is not None:
        by_rank = [nbytes for rank, nbytes in found.nbytes_by_rank().items() if rank is not None]
        each = dict.fromkeys(nbytes_text(of(by_rank)) for of in (min, max) if by_rank)
        ranks = count_of(found.world_size, "rank")
        yield "written by", f"{ranks}, {' to '.join(each)} each" if each else ranks
    if found.step is not None:
        yield "step", str(found.step)
    numbers = collections.Counter(tensor.section for tensor in found.tensors)
    for section, nbytes in found.nbytes_by_section().items():
        yield section, f"{count_of(numbers[section], 'tensor')}, {nbytes_text(nbytes)}"
    yield "total", f"{count_of(len(found.tensors), 'tensor')}, {nbytes_text(found.nbytes)}"


def _modules_of(tensors: Iterable[TensorFacts]) -> dict[str, list[TensorFacts]]:
    """Return the tensors of each module, with the optimizer states of its parameters. Names have as
    many components as give few modules."""
    owners: list[tuple[TensorFacts, list[str]]] = []
    for tensor in tensors:
        section, _, name = tensor.path.partition("/")
        if section == "optimizer":
            name = name.rpartition("/")[0]
            name = "optimizer, by number" if name.isdecimal() else name
        parts = name.split(".")
        if section != "extra":
            owners.append((tensor, parts[:-1] or parts))
    depth = max((len(owner) for _, owner in owners), default=1)
    while depth > 1 and len({tuple(owner[:depth]) for _, owner in owners}) > _MAX_MODULES:
        depth -= 1
    found: dict[str, list[TensorFacts]] = {}
    for tensor, owner in owners:
        found.setdefault(".".join(owner[:depth]), []).append(tensor)
    return found


def _row_of_module(name: str, tensors: Sequence[TensorFacts]) -> tuple[str, ...]:
    of_model = [tensor for tensor in tensors if tensor.section == "model"]
    nbytes = sum(tensor.nbytes for tensor in of_model)
    others = sum(tensor.nbytes for tensor in tensors) - nbytes
    return (
        name,
        f"{sum(math.prod(tensor.shape) for tensor in of_model):,}",
        ", ".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in of_model)),
        nbytes_text(nbytes),
        nbytes_text(others) if others else "-",
        ranks_text(rank for tensor in tensors for rank in tensor.ranks),
    )


def _head(tensor: TensorFacts | TensorCheck) -> tuple[str, str, str]:
    return tensor.path, dtype_name(tensor.dtype), _shape_text(tensor.shape)


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "-"


def of_listing(found: Listing) -> str:
    """Return a line for each checkpoint."""
    rows = []
    for each in found.checkpoints:
        numbers = ("-" if it is None else str(it) for it in (each.step, each.world_size))
        step, num_ranks = numbers
        complete = "yes" + ", latest" * (each.path == found.latest)
        rows.append(
            (
                os.path.relpath(each.path, found.path),
                step,
                each.kind or "-",
                num_ranks,
                nbytes_text(each.nbytes),
                f"no: {each.problem}" if each.problem else complete,
            )
        )
    return _printed(_table("checkpoint | step> | format | ranks> | size> | complete", rows))


def of_verification(found: Verification) -> str:
    facts = [("path", str(found.path)), ("kind", found.kind)]
    if found.tensors or not found.problems:  # which may prevent that they are known
        facts.append(("tensors", f"{len(found.tensors):,}, {nbytes_text(found.nbytes)}"))
    compared = f"{found.num_checksums:,} compared" if found.num_checksums else "none"
    odd = [each for each in found.tensors if each.num_nan or each.num_inf]
    counts = ((*_head(each), f"{each.num_nan:,}", f"{each.num_inf:,}") for each in odd)
    problems = ((problem.kind, problem.where, problem.what) for problem in found.problems)
    return _printed(
        _table("|", [*facts, ("checksums", compared)]),
        _table("tensor | dtype | shape | NaN> | infinite>", counts),
        _table("problem | where | what", problems, "red"),
        _table("not looked at", ([reason] for reason in found.left_out), "yellow"),
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
    num_different, num_same = len(found.different), len(found.tensors) - len(found.different)
    summary = Text(
        f"{count_of(num_different, 'tensor')} different, {num_same:,} the same, "
        f"{len(found.missing):,} missing, {len(found.added):,} added; "
        f"{count_of(len(found.values), 'other value')} different",
        "bold yellow",
    )
    if found.is_same:
        summary = Text(f"{count_of(len(found.tensors), 'tensor')}, all the same", "bold green")
    alone = [(path, "only in the first") for path in found.missing]
    alone += [(path, "only in the second") for path in found.added]
    has_more = any(not path.startswith("model/") for path, _ in alone)
    rows = []
    for each in found.different:
        numbers = ["-"] * 3
        if each.num_different is not None:
            distances = each.max_absolute, each.max_relative
            numbers = [f"{each.num_different:,}", *(f"{number:.3g}" for number in distances)]
        facts = map(dtype_name, each.dtypes), map(_shape_text, each.shapes)
        rows.append((each.path, *(" / ".join(dict.fromkeys(both)) for both in facts), *numbers))
    values = ((each.path, each.one or "-", each.other or "-") for each in found.values)
    return _printed(
        _table("tensor or value | where", alone),
        "--weights compares the models alone" if has_more else None,
        _table("tensor | dtype | shape | different> | largest distance> | relative>", rows),
        _table("other value | first | second", values),
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
