"""What one rank refuses, all ranks refuse: each tells its problem beside its answer, in one
exchange of small values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import errors
from ..errors import FsdpCompatError, RuntimeUsageError

Told = Sequence[str] | None  # the class and the text of a problem, as JSON; None: no problem


@dataclasses.dataclass
class Agreement:
    """What ranks tell each other after a step that each takes by itself."""

    own: Any = None  # of this rank, set inside the with block
    by_rank: list[Any] = dataclasses.field(default_factory=list)  # set at its end


@contextlib.contextmanager
def agreeing(exchange: Callable[[Any], list[Any]], where: str) -> Iterator[Agreement]:
    """Run the with block on all ranks; if it fails on any, raise on all, as ``raise_together``.
    exchange: returns every rank's value. Collective."""
    agreement, problem = Agreement(), None
    try:
        yield agreement
    except Exception as error:  # raised when the other ranks have been told
        problem = error
    answers = exchange((told(problem), agreement.own))
    raise_together(problem, [its for its, _ in answers], where)
    agreement.by_rank = [own for _, own in answers]


def told(problem: BaseException | None) -> Told:
    """Return what the other ranks get to know of this rank's problem."""
    return None if problem is None else (type(problem).__name__, str(problem))


def raise_together(
    problem: BaseException | None,
    of_all: Sequence[Told],
    where: str,
    otherwise: type[FsdpCompatError] = RuntimeUsageError,
) -> None:
    """Raise on every rank if one has a problem: its own there, elsewhere an error that quotes the
    first one, of its class if that is the package's. of_all: what each rank has ``told``. where:
    the call."""
    if problem is not None:
        raise problem
    for rank, its in enumerate(of_all):
        if its is not None:
            kind: Any = vars(errors).get(its[0])
            is_ours = isinstance(kind, type) and issubclass(kind, FsdpCompatError)
            text = f"{where}, on rank {rank} of {len(of_all)}: {its[0]}: {its[1]}"
            raise (kind if is_ours else otherwise)(text)
