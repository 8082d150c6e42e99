"""Whether a checkpoint is complete and undamaged, and which of its values are not finite."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from ..._archive.archive import Archive, NotRead, Span, StoredTensor
from ..._archive.blocks import FileFacts
from ..._archive.reader import AT_ONCE_NBYTES, Files, read_box, values_of
from ..._archive.texts import brief
from ..._archive.threads import for_each
from ..._progress import Tick
from ..._text import joined
from ...errors import CheckpointError, unusable
from .._arguments import require_arguments
from .._formats.native import files_of_native, native_in
from .._formats.paths import require_inside
from .._formats.recognition import open_archive, require_lengths
from .arithmetic import count_not_finite, count_unequal
from .inspection import Facts, relative_name

_CALL = "checkpoint.files.verify"


@dataclasses.dataclass(frozen=True)
class Problem(Facts):
    """One defect of a checkpoint. Its kind is ``"coverage"`` (elements missing, or held by two
    parts), ``"checksum"``, ``"file"`` (missing, too short, unreadable, outside of the
    directory), ``"copies"`` (replicas that differ), ``"optimizer"`` (state of a parameter that the
    model does not have) or ``"not finite"`` (only on demand)."""

    kind: str
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
    num_checksums: int  # that were compared: of blocks or records; 0 if the files have none
    num_without_checksum: int  # tensors whose values could change without a trace
    nbytes: int  # of all tensors
    left_out: tuple[str, ...]  # what was not looked at, and why: such as states of random numbers
    also_in_json = ("is_intact",)

    @property
    def is_intact(self) -> bool:
        """Return whether there is no problem."""
        return not self.problems


def verify(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    finite: bool = False,
    shapes: str | os.PathLike[str] | None = None,
    ignore_class: Collection[str] = (),
    keep_module: bool = False,
    progress: bool = False,
) -> Verification:
    """Check a checkpoint of any format, and return every problem found.

        result = verify("runs/7/step-00001200")
        assert result.is_intact, result.problems

    Every element of every tensor has to be in the files exactly once, every file as long as the
    checkpoint says and inside its directory. Checksums are compared, copies by replicas have to be
    equal, and NaN and infinite values are counted. Native checkpoints, torch.save and
    torch.distributed.checkpoint have checksums; safetensors files do not: their values could have
    changed unnoticed. Damage that prevents opening the checkpoint is a problem, too; the files of a
    native one are still compared.

    Args:
        path: as for ``inspect``.
        quick: read no values and compare no checksums, which takes seconds.
        finite: values that are NaN or infinite are a problem.
        shapes: as for ``inspect``.
        ignore_class: as for ``inspect``.
        keep_module: as for ``inspect``.
        progress: show bytes and rate on stderr.

    Returns:
        ``path``, ``kind`` (the format), ``tensors`` (each with ``path``, ``dtype``, ``shape``,
        ``num_nan`` and ``num_inf``), ``problems`` (each with ``kind``, ``where`` and ``what``),
        ``num_checksums``, ``num_without_checksum`` (tensors), ``nbytes``, ``left_out`` and
        ``is_intact``.

    Raises:
        CheckpointError: there is no checkpoint, or it holds objects of a class that is not in
            ``ignore_class``.
        UsageError: an argument is invalid.
        OSError: a file cannot be read."""
    require_arguments(_CALL, progress, path=path)
    if finite and quick:
        raise unusable("finite", "False with quick: no values are read", finite, _CALL)
    opening: list[Problem] = []
    try:
        archive = open_archive(path, shapes, ignore_class, keep_module, progress)
    except NotRead:
        raise
    except CheckpointError as error:
        title = str(error).partition("\n")[0].rstrip(".")
        opening = [Problem("file", Path(path).name, f"{title}: {_line(error)}")]
        archive = Archive(Path(path), "not known: it cannot be opened", {})
        if native := native_in(archive.path):
            with contextlib.suppress(CheckpointError):
                archive = files_of_native(native)
    found = _Verifier(archive, not quick, finite).run(progress)
    return dataclasses.replace(found, problems=found.problems or tuple(opening))


class _Verifier:
    """One call of ``verify``."""

    def __init__(self, archive: Archive, values: bool, finite: bool) -> None:
        self._archive, self._values, self._finite = archive, values, finite
        # Each block and record is compared once, apart from the tensors that lie in it.
        self._blocks, self._files = Files(archive.checksums), Files(compares_records=False)
        self._tensors: list[tuple[str, StoredTensor]] = []
        self._bare: set[str] = set()  # tensors with values that have no checksum
        self._records: dict[Any, list[str]] = {}  # with a checksum: the tensors in each

    def run(self, progress: bool) -> Verification:
        with self._files:
            problems = [*self._problems_of_files(), *self._problems_of_places()]
            unusable = {problem.where for problem in problems}
            compared: list[tuple[Path, Any]] = [
                item
                for item in (*self._archive.checksums.items(), *self._records)
                if self._values and self._name(item[0]) not in unusable
            ]
            items = [*compared, *self._tensors]
            results = for_each(
                items,
                lambda item, tick: [*self._look_at(item, tick)],
                what="verify",
                total_nbytes=sum(what.nbytes for _, what in items),
                progress=progress and self._values,
            )
        found = [each for result in results for each in result]
        return Verification(
            path=self._archive.path,
            kind=self._archive.kind,
            tensors=tuple(each for each in found if isinstance(each, TensorCheck)),
            problems=(*problems, *(each for each in found if isinstance(each, Problem))),
            num_checksums=sum(
                len(what.checksums) if isinstance(what, FileFacts) else 1 for _, what in compared
            ),
            num_without_checksum=len(self._bare),
            nbytes=self._archive.nbytes,
            left_out=tuple(self._archive.left_out),
        )

    def _name(self, file: Path) -> str:
        return relative_name(file, self._archive.path)

    def _problems_of_files(self) -> Iterator[Problem]:
        """Yield files that are missing, of another length, or outside of the directory."""
        for file, facts in sorted(self._archive.checksums.items(), key=lambda item: item[0]):
            try:
                require_inside(self._archive.path, file)
                require_lengths(dataclasses.replace(self._archive, checksums={file: facts}))
            except (OSError, CheckpointError) as error:
                yield Problem("file", self._name(file), _line(error))

    def _problems_of_places(self) -> Iterator[Problem]:
        """Enter all tensors and their records. Yield those with a chunk that cannot be opened, and
        states of no parameter."""
        for path, tensor in self._archive.all_tensors():
            pieces = [piece for piece in (*tensor.pieces, *tensor.copies) if piece.box.numel]
            try:
                spans = [x for x in (piece.source for piece in pieces) if isinstance(x, Span)]
            except (CheckpointError, OSError) as error:
                yield Problem("file", path, _line(error))
                continue
            self._tensors.append((path, tensor))
            for span in spans:
                if span.checksum is not None:
                    self._records.setdefault((span.path, span.checksum), []).append(path)
                elif span.path not in self._archive.checksums:
                    self._bare.add(path)
        for name in self._archive.strange_states:
            yield Problem("optimizer", name, "no parameter of the model has this name")

    # -- values

    def _look_at(self, item: tuple[Any, Any], tick: Tick) -> Iterator[Facts]:
        """Yield what is wrong with the blocks of a file, a record or a tensor, and its counts."""
        where, what = item
        try:
            if isinstance(what, StoredTensor):
                yield from self._look_at_tensor(where, what, tick)
            elif isinstance(what, FileFacts):
                self._blocks.check_blocks(where, range(len(what.checksums)), tick)
            else:
                self._files.compare(where, what, tick)
        except (CheckpointError, OSError) as error:
            names = list(dict.fromkeys(self._records.get(item, ())))
            of = f", of {joined(names, 3, ', ')}" if names else ""
            yield Problem("checksum", self._name(where), _line(error) + of)

    def _look_at_tensor(self, path: str, tensor: StoredTensor, tick: Tick) -> Iterator[Facts]:
        counts: list[int | None] = [None, None]
        what = tensor.coverage_problem()
        if what is not None:
            yield Problem("coverage", path, what)
        elif self._values:
            numel = AT_ONCE_NBYTES // tensor.dtype.itemsize
            try:
                found = [count_not_finite(x) for x in values_of(tensor, self._files, numel, tick)]
                counts = [sum(each[at] for each in found) for at in (0, 1)]
                for text in self._copies(tensor, numel, tick):
                    yield Problem("copies", path, text)
            except (CheckpointError, OSError) as error:
                yield Problem("file", path, _line(error))
        if self._finite and any(counts):
            yield Problem("not finite", path, f"{counts[0]} NaN, {counts[1]} infinite")
        yield TensorCheck(path, tensor.dtype, tensor.shape, *counts)

    def _copies(self, tensor: StoredTensor, numel: int, tick: Tick) -> Iterator[str]:
        """Yield which copies differ from the pieces, and in how many elements."""
        for copy in tensor.copies:
            alone = dataclasses.replace(tensor, pieces=(copy,), copies=())
            num_different = 0
            for box in copy.box.cut(AT_ONCE_NBYTES // tensor.dtype.itemsize):
                one, other = (read_box(side, box, self._files) for side in (tensor, alone))
                num_different += count_unequal(one, other)
                tick(0)
            if num_different:
                where = "a copy" if copy.holder is None else f"the copy of rank {copy.holder}"
                counts = f"{num_different} of {copy.box.numel} elements"
                yield f"{counts} in {where} differ from the others'"


def _line(error: Exception) -> str:
    """Return an error as one line: what it got, and what was expected."""
    if isinstance(error, FileNotFoundError):
        return "No such file"
    found = re.search(r"\n  expected: (.*)\n  got:      (.*)", str(error))
    return f"{found[2]} instead of {found[1]}" if found else brief(error)
