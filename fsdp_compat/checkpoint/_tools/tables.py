"""What the commands print: tables on a terminal, the same without colours and cuts elsewhere.

Imports rich, which is in the extra ``cli``; only the commands import this module."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._header import dtype_name
from .difference import Difference, TensorDifference
from .display import count_of, nbytes_text, ranks_text, shortened, shown
from .inspection import Inspection, TensorFacts
from .verification import Verification

_MAX_CELL = 300  # characters in a table; JSON has all of them
_FAR = 100_000  # columns where there is no terminal: nothing is folded


class Report:
    """Lines and tables, in order."""

    def __init__(self) -> None:
        self._items: list[Text | Table] = []

    def line(self, text: str, style: str = "") -> None:
        self._items.append(Text(shown(text), style=style))

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Add a table of names and values, without a head."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, value in pairs:
            table.add_row(Text(name), Text(shown(value)))
        self._items.append(table)

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> None:
        """Add a table. titles: with "<" before those of texts; the others are numbers."""
        rows = list(rows)
        if not rows:
            return
        table = Table(box=box.SIMPLE_HEAD if is_terminal() else None, pad_edge=False, style=style)
        for title in titles:
            is_text = title.startswith("<")
            table.add_column(
                Text(title.removeprefix("<")),
                justify="left" if is_text else "right",
                overflow="fold",
                no_wrap=not is_text,
            )
        for row in rows:
            table.add_row(*(Text(shortened(cell, _MAX_CELL)) for cell in row))
        self._items.append(table)

    def text(self) -> str:
        """Return everything as it is printed to stdout."""
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
        for number, item in enumerate(self._items):
            if number:
                console.print()
            console.print(item)
        return "".join(f"{line.rstrip()}\n" for line in file.getvalue().strip().split("\n"))


def is_terminal() -> bool:
    """Return whether people read what is printed to stdout."""
    return sys.stdout.isatty()


# -- inspect


def of_inspection(found: Inspection) -> Report:
    report = Report()
    report.facts(_facts_of_inspection(found))
    report.table(
        ("<tensor", "<dtype", "<shape", "size", "parts", "<ranks"),
        (_row_of_tensor(tensor) for tensor in found.tensors),
    )
    report.table(("<further name", "<of"), found.aliases.items())
    report.table(("<other value", "<"), found.values.items())
    by_rank = found.nbytes_by_rank()
    if len(by_rank) > 1 or None not in by_rank:
        report.table(
            ("<rank", "bytes"),
            (("unknown" if r is None else str(r), nbytes_text(n)) for r, n in by_rank.items()),
        )
    report.table(("<left out",), ((reason,) for reason in found.left_out), "yellow")
    return report


def _facts_of_inspection(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "path", str(found.path)
    yield "kind", found.kind
    if found.world_size is not None:
        yield "written by", count_of(found.world_size, "rank")
    if found.step is not None:
        yield "step", str(found.step)
    numbers: dict[str, int] = {}
    for tensor in found.tensors:
        numbers[tensor.section] = numbers.get(tensor.section, 0) + 1
    for section, nbytes in found.nbytes_by_section().items():
        yield section, f"{count_of(numbers[section], 'tensor')}, {nbytes_text(nbytes)}"
    yield "total", f"{count_of(len(found.tensors), 'tensor')}, {nbytes_text(found.nbytes)}"
    by_dtype = found.nbytes_by_dtype().items()
    if by_dtype:
        texts = (f"{dtype_name(dtype)} {nbytes_text(nbytes)}" for dtype, nbytes in by_dtype)
        yield "dtypes", ", ".join(texts)
    files = [name for name in found.nbytes_by_file() if name is not None]
    yield "files", str(len(files))


def _row_of_tensor(tensor: TensorFacts) -> tuple[str, ...]:
    num_copies = sum(part.is_copy for part in tensor.parts)
    copies = f" (+{count_of(num_copies, 'copy', 'copies')})" if num_copies else ""
    return (
        tensor.path,
        dtype_name(tensor.dtype),
        _shape_text(tensor.shape),
        nbytes_text(tensor.nbytes),
        f"{len(tensor.parts) - num_copies}{copies}",
        ranks_text(tensor.ranks),
    )


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "-"


# -- verify


def of_verification(found: Verification) -> Report:
    report = Report()
    report.facts(_facts_of_verification(found))
    report.table(
        ("<tensor", "<dtype", "<shape", "NaN", "infinite"),
        (
            (
                tensor.path,
                dtype_name(tensor.dtype),
                _shape_text(tensor.shape),
                f"{tensor.num_nan:,}",
                f"{tensor.num_inf:,}",
            )
            for tensor in found.tensors
            if tensor.num_nan or tensor.num_inf
        ),
    )
    report.table(
        ("<problem", "<where", "<what"),
        ((problem.kind, problem.where, problem.what) for problem in found.problems),
        "red",
    )
    report.table(("<not looked at",), ((reason,) for reason in found.left_out), "yellow")
    if found.problems:
        report.line(
            f"{count_of(len(found.problems), 'problem')} found: do not load this checkpoint",
            "bold red",
        )
    else:
        report.line(_verdict(found), "bold green")
    return report


def _verdict(found: Verification) -> str:
    if any(tensor.num_nan is None for tensor in found.tensors):
        return "complete; values were not read"
    if not found.num_without_checksum:
        return "complete and undamaged"
    if not found.num_checksums:
        return "complete; this format has no checksums, so changed values cannot be seen"
    return (
        f"complete; {count_of(found.num_without_checksum, 'tensor')} without a checksum, of which "
        "changed values cannot be seen"
    )


def _facts_of_verification(found: Verification) -> Iterator[tuple[str, str]]:
    yield "path", str(found.path)
    yield "kind", found.kind
    yield "tensors", f"{len(found.tensors):,}, {nbytes_text(found.nbytes)}"
    yield "files", str(found.num_files)
    yield "checksums", f"{found.num_checksums:,} compared" if found.num_checksums else "none"
    for section, counts in found.dtypes().items():
        texts = (f"{number} {dtype_name(dtype)}" for dtype, number in counts.items())
        yield f"dtypes, {section}", ", ".join(texts)


# -- diff


def of_difference(found: Difference, shows_all: bool) -> Report:
    """shows_all: list the tensors that are the same, too."""
    report = Report()
    alone = [*((path, "only in the first") for path in found.missing)]
    alone += [(path, "only in the second") for path in found.added]
    report.table(("<tensor", "<"), alone)
    report.table(
        ("<tensor", "<dtype", "<shape", "different", "largest distance", "relative"),
        map(_row_of_difference, found.tensors if shows_all else found.different),
    )
    report.table(
        ("<other value", "<first", "<second"),
        ((v.path, v.one or "-", v.other or "-") for v in found.values),
    )
    if found.is_same:
        report.line(f"{count_of(len(found.tensors), 'tensor')}, all the same", "bold green")
        return report
    num_same = len(found.tensors) - len(found.different)
    report.line(
        f"{count_of(len(found.different), 'tensor')} different, {num_same:,} the same, "
        f"{len(found.missing):,} missing, {len(found.added):,} added; "
        f"{count_of(len(found.values), 'other value')} different",
        "bold yellow",
    )
    return report


def _row_of_difference(tensor: TensorDifference) -> tuple[str, ...]:
    dtypes = dict.fromkeys(dtype_name(dtype) for dtype in tensor.dtypes)
    shapes = dict.fromkeys(_shape_text(shape) for shape in tensor.shapes)
    numbers = ("-", "-", "-")
    if tensor.num_different is not None:
        numbers = (
            f"{tensor.num_different:,}",
            f"{tensor.max_absolute:.3g}",
            f"{tensor.max_relative:.3g}",
        )
    return (tensor.path, " / ".join(dtypes), " / ".join(shapes), *numbers)
