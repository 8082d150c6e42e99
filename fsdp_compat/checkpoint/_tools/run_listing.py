"""The checkpoints in a run's folder, of any format."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from ..._archive.archive import Archive, Unrecognised
from ..._archive.blocks import damaged
from ..._archive.texts import found_in
from ..._progress import elapsing
from ..._text import joined
from ...errors import CheckpointError
from .._arguments import require_arguments
from .._folder.directory import step_in, steps_in
from .._formats.manifest import MANIFEST
from .._formats.native import files_of_native
from .._formats.rank_files import TORCH_SUFFIXES
from .._formats.recognition import (
    UNFINISHED,
    open_archive,
    problems_of,
    require_lengths,
    unreadable,
)
from .inspection import Facts

_NUMBER = re.compile(r"(\d+)\D*$")


@dataclasses.dataclass(frozen=True)
class Listed(Facts):
    """One checkpoint of a run."""

    path: Path
    kind: str  # the format, for people; empty if it is not known
    step: int | None  # as the checkpoint says, or else its name
    world_size: int | None  # ranks that wrote it; None if the files do not say so
    nbytes: int  # of its files
    problem: str  # why it is not complete, or not read; empty: none was found


@dataclasses.dataclass(frozen=True)
class Listing(Facts):
    """The checkpoints of a folder, by step. ``list_checkpoints`` returns it."""

    path: Path
    checkpoints: tuple[Listed, ...]
    also_in_json = ("latest",)

    @property
    def latest(self) -> Path | None:
        """Return the path of the highest step without a problem."""
        return next((each.path for each in reversed(self.checkpoints) if not each.problem), None)


def list_checkpoints(
    folder: str | os.PathLike[str], *, ignore_class: Collection[str] = (), progress: bool = False
) -> Listing:
    """Return the checkpoints in a run's folder, of any format, or the folder if it is one itself.

        for each in list_checkpoints("runs/7").checkpoints:
            print(each.path, each.step, each.nbytes, each.problem or "complete")

    No values are read: headers, metadata and the lengths of files.

    Args:
        folder: the folder.
        ignore_class: as for ``inspect``.
        progress: show on stderr how long it takes.

    Returns:
        ``path``, ``checkpoints`` by step (each with ``path``, ``kind``, ``step``, ``world_size``,
        ``nbytes`` and ``problem``, empty if none was found), and ``latest``, the path of the
        highest step without a problem, or None.

    Raises:
        CheckpointError: there are none.
        UsageError: an argument is invalid.
        OSError: the folder cannot be read."""
    require_arguments("checkpoint.files.list_checkpoints", progress, folder=folder)
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir())
    paths = [folder / name for name in names if _is_candidate(folder / name)]
    files = [path for path in paths if not path.is_dir()]
    if _are_one(folder, files, ignore_class):
        paths = [folder, *(path for path in paths if path not in files)]
    with elapsing(progress, f"reading the headers in {folder.name}"):
        found = [each for path in paths if (each := _listed(path, ignore_class)) is not None]
    if not found:
        raise unreadable(folder, joined(names, 8, ", ") or "an empty directory", is_listed=True)
    found.sort(key=lambda each: (-1 if each.step is None else each.step, each.path))
    return Listing(folder, tuple(found))


def _is_candidate(path: Path) -> bool:
    if path.name.startswith("."):
        return UNFINISHED.fullmatch(path.name) is not None
    return path.is_dir() or path.suffix in (*TORCH_SUFFIXES, ".safetensors")


def _are_one(folder: Path, files: Sequence[Path], ignore_class: Collection[str]) -> bool:
    """Return whether the files of a folder are one checkpoint."""
    if (folder / MANIFEST).is_file() or steps_in(folder):
        return (folder / MANIFEST).is_file()
    try:
        archive = open_archive(folder, ignore_class=ignore_class)
    except CheckpointError:
        return False
    is_mixed = {file.suffix for file in files} != {".safetensors"}
    return archive.path == folder and not (archive.kind == "safetensors" and is_mixed)


def _listed(path: Path, ignore_class: Collection[str]) -> Listed | None:
    """Return what a path holds, or None if nothing says that it is a checkpoint."""
    archive, problem, nbytes = Archive(path, "", {}), "a save that is running, or was killed", 0
    unfinished = UNFINISHED.fullmatch(path.name)
    try:
        files = path.rglob("*") if path.is_dir() else [path]
        nbytes = sum(file.stat().st_size for file in files if file.is_file())
        if unfinished is None:
            archive = _opened(path, ignore_class)
            problem = next(iter(problems_of(archive)), "")
    except Unrecognised:
        return None
    except CheckpointError as error:
        problem = f"{str(error).splitlines()[0].rstrip('.')}: {found_in(error)}"
    except OSError as error:  # a running job may have removed it
        problem = f"{error.strerror}: {error.filename}"
    number = _NUMBER.search(unfinished[1] if unfinished else path.stem)
    step = int(number[1]) if archive.step is None and number else archive.step
    return Listed(path, archive.kind, step, archive.world_size, nbytes, problem)


def _opened(path: Path, ignore_class: Collection[str]) -> Archive:
    """Return what a checkpoint holds; of a native one, what its manifest says."""
    if not (path / MANIFEST).is_file():
        return open_archive(path, ignore_class=ignore_class)
    archive = files_of_native(path)
    require_lengths(archive)
    if step_in(path.name) not in (None, archive.step):
        raise damaged(path, "the manifest of this step", f"that of step {archive.step}")
    return archive
