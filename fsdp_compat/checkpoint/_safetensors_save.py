"""Saving a model's weights as safetensors files of whole tensors. Each rank writes its own bytes;
nothing is gathered."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from .._archive.blocks import BLOCK_NBYTES, sync_directory
from .._layout.box import Box
from .._progress import progress_bar
from .._state.held import HeldPart, held_state
from .._state.units import units_of
from ..errors import CheckpointError, UsageError
from ._arguments import Rename, renamed, require_arguments
from ._folder.publishing import hidden_beside, make_fresh, remove_leftovers
from ._formats.safetensors_files import INDEX, ONE_FILE, FileImage, images_of, write_index
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
    is_first, folder = ranks.number == 0, Path(path)
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
            parts, _ = held_state(model)
            names = renamed([held.names[0] for held in parts], rename, call)
            files = images_of(_described(parts, names, dtype), max_file_size)
            _refuse_existing(folder, call)
            facts = [(file.name, file.header, list(file.tensors)) for file in files]
            agreement.own = hashlib.sha256(repr(facts).encode()).hexdigest(), uuid.uuid4().hex
        num_plans = len({digest for digest, _ in agreement.by_rank})
        if num_plans > 1:
            raise UsageError.of(
                "The ranks' arguments differ.",
                expected="the same names and dtypes on all ranks",
                got=f"{num_plans} plans on {ranks.count} ranks",
                where=call,
                fix="pass the same arguments on all ranks, and a path on a shared file system",
            )
        hidden = hidden_beside(folder / "weights", agreement.by_rank[0][1])
        with ranks.agreeing(unsaved, path, "no file was published"):
            if is_first:  # the others open them
                if (owned := make_fresh(hidden)) is not None:
                    leaving.callback(owned.discard)
                remove_leftovers(folder, "weights")
                for file in files:
                    file.create(hidden / file.name)
        with ranks.agreeing(unsaved, path, "no file was published") as agreement:
            own = {held.names[0]: held for held in _written_here(model, parts, is_first)}
            agreement.own = _write(files, hidden, own, dtype, progress and is_first)
        total = sum(info.nbytes for file in files for info in file.tensors.values())
        if sum(agreement.by_rank) != total:
            raise CheckpointError.of(
                unsaved,
                expected=f"{total} bytes of tensors, each written by one rank",
                got=f"{sum(agreement.by_rank)} bytes written by all ranks",
                where=str(path),
                fix="report this with the way in which the model is wrapped; no file was published",
            )
        published = [*(file.name for file in files), *([INDEX] if files[1:] else [])]
        with ranks.agreeing(unsaved, path, "remove the files that already have their names"):
            if is_first:
                if files[1:]:
                    write_index(files, hidden / INDEX)
                for name in published:  # the index last
                    (hidden / name).rename(folder / name)
                sync_directory(folder)
                leaving.close()  # before other ranks return
        return [folder / name for name in published]


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


def _described(
    parts: Sequence[HeldPart], names: Mapping[str, str], dtype: torch.dtype | None
) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return (name in the files, dtype, shape) of the tensors to write, by name in the model."""
    return {
        name: (new, dtype if dtype and held.dtype.is_floating_point else held.dtype, held.shape)
        for held in parts
        for name in held.names[:1]
        if (new := names.get(name)) is not None
    }


def _written_here(
    model: nn.Module, parts: Sequence[HeldPart], is_first: bool
) -> Iterator[HeldPart]:
    """Yield the parts that this rank writes, and no other one."""
    named = [each for each in named_groups(units_of(model)) if each.is_written_here]
    params = {(each.group, number) for each in named for number in each.params}
    for held in parts:
        # Every rank may hold the one element of a 0-d parameter.
        is_one = held.rank == 0 or held.part != held.layout.part(held.index, 0)
        if is_one and (is_first if held.group is None else (held.group, held.number) in params):
            yield held


def _write(
    files: Sequence[FileImage],
    folder: Path,
    own: Mapping[str, HeldPart],
    dtype: torch.dtype | None,
    shown: bool,
) -> int:
    """Write this rank's bytes, durably; return their number."""
    with progress_bar(shown, "save weights", sum(x.values.nbytes for x in own.values())) as tick:

        def contents(name: str) -> Iterator[tuple[Box, torch.Tensor]]:
            for box, values in own[name].boxes() if name in own else ():
                itemsize = max(1 if dtype is None else dtype.itemsize, values.itemsize)
                for place in box.cut(BLOCK_NBYTES // itemsize):
                    some = values[place.in_part(box.offsets).index]
                    yield place, some
                    tick(some.nbytes)

        return sum(file.write(folder / file.name, contents) for file in files)
