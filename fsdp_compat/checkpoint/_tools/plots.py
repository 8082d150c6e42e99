"""Pictures of checkpoints, as the bytes of PNG files: how bytes are spread, the values of a tensor,
and the norms of two checkpoints side by side.

They are drawn by matplotlib without a display and without its global state."""

from __future__ import annotations

import dataclasses
import difflib
import io
import math
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError, UsageError
from .._progress import progress_bar
from .archive import Archive, StoredTensor
from .display import count_of, nbytes_text, shortened
from .inspection import Inspection, inspection_of
from .numbers import comparable
from .opening import open_archive
from .reading import Files, boxes_of, read_box
from .work import MEMORY, Tick, for_each, numel_at_once, require_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_BINS = 100
_NUM_TENSORS = 24  # with a bar of their own
_MAX_NAMES = 40  # below the norms
_NAME_LENGTH = 48
_COLOURS = {"model": "#2f6db3", "optimizer": "#e08a1e", "extra": "#5a9e6f"}
_WIDEST = 1e300  # of an axis: matplotlib adds up its ends
_TEMPORARY_NBYTES = 40  # per element, while it is counted


def plot(
    source: Path,
    *,
    histogram: str | None = None,
    beside: Path | None = None,
    shapes: Path | None = None,
    ignored: Collection[str] = (),
    keep_module: bool = False,
    memory: int = MEMORY,
    workers: int = 1,
    progress: bool = False,
) -> bytes:
    """Return a PNG file: how the bytes of a checkpoint are spread over ranks and tensors.

    histogram: draw the values of the tensor of this name instead.
    beside: draw the norms of all tensors in this and another checkpoint instead.
    The others are as for ``diff``. Raises what ``diff`` raises, and UsageError for a name that the
    checkpoint does not have."""
    require_limits(memory, workers, progress, "plot")
    one = open_archive(source, shapes, ignored, keep_module)
    if histogram is not None:
        tensor = _tensor_called(histogram, one)
        with Files() as files, progress_bar(progress, "plot", 2 * tensor.nbytes) as tick:
            return png_of_histogram(tensor, histogram_of(tensor, files, memory, tick))
    if beside is None:
        return png_of_bytes(inspection_of(one))
    pairs = common_tensors(one, open_archive(beside, shapes, ignored, keep_module))
    with Files() as files:
        norms = for_each(
            pairs,
            lambda pair, tick: (
                norm_of(pair[1], files, memory, workers, tick),
                norm_of(pair[2], files, memory, workers, tick),
            ),
            workers=workers,
            what="plot",
            total_nbytes=sum(tensor.nbytes + other.nbytes for _, tensor, other in pairs),
            progress=progress,
        )
    return png_of_norms([name for name, _, _ in pairs], norms, (str(source), str(beside)))


def _tensor_called(name: str, archive: Archive) -> StoredTensor:
    """Return a tensor by its path, or by its name in the model. Raises UsageError."""
    tensors = dict(archive.all_tensors())
    found = tensors.get(name) or archive.tensors.get(archive.aliases.get(name, name))
    if found is not None:
        return found
    close = difflib.get_close_matches(name, [*archive.tensors, *tensors], 3, 0.4)
    raise UsageError.of(
        "The checkpoint has no tensor of this name.",
        expected="a name that fsdp-compat inspect lists"
        + (f", such as {', '.join(map(repr, close))}" if close else ""),
        got=repr(name),
        where=str(archive.path),
        fix="pass another name",
    )


# -- how bytes are spread


def png_of_bytes(found: Inspection) -> bytes:
    """Return a picture of the bytes that each rank wrote, or each file holds if the ranks are not
    known, and of the largest tensors."""
    figure = _figure(14.0, 6.0)
    left, right = figure.subplots(1, 2)
    by_place, unit = _bytes_by_place(found)
    _stack(left, by_place, unit)
    largest = sorted(found.tensors, key=lambda tensor: -tensor.nbytes)[:_NUM_TENSORS]
    rest = found.nbytes - sum(tensor.nbytes for tensor in largest)
    names = [_name(tensor.path) for tensor in largest]
    sizes = [tensor.nbytes for tensor in largest]
    colours = [_COLOURS[tensor.section] for tensor in largest]
    if rest:
        names.append(f"{len(found.tensors) - len(largest):,} others")
        sizes.append(rest)
        colours.append("#999999")
    right.barh(range(len(names)), sizes, color=colours)
    right.invert_yaxis()
    _label(right, "y", names)
    right.xaxis.set_major_formatter(_as_nbytes)
    right.set_title("largest tensors")
    title = f"{found.path.name}: {count_of(len(found.tensors), 'tensor')}"
    _title(figure, f"{title}, {nbytes_text(found.nbytes)} ({found.kind})")
    return _png(figure)


def _bytes_by_place(found: Inspection) -> tuple[dict[str, dict[str, int]], str]:
    """Return the bytes of each section by rank, or else by file, and what the places are."""
    parts = [(tensor.section, part) for tensor in found.tensors for part in tensor.parts]
    by_rank = any(part.rank is not None for _, part in parts)
    places: dict[Any, dict[str, int]] = {}
    for section, part in parts:
        place = part.rank if by_rank else part.file
        of_place = places.setdefault(place, dict.fromkeys(_COLOURS, 0))
        of_place[section] += part.nbytes
    in_order = sorted(places, key=lambda place: (place is None, place))
    named = {("no rank" if by_rank else "metadata") if p is None else str(p): p for p in in_order}
    return {name: places[place] for name, place in named.items()}, "rank" if by_rank else "file"


def _stack(axes: Axes, by_place: dict[str, dict[str, int]], unit: str) -> None:
    below = [0] * len(by_place)
    for section, colour in _COLOURS.items():
        heights = [of_place[section] for of_place in by_place.values()]
        if any(heights):
            axes.bar(range(len(heights)), heights, bottom=below, color=colour, label=section)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    if len(by_place) <= _MAX_NAMES:
        _label(axes, "x", [_name(name) for name in by_place], slanted=unit == "file")
    axes.set_xlabel(unit)
    axes.yaxis.set_major_formatter(_as_nbytes)
    axes.set_title(f"bytes by {unit}")
    if any(below):
        axes.legend()


# -- the values of a tensor


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How the finite values of a tensor are spread."""

    lowest: float  # left end of the first bin; NaN if there is no finite value
    highest: float  # right end of the last bin
    counts: tuple[int, ...]  # elements in each of the bins, which have equal widths
    num_nan: int
    num_inf: int


def histogram_of(tensor: StoredTensor, files: Files, memory: int, tick: Tick) -> Histogram:
    """Read a tensor twice, slab by slab, and count its values. Raises UsageError for a dtype with
    which torch cannot compute."""
    if not comparable(tensor.dtype):
        raise UsageError.of(
            "The values of this tensor cannot be counted.",
            expected="a dtype with which torch can compute",
            got=str(tensor.dtype),
            where=repr(tensor.name),
            fix="choose another tensor",
        )
    lowest, highest, num_nan, num_inf = math.inf, -math.inf, 0, 0
    numel = numel_at_once(memory, 1, _TEMPORARY_NBYTES)
    for box in boxes_of(tensor.shape, numel):
        values = _magnitudes(read_box(tensor, box, files))
        num_nan += int(values.isnan().sum())
        num_inf += int(values.isinf().sum())
        finite = values[values.isfinite()]
        if finite.numel():
            lowest, highest = min(lowest, float(finite.min())), max(highest, float(finite.max()))
        tick(box.numel * tensor.dtype.itemsize)
    if lowest > highest:
        return Histogram(math.nan, math.nan, (), num_nan, num_inf)
    counts = torch.zeros(_NUM_BINS, dtype=torch.int64)
    # In halves, as the difference of two finite numbers may be infinite.
    width = highest / 2 - lowest / 2
    for box in boxes_of(tensor.shape, numel):
        values = _magnitudes(read_box(tensor, box, files))
        finite = values[values.isfinite()]
        place = (finite / 2 - lowest / 2) / width if width else torch.full_like(finite, 0.5)
        bins = (place * _NUM_BINS).long().clamp_(0, _NUM_BINS - 1)
        counts += torch.bincount(bins, minlength=_NUM_BINS)
        tick(box.numel * tensor.dtype.itemsize)
    return Histogram(lowest, highest, tuple(counts.tolist()), num_nan, num_inf)


def png_of_histogram(tensor: StoredTensor, found: Histogram) -> bytes:
    """Return a picture of the values of a tensor, with the number of elements on a logarithmic
    scale."""
    figure = _figure(9.0, 5.0)
    axes = figure.subplots()
    if found.counts:
        low, high = (max(min(end, _WIDEST), -_WIDEST) for end in (found.lowest, found.highest))
        if low == high:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        steps = [number / len(found.counts) for number in range(len(found.counts) + 1)]
        edges = [low * (1 - step) + high * step for step in steps]
        axes.stairs(found.counts, edges, fill=True, color=_COLOURS["model"])
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
    axes.set_xlabel("magnitude" if tensor.dtype.is_complex else "value")
    axes.set_ylabel("elements")
    sizes = " x ".join(map(str, tensor.shape)) or "one value"
    kind = str(tensor.dtype).removeprefix("torch.")
    _title(figure, _name(tensor.name, 80))
    axes.set_title(f"{kind}, {sizes}: {found.num_nan:,} NaN, {found.num_inf:,} infinite")
    return _png(figure)


# -- norms


def norm_of(tensor: StoredTensor, files: Files, memory: int, workers: int, tick: Tick) -> float:
    """Return the Euclidean norm of a tensor, read slab by slab; NaN if torch cannot compute with
    its dtype."""
    norms = []
    for box in boxes_of(tensor.shape, numel_at_once(memory, workers, _TEMPORARY_NBYTES)):
        if comparable(tensor.dtype):
            values = _magnitudes(read_box(tensor, box, files))
            norms.append(float(torch.linalg.vector_norm(values)))
        else:
            norms.append(math.nan)
        tick(box.numel * tensor.dtype.itemsize)
    return math.hypot(*norms)


def png_of_norms(
    names: Sequence[str], norms: Sequence[tuple[float, float]], labels: tuple[str, str]
) -> bytes:
    """Return a picture of the norms of tensors in two checkpoints.

    names: of the tensors that both have; norms: in the one and in the other; labels: what the
    checkpoints are called."""
    figure = _figure(max(9.0, min(len(names), _MAX_NAMES) * 0.35), 6.0)
    axes = figure.subplots()
    places = range(len(names))
    for side, (marker, colour) in enumerate((("o", "#2f6db3"), ("x", "#e08a1e"))):
        heights = [pair[side] for pair in norms]
        axes.plot(
            places, heights, marker, color=colour, label=_name(labels[side]), fillstyle="none"
        )
    positive = [norm for pair in norms for norm in pair if 0 < norm < math.inf]
    if positive:
        axes.set_yscale("symlog", linthresh=min(positive))
    if len(names) <= _MAX_NAMES:
        _label(axes, "x", [_name(name) for name in names], slanted=True)
    else:
        axes.set_xlabel("tensor, in the order of the first checkpoint")
    axes.set_ylabel("Euclidean norm")
    axes.grid(axis="y", alpha=0.3)
    for text in axes.legend().get_texts():
        text.set_parse_math(False)
    num_odd = sum(not math.isfinite(norm) for pair in norms for norm in pair)
    odd = f"; {count_of(num_odd, 'norm')} not finite" if num_odd else ""
    _title(figure, f"{count_of(len(names), 'tensor')} in both checkpoints{odd}")
    return _png(figure)


def common_tensors(one: Archive, other: Archive) -> list[tuple[str, StoredTensor, StoredTensor]]:
    """Return the tensors of the model that both checkpoints have. Raises CheckpointError if there
    are none."""
    pairs = [
        (name, tensor, other.tensors[name])
        for name, tensor in one.tensors.items()
        if name in other.tensors
    ]
    if not pairs:
        raise CheckpointError.of(
            "These checkpoints have no tensor in common.",
            expected="two checkpoints of one model",
            got=f"{count_of(len(one.tensors), 'tensor')} and {len(other.tensors):,}, under "
            "different names",
            where=f"{one.path} and {other.path}",
            fix="look at the names with fsdp-compat inspect; convert --rename changes them",
        )
    return pairs


# -- drawing


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Return values as 1-D float64; of complex ones the magnitudes."""
    values = values.reshape(-1)
    if values.is_complex():
        return values.to(torch.complex128).abs()
    return values.to(torch.float64)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that leave little room for the plot
        figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _name(text: str, most: int = _NAME_LENGTH) -> str:
    """Return a name in characters that every font has."""
    return shortened(text.encode("ascii", "backslashreplace").decode(), most)


def _as_nbytes(value: float, place: object = None) -> str:
    return nbytes_text(value)


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(_name(text, 120)).set_parse_math(False)  # a dollar sign in a name is no formula


def _label(axes: Axes, axis: str, names: Sequence[str], slanted: bool = False) -> None:
    which = axes.xaxis if axis == "x" else axes.yaxis
    which.set_ticks(range(len(names)), names)
    for label in which.get_ticklabels():
        label.set_parse_math(False)
        label.set_fontsize("small")
        if slanted:
            label.set_rotation(60)
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
