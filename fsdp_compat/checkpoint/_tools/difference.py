"""What is different between two checkpoints, of any two formats."""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._archive.archive import Archive, StoredTensor
from ..._archive.reader import SLAB_NBYTES, Files, read, read_box
from ..._archive.threads import for_each
from ..._layout.box import Box
from ..._progress import Tick
from .._arguments import require_arguments
from .._formats.recognition import open_archive
from .arithmetic import Distance, comparable, distance
from .inspection import Facts, path_selection, plain_values

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
        return tuple(tensor for tensor in self.tensors if not self._is_same(tensor))

    @property
    def num_different(self) -> int:
        """Return the number of these tensors."""
        return len(self.different)

    @property
    def is_same(self) -> bool:
        """Return whether nothing is different, missing or added."""
        return not (self.missing or self.added or self.values or self.different)

    def _is_same(self, tensor: TensorDifference) -> bool:
        of_one, of_other = tensor.dtypes
        is_accepted = of_one == of_other or self.any_dtype
        return tensor.num_different == 0 and is_accepted


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
        path: a file or a directory; its format is recognised.
        other: the same.
        rtol: two values are the same if they are at most ``atol + rtol * m`` apart, where m is the
            larger of their magnitudes.
        atol: see ``rtol``.
        any_dtype: ignore dtypes, compare values.
        include: regular expressions, searched in names of parameters and, for all else, in paths:
            compare what matches any of these; default: all.
        exclude: the same: compare nothing that matches any of these.
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
    is_selected = path_selection(include, exclude)

    def is_wanted(path: str) -> bool:
        return is_selected(path) and (not weights or path.startswith("model/"))

    archives = [open_archive(x, shapes, ignore_class, keep_module, progress) for x in (path, other)]
    contents = [_content(archive, is_wanted) for archive in archives]
    with Files() as files:

        def compared(pair: _Pair, tick: Tick) -> TensorDifference:
            path, one, other = pair
            found: Distance | None = None
            if one.shape == other.shape:
                found = Distance()
                for box in Box.of_whole(one.shape).cut(SLAB_NBYTES // _TEMPORARY_NBYTES):
                    values = [read_box(side, box, files).view(-1) for side in (one, other)]
                    found += distance(values[0], values[1], rtol, atol)
                    tick(sum(side.nbytes for side in values))
            numbers = (None, None, None) if found is None else dataclasses.astuple(found)
            dtypes, shapes = (one.dtype, other.dtype), (one.shape, other.shape)
            return TensorDifference(path, dtypes, shapes, *numbers)

        sides = [_with_numbers(files, *both) for both in (contents, contents[::-1])]
        pairs = _pairs(*sides)
        nbytes = sum(one.nbytes + other.nbytes for _, one, other in pairs)
        tensors = for_each(pairs, compared, what="diff", total_nbytes=nbytes, progress=progress)
    return Difference(
        path=archives[0].path,
        other=archives[1].path,
        missing=_only_in(sides[0], [one for _, one, _ in pairs]),
        added=_only_in(sides[1], [other for _, _, other in pairs]),
        tensors=tuple(sorted(tensors, key=_nearness)),
        values=tuple(_different_values((rtol, atol), *sides)),
        any_dtype=any_dtype,
    )


def _nearness(tensor: TensorDifference) -> tuple[bool, float, float]:
    has_distance = tensor.num_different is not None
    return has_distance, -(tensor.max_absolute or 0), -(tensor.max_relative or 0)


def _content(archive: Archive, is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Return everything wanted, by path; tensors also under their second names."""
    found: dict[str, Any] = dict(archive.all_tensors())
    for name, target in archive.aliases.items():
        found.setdefault(f"model/{name}", archive.tensors[target])
    found |= plain_values(archive)
    return {path: value for path, value in found.items() if is_wanted(path)}


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


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> list[_Pair]:
    """Return the tensors that both sides have, each pair once."""
    found: dict[tuple[int, int], _Pair] = {}
    for path in filter(other.__contains__, one):
        sides = one[path], other[path]
        if all(isinstance(side, StoredTensor) for side in sides):
            found.setdefault((id(sides[0]), id(sides[1])), (path, *sides))
    return list(found.values())


def _only_in(side: dict[str, Any], paired: Iterable[StoredTensor]) -> tuple[str, ...]:
    """Return the paths of tensors that the other side does not have under any name."""
    ids = set(map(id, paired))
    tensors = ((path, each) for path, each in side.items() if isinstance(each, StoredTensor))
    return tuple(path for path, tensor in tensors if id(tensor) not in ids)


def _different_values(
    tolerance: tuple[float, float], one: dict[str, Any], other: dict[str, Any]
) -> Iterator[ValueDifference]:
    """Yield the values other than tensors that differ, or that only one side has."""
    plain = [
        {path: value for path, value in side.items() if not isinstance(value, StoredTensor)}
        for side in (one, other)
    ]
    for path in {**plain[0], **plain[1]}:
        # To a format None may be nothing at all.
        if not _is_same(tolerance, *(side.get(path) for side in plain)):
            texts = (reprlib.repr(side[path]) if path in side else None for side in plain)
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
