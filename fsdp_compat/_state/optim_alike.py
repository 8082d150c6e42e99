"""Whether the optimizers of all ranks hold the same parameters, which ranks tell each other before
anything is gathered or sent.

Every rank's optimizer may have its parameters in another order, and may lack those that the rank
has no part of. Everything else that differs is one error on all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from .._comm.communicator import Communicator
from .._engine.group import Group
from .._engine.state_store import store_of
from ..errors import RuntimeUsageError, explain
from .param_ownership import ParamOwnership

__all__ = ["Agreed", "Told", "agree_together", "held_by_any", "require_alike", "tell"]

_Runs = tuple[tuple[int, int], ...]  # (start, stop), in order


@dataclasses.dataclass(frozen=True)
class Told:
    """One rank's description of its optimizer. Parameters are numbered over some groups, in the
    model's order."""

    rank: int  # the global one
    sizes: tuple[int, ...]  # elements of a shard, by flat group
    held: _Runs  # parameters of which the rank has elements, and which its optimizer has
    missing: _Runs  # those of which it has elements, but which its optimizer lacks
    unmanaged: str  # a checksum of the names of the optimizer's parameters that no unit manages


def tell(ownership: ParamOwnership, groups: Sequence[Group]) -> Told:
    """Return this rank's description of its optimizer. groups: the same on all ranks."""
    here = [
        (position, p)
        for position, p in enumerate(_targets(ownership, groups))
        if not ownership.is_vacant(p)
    ]
    return Told(
        _global_rank(),
        tuple(store_of(group).numel for group in groups),
        _runs(position for position, p in here if p in ownership.members),
        _runs(position for position, p in here if p not in ownership.members),
        hashlib.sha1("\n".join(name for _, name in ownership.unmanaged).encode()).hexdigest(),
    )


def held_by_any(
    ownership: ParamOwnership, groups: Sequence[Group], told: Sequence[Told]
) -> set[nn.Parameter]:
    """Return the parameters of ``groups`` that some rank's optimizer has."""
    held = {position for its in told for run in its.held for position in range(*run)}
    return {
        p
        for position, p in enumerate(_targets(ownership, groups))
        if position in held or p in ownership.members
    }


def require_alike(
    ownership: ParamOwnership,
    groups: Sequence[Group],
    told: Sequence[Told],
    call: str,
    *,
    unmanaged: bool,
) -> None:
    """Raise UsageError unless all ranks have told the same; all of them find the same.

    unmanaged: also of parameters that no unit manages.
    """
    for number, group in enumerate(groups):
        sizes = {its.rank: its.sizes[number] if number < len(its.sizes) else 0 for its in told}
        if len(set(sizes.values())) > 1:
            raise _unlike(
                "A unit has another size on other ranks.",
                "the same model, with parameters of the same shapes, on every rank",
                f"{group.name}: shards of "
                f"{', '.join(f'{size} elements on rank {rank}' for rank, size in sizes.items())}",
                call,
                "build and wrap the model in the same way on every rank",
            )
    held = {position: its.rank for its in told for run in its.held for position in range(*run)}
    lacking = [
        (position, its.rank)
        for its in told
        for run in its.missing
        for position in range(*run)
        if position in held
    ]
    if lacking:
        sharded_params = _targets(ownership, groups)
        position = min(position for position, _ in lacking)
        without = sorted({rank for its_position, rank in lacking if its_position == position})
        more = len({its_position for its_position, _ in lacking}) - 1
        raise _unlike(
            "The optimizers of the ranks hold different parameters.",
            "the same parameters in the optimizer of every rank, in any order",
            f"{ownership.held[sharded_params[position]].names[0][1]!r}"
            f"{f' and {more} more' if more else ''}: missing on rank(s) "
            f"{textwrap.shorten(str(without), 200)}, there on rank {held[position]}",
            call,
            "make the optimizer from the same parameters on every rank; only those that a rank has "
            "no part of may be missing there",
        )
    if unmanaged and len({its.unmanaged for its in told}) > 1:
        own = next((its.unmanaged for its in told if its.rank == _global_rank()), "")
        raise _unlike(
            "The optimizers of the ranks hold different parameters outside of units.",
            "the same parameters in the optimizer of every rank, in any order",
            "other ones than here on rank(s) "
            f"{textwrap.shorten(str([its.rank for its in told if its.unmanaged != own]), 200)}",
            call,
            "make the optimizer from the same parameters on every rank",
        )


@dataclasses.dataclass(frozen=True)
class Agreed:
    """The descriptions that ranks have exchanged."""

    sharded_params: set[nn.Parameter]  # those that the optimizer of some rank has
    facts: Mapping[
        int, Sequence[Any]
    ]  # by the id of a flat group: what each rank of its shard axis has told of it


def agree_together(
    ownership: ParamOwnership | None,
    groups: Sequence[Group],
    problem: Exception | None,
    facts_of: Callable[[Group], Any],
    call: str,
) -> Agreed:
    """Return what the ranks that ``groups`` are spread over have told each other: ``facts_of`` each
    group.

    Collective: one small exchange for each set of ranks, the smaller sets first, so that what is
    wrong in one is heard of in those around it. Raises ``problem``, what keeps this rank from going
    on and leaves it without ``ownership``, and on all other ranks UsageError; likewise if ranks do
    not hold alike.
    """
    communicators: dict[int, tuple[Communicator, list[Group]]] = {}
    for group in groups:
        for communicator in (group.shard, *group.tensor_parallel):
            if communicator.ranks > 1:
                communicators.setdefault(id(communicator), (communicator, []))[1].append(group)
    text = "" if problem is None else str(_elsewhere(problem, call))
    sharded_params, facts = set[nn.Parameter](), dict[int, Sequence[Any]]()
    for communicator, its in sorted(
        communicators.values(), key=lambda pair: (pair[0].ranks, pair[0].members)
    ):
        own = (
            None
            if ownership is None
            else (tell(ownership, its), [facts_of(group) for group in its])
        )
        answers = communicator.gather_objects((text, own))
        text = text or next((its_text for its_text, _ in answers if its_text), "")
        if text or ownership is None:
            continue
        told = [answer[0] for _, answer in answers]
        try:
            require_alike(ownership, its, told, call, unmanaged=False)
        except RuntimeUsageError as error:
            text = str(error)
            continue
        sharded_params |= held_by_any(ownership, its, told)
        for number, group in enumerate(its):
            if group.shard is communicator:
                facts[id(group)] = [answer[1][number] for _, answer in answers]
    if problem is not None:
        raise problem
    if text:
        raise RuntimeUsageError(text)
    assert ownership is not None
    facts.update({id(group): [facts_of(group)] for group in groups if id(group) not in facts})
    return Agreed(sharded_params | ownership.members, facts)


def _elsewhere(problem: Exception, call: str) -> RuntimeUsageError:
    return _unlike(
        "Another rank could not give the state of its optimizer.",
        "an optimizer of this model's parameters on every rank",
        f"on rank {_global_rank()}: {type(problem).__name__}: {problem}",
        call,
        "see what that rank says",
    )


def _unlike(what: str, expected: str, got: str, where: str, fix: str) -> RuntimeUsageError:
    return RuntimeUsageError(explain(what, expected=expected, got=got, where=where, fix=fix))


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _targets(ownership: ParamOwnership, groups: Sequence[Group]) -> list[nn.Parameter]:
    return [param for group in groups for param in ownership.in_group(group)]


def _runs(positions: Iterable[int]) -> _Runs:
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return tuple(runs)
