"""What a checkpoint holds; and what the results of all tools have in common."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import reprlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..._archive.archive import Archive, Span, StoredPiece, StoredTensor
from ..._archive.header import dtype_name
from ..._archive.reader import SLAB_NBYTES, Files, values_of
from ..._archive.threads import for_each
from ..._archive.walk import leaves
from ..._progress import Tick, no_tick
from .._arguments import require_arguments, selection
from .._formats.recognition import open_archive
from .arithmetic import comparable, extremes_and_mean

_CALL = "checkpoint.files.inspect"
_TEMPORARY_NBYTES = 16  # per element: as stored, and in float64


@dataclasses.dataclass(frozen=True)
class Facts:
    """A result, which becomes JSON by the names of its fields, and the same way a table."""

    also_in_json: ClassVar[tuple[str, ...]] = ()  # properties and methods

    def as_json(self) -> dict[str, Any]:
        """Return the same for ``json.dumps``: dtypes, paths and not finite numbers are texts."""
        fields = [each.name for each in dataclasses.fields(self) if each.name[0] != "_"]
        found = [(name, getattr(self, name)) for name in (*fields, *self.also_in_json)]
        return {name: _plain(value() if callable(value) else value) for name, value in found}


def _plain(value: Any) -> Any:
    if isinstance(value, Facts):
        return value.as_json()
    if isinstance(value, dict):
        # None is the key of what lies in no file, or what no rank is known to have written.
        return {str(_plain(key)): _plain(item) for key, item in value.items() if key is not None}
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    is_text = isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_text else value


@dataclasses.dataclass(frozen=True)
class Part(Facts):
    """A rectangular part of a tensor, and where it lies."""

    offsets: tuple[int, ...]  # where it begins in each dimension, in elements
    sizes: tuple[int, ...]  # its extent in each dimension, in elements
    nbytes: int
    rank: int | None  # that wrote it; None if the files do not say so
    file: str | None  # relative to the checkpoint; None: the value is in the checkpoint's metadata
    is_copy: bool  # another part holds the same elements
    _piece: StoredPiece = dataclasses.field(repr=False, compare=False)
    also_in_json = ("start",)

    @property
    def start(self) -> int | None:
        """Return its first byte in the file. Of torch.distributed.checkpoint this reads a header,
        and raises CheckpointError or OSError if it cannot."""
        source = self._piece.source
        return source.start if isinstance(source, Span) else None


@dataclasses.dataclass(frozen=True)
class TensorFacts(Facts):
    """One tensor of a checkpoint, as its files describe it."""

    path: str  # the section and the name: "model/...", "optimizer/<parameter>/<key>", "extra/..."
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int  # of its values, once
    parts: tuple[Part, ...]  # copies, such as those of replicas, last
    minimum: float | None = None  # None, as the two below: without ``stats``, values, or an order
    maximum: float | None = None
    mean: float | None = None

    @property
    def section(self) -> str:
        """Return "model", "optimizer" or "extra"."""
        return self.path.partition("/")[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that wrote parts of it, in order; none if the files do not say so."""
        return tuple(sorted({part.rank for part in self.parts if part.rank is not None}))


@dataclasses.dataclass(frozen=True)
class Inspection(Facts):
    """The content of a checkpoint. ``inspect`` returns it."""

    path: Path
    kind: str  # the format, for people
    tensors: tuple[TensorFacts, ...]  # in the order of the files; of the model first
    aliases: dict[str, str]  # second names of tied tensors: the name that ``tensors`` has
    values: dict[str, str]  # everything that is not a tensor: its path, and the value, shortened
    world_size: int | None  # ranks that wrote it; None if the files do not say so
    step: int | None  # of training; None if the files do not say so
    left_out: tuple[str, ...]  # what could not be read, and why
    also_in_json = ("nbytes", "nbytes_by_section", "nbytes_by_rank")

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors, each counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def nbytes_by_section(self) -> dict[str, int]:
        """Return the bytes of "model", "optimizer" and "extra", if they have tensors."""
        found: collections.Counter[str] = collections.Counter()
        for tensor in self.tensors:
            found[tensor.section] += tensor.nbytes
        return dict(found)

    def nbytes_by_rank(self) -> dict[int | None, int]:
        """Return the bytes that each rank wrote, copies included; None: not known who."""
        found: collections.Counter[int | None] = collections.Counter()
        for part in (part for tensor in self.tensors for part in tensor.parts):
            found[part.rank] += part.nbytes
        return dict(sorted(found.items(), key=lambda item: (item[0] is None, item[0])))


def inspect(
    path: str | os.PathLike[str],
    *,
    include: Collection[str] = (),
    exclude: Collection[str] = (),
    stats: bool = False,
    shapes: str | os.PathLike[str] | None = None,
    ignore_class: Collection[str] = (),
    keep_module: bool = False,
    progress: bool = False,
) -> Inspection:
    """Return what a checkpoint of any format holds; only headers and metadata are read.

        for tensor in inspect("runs/7/step-00001200").tensors:
            print(tensor.path, tensor.dtype, tensor.shape, tensor.ranks)

    Args:
        path: a checkpoint, or a run's folder: the newest in it. The format is recognised.
        include: regular expressions, searched in names of parameters and, for all else, in paths:
            take what matches any of these; default: all.
        exclude: the same: take nothing that matches any of these.
        stats: also read the values, for the smallest, the largest and the mean of each tensor.
        shapes: for flat files of FSDP1 (LOCAL_STATE_DICT), which hold none: a file of
            ``torch.save(model.state_dict(), path)``, of the model before wrapping, with any values.
            Without it, parameters stay flat.
        ignore_class: full names of classes, such as "omegaconf.dictconfig.DictConfig", whose
            objects in torch.save files are left out, not refused.
        keep_module: keep a "module." that all names begin with. Without it, it counts as the prefix
            of DistributedDataParallel, and is removed; native checkpoints keep it in any case.
        progress: show bytes and rate on stderr.

    Returns:
        ``path``, ``kind`` (the format), ``tensors``, ``aliases`` (second names of tied tensors),
        ``values`` (all else, shortened), ``world_size``, ``step``, ``left_out`` (what could not be
        read) and ``nbytes``, also by section and by rank. A tensor has ``path`` ("model/...",
        "optimizer/<parameter>/<key>" or "extra/..."), ``dtype``, ``shape``, ``nbytes``, ``ranks``,
        ``parts`` (which ranks and files have), and with ``stats`` ``minimum``, ``maximum`` and
        ``mean``.

    Raises:
        CheckpointError: it is not a checkpoint, or is damaged, incomplete or refused.
        UsageError: an argument is invalid.
        OSError: a file cannot be read."""
    require_arguments(_CALL, progress, path=path, include=include, exclude=exclude)
    is_selected = selection(include, exclude)
    archive = open_archive(path, shapes, ignore_class, keep_module, progress)
    selected = [each for each in entries(archive) if is_selected(owner_of(each[0]))]
    with Files() as files:

        def facts_of(item: tuple[str, StoredTensor], tick: Tick) -> TensorFacts:
            path, tensor = item
            numbers = _statistics(tensor, files, tick) if stats else ()
            parts = tuple(_parts(tensor, archive.path))
            return TensorFacts(path, tensor.dtype, tensor.shape, tensor.nbytes, parts, *numbers)

        stored = [each for each in selected if isinstance(each[1], StoredTensor)]
        if stats:
            nbytes = sum(tensor.nbytes for _, tensor in stored)
            tensors = for_each(
                stored, facts_of, what="inspect", total_nbytes=nbytes, progress=progress
            )
        else:  # there is nothing to wait for, so threads would only cost
            tensors = [facts_of(each, no_tick) for each in stored]
    return Inspection(
        path=archive.path,
        kind=archive.kind,
        tensors=tuple(tensors),
        aliases={name: first for name, first in archive.aliases.items() if is_selected(name)},
        values={
            path: reprlib.repr(value)
            for path, value in selected
            if not isinstance(value, StoredTensor)
        },
        world_size=archive.world_size,
        step=archive.step,
        left_out=tuple(archive.left_out),
    )


def entries(archive: Archive) -> Iterator[tuple[str, Any]]:
    """Yield every tensor, and then every other value, with its path."""
    yield from archive.all_tensors()
    groups = enumerate(archive.param_groups or [])
    settings = {number: {**group, "params": len(group["params"])} for number, group in groups}
    for path, value in (
        *leaves(archive.states, "optimizer"),
        *leaves(settings, "optimizer/param_groups"),
        *leaves(archive.extra, "extra"),
    ):
        if not isinstance(value, StoredTensor) and (value != {} or path.startswith("extra/")):
            yield path, value


def owner_of(path: str) -> str:
    """Return the name of the parameter that a path belongs to, or of "extra" the path itself."""
    section, _, name = path.partition("/")
    return {"extra": path, "optimizer": name.rpartition("/")[0]}.get(section, name)


def relative_name(path: Path, directory: Path) -> str:
    """Return the name of a file in a checkpoint, relative to it."""
    return path.name if path == directory else os.path.relpath(path, directory)


def _statistics(
    tensor: StoredTensor, files: Files, tick: Tick
) -> tuple[float, float, float] | tuple[()]:
    """Return the smallest, the largest and the mean value, if there are any."""
    if tensor.dtype.is_complex or not comparable(tensor.dtype) or not tensor.numel:
        return ()
    return extremes_and_mean(values_of(tensor, files, SLAB_NBYTES // _TEMPORARY_NBYTES, tick))


def _parts(tensor: StoredTensor, directory: Path) -> Iterator[Part]:
    """Yield the parts that hold the elements, and then copies of them."""
    for pieces, is_copy in ((tensor.pieces, False), (tensor.copies, True)):
        for piece in pieces:
            file = None if piece.path is None else relative_name(piece.path, directory)
            box, nbytes = piece.box, piece.box.numel * tensor.dtype.itemsize
            yield Part(box.offsets, box.sizes, nbytes, piece.holder, file, is_copy, piece)
