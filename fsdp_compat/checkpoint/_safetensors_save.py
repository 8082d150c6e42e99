"""Saving a model's weights as safetensors files: whole tensors under their names, in one file, or
in several with an index. Each rank writes its own bytes; nothing is gathered."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from .. import errors
from .._comm.host_memory import memory_of
from .._layout.pieces import Rows
from .._layout.spec import Interval
from .._state.units import names_before, units_of
from ..errors import CheckpointError, UsageError
from ._blocks import BLOCK_NBYTES, Tick, make_directories, sync_directory
from ._header import METADATA, TensorInfo, encode_header, is_known
from ._named_groups import named_groups
from ._progress import progress_bar
from ._ranks import all_ranks_or_raise, checkpoint_error_from, ranks_of, require_rest
from ._safetensors_parts import (
    INDEX,
    ONE_FILE,
    HeldPart,
    Rename,
    check_arguments,
    digest,
    managed_parts,
    renamed,
    require_same_plan,
    unmanaged_tensors,
)


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
    with ranks.taking_part():
        problem: BaseException | None = None
        files: _WeightFiles | None = None
        try:
            check_arguments(call, path, rename, dtype, progress)
            if (
                isinstance(max_file_nbytes, bool)
                or not isinstance(max_file_nbytes, int)
                or max_file_nbytes < 1
            ):
                raise errors.wrong_type(
                    "max_file_nbytes", "a number of bytes, at least 1", max_file_nbytes, call
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
        told = all_ranks_or_raise(
            ranks, problem, (digest(files and files.described()), uuid.uuid4().hex), call
        )
        require_same_plan([digest for digest, _ in told], ranks, call)
        assert files is not None
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
            files.remove(token)
        all_ranks_or_raise(ranks, problem, None, call)
        return [Path(path) / name for name in files.names]


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


@dataclasses.dataclass(frozen=True)
class _WeightFile:
    header: bytes
    tensors: dict[str, TensorInfo]  # by name in the model


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
        order = {name: position for position, name in enumerate(names_before(model))}
        groups = named_groups(units_of(model))
        parts = [*managed_parts(groups), *unmanaged_tensors(model, groups, is_first)]
        parts.sort(key=lambda held: order.get(held.names[0], len(order)))
        self._parts: list[HeldPart] = []
        files: list[dict[str, tuple[str, torch.dtype, tuple[int, ...]]]] = [{}]
        names: set[str] = set()
        nbytes = self.total_nbytes = 0  # the latter: of the tensors in all files
        for held in parts:
            name = renamed(held.names[0], rename, call)
            if name is None:
                continue
            if name == METADATA:
                raise errors.wrong_type(
                    "the result of rename", f"a name for {held.names[0]!r}", name, call
                )
            if name in names:
                raise UsageError.of(
                    "Two tensors of the model get the same name in the files.",
                    expected="a different name for each",
                    got=f"{name!r} for {held.names[0]!r} and for another tensor",
                    where=call,
                    fix="make rename return different names, or None for one of them",
                )
            names.add(name)
            stored = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
            if not is_known(stored):
                raise UsageError.of(
                    "safetensors files do not support this dtype.",
                    expected="a dtype that the format supports",
                    got=f"{stored} for {held.names[0]!r}",
                    where=call,
                    fix=(
                        "pass dtype=torch.float32"
                        if stored.is_floating_point
                        else "leave it out with rename"
                    )
                    + ", or use checkpoint.save, which keeps every dtype",
                )
            size = math.prod(held.shape) * stored.itemsize
            if nbytes and nbytes + size > max_file_nbytes:
                files.append({})
                nbytes = 0
            files[-1][held.names[0]] = name, stored, held.shape
            nbytes += size
            self.total_nbytes += size
            self._parts.append(held)
        self._files: dict[str, _WeightFile] = {}
        for number, tensors in enumerate(files):
            header, infos = encode_header(list(tensors.values()), {"format": "pt"})
            by_name = {info.name: info for info in infos}
            file_name = (
                ONE_FILE
                if len(files) == 1
                else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            )
            self._files[file_name] = _WeightFile(
                header, {model_name: by_name[name] for model_name, (name, _, _) in tensors.items()}
            )

    @property
    def names(self) -> list[str]:
        """The names of the files, including the index."""
        return [*self._files, *([INDEX] if len(self._files) > 1 else [])]

    def _partial(self, name: str, token: str) -> Path:
        return self._path / f".{name}.{token}"

    def described(self) -> list[object]:
        """Return what must be the same on all ranks."""
        return [(name, file.header, list(file.tensors)) for name, file in self._files.items()]

    def create(self, token: str, shown: bool) -> int:
        """Create the files under hidden names, with their headers and in their final length; return
        0, the number of bytes of tensors that are written."""
        make_directories(self._path)
        for name, file in self._files.items():
            with open(self._partial(name, token), "xb") as created:
                created.write(file.header)
                created.truncate(
                    max([len(file.header), *(info.stop for info in file.tensors.values())])
                )
        return 0

    def write(self, token: str, shown: bool) -> int:
        """Write this rank's bytes, durably; return their number."""
        nbytes = 0
        own = [held for held in self._parts if held.is_written_here]
        total = sum(held.values.nbytes for held in own)
        with progress_bar(shown, "save weights", total) as tick:
            for name, file in self._files.items():
                descriptor = os.open(self._partial(name, token), os.O_WRONLY)
                try:
                    for held in own:
                        if (info := file.tensors.get(held.names[0])) is not None:
                            nbytes += _write_part(descriptor, held, info, tick)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        return nbytes

    def publish(self, token: str) -> None:
        """Give the files their names, the index last."""
        for name in self._files:
            self._partial(name, token).rename(self._path / name)
        if len(self._files) > 1:
            file_of = {
                info.name: name
                for name, file in self._files.items()
                for info in file.tensors.values()
            }
            index = {"metadata": {"total_size": self.total_nbytes}, "weight_map": file_of}
            partial = self._partial(INDEX, token)
            with open(partial, "x", encoding="utf-8") as text:
                json.dump(index, text, indent=2)
                text.flush()
                os.fsync(text.fileno())
            partial.rename(self._path / INDEX)
        sync_directory(self._path)

    def remove(self, token: str) -> None:
        """Remove the hidden files that were not published."""
        for name in (*self._files, INDEX):
            with contextlib.suppress(OSError):
                self._partial(name, token).unlink()


def _write_part(descriptor: int, held: HeldPart, info: TensorInfo, tick: Tick) -> int:
    """Write a part of a tensor; return the number of bytes."""
    size, nbytes = info.dtype.itemsize, 0
    chunk = BLOCK_NBYTES // max(size, held.dtype.itemsize)  # elements
    for rows in _in_chunks(held.rows(), chunk):
        values = held.values[rows.to : rows.to + rows.to_span]
        data = memory_of(values.to("cpu", info.dtype).contiguous())
        for number in range(rows.count):
            row = data[number * rows.to_stride * size :][: rows.numel * size]
            _write_at(descriptor, row, info.start + (rows.start + number * rows.stride) * size)
            nbytes += len(row)
        tick(rows.count * rows.numel * held.dtype.itemsize)
    return nbytes


def _in_chunks(found: Iterator[Rows], chunk: int) -> Iterator[Rows]:
    """Yield the same elements, as rows that lie in at most ``chunk`` elements of the target."""
    for rows in found:
        step = max(chunk // rows.to_stride, 1)
        for first in range(0, rows.count, step):
            few = rows.part(first, min(step, rows.count - first))
            if few.to_span <= chunk:
                yield few
                continue
            for start in range(few.start, few.start + few.numel, chunk):  # a single long row
                yield from few.within(Interval(start, start + chunk))


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        num_written = os.pwrite(descriptor, data, start)
        data, start = data[num_written:], start + num_written
