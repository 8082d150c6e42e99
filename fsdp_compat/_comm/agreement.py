"""A problem of one rank is raised on all of them, after any exchange of small values: every rank
sends what it was ``told`` beside its answer, and calls ``raise_together`` with those of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import errors
from ..errors import CheckpointError, FsdpCompatError

Told = Sequence[str] | None  # the kind and the text of a problem, as JSON; None: no problem


def told(problem: BaseException | None) -> Told:
    """Return what the other ranks get to know of this rank's problem."""
    return None if problem is None else (type(problem).__name__, str(problem))


def raise_together(problem: BaseException | None, of_all: Sequence[Told], where: str) -> None:
    """Raise on every rank if one has a problem: its own there, elsewhere an error of the same kind
    that quotes the first one. of_all: what each rank has ``told``. where: the call."""
    if problem is not None:
        raise problem
    for rank, its in enumerate(of_all):
        if its is not None:
            kind: Any = vars(errors).get(its[0])
            is_ours = isinstance(kind, type) and issubclass(kind, FsdpCompatError)
            text = f"{where}, on rank {rank} of {len(of_all)}: {its[1]}"
            raise (kind if is_ours else CheckpointError)(text)
