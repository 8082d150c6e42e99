"""What is different between two checkpoints, of any two formats."""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .archive import Archive, StoredTensor
from .facts import Facts
from .inspection import plain_values
from .numbers import Distance, comparable, distance
from .opening import open_archive
from .reading import Files, boxes_of, read, read_box
from .selection import selection
from .work import MEMORY, Tick, for_each, numel_at_once, require_amount, require_limits

_WHERE = "fsdp_compat.checkpoint.diff"
_DTYPES = {
    bool: torch.int64,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_TEMPORARY_NBYTES = 96  # per element: both values in float64, and what is computed from them


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

    @property
    def is_within_tolerance(self) -> bool:
        """Return whether the shapes are the same and no element is too far apart."""
        return self.num_different == 0


@dataclasses.dataclass(frozen=True)
class ValueDifference(Facts):
    """A value that is not a tensor, and is different or in one checkpoint alone."""

    path: str  # "optimizer/param_groups/0/lr", "optimizer/<parameter>/<key>" or "extra/..."
    one: str | None  # the value, shortened; None: the checkpoint does not have it
    other: str | None


@dataclasses.dataclass(frozen=True)
class Difference(Facts):
    """The result of ``diff``. Paths are those of ``TensorFacts``."""

    one: Path
    other: Path
    missing: tuple[str, ...]  # tensors that ``one`` has, and ``other`` under none of their names
    added: tuple[str, ...]  # tensors that ``other`` has, and ``one`` under none of their names
    tensors: tuple[TensorDifference, ...]
    """All tensors that both have, those of different shapes first, then from the largest absolute
    distance to the smallest."""
    values: tuple[ValueDifference, ...]
    compares_dtypes: bool  # whether tensors of different dtypes are different
    in_json = ("one", "other", "is_same", "num_different", "missing", "added", "tensors", "values")

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
        is_accepted = of_one == of_other or not self.compares_dtypes
        return tensor.is_within_tolerance and is_accepted


def diff(
    one: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    dtypes: bool = True,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    optimizer: bool = True,
    shapes: str | os.PathLike[str] | None = None,
    ignored: Collection[str] = (),
    keep_module: bool = False,
    memory: int = MEMORY,
    workers: int = 1,
    progress: bool = False,
) -> Difference:
    """Compare two checkpoints, of any two formats, and return what is different.

        found = diff("runs/7/step-00001200", "exported", optimizer=False, rtol=1e-2, dtypes=False)
        for tensor in found.different:
            print(tensor.path, tensor.max_absolute, tensor.num_different)

    Values are compared in float64, integers exactly. NaN is equal to NaN, and an infinite value to
    the same one. Values other than tensors are compared within the same tolerance; a number equals
    a tensor of one element that holds it.

    one, other: files or directories; their formats are recognised.
    rtol, atol: two values are the same if they are at most ``atol + rtol * m`` apart, where m is
    the larger of their magnitudes.
    dtypes: False compares the values of tensors of different dtypes, and nothing else.
    include, exclude: regular expressions, searched in names of parameters and, for all else, in
    paths. Only names with a match of one in ``include`` (if there is any) and of none in
    ``exclude`` are compared.
    optimizer: False leaves the optimizer's state out.
    shapes, ignored, keep_module: as for ``inspect``, for both.
    memory: bytes of values in memory at a time, by all workers together; at least 1 MiB for each.
    workers: threads. progress: draw a bar, with tqdm.

    Raises CheckpointError if one of them is not a checkpoint, or is damaged, incomplete or refused;
    UsageError for wrong arguments; OSError.
    """
    require_amount("rtol", rtol, _WHERE)
    require_amount("atol", atol, _WHERE)
    require_limits(memory, workers, progress, _WHERE)
    is_wanted = _selection(include, exclude, optimizer)
    archives = [open_archive(Path(path), shapes, ignored, keep_module) for path in (one, other)]
    sides = [_tensors(archive, is_wanted) for archive in archives]
    values = [
        {path: value for path, value in plain_values(archive) if is_wanted(path)}
        for archive in archives
    ]
    with Files() as files:
        _read_numbers(sides[0], values[0], values[1], files)
        _read_numbers(sides[1], values[1], values[0], files)
        pairs = _pairs(*sides)
        compare = _Comparison(files, rtol, atol, numel_at_once(memory, workers, _TEMPORARY_NBYTES))
        compared = for_each(
            pairs,
            compare.tensor,
            workers=workers,
            what="diff",
            total_nbytes=sum(one.nbytes + other.nbytes for _, one, other in pairs),
            progress=progress,
        )
    return Difference(
        one=archives[0].path,
        other=archives[1].path,
        missing=_only_in(sides[0], sides[1]),
        added=_only_in(sides[1], sides[0]),
        tensors=tuple(sorted(compared, key=_by_size)),
        values=tuple(compare.values(*values)),
        compares_dtypes=dtypes,
    )


def _by_size(tensor: TensorDifference) -> tuple[float, float]:
    if tensor.max_absolute is None or tensor.max_relative is None:
        return -math.inf, -math.inf
    return -tensor.max_absolute, -tensor.max_relative


# -- what is compared


def _selection(
    include: Iterable[str], exclude: Iterable[str], optimizer: bool
) -> Callable[[str], bool]:
    """Return whether a path is to be compared. Raises UsageError for an invalid pattern."""
    include, exclude = ([each] if isinstance(each, str) else [*each] for each in (include, exclude))
    is_selected = selection(include, exclude, _WHERE)

    def is_wanted(path: str) -> bool:
        section, _, name = path.partition("/")
        if section == "optimizer":
            return optimizer and is_selected(name.rpartition("/")[0])
        return is_selected(path if section == "extra" else name)

    return is_wanted


def _tensors(archive: Archive, is_wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """Return all tensors that are wanted, also under their further names."""
    found = dict(archive.all_tensors())
    for name, target in archive.aliases.items():
        if target in archive.tensors:
            found.setdefault(f"model/{name}", archive.tensors[target])
    return {path: tensor for path, tensor in found.items() if is_wanted(path)}


def _only_in(one: dict[str, StoredTensor], other: dict[str, StoredTensor]) -> tuple[str, ...]:
    """Return the paths of tensors that ``other`` has under none of their names: some formats keep
    one name of a tied tensor."""
    found = {id(tensor) for path, tensor in one.items() if path in other}
    return tuple(path for path, tensor in one.items() if id(tensor) not in found)


def _read_numbers(
    tensors: dict[str, StoredTensor],
    plain: dict[str, Any],
    opposite: dict[str, Any],
    files: Files,
) -> None:
    """Move tensors of one element to the plain values where the other side has a number: formats
    differ in how they write, for example, the number of steps."""
    for path, value in opposite.items():
        tensor = tensors.get(path)
        is_number = isinstance(value, (bool, int, float))
        if is_number and tensor is not None and tensor.numel == 1 and comparable(tensor.dtype):
            plain[path] = read(tensor, files).reshape(()).item()
            del tensors[path]


def _pairs(
    one: dict[str, StoredTensor], other: dict[str, StoredTensor]
) -> list[tuple[str, StoredTensor, StoredTensor]]:
    """Return the tensors that both sides have. Where both have further names of a pair, it occurs
    once."""
    found: dict[tuple[int, int], tuple[str, StoredTensor, StoredTensor]] = {}
    for path, tensor in one.items():
        if path in other:
            found.setdefault((id(tensor), id(other[path])), (path, tensor, other[path]))
    return list(found.values())


# -- comparing


class _Comparison:
    """Compares tensors and plain values within one tolerance."""

    def __init__(self, files: Files, rtol: float, atol: float, numel: int) -> None:
        self._files, self._rtol, self._atol, self._numel = files, rtol, atol, numel

    def tensor(self, pair: tuple[str, StoredTensor, StoredTensor], tick: Tick) -> TensorDifference:
        path, one, other = pair
        found: Distance | None = None
        if one.shape == other.shape:
            found = Distance()
            for box in boxes_of(one.shape, self._numel):
                values = [read_box(side, box, self._files).view(-1) for side in (one, other)]
                found += distance(values[0], values[1], self._rtol, self._atol)
                tick(sum(side.nbytes for side in values))
        return TensorDifference(
            path,
            (one.dtype, other.dtype),
            (one.shape, other.shape),
            None if found is None else found.num_different,
            None if found is None else found.max_absolute,
            None if found is None else found.max_relative,
        )

    def values(self, one: dict[str, Any], other: dict[str, Any]) -> list[ValueDifference]:
        """Return the values that differ, or that only one side has."""
        found, both = [], (one, other)
        for path in dict.fromkeys((*one, *other)):
            sides = [side.get(path) for side in both]  # to a format None may be nothing at all
            if sides[0] is not sides[1] and not self._is_same(sides[0], sides[1]):
                texts = [reprlib.repr(side[path]) if path in side else None for side in both]
                found.append(ValueDifference(path, texts[0], texts[1]))
        return found

    def _is_same(self, one: Any, other: Any) -> bool:
        numbers = [side for side in (one, other) if isinstance(side, (bool, int, float, complex))]
        if len(numbers) == 2:
            if one == other:
                return True
            try:
                sides = [torch.tensor([number], dtype=_DTYPES[type(number)]) for number in numbers]
            except (KeyError, RuntimeError, OverflowError):  # more than 64 bits
                return False
            return not distance(sides[0], sides[1], self._rtol, self._atol).num_different
        if isinstance(one, Sequence) and isinstance(other, Sequence):
            if isinstance(one, (str, bytes)) or isinstance(other, (str, bytes)):
                return bool(one == other)
            return len(one) == len(other) and all(map(self._is_same, one, other))
        return type(one) is type(other) and bool(one == other)
