"""Names and numbers as people read them. Names come from files, so they are untrusted."""

from __future__ import annotations

from collections.abc import Iterable

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def shown(text: str) -> str:
    """Return a text in which nothing moves the cursor, changes colours, breaks the line or turns
    the direction of writing: such characters are escaped, as Python writes them."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def shortened(text: str, most: int) -> str:
    """Return ``shown(text)``, without its middle if it has more than ``most`` characters."""
    if len(text) > 2 * most:  # what is cut off need not be escaped first
        text = text[:most] + text[-most:]
    text = shown(text)
    if len(text) <= most:
        return text
    head = (most - 3) // 2
    return f"{text[:head]}...{text[head + 3 - most :]}"


def nbytes_text(nbytes: float) -> str:
    """Return a number of bytes in powers of 1000: "1.50 GB"."""
    number = 0
    while nbytes >= 999.5 and number + 1 < len(_UNITS):
        nbytes, number = nbytes / 1000, number + 1
    if not number:
        return f"{nbytes:.0f} B"
    digits = 2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0
    return f"{nbytes:.{digits}f} {_UNITS[number]}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return numbers as intervals: "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def count_of(number: int, singular: str, plural: str = "") -> str:
    """Return "1 tensor", "2 tensors"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
