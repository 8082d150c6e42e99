"""Checks that the optimizers of all ranks hold the same parameters. Ranks exchange what theirs
holds before anything is gathered or sent.

Optimizers may hold their parameters in different orders, and may lack parameters that their rank
has no part of. Any other difference raises the same error on all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from .._comm.transport import Transport
from .._engine.group import Group
from .._engine.state_store import StateStore, store_of
from ..errors import RuntimeUsageError, explain
from .optim_contents import ParamOwnership

_Runs = tuple[tuple[int, int], ...]  # (start, stop), in order


@dataclasses.dataclass(frozen=True)
class OptimizerFacts:
    """One rank's description of its optimizer, for other ranks. Parameters are numbered over some
    groups, in the model's order."""

    rank: int  # the global rank
    # By flat group: elements of a shard; of tensor-parallel parameters, of which ranks may hold
    # parts of different sizes, those of the whole.
    sizes: tuple[int, ...]
    held: _Runs  # parameters that the rank has elements of and its optimizer holds
    missing: _Runs  # parameters that the rank has elements of but its optimizer does not hold
    unmanaged: str  # a checksum of the names of the optimizer's parameters that no unit manages


def describe(ownership: ParamOwnership, groups: Sequence[Group]) -> OptimizerFacts:
    """Return this rank's description of its optimizer. groups: the same on all ranks."""
    here = [
        (position, p)
        for position, p in enumerate(_sharded_params(ownership, groups))
        if not ownership.is_vacant(p)
    ]
    return OptimizerFacts(
        _global_rank(),
        tuple(_size(store_of(group)) for group in groups),
        _runs(position for position, p in here if p in ownership.members),
        _runs(position for position, p in here if p not in ownership.members),
        hashlib.sha1("\n".join(name for _, name in ownership.unmanaged).encode()).hexdigest(),
    )


def _size(store: StateStore) -> int:
    if not any(parallel is not None for parallel in store.parallel):
        return store.numel
    return sum(math.prod(store.shape(index)) for index in range(len(store.orig_params)))


def held_by_any(
    ownership: ParamOwnership, groups: Sequence[Group], by_rank: Sequence[OptimizerFacts]
) -> set[nn.Parameter]:
    """Return the parameters of ``groups`` that any rank's optimizer holds."""
    held = {position for facts in by_rank for position in _positions(facts.held)}
    return {
        p
        for position, p in enumerate(_sharded_params(ownership, groups))
        if position in held or p in ownership.members
    }


def require_alike(
    ownership: ParamOwnership,
    groups: Sequence[Group],
    by_rank: Sequence[OptimizerFacts],
    call: str,
    *,
    unmanaged: bool,
) -> None:
    """Raise UsageError unless the facts of all ranks match. All ranks come to the same result.

    unmanaged: whether to compare parameters that no unit manages, too.
    """
    for number, group in enumerate(groups):
        sizes = {each.rank: (*each.sizes, *[0] * len(groups))[number] for each in by_rank}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{size} elements on rank {rank}" for rank, size in sizes.items())
            raise RuntimeUsageError.of(
                "A unit does not have the same size on all ranks.",
                expected="the same model, with parameters of the same shapes, on every rank",
                got=f"{group.name}: shards of {listed}",
                where=call,
                fix="build and wrap the model in the same way on every rank",
            )
    held = {position: facts.rank for facts in by_rank for position in _positions(facts.held)}
    missing: dict[int, list[int]] = {}
    for facts in by_rank:
        for position in _positions(facts.missing) & held.keys():
            missing.setdefault(position, []).append(facts.rank)
    different = ""
    if missing:
        position, ranks = min(missing.items())
        name = ownership.names_in(_sharded_params(ownership, groups)[position])[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        different = (
            f"{name!r}{more}: missing on rank(s) {textwrap.shorten(str(ranks), 200)}, present on "
            f"rank {held[position]}"
        )
    if unmanaged and not different and len({facts.unmanaged for facts in by_rank}) > 1:
        own = next((facts.unmanaged for facts in by_rank if facts.rank == _global_rank()), "")
        others = [facts.rank for facts in by_rank if facts.unmanaged != own]
        different = (
            f"different parameters outside of units on rank(s) {textwrap.shorten(str(others), 200)}"
        )
    if different:
        raise RuntimeUsageError.of(
            "The optimizers of the ranks hold different parameters.",
            expected="the same parameters in the optimizer of every rank, in any order",
            got=different,
            where=call,
            fix="make the optimizer from the same parameters on every rank; a rank may only leave "
            "out parameters that it has no part of",
        )


@dataclasses.dataclass(frozen=True)
class Agreed:
    """The descriptions that ranks have exchanged."""

    sharded_params: set[nn.Parameter]  # those that any rank's optimizer holds
    # By the id of a flat group: the facts that each rank of its shard axis has given of it.
    facts: Mapping[int, Sequence[Any]]


def agree_together(
    ownership: ParamOwnership | None,
    groups: Sequence[Group],
    problem: Exception | None,
    facts_of: Callable[[Group], Any],
    call: str,
) -> Agreed:
    """Exchange ``facts_of`` each group among the ranks that shard it, and return the facts.

    Collective: one small exchange for each set of ranks, smaller sets first, so that an error in
    one reaches the sets around it. problem: why this rank cannot go on, and has no ``ownership``;
    it is raised here, and as UsageError on all other ranks. Raises UsageError if ranks hold
    different parameters.
    """
    communicators: dict[int, tuple[Transport, list[Group]]] = {}
    for group in groups:
        for communicator in (group.shard, *group.tensor_parallel):
            if communicator.ranks > 1:
                communicators.setdefault(id(communicator), (communicator, []))[1].append(group)
    text = ""
    if problem is not None:
        text = explain(
            "Another rank could not export the state of its optimizer.",
            expected="an optimizer of this model's parameters on every rank",
            got=f"on rank {_global_rank()}: {type(problem).__name__}: {problem}",
            where=call,
            fix="see the error on that rank",
        )
    sharded_params, facts = set[nn.Parameter](), dict[int, Sequence[Any]]()
    for communicator, shared_groups in sorted(
        communicators.values(), key=lambda pair: (pair[0].ranks, pair[0].members)
    ):
        own = (
            None
            if ownership is None
            else (describe(ownership, shared_groups), [facts_of(group) for group in shared_groups])
        )
        answers = communicator.gather_objects((text, own))
        text = text or next((other for other, _ in answers if other), "")
        if text or ownership is None:
            continue
        by_rank = [answer[0] for _, answer in answers]
        try:
            require_alike(ownership, shared_groups, by_rank, call, unmanaged=False)
        except RuntimeUsageError as error:
            text = str(error)
            continue
        sharded_params |= held_by_any(ownership, shared_groups, by_rank)
        for number, group in enumerate(shared_groups):
            if group.shard is communicator:
                facts[id(group)] = [answer[1][number] for _, answer in answers]
    if problem is not None:
        raise problem
    if text:
        raise RuntimeUsageError(text)
    assert ownership is not None
    facts.update({id(group): [facts_of(group)] for group in groups if id(group) not in facts})
    return Agreed(sharded_params | ownership.members, facts)


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _sharded_params(ownership: ParamOwnership, groups: Sequence[Group]) -> list[nn.Parameter]:
    return [param for group in groups for param in ownership.in_group(group)]


def _runs(positions: Iterable[int]) -> _Runs:
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return tuple(runs)


def _positions(runs: _Runs) -> set[int]:
    return {position for run in runs for position in range(*run)}
