"""Numbers and names as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def dtype_text(dtype: torch.dtype) -> str:
    """Return "bf16", "fp32", "int8" and the like."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def nbytes_text(nbytes: float) -> str:
    """Return a number of bytes in powers of 1000: "1.50 GB"."""
    number = 0
    while nbytes >= 999.5 and number + 1 < len(_UNITS):
        nbytes, number = nbytes / 1000, number + 1
    digits = 0 if not number or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {_UNITS[number]}"


def count_of(number: int, singular: str) -> str:
    """Return "1 tensor", "2 tensors"."""
    return f"{number:,} {singular if number == 1 else singular + 's'}"


def joined(items: Sequence[str], most: int, separator: str) -> str:
    """Return the first ``most`` items as one text, and the number of the others."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def shown(text: str) -> str:
    """Return a text with control characters, line breaks and direction marks escaped."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )
