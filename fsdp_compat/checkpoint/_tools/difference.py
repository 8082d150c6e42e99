"""What is different between two checkpoints, of any two formats."""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._archive.archive import Archive, StoredTensor
from ..._archive.reader import SLAB_NBYTES, Files, read, read_box
from ..._archive.threads import for_each
from ..._layout.box import Box
from ..._progress import Tick
from .._arguments import require_arguments, selection
from .._formats.recognition import open_archive
from .arithmetic import comparable, distance
from .inspection import Facts, entries, owner_of

_CALL = "checkpoint.files.diff"
_TEMPORARY_NBYTES = 96  # per element: both values in float64, and what is computed from them
_Pair = tuple[str, StoredTensor, StoredTensor]


@dataclasses.dataclass(frozen=True)
class TensorDifference(Facts):
    """One tensor that both checkpoints have."""

    path: str  # the section and the name, as in ``TensorFacts``
    dtypes: tuple[torch.dtype, torch.dtype]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    num_different: int | None
    """Elements that are further apart than the tolerance. None, as the two numbers below, if the
    shapes differ, for then nothing was read."""
    max_absolute: float | None  # largest distance; infinite where one alone is NaN or infinite
    max_relative: float | None  # largest distance relative to the larger of the two magnitudes


@dataclasses.dataclass(frozen=True)
class ValueDifference(Facts):
    """A value that is not a tensor, and is different or in one checkpoint alone."""

    path: str  # "optimizer/param_groups/0/lr", "optimizer/<parameter>/<key>" or "extra/..."
    one: str | None  # the value, shortened; None: the checkpoint does not have it
    other: str | None


@dataclasses.dataclass(frozen=True)
class Difference(Facts):
    """The result of ``diff``. Paths are those of ``TensorFacts``."""

    path: Path
    other: Path
    missing: tuple[str, ...]  # tensors that ``path`` has, and ``other`` under none of their names
    added: tuple[str, ...]  # tensors that ``other`` has, and ``path`` under none of their names
    tensors: tuple[TensorDifference, ...]
    """All tensors that both have, those of different shapes first, then from the largest absolute
    distance to the smallest."""
    values: tuple[ValueDifference, ...]
    any_dtype: bool  # whether tensors of different dtypes may be the same
    also_in_json = ("is_same", "num_different")

    @property
    def different(self) -> tuple[TensorDifference, ...]:
        """Return the tensors that both have and that are not the same."""
        return tuple(
            tensor
            for tensor in self.tensors
            if tensor.num_different != 0
            or not (self.any_dtype or tensor.dtypes[0] == tensor.dtypes[1])
        )

    @property
    def num_different(self) -> int:
        """Return the number of these tensors."""
        return len(self.different)

    @property
    def is_same(self) -> bool:
        """Return whether nothing is different, missing or added."""
        return not (self.missing or self.added or self.values or self.different)


def diff(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    any_dtype: bool = False,
    include: Collection[str] = (),
    exclude: Collection[str] = (),
    weights: bool = False,
    shapes: str | os.PathLike[str] | None = None,
    ignore_class: Collection[str] = (),
    keep_module: bool = False,
    progress: bool = False,
) -> Difference:
    """Compare two checkpoints, of any two formats.

        found = diff("runs/7/step-00001200", "exported", weights=True, rtol=1e-2, any_dtype=True)
        for tensor in found.different:
            print(tensor.path, tensor.max_absolute, tensor.num_different)

    Values are compared in float64, integers exactly. NaN is equal to NaN, and an infinite value to
    the same one. Values other than tensors are compared within the same tolerance; a number equals
    a tensor of one element that holds it.

    Args:
        path: as for ``inspect``.
        other: the same, of any format.
        rtol: two values are the same if they are at most ``atol + rtol * m`` apart, where m is the
            larger of their magnitudes.
        atol: see ``rtol``.
        any_dtype: ignore dtypes, compare values.
        include: as for ``inspect``.
        exclude: as for ``inspect``.
        weights: compare the model alone.
        shapes: as for ``inspect``, for both.
        ignore_class: as for ``inspect``.
        keep_module: as for ``inspect``.
        progress: show bytes and rate on stderr.

    Returns:
        ``path``, ``other``, ``is_same``, ``missing`` and ``added`` (tensors of ``path`` alone and
        of ``other`` alone), ``tensors`` of both, ``different`` of these, and ``values`` that
        differ. A tensor has ``path``, ``dtypes``, ``shapes``, ``num_different``, ``max_absolute``
        and ``max_relative``; a value has ``path``, ``one`` and ``other``.

    Raises:
        CheckpointError: one of them is not a checkpoint, or is damaged, incomplete or refused.
        UsageError: an argument is invalid.
        OSError: a file cannot be read."""
    require_arguments(_CALL, progress, path=path, other=other, rtol=rtol, atol=atol)
    require_arguments(_CALL, progress, include=include, exclude=exclude)
    is_selected = selection(include, exclude)
    archives = [open_archive(x, shapes, ignore_class, keep_module, progress) for x in (path, other)]
    contents = [_content(archive, is_selected, weights) for archive in archives]
    with Files() as files:

        def compared(pair: _Pair, tick: Tick) -> TensorDifference:
            path, *both = pair
            dtypes, shapes = (both[0].dtype, both[1].dtype), (both[0].shape, both[1].shape)
            if shapes[0] != shapes[1]:
                return TensorDifference(path, dtypes, shapes, None, None, None)
            found = [(0, 0.0, 0.0)]
            for box in Box.of_whole(shapes[0]).cut(SLAB_NBYTES // _TEMPORARY_NBYTES):
                one, two = (read_box(side, box, files).view(-1) for side in both)
                found.append(distance(one, two, rtol, atol))
                tick(one.nbytes + two.nbytes)
            numbers, absolute, relative = zip(*found, strict=True)
            return TensorDifference(
                path, dtypes, shapes, sum(numbers), max(absolute), max(relative)
            )

        one, two = (_with_numbers(files, *both) for both in (contents, contents[::-1]))
        pairs: dict[tuple[int, int], _Pair] = {}  # each once, under its first name
        for path in filter(two.__contains__, one):
            if isinstance(one[path], StoredTensor) and isinstance(two[path], StoredTensor):
                key = id(one[path]), id(two[path])
                pairs.setdefault(key, (path, one[path], two[path]))
        nbytes = sum(each.nbytes for _, *both in pairs.values() for each in both)
        tensors = for_each(
            [*pairs.values()], compared, what="diff", total_nbytes=nbytes, progress=progress
        )
    paired = {id(each) for _, *both in pairs.values() for each in both}
    missing, added = (
        tuple(p for p, x in side.items() if isinstance(x, StoredTensor) and id(x) not in paired)
        for side in (one, two)
    )
    return Difference(
        path=archives[0].path,
        other=archives[1].path,
        missing=missing,
        added=added,
        tensors=tuple(sorted(tensors, key=_nearness)),
        values=tuple(_different_values((rtol, atol), one, two)),
        any_dtype=any_dtype,
    )


def _nearness(tensor: TensorDifference) -> tuple[bool, float, float]:
    has_distance = tensor.num_different is not None
    return has_distance, -(tensor.max_absolute or 0), -(tensor.max_relative or 0)


def _content(archive: Archive, is_selected: Callable[[str], bool], weights: bool) -> dict[str, Any]:
    """Return what is selected, by path; tensors also under their second names."""
    found = dict(entries(archive))
    for name, target in archive.aliases.items():
        found.setdefault(f"model/{name}", archive.tensors[target])
    if weights:
        found = {path: value for path, value in found.items() if path.startswith("model/")}
    return {path: value for path, value in found.items() if is_selected(owner_of(path))}


def _with_numbers(
    files: Files, content: dict[str, Any], opposite: dict[str, Any]
) -> dict[str, Any]:
    """Return the content with numbers for tensors of one element where the other side has a number:
    formats differ in how they write, for example, the number of steps."""
    found = dict(content)
    for path, value in content.items():
        is_one = isinstance(value, StoredTensor) and value.numel == 1 and comparable(value.dtype)
        if is_one and isinstance(opposite.get(path), (bool, int, float)):
            found[path] = read(value, files).reshape(()).item()
    return found


def _different_values(
    tolerance: tuple[float, float], *sides: dict[str, Any]
) -> Iterator[ValueDifference]:
    """Yield the values other than tensors that differ, or that only one side has."""
    one, other = (
        {path: value for path, value in side.items() if not isinstance(value, StoredTensor)}
        for side in sides
    )
    for path in one | other:
        # To a format None may be nothing at all.
        if not _is_same(tolerance, one.get(path), other.get(path)):
            texts = (reprlib.repr(side[path]) if path in side else None for side in (one, other))
            yield ValueDifference(path, *texts)


def _is_same(tolerance: tuple[float, float], one: Any, other: Any) -> bool:
    both, (rtol, atol) = (one, other), tolerance
    if all(isinstance(side, (bool, int, float, complex)) for side in both):
        if one == other or (one != one and other != other):  # both are NaN
            return True
        try:
            apart = abs(one - other)
            return math.isfinite(apart) and apart <= atol + rtol * max(abs(one), abs(other))
        except OverflowError:  # of integers that are too large for a float
            return False
    if all(isinstance(side, Sequence) and not isinstance(side, (str, bytes)) for side in both):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_is_same(tolerance, *pair) for pair in pairs)
    return one is other or (type(one) is type(other) and bool(one == other))
