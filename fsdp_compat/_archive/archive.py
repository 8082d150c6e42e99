"""What a checkpoint of any format holds: names, dtypes, shapes, and where the bytes lie. Values are
read only when they are needed."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .._layout.box import Box, coverage_problem, cut_into_boxes
from .._layout.spec import Interval, row_major_strides
from ..errors import CheckpointError
from .blocks import FileFacts
from .walk import leaves


class NotRead(CheckpointError):
    """Nothing is damaged: there is no checkpoint, or it has objects of a class that is not read."""


class Unrecognised(NotRead):
    """No format is recognised, and nothing says that there is a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Checksum:
    """The CRC-32 that a zip archive has of one of its records."""

    start: int  # the first byte of the record in the file
    nbytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Span:
    """Elements in a file, placed as those of a strided tensor."""

    path: Path
    start: int  # the first byte of the first element
    strides: tuple[int, ...]  # in elements, one per dimension of the box
    checksum: Checksum | None = None  # of the record that the elements lie in, if it has one
    file: tuple[int, ...] | None = None  # when the place was found; None: blocks have checksums


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A range of a file that is a file in itself, and is opened when its elements are needed."""

    path: Path
    start: int
    nbytes: int
    open: Callable[[], Span] = dataclasses.field(compare=False, repr=False)
    # ^ raises CheckpointError unless the range holds what was announced; OSError

    @functools.cached_property
    def span(self) -> Span:
        return self.open()


@dataclasses.dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor, and where its elements are."""

    box: Box
    place: Span | Chunk | torch.Tensor  # a small tensor on the CPU, of the sizes of the box
    holder: int | None = None  # the rank that wrote it, if the format says so

    @property
    def source(self) -> Span | torch.Tensor:
        """Where the elements are. Opens a chunk, and raises what ``Chunk.open`` raises."""
        return self.place.span if isinstance(self.place, Chunk) else self.place

    @property
    def path(self) -> Path | None:
        return None if isinstance(self.place, torch.Tensor) else self.place.path

    @property
    def record(self) -> tuple[int, Path, int] | None:
        """The bytes, file and first byte of the zip record, or of the unopened chunk, if any."""
        if isinstance(self.place, Chunk):
            return self.place.nbytes, self.place.path, self.place.start
        if isinstance(self.place, torch.Tensor) or self.place.checksum is None:
            return None
        return self.place.checksum.nbytes, self.place.path, self.place.checksum.start

    def inside(self, box: Box, itemsize: int) -> StoredPiece | None:
        """Return the elements that lie in a box of the tensor, or None."""
        common = self.box.intersection(box)
        if common is None or common == self.box:
            return self if common else None
        part, source = common.in_part(self.box.offsets), self.source
        if isinstance(source, torch.Tensor):
            source = source[part.index]
        else:
            first = sum(map(int.__mul__, part.offsets, source.strides))
            source = dataclasses.replace(source, start=source.start + first * itemsize)
        return StoredPiece(common, source, self.holder)


@dataclasses.dataclass(frozen=True)
class LazyPieces:
    """Very many pieces. within: yields those in a box, and maybe others; for None, all."""

    within: Callable[[Box | None], Iterator[StoredPiece]]

    def __iter__(self) -> Iterator[StoredPiece]:
        return self.within(None)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor. Its pieces cover every element once; ``copies``, as of replicas, repeat some."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...] | LazyPieces
    copies: tuple[StoredPiece, ...] = ()
    written_as: torch.dtype | None = None  # the dtype that a conversion writes; None: ``dtype``
    is_array: bool = False  # saved as an array of numpy

    def numpy(self) -> StoredTensor:
        """Return the same values as an array, which native checkpoints tell apart."""
        return dataclasses.replace(self, is_array=True)

    def pieces_in(self, box: Box) -> Iterator[StoredPiece]:
        """Yield the parts of the pieces that lie in a box."""
        pieces = self.pieces
        for piece in pieces.within(box) if isinstance(pieces, LazyPieces) else self._near(box):
            part = piece.inside(box, self.dtype.itemsize)
            if part is not None:
                yield part

    def _near(self, box: Box) -> Sequence[StoredPiece]:
        """Return the pieces with elements in the rows of a box, and maybe a few others."""
        pieces, starts, ends = self._by_row
        if len(pieces) < 2 or not box.sizes:
            return pieces
        first = bisect.bisect_right(ends, box.offsets[0])
        return pieces[first : bisect.bisect_left(starts, box.offsets[0] + box.sizes[0])]

    @functools.cached_property
    def _by_row(self) -> tuple[list[StoredPiece], list[int], list[int]]:
        """The pieces by their first row, these rows, and the last end of any piece so far."""
        pieces = sorted(self.pieces, key=lambda piece: piece.box.offsets)
        rows = [(piece.box.offsets or (0,))[0] for piece in pieces]
        ends = [row + (piece.box.sizes or (1,))[0] for row, piece in zip(rows, pieces, strict=True)]
        return pieces, rows, list(itertools.accumulate(ends, max))

    def coverage_problem(self) -> str | None:
        """Return what is wrong unless the pieces cover every element exactly once."""
        return coverage_problem(self.shape, [piece.box for piece in self.pieces])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclasses.dataclass
class Archive:
    """The content of one checkpoint. Names are those of the unwrapped, uncompiled model."""

    path: Path
    kind: str  # for people: "safetensors", "torch.distributed.checkpoint", ...
    tensors: dict[str, StoredTensor]  # of the model, in the order of the files
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    # ^ second names of tied tensors: the name that ``tensors`` has
    states: dict[str, dict[Any, Any]] = dataclasses.field(default_factory=dict)
    # ^ of the optimizer, by parameter and key: StoredTensors and plain values; see ``is_user``
    param_groups: list[dict[str, Any]] | None = None  # "params": names; None: no optimizer
    optimizer_classes: tuple[str, ...] = ()  # as in a native manifest; empty: not known
    is_by_number: bool = False  # the optimizer's parameters are numbered, as in torch.optim
    models: list[str] = dataclasses.field(default_factory=list)
    # ^ prefixes of the models whose names wrappers may have changed: "" for a single model
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    # ^ everything else: containers of plain values and StoredTensors
    as_saved: Any = None  # the nested values that `tree` divides into the above; None: not known
    world_size: int | None = None  # number of ranks that wrote it, if the files say so
    step: int | None = None
    checksums: dict[Path, FileFacts] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)  # not read or not saved, and why

    def all_tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield every tensor with its path, which begins with "model", "optimizer" or "extra"."""
        for name, tensor in self.tensors.items():
            yield f"model/{name}", tensor
        for path, leaf in (*leaves(self.states, "optimizer"), *leaves(self.extra, "extra")):
            if isinstance(leaf, StoredTensor):
                yield path, leaf

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.all_tensors())

    @property
    def strange_states(self) -> list[str]:
        """The parameters of the optimizer that are in no model of the archive."""
        names = [name for name, state in self.states.items() if not is_user(state)]
        names += [name for group in self.param_groups or () for name in group["params"]]
        known, prefixes = {*self.tensors, *self.aliases}, self.models or [""]
        others = (n for n in names if not any(prefix + n in known for prefix in prefixes))
        return list(dict.fromkeys(others)) if known and not self.is_by_number else []


def is_user(state: dict[Any, Any]) -> bool:
    """Return whether a state of the optimizer belongs to no parameter: it is the value of None."""
    return state.keys() == {None}


def is_count(key: Any, shape: tuple[int, ...]) -> bool:
    """True for a 0-d parameter's step count, which only its name tells from other states."""
    return shape == () and key == "step"


def is_per_element(key: Any, value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a state has one element per element of its parameter."""
    is_alike = isinstance(value, StoredTensor) and value.shape == shape
    return is_alike and not is_count(key, shape)


# -- making stored tensors


def in_one_piece(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    source: Span | torch.Tensor,
    holder: int | None = None,
) -> StoredTensor:
    return StoredTensor(name, dtype, shape, (StoredPiece(Box.of_whole(shape), source, holder),))


def of_memory(name: str, values: torch.Tensor) -> StoredTensor:
    """Return a tensor whose values are in memory already."""
    return in_one_piece(name, values.dtype, tuple(values.shape), values)


def of_parts(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[StoredPiece]
) -> StoredTensor:
    """Return the tensor that parts make up, of which some may be empty, or copies of earlier ones.
    Raises ValueError if they leave elements out or overlap."""
    pieces: dict[Box, StoredPiece] = {}
    filled = (part for part in parts if part.box.numel)
    copies = tuple(part for part in filled if pieces.setdefault(part.box, part) is not part)
    if problem := coverage_problem(shape, [*pieces]):
        raise ValueError(problem)
    return StoredTensor(name, dtype, shape, tuple(pieces.values()), copies)


def pieces_of_run(
    shape: tuple[int, ...],
    run: Interval,
    source: Span | torch.Tensor,
    itemsize: int,
    holder: int | None = None,
    origin: Sequence[int] | None = None,
) -> Iterator[StoredPiece]:
    """Yield the pieces of row-major elements ``run``, which ``source`` holds, 1-D. shape: of the
    tensor, or of a part of it that begins at ``origin``. Raises ValueError for gaps in a file."""
    if isinstance(source, Span) and source.strides != (1,) and run.numel > 1:
        raise ValueError("a run of elements with gaps")
    at = 0
    for box in cut_into_boxes(shape, run):
        place: Span | torch.Tensor
        if isinstance(source, torch.Tensor):
            place = source[at : at + box.numel].reshape(box.sizes)
        else:
            start, strides = source.start + at * itemsize, row_major_strides(box.sizes)
            place = Span(source.path, start, strides, source.checksum, source.file)
        yield StoredPiece(box if origin is None else box.moved(origin), place, holder)
        at += box.numel
