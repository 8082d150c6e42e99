"""The folder of a run's checkpoints: a directory ``step-00000042`` per step, complete with a
manifest of this step."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from ..._archive.texts import found_in
from ..._comm.board.progress import is_users
from ...errors import CheckpointError
from .._arguments import require_arguments
from .._formats.manifest import MANIFEST, Manifest, read_manifest
from .._ranks.ranks import Ranks, ranks_of
from .publishing import remove

STEP = "step-(?:[0-9]{8}|[1-9][0-9]{8,})"  # names of checkpoints, as ``directory_of`` has them

Saved = tuple[int, str]  # step and identity of a complete checkpoint
Offer = tuple[Saved | None, list[int]]  # see ``Run.offer``


def directory_of(folder: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """Return the step that the name of a checkpoint's directory says, or None."""
    return int(name.removeprefix("step-")) if re.fullmatch(STEP, name) else None


def steps_in(folder: Path) -> dict[int, Path]:
    """Return the paths that have the name of a checkpoint, by step."""
    try:
        found = {step_in(path.name): path for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {step: path for step, path in found.items() if step is not None}


def _manifest_in(path: Path, step: int) -> Manifest | str:
    """Return the manifest of a complete checkpoint, or what is wrong: "" for an unfinished save."""
    try:
        if not (path / MANIFEST).is_file():
            return ""
        found = read_manifest(path)
    except (CheckpointError, OSError) as error:
        first = str(error).splitlines()[0].rstrip(".")
        return f"{first}: {found_in(error)}" if isinstance(error, CheckpointError) else first
    return found if found.step == step else f"its manifest is that of step {found.step}"


def latest(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Path | None:
    """Return the complete checkpoint with the highest step in ``folder``, or None.

    Saves that did not finish do not count. A directory whose manifest is damaged or unreadable is
    skipped with a warning.

    With a folder per node, nodes may differ: if the job ends while a save gives the checkpoint its
    name, some have it and others do not. Pass the ``model`` on all ranks to get the highest step
    that all of them have, of the same save; a warning names the higher ones.

    Collective: all ranks of the model, if it is passed."""
    call = "checkpoint.latest"
    if model is None:
        require_arguments(call, False, folder=folder)
        newest, _ = Run(Path(folder)).offer()
        return None if newest is None else directory_of(Path(folder), newest[0])
    _, ranks = ranks_of(model, call)
    with ranks.taking_part():
        with ranks.agreeing("The folder could not be read.", folder, "") as agreement:
            require_arguments(call, False, folder=folder)
            run = Run(Path(folder))
            agreement.own = run.offer()
        return newest_common(run, ranks, agreement.by_rank)[0]


class Run:
    """The complete checkpoints in a run's folder, as one rank sees them. Manifests may be large:
    they are read from the highest step down, only as far as ranks need to find one in common."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: Manifest | None = None  # of those offered, the last one
        self._complete = _complete_in(folder)
        self._steps: list[int] = []  # of the manifests that were read

    def offer(self, most: int | None = None) -> Offer:
        """Return the newest complete checkpoint up to step ``most``, or None, and the steps that
        seem to be complete: damaged manifests may be among those not read yet."""
        while self.newest is None or (most is not None and self.newest.step > most):
            self.newest = next(self._complete, None)
            if self.newest is None:
                return None, sorted(self._steps)
            self._steps.append(self.newest.step)
        newest, steps = self.newest, [*self._steps]
        for step, path in steps_in(self.folder).items():
            with contextlib.suppress(OSError):
                steps += [step] if step < newest.step and (path / MANIFEST).is_file() else []
        return (newest.step, newest.identity), sorted(steps)


def newest_common(
    run: Run, ranks: Ranks, offers: Sequence[Offer]
) -> tuple[Path | None, list[list[int]]]:
    """Return the newest checkpoint that all ranks have, or None; and the steps that each rank has.
    Warns of newer ones. offers: of all ranks. Collective if their newest ones differ."""
    while True:
        newest = [saved for saved, _ in offers if saved is not None]
        if len(newest) < len(offers):
            return None, [steps for _, steps in offers]
        step = min(newest)[0]
        if all(saved == newest[0] for saved in newest):
            for skipped in sorted({n for _, steps in offers for n in steps if n > step}):
                why = "not all ranks have it, of the same save"
                _warn_of_skipped(directory_of(run.folder, skipped), why)
            return directory_of(run.folder, step), []
        is_one_step = max(newest)[0] == step  # of different saves
        with ranks.agreeing("The folder could not be read.", run.folder, "") as agreement:
            agreement.own = run.offer(step - is_one_step)
        offers = agreement.by_rank


def _complete_in(folder: Path) -> Iterator[Manifest]:
    """Yield the manifests of the complete checkpoints in a folder, the highest step first. Warns of
    damaged ones."""
    for step, path in sorted(steps_in(folder).items(), reverse=True):
        found = _manifest_in(path, step)
        if isinstance(found, Manifest):
            yield found
        elif found:
            _warn_of_skipped(path, found)


def _warn_of_skipped(path: Path, why: str) -> None:
    """Warn at the line of the user's call."""
    frames = traceback.walk_stack(sys._getframe())
    levels = (n for n, (frame, _) in enumerate(frames, 1) if is_users(frame.f_code.co_filename))
    warnings.warn(f"{path} was skipped: {why}", stacklevel=next(levels, 1))


def remove_older(folder: Path, step: int, keep_last: int) -> None:
    """Remove the oldest complete checkpoints before ``step``, so that ``keep_last`` remain. Links,
    and directories without a manifest of their step, stay. Raises OSError."""
    older = [
        path
        for number, path in sorted(steps_in(folder).items())
        if number < step and not path.is_symlink()
        if isinstance(_manifest_in(path, number), Manifest)
    ]
    for path in older[: max(len(older) - (keep_last - 1), 0)]:
        with contextlib.suppress(OSError):  # another save removes it, or another user owns it
            remove(path)
