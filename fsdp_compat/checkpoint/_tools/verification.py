"""Whether a checkpoint is complete and undamaged, and which of its values are not finite."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from ..._layout.box import Box
from ...errors import CheckpointError, UsageError
from .._blocks import FileFacts
from .._manifest import MANIFEST
from .._texts import brief, joined
from .archive import Archive, NotRead, Piece, StoredTensor, coverage_problem
from .facts import Facts
from .inspection import file_name
from .native_reading import files_of_native, is_native
from .numbers import comparable, count_not_finite
from .opening import open_archive, spans_of
from .paths import require_inside
from .reading import Files, boxes_of, read_box
from .work import MEMORY, Tick, for_each, numel_at_once, require_limits

_WHERE = "fsdp_compat.checkpoint.verify"
_TEMPORARY = 4  # copies of a slab in memory while it is looked at, as float64 at most


@dataclasses.dataclass(frozen=True)
class Problem(Facts):
    """One defect of a checkpoint."""

    kind: str
    """``"coverage"`` (elements that are missing, or that two parts hold), ``"checksum"``,
    ``"file"`` (missing, too short, unreadable), ``"link"`` (out of the directory), ``"copies"``
    (replicas that differ), ``"alias"`` (of a tensor that the checkpoint does not have) or
    ``"not finite"`` (only on demand)."""
    where: str  # the path of the tensor, or the name of the file
    what: str  # one line


@dataclasses.dataclass(frozen=True)
class TensorCheck(Facts):
    """What was found in one tensor."""

    path: str  # as in ``TensorFacts``
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_nan: int | None  # elements; None: its values were not read
    num_inf: int | None  # elements that are infinite; a complex one may be counted as both


@dataclasses.dataclass(frozen=True)
class Verification(Facts):
    """The result of ``verify``."""

    path: Path
    kind: str  # the format, for people
    tensors: tuple[TensorCheck, ...]
    problems: tuple[Problem, ...]
    num_files: int  # that hold tensors or have checksums
    num_checksums: int  # that were compared: of blocks or records; 0 if the files have none
    num_without_checksum: int  # tensors whose values could change without a trace
    nbytes: int  # of all tensors
    left_out: tuple[str, ...]  # what was not looked at, and why: such as states of random numbers
    in_json = (
        *("path", "kind", "is_intact", "problems", "num_files", "num_checksums"),
        *("num_without_checksum", "nbytes", "num_not_finite", "dtypes", "tensors", "left_out"),
    )

    @property
    def is_intact(self) -> bool:
        """Return whether there is no problem."""
        return not self.problems

    @property
    def num_not_finite(self) -> int:
        """Return the number of elements of all tensors that are NaN or infinite."""
        return sum((tensor.num_nan or 0) + (tensor.num_inf or 0) for tensor in self.tensors)

    def dtypes(self) -> dict[str, dict[torch.dtype, int]]:
        """Return how many tensors of each section ("model", "optimizer", "extra") have which
        dtype."""
        found: dict[str, collections.Counter[torch.dtype]] = {}
        for tensor in self.tensors:
            section = tensor.path.partition("/")[0]
            found.setdefault(section, collections.Counter())[tensor.dtype] += 1
        return {section: dict(counts) for section, counts in found.items()}


def verify(
    path: str | os.PathLike[str],
    *,
    values: bool = True,
    finite: bool = False,
    shapes: str | os.PathLike[str] | None = None,
    ignored: Collection[str] = (),
    keep_module: bool = False,
    memory: int = MEMORY,
    workers: int = 1,
    progress: bool = False,
) -> Verification:
    """Check a checkpoint of any format, and return every problem found.

        result = verify("runs/7/step-00001200", workers=4)
        assert result.is_intact, result.problems

    Every element of every tensor has to be in the files exactly once, every file as long as the
    checkpoint says and inside its directory. The values are read: checksums are compared, copies by
    replicas have to be equal, and NaN and infinite values are counted for each tensor. Native
    checkpoints have checksums, and so do files of torch.save and torch.distributed.checkpoint
    (unless they were turned off). safetensors files and those of torch before 1.6 have none:
    ``num_without_checksum`` counts the tensors whose values could have changed unnoticed.

    path: a file or a directory; its format is recognised.
    values: False: read no values and compare no checksums, which takes seconds.
    finite: values that are NaN or infinite are a problem.
    shapes, ignored, keep_module: as for ``inspect``.
    memory: bytes of values in memory at a time, by all workers together; at least 1 MiB for each.
    workers: threads. progress: draw a bar, with tqdm.

    Damage that prevents opening the checkpoint is a problem, too, and of a native one all files are
    still compared. Raises CheckpointError if there is no checkpoint, or if it holds objects of a
    class that is not in ``ignored``; UsageError for wrong arguments; OSError.
    """
    require_limits(memory, workers, progress, _WHERE)
    if finite and not values:
        raise UsageError.of(
            "Nothing can be said about values that are not read.",
            expected="values=True with finite=True",
            got="values=False",
            where=_WHERE,
            fix="leave one of them out",
        )
    try:
        archive = open_archive(Path(path), shapes, ignored, keep_module)
    except NotRead:
        raise
    except CheckpointError as error:
        archive = _unopened(Path(path))
        found = _Verifier(archive, values, finite, memory, workers).run(progress)
        problems = found.problems or (_problem_of(error, Path(path)),)
        return dataclasses.replace(found, problems=problems)
    return _Verifier(archive, values, finite, memory, workers).run(progress)


def _unopened(path: Path) -> Archive:
    """Return what can be said of a checkpoint that cannot be opened."""
    directory = path.parent if path.name == MANIFEST else path
    if directory.is_dir() and is_native(directory):
        return files_of_native(directory)
    return Archive(path, "not known: it cannot be opened", {})


def _problem_of(error: CheckpointError, path: Path) -> Problem:
    """Return an error that was raised while a checkpoint was opened."""
    title = str(error).partition("\n")[0].rstrip(".")
    return Problem("file", path.name, f"{title}: {_line(error)}")


class _Verifier:
    """One call of ``verify``."""

    def __init__(
        self, archive: Archive, values: bool, finite: bool, memory: int, workers: int
    ) -> None:
        self._archive, self._values, self._finite = archive, values, finite
        self._memory, self._workers = memory, workers
        self._files = Files(compares_records=False)  # every block and record is compared once
        self._checked = Files(archive.checksums)

    def run(self, progress: bool) -> Verification:
        archive = self._archive
        tensors = list(archive.all_tensors())
        spans = [(path, span, stop) for path, tensor in tensors for span, stop in spans_of(tensor)]
        ends: dict[Path, int] = {}
        for _, span, stop in spans:
            ends[span.path] = max(ends.get(span.path, 0), stop)
        problems = [*self._of_names(), *self._of_files(ends)]
        unusable = {problem.where for problem in problems if problem.kind in ("file", "link")}
        records: dict[Any, dict[str, None]] = {}  # with a checksum: the tensors in them
        for path, span, _ in spans:
            if span.checksum is not None:
                records.setdefault((span.path, span.checksum), {})[path] = None
        checked = [
            (path, what)
            for path, what in (*archive.checksums.items(), *records)
            if self._values and self._name(path) not in unusable
        ]

        def do(item: tuple[Any, Any], tick: Tick) -> tuple[TensorCheck | None, list[Problem]]:
            where, what = item
            if isinstance(what, StoredTensor):
                return self._look_at(where, what, unusable, tick)
            try:
                if isinstance(what, FileFacts):
                    self._checked.check_blocks(where, range(len(what.checksums)), tick)
                else:
                    self._files.compare(where, what, tick)
            except (CheckpointError, OSError) as error:
                names = f", of {joined([*records[item]], 3, ', ')}" if item in records else ""
                return None, [Problem("checksum", self._name(where), _line(error) + names)]
            return None, []

        with self._files:
            results = for_each(
                [*checked, *tensors],
                do,
                workers=self._workers,
                what="verify",
                total_nbytes=sum(map(self._nbytes_to_read, [*checked, *tensors])),
                progress=progress,
            )
        for _, found in results:
            problems += found
        bare = {
            path
            for path, span, _ in spans
            if span.checksum is None and span.path not in archive.checksums
        }
        return Verification(
            path=archive.path,
            kind=archive.kind,
            tensors=tuple(result for result, _ in results if result is not None),
            problems=tuple(problems),
            num_files=len(ends.keys() | archive.checksums.keys()),
            num_checksums=sum(
                len(what.checksums) if isinstance(what, FileFacts) else 1 for _, what in checked
            ),
            num_without_checksum=len(bare),
            nbytes=archive.nbytes,
            left_out=tuple(archive.left_out),
        )

    def _name(self, file: Path) -> str:
        return file_name(file, self._archive.path)

    def _nbytes_to_read(self, item: tuple[Any, Any]) -> int:
        what = item[1]
        if not isinstance(what, StoredTensor):
            return int(what.nbytes)
        copies = sum(piece.nbytes(what.dtype) for piece in what.copies)
        return what.nbytes + 2 * copies if self._values else 0

    # -- names and files

    def _of_names(self) -> Iterator[Problem]:
        archive = self._archive
        for name, target in archive.aliases.items():
            if target not in archive.tensors:
                yield Problem("alias", f"model/{name}", f"the checkpoint has no {target!r}")

    def _of_files(self, ends: dict[Path, int]) -> Iterator[Problem]:
        """Yield what is wrong with the files, without reading them."""
        archive = self._archive
        for path in sorted(ends.keys() | archive.checksums.keys()):
            name = self._name(path)
            try:
                if archive.path.is_dir():
                    require_inside(archive.path, path)
            except CheckpointError as error:
                yield Problem("link", name, _line(error))
                continue
            expected = archive.checksums.get(path)
            end = ends.get(path, 0) if expected is None else expected.nbytes
            try:
                with self._files.descriptor(path) as descriptor:
                    nbytes = os.fstat(descriptor).st_size
            except (OSError, CheckpointError) as error:
                yield Problem("file", name, _line(error))
                continue
            if nbytes < end or (expected is not None and nbytes != end):
                at_least = "" if expected is not None else "at least "
                yield Problem("file", name, f"{nbytes} bytes instead of {at_least}{end}")

    # -- values

    def _look_at(
        self, path: str, tensor: StoredTensor, unusable: set[str], tick: Tick
    ) -> tuple[TensorCheck, list[Problem]]:
        what = coverage_problem(tensor.shape, [piece.box for piece in tensor.pieces])
        problems = [] if what is None else [Problem("coverage", path, what)]
        counts: tuple[int, int] | None = None
        names = {self._name(span.path) for span, _ in spans_of(tensor)}
        if self._values and not problems and not names & unusable:
            try:
                counts = self._count(tensor, tick)
                problems += self._compare_copies(path, tensor, tick)
            except (CheckpointError, OSError) as error:
                problems.append(Problem("file", path, _line(error)))
            if self._finite and counts is not None and any(counts):
                problems.append(
                    Problem("not finite", path, f"{counts[0]} NaN, {counts[1]} infinite")
                )
        num_nan, num_inf = counts if counts is not None else (None, None)
        return TensorCheck(path, tensor.dtype, tensor.shape, num_nan, num_inf), problems

    def _count(self, tensor: StoredTensor, tick: Tick) -> tuple[int, int]:
        num_nan = num_inf = 0
        has_such = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        wide = 8 if has_such and comparable(tensor.dtype) else 0
        numel = numel_at_once(
            self._memory, self._workers, _TEMPORARY * (tensor.dtype.itemsize + wide)
        )
        buffer = torch.empty(min(numel, tensor.numel), dtype=tensor.dtype)
        for box in boxes_of(tensor.shape, numel):
            values = buffer[: box.numel]
            read_box(tensor, box, self._files, values.view(box.sizes))
            found = count_not_finite(values)
            num_nan, num_inf = num_nan + found[0], num_inf + found[1]
            tick(values.nbytes)
        return num_nan, num_inf

    def _compare_copies(self, path: str, tensor: StoredTensor, tick: Tick) -> list[Problem]:
        numel = numel_at_once(self._memory, self._workers, 4 * tensor.dtype.itemsize)
        problems = []
        for copy in tensor.copies:
            alone = dataclasses.replace(tensor, pieces=(copy,), copies=())
            num_different = 0
            for inner in boxes_of(copy.box.sizes, numel):
                offsets = zip(copy.box.offsets, inner.offsets, strict=True)
                box = Box(tuple(at + inside for at, inside in offsets), inner.sizes)
                one = read_box(tensor, box, self._files).view(-1).view(torch.uint8)
                other = read_box(alone, box, self._files).view(-1).view(torch.uint8)
                if not torch.equal(one, other):
                    size = tensor.dtype.itemsize
                    num_different += int((one != other).view(-1, size).any(dim=1).sum())
                tick(one.nbytes + other.nbytes)
            if num_different:
                problems.append(
                    Problem(
                        "copies",
                        path,
                        f"{num_different} of {copy.box.numel} elements {_by(copy)} differ from the "
                        "others'",
                    )
                )
        return problems


def _by(piece: Piece) -> str:
    return "in a copy" if piece.holder is None else f"in the copy of rank {piece.holder}"


def _line(error: Exception) -> str:
    """Return an error as one line: what was expected, and what was found instead."""
    if not isinstance(error, CheckpointError):
        return brief(error)
    facts = dict(
        line.strip().partition(":")[::2] for line in str(error).splitlines()[1:] if ":" in line
    )
    got, expected = facts.get("got", "").strip(), facts.get("expected", "").strip()
    return f"{got} instead of {expected}" if got and expected else brief(error)
