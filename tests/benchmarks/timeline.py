"""A picture of a step: a lane for each stream, time from left to right, and memory below. An SVG
file, written without further packages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

COLOURS = {
    "matrix product": "#4269d0",
    "other kernel": "#97bbf5",
    "all-gather": "#3ca951",
    "reduce-scatter": "#ff725c",
    "all-reduce": "#a463f2",
    "copy from host": "#efb118",
    "copy to host": "#9c6b4e",
    "the host waits": "#bbbbbb",
}
WIDTH, LEFT, LANE, GAP, MEMORY, MARGIN = 1600, 130, 22, 6, 70, 16
TICKS = 10


class Lane(NamedTuple):
    """One stream."""

    name: str
    blocks: list[tuple[str, str, float, float]]  # kind, name, start and end in seconds


class Picture(NamedTuple):
    """A contender's step."""

    name: str
    seconds: float
    lanes: Sequence[Lane]
    memory: Sequence[tuple[float, float]]  # (seconds, bytes)


def write_picture(title: str, pictures: Sequence[Picture]) -> str:
    """Return the text of an SVG file with steps one above the other, on one scale."""
    longest = max(picture.seconds for picture in pictures)
    most = max((nbytes for picture in pictures for _, nbytes in picture.memory), default=0.0)
    parts, y = [_text(MARGIN, 24, title, 15)], 44.0
    x = MARGIN
    for kind, colour in COLOURS.items():
        parts.append(_box(x, y - 10, 12, 12, colour))
        parts.append(_text(x + 17, y, kind))
        x += 30 + 7 * len(kind)
    y += 20
    for picture in pictures:
        drawn, y = _step(picture, y, (WIDTH - LEFT - MARGIN) / longest, most)
        parts += drawn
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" '
        'font-family="sans-serif">'
    )
    return "\n".join([head, _box(0, 0, WIDTH, y, "white"), *parts, "</svg>", ""])


def _step(picture: Picture, y: float, scale: float, most: float) -> tuple[list[str], float]:
    """Return what shows one step, and where it ends. scale: pixels per second."""
    parts = [_text(MARGIN, y + 12, f"{picture.name}: {picture.seconds * 1e3:.1f} ms", 13)]
    y += 20
    top = y
    for lane in picture.lanes:
        parts.append(_text(MARGIN, y + LANE - 7, lane.name))
        parts.append(_box(LEFT, y, picture.seconds * scale, LANE, "#f4f4f4"))
        for kind, name, start, end in lane.blocks:
            about = f"{name or kind}: {start * 1e3:.2f} to {end * 1e3:.2f} ms"
            box = LEFT + start * scale, y, (end - start) * scale, LANE
            parts.append(_box(*box, COLOURS[kind], about))
        y += LANE + GAP
    if most and picture.memory:
        peak = max(nbytes for _, nbytes in picture.memory)
        parts.append(_text(MARGIN, y + 14, "memory in use"))
        parts.append(_text(MARGIN, y + 28, f"at most {peak / 1e9:.1f} GB"))
        parts.append(_curve(picture, y + MEMORY, scale, MEMORY / most))
        y += MEMORY + GAP
    parts += _axis(picture.seconds, top, y, scale)
    return parts, y + 34


def _curve(picture: Picture, bottom: float, scale: float, height: float) -> str:
    """height: pixels per byte."""
    path, level = [f"M{LEFT} {bottom:.1f}"], bottom
    for seconds, nbytes in picture.memory:
        path.append(f"H{LEFT + seconds * scale:.1f}")
        level = bottom - nbytes * height
        path.append(f"V{level:.1f}")
    path.append(f"H{LEFT + picture.seconds * scale:.1f}V{bottom:.1f}Z")
    return f'<path d="{"".join(path)}" fill="#d9d9d9" stroke="#777" stroke-width="0.7"/>'


def _axis(seconds: float, top: float, bottom: float, scale: float) -> list[str]:
    """Return a line with round milliseconds."""
    step = next(
        size
        for size in (base * 10**power for power in range(-2, 6) for base in (1, 2, 5))
        if seconds * 1e3 / size <= TICKS
    )
    parts = []
    for number in range(int(seconds * 1e3 / step) + 1):
        x = LEFT + number * step * 1e-3 * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom + 4}" '
            'stroke="#999" stroke-width="0.5"/>'
        )
        parts.append(_text(x, bottom + 16, f"{number * step:g} ms", 10))
    return parts


def _box(x: float, y: float, width: float, height: float, colour: str, about: str = "") -> str:
    shape = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.2):.2f}" height="{height:.1f}" '
        f'fill="{colour}"'
    )
    return f"{shape}><title>{escape(about)}</title></rect>" if about else f"{shape}/>"


def _text(x: float, y: float, text: str, size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'
