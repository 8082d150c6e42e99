"""Saving a model's weights as safetensors files: whole tensors under their names, in one file, or
in several with an index. Each rank writes its own bytes; nothing is gathered."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from pathlib import Path

import torch
from torch import nn

from .._state.units import names_before, units_of
from ..errors import CheckpointError, UsageError
from ._arguments import Rename, renamed, require_arguments
from ._blocks import BLOCK_NBYTES, Tick, sync_directory
from ._header import TensorInfo
from ._held_parts import HeldPart, managed_parts, unmanaged_tensors
from ._named_groups import named_groups
from ._progress import progress_bar
from ._publishing import Fresh, hidden_beside, make_fresh, remove_leftovers
from ._ranks import checkpoint_error_from, ranks_of, require_rest
from ._tools.archive import moved, slices
from ._tools.reading import boxes_of
from ._tools.safetensors_files import INDEX, ONE_FILE, images_of, write_box, write_index


def save_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5_000_000_000,
    progress: bool = False,
) -> list[Path]:
    """Save the model's weights and persistent buffers as safetensors files in directory ``path``;
    return the files' paths.

    Collective: all ranks, on a shared file system. A single file is called ``model.safetensors``;
    several files come with an index. Each rank writes the bytes of its own part. Tied parameters
    are written once, under the first of their names. The files get their names once all their
    bytes are durable. Existing files are never overwritten.

    Args:
        path: the directory; created if missing.
        model: contains sharded modules, of either front end.
        rename: from a name in the model before wrapping to the name in the files, or to None to
            leave the tensor out.
        dtype: of floating-point tensors in the files; default: their own.
        max_file_nbytes: largest number of bytes of tensors in one file. A larger tensor gets a file
            of its own.
        progress: show bytes and rate on the first rank; requires tqdm.

    Raises:
        UsageError: an argument is invalid, or the files exist; on all ranks, before anything is
            written.
        CheckpointError: a rank could not write; on all ranks. None of the files exists then.
    """
    call = "checkpoint.save_safetensors"
    units, ranks = ranks_of(model, call)
    with ranks.taking_part(), contextlib.ExitStack() as leaving:
        problem: BaseException | None = None
        files: _WeightFiles | None = None
        try:
            require_arguments(
                call,
                progress,
                path=path,
                rename=rename,
                dtype=dtype,
                max_file_nbytes=max_file_nbytes,
            )
            require_rest(units, call)
            files = _WeightFiles(
                Path(path), model, rename, dtype, max_file_nbytes, call, ranks.number == 0
            )
            _refuse_existing(Path(path), call)
        except Exception as error:
            problem = checkpoint_error_from(
                error, "The weights could not be saved.", path, "no file was published"
            )
        told = ranks.agree(problem, (_digest(files and files.described()), uuid.uuid4().hex))
        if len({digest for digest, _ in told}) > 1:
            raise UsageError.of(
                "The ranks' arguments differ.",
                expected="the same names and dtypes on all ranks",
                got=f"{len({digest for digest, _ in told})} plans on {ranks.count} ranks",
                where=call,
                fix="pass the same arguments on all ranks, and a path on a shared file system",
            )
        assert files is not None
        leaving.callback(files.discard)
        token = told[0][1]
        # The first rank creates the files before the others open them.
        nbytes = 0  # that this rank has written
        for step in (files.create if ranks.number == 0 else None, files.write):
            try:
                if step is not None and problem is None:
                    nbytes = step(token, progress and ranks.number == 0)
            except Exception as error:
                problem = checkpoint_error_from(
                    error, "The weights could not be saved.", path, "no file was published"
                )
            answers = ranks.exchange((problem is not None, nbytes))
            failed = [there for there, _ in answers]
            if any(failed):
                break
        else:
            if (total := sum(each for _, each in answers)) != files.total_nbytes:
                problem = _incomplete(path, total, files.total_nbytes)
                failed = [True]
        if ranks.number == 0:
            try:
                if not any(failed):
                    files.publish(token)
            except OSError as error:
                problem = checkpoint_error_from(
                    error,
                    "The weights could not be saved.",
                    path,
                    "remove the files that already have their names",
                )
            files.discard()
        ranks.agree(problem, None)
        return [Path(path) / name for name in files.names]


def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _incomplete(path: object, total: int, expected: int) -> CheckpointError:
    return CheckpointError.of(
        "The weights could not be saved.",
        expected=f"{expected} bytes of tensors, each written by one rank",
        got=f"{total} bytes written by all ranks",
        where=str(path),
        fix="report this with the way in which the model is wrapped; no file was published",
    )


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
        max_file_nbytes: int,
        call: str,
        is_first: bool,
    ) -> None:
        self._path = path
        self._fresh: Fresh | None = None  # on the first rank
        order = {name: position for position, name in enumerate(names_before(model))}
        parts = [
            *managed_parts(named_groups(units_of(model))),
            *unmanaged_tensors(model, is_first),
        ]
        parts.sort(key=lambda held: order.get(held.names[0], len(order)))
        names = renamed([held.names[0] for held in parts], rename, call)
        self._parts = {names[held.names[0]]: held for held in parts if held.names[0] in names}
        described = {
            held.names[0]: (name, _stored_dtype(held, dtype), held.shape)
            for name, held in self._parts.items()
        }
        self._images = images_of(described, max_file_nbytes)

    @property
    def names(self) -> list[str]:
        """The names of the files, including the index."""
        return [*(image.name for image in self._images), *([INDEX] if self._images[1:] else [])]

    @property
    def total_nbytes(self) -> int:
        """Bytes of the tensors in all files."""
        return sum(info.nbytes for image in self._images for info in image.tensors.values())

    def _hidden(self, token: str) -> Path:
        """Return the directory that the files are in until they get their names."""
        return hidden_beside(self._path / "weights", token)

    def described(self) -> list[object]:
        """Return what must be the same on all ranks."""
        return [(image.name, image.header, list(image.tensors)) for image in self._images]

    def create(self, token: str, shown: bool) -> int:
        """Create the files, hidden, with their headers and in their final length; return 0, the
        number of bytes of tensors that are written. Remove what killed saves have left."""
        self._fresh = make_fresh(self._hidden(token))
        remove_leftovers(self._path, "weights")
        for image in self._images:
            image.write_header(self._hidden(token) / image.name)
        return 0

    def write(self, token: str, shown: bool) -> int:
        """Write this rank's bytes, durably; return their number."""
        nbytes = 0
        own = [held for held in self._parts.values() if held.is_written_here]
        total = sum(held.values.nbytes for held in own)
        with progress_bar(shown, "save weights", total) as tick:
            for image in self._images:
                descriptor = os.open(self._hidden(token) / image.name, os.O_WRONLY)
                try:
                    for held in own:
                        if (info := image.tensors.get(held.names[0])) is not None:
                            nbytes += _write_part(descriptor, held, info, tick)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        return nbytes

    def publish(self, token: str) -> None:
        """Give the files their names, the index last."""
        if self._images[1:]:
            write_index(self._images, self._hidden(token) / INDEX)
        for name in self.names:
            (self._hidden(token) / name).rename(self._path / name)
        sync_directory(self._path)

    def discard(self) -> None:
        """Remove what was not published."""
        if self._fresh is not None:
            self._fresh.discard()


def _stored_dtype(held: HeldPart, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and held.dtype.is_floating_point else held.dtype


def _write_part(descriptor: int, held: HeldPart, info: TensorInfo, tick: Tick) -> int:
    """Write a part of a tensor; return the number of bytes."""
    nbytes = 0
    chunk = BLOCK_NBYTES // max(info.dtype.itemsize, held.dtype.itemsize)  # elements
    for box, values in held.boxes():
        for inner in boxes_of(box.sizes, chunk):
            some = values[slices(inner)]
            nbytes += write_box(descriptor, info, moved(inner, box.offsets), some)
            tick(some.nbytes)
    return nbytes
