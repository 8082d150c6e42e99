"""Saving a model's weights as safetensors files of whole tensors. Each rank writes its own bytes;
nothing is gathered."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from .._archive.archive import slices
from .._archive.blocks import BLOCK_NBYTES, sync_directory
from .._archive.reader import boxes_of
from .._layout.box import Box
from .._progress import progress_bar
from .._state.held import held_state
from .._state.units import units_of
from ..errors import CheckpointError, UsageError
from ._arguments import Rename, renamed, require_arguments
from ._folder.publishing import OwnedDirectory, hidden_beside, make_fresh, remove_leftovers
from ._formats.safetensors_files import INDEX, ONE_FILE, images_of, write_index
from ._live.model import named_groups
from ._ranks.ranks import ranks_of, require_rest


def save_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_file_size: int = 5_000_000_000,
    progress: bool = False,
) -> list[Path]:
    """Save the model's weights and persistent buffers as safetensors files.

    A single file is called ``model.safetensors``; several files come with an index. Each rank
    writes the bytes of its own part. Tied parameters are written once, under the first of their
    names. The files get their names once all their bytes are durable. Existing files are never
    overwritten.

    Collective: all ranks of the model, on a shared file system.

    Args:
        path: the directory; created if missing.
        model: contains sharded modules, of either front end.
        rename: from a name in the model before wrapping to the name in the files, or to None to
            leave the tensor out.
        dtype: of floating-point tensors in the files; default: their own.
        max_file_size: most bytes of tensors in one file. A larger tensor gets a file of its own.
        progress: show bytes and rate on stderr, on the first rank.

    Returns:
        The paths of the files.

    Raises:
        UsageError: an argument is invalid, or files exist; on all ranks, before anything is
            written.
        CheckpointError: a rank could not write; on all ranks. None of the files exists then."""
    call, unsaved = "checkpoint.save_safetensors", "The weights could not be saved."
    units, ranks = ranks_of(model, call)
    is_first = ranks.number == 0
    with ranks.taking_part(), contextlib.ExitStack() as leaving:
        with ranks.agreeing(unsaved, path, "no file was published") as agreement:
            require_arguments(
                call,
                progress,
                path=path,
                rename=rename,
                dtype=dtype,
                max_file_size=max_file_size,
            )
            require_rest(units, call)
            files = _WeightFiles(Path(path), model, rename, dtype, max_file_size, call, is_first)
            _refuse_existing(Path(path), call)
            agreement.own = files.digest(), uuid.uuid4().hex
        num_plans = len({digest for digest, _ in agreement.by_rank})
        if num_plans > 1:
            raise UsageError.of(
                "The ranks' arguments differ.",
                expected="the same names and dtypes on all ranks",
                got=f"{num_plans} plans on {ranks.count} ranks",
                where=call,
                fix="pass the same arguments on all ranks, and a path on a shared file system",
            )
        files.hidden = hidden_beside(Path(path) / "weights", agreement.by_rank[0][1])
        leaving.callback(files.discard)
        with ranks.agreeing(unsaved, path, "no file was published"):
            if is_first:  # the others open them
                files.create()
        with ranks.agreeing(unsaved, path, "no file was published") as agreement:
            agreement.own = files.write(progress and is_first)
        if sum(agreement.by_rank) != files.total_nbytes:
            raise CheckpointError.of(
                unsaved,
                expected=f"{files.total_nbytes} bytes of tensors, each written by one rank",
                got=f"{sum(agreement.by_rank)} bytes written by all ranks",
                where=str(path),
                fix="report this with the way in which the model is wrapped; no file was published",
            )
        with ranks.agreeing(unsaved, path, "remove the files that already have their names"):
            if is_first:
                files.publish()
        return [Path(path) / name for name in files.names]


def _refuse_existing(path: Path, call: str) -> None:
    existing = sorted(
        file.name
        for pattern in (ONE_FILE, INDEX, "model-*-of-*.safetensors")
        for file in path.glob(pattern)
    )
    if existing:
        raise UsageError.of(
            "The directory already holds weights, which are never overwritten.",
            expected="a directory without weights",
            got=f"an existing {existing[0]}",
            where=f"{call}({str(path)!r}, ...)",
            fix="save into another directory, or move these files away",
        )


class _WeightFiles:
    """The files to write: where each tensor lies. The same on all ranks."""

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        rename: Rename | None,
        dtype: torch.dtype | None,
        max_file_size: int,
        call: str,
        is_first: bool,
    ) -> None:
        self._path = path
        self.hidden = path  # the directory that the files are in until they get their names
        self._owned: OwnedDirectory | None = None  # on the first rank
        parts, _ = held_state(model)
        named = [each for each in named_groups(units_of(model)) if each.is_written_here]
        params = {(each.group, number) for each in named for number in each.params}
        # Every rank may hold the one element of a 0-d parameter.
        self._written = {
            held.names[0]
            for held in parts
            if (is_first if held.group is None else (held.group, held.number) in params)
            and (held.rank == 0 or held.part != held.layout.part(held.index, 0))
        }
        names = renamed([held.names[0] for held in parts], rename, call)
        self._parts = {held.names[0]: held for held in parts if held.names[0] in names}
        described = {
            name: (
                names[name],
                dtype if dtype and its.dtype.is_floating_point else its.dtype,
                its.shape,
            )
            for name, its in self._parts.items()
        }
        self._images = images_of(described, max_file_size)
        self._itemsize = 1 if dtype is None else dtype.itemsize

    @property
    def names(self) -> list[str]:
        """The names of the files, including the index."""
        return [*(image.name for image in self._images), *([INDEX] if self._images[1:] else [])]

    @property
    def total_nbytes(self) -> int:
        """Bytes of the tensors in all files."""
        return sum(info.nbytes for image in self._images for info in image.tensors.values())

    def digest(self) -> str:
        """Return what must be the same on all ranks."""
        facts = [(image.name, image.header, list(image.tensors)) for image in self._images]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def create(self) -> None:
        """Create the files, hidden, in their final length; remove leftovers of killed saves."""
        self._owned = make_fresh(self.hidden)
        remove_leftovers(self._path, "weights")
        for image in self._images:
            image.create(self.hidden / image.name)

    def write(self, shown: bool) -> int:
        """Write this rank's bytes, durably; return their number."""
        own = {name: held for name, held in self._parts.items() if name in self._written}
        total = sum(held.values.nbytes for held in own.values())
        with progress_bar(shown, "save weights", total) as tick:

            def contents(name: str) -> Iterator[tuple[Box, torch.Tensor]]:
                for box, values in own[name].boxes() if name in own else ():
                    most = BLOCK_NBYTES // max(self._itemsize, values.itemsize)
                    for inner in boxes_of(box.sizes, most):
                        some = values[slices(inner)]
                        yield inner.moved(box.offsets), some
                        tick(some.nbytes)

            return sum(image.write(self.hidden / image.name, contents) for image in self._images)

    def publish(self) -> None:
        """Give the files their names, the index last."""
        if self._images[1:]:
            write_index(self._images, self.hidden / INDEX)
        for name in self.names:
            (self.hidden / name).rename(self._path / name)
        sync_directory(self._path)
        self.discard()  # before other ranks return

    def discard(self) -> None:
        """Remove what was not published."""
        if self._owned is not None:
            self._owned.discard()
