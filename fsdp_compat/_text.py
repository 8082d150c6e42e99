"""Numbers, names and tables as people read them, without colours and other libraries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SHORT_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def dtype_text(dtype: torch.dtype) -> str:
    """Return "bf16", "fp32" and the like, or torch's name of other dtypes."""
    return SHORT_DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def nbytes_text(nbytes: float) -> str:
    """Return a number of bytes in powers of 1000: "1.50 GB"."""
    number = 0
    while nbytes >= 999.5 and number + 1 < len(_UNITS):
        nbytes, number = nbytes / 1000, number + 1
    digits = 0 if not number or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {_UNITS[number]}"


def count_of(number: int, singular: str, plural: str = "") -> str:
    """Return "1 tensor", "2 tensors"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def joined(items: Sequence[str], most: int, separator: str) -> str:
    """Return the first ``most`` items as one text, and the number of the others."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def table(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Return the lines of a table: the first ``num_left`` columns to the left, others to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < num_left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
