"""Which checkpoint of a run ``load`` and ``resume`` take: the newest that all ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..._archive.archive import Unrecognised
from ..._text import joined
from ...errors import CheckpointError, unusable
from .._formats.manifest import MANIFEST, file_name, read_manifest
from .._formats.recognition import open_archive
from .._ranks.ranks import Ranks
from .directory import Offer, Run, newest_common, steps_in


def offer_of(run: Run, may_be_none: bool) -> Offer | None:
    """Return the newest complete checkpoint in a run's folder, or None if it is not one.

    may_be_none: take a path without any checkpoint for the folder of a run that has not saved yet.
    Raises CheckpointError if all in the folder are damaged, UsageError for one rank's file."""
    path = run.folder
    if path.match("rank-*.safetensors") and (path.parent / MANIFEST).is_file():
        fix, expected = f"pass {path.parent}", "the directory of a checkpoint"
        raise unusable("A file with the part of one rank", expected, str(path), "path", fix)
    if (path / MANIFEST).exists() or (path / file_name(0)).exists():
        return None
    steps = steps_in(path)
    offer = run.offer()
    has_any = offer[0] is not None
    for step in () if has_any else steps.values():
        if (step / MANIFEST).is_file():
            read_manifest(step)  # raises: a damaged checkpoint is not a run that has not saved
    return offer if has_any or (may_be_none and (steps or _holds_none(path))) else None


def _holds_none(path: Path) -> bool:
    """Return whether no format is recognised at a path. Logs may be there."""
    try:
        open_archive(path)
    except CheckpointError as error:  # load raises the others
        return isinstance(error, Unrecognised)
    return False


def newest_of_all(run: Run, ranks: Ranks, offers: Sequence[Offer]) -> Path | None:
    """Return the newest checkpoint that all ranks have, or None if none has any. Raises
    CheckpointError if some have, but none in common. Collective if their newest ones differ."""
    newest, by_rank = newest_common(run, ranks, offers)
    if newest is not None or not any(by_rank):
        return newest
    steps = [
        f"rank {rank}: {', '.join(map(str, its)) or 'none'}" for rank, its in enumerate(by_rank)
    ]
    raise CheckpointError.of(
        "The ranks have no checkpoint in common.",
        expected="a step that is complete on all ranks, or no checkpoint on any",
        got=f"steps by rank: {joined(steps, 8, '; ')}",
        where=str(run.folder),
        fix="mount the same folder on all nodes, or copy a checkpoint to the nodes without one",
    )
