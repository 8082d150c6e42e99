"""Checks that all ranks save or load optimizers of the same parameters, with the same settings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..._comm.mesh import Axis, named
from ..._engine.group import Group
from ..._state.optim_agreement import OptimizerFacts, describe, global_rank, require_alike
from ..._state.optim_contents import ParamOwnership, inner_optimizers, ownership_of
from ..._state.optim_fit import differing_settings
from ..._state.units import tensor_parallel_axes, units_of
from ..._text import joined
from ...errors import RuntimeUsageError, UsageError
from .._ranks.ranks import Ranks


class SharedOptimizer:
    """This rank's optimizer, to be compared with those of the other ranks."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
    ) -> None:
        """Raises UsageError for an optimizer with a parameter that is not the model's."""
        self._ranks, units = ranks, units_of(model)
        # Tensor parallelism repeats plain parameters, and those of any unit.
        axes = tensor_parallel_axes([named.unit for named in units])
        self._groups: list[Group] = [
            group
            for named in units
            for group in named.unit.groups
            if group.shard.ranks * group.replica.ranks * _ranks_beside(group, axes) == ranks.count
        ]
        self._ownership: ParamOwnership | None = None
        if optimizer is not None:
            where = f"the state of {type(optimizer).__name__}"
            self._ownership = ownership_of(optimizer.param_groups, where, units, model)

    def facts(self, exact: bool = False) -> list[Any] | None:
        """Return the facts to compare, as JSON values; None without an optimizer."""
        own = self._ownership
        return None if own is None else list(describe(own, self._groups, exact=exact))

    def require_alike(self, all_facts: Sequence[list[Any] | None]) -> None:
        """Raise UsageError, on all ranks, unless all facts, in rank order, match. Collective."""
        if all(facts == all_facts[0] for facts in all_facts):
            return
        ranks = self._ranks
        exact = ranks.exchange((global_rank(), self.facts(exact=True)))
        by_rank = {rank: OptimizerFacts(*facts) for rank, facts in exact if facts is not None}
        if self._ownership is not None and len(by_rank) == len(all_facts):
            require_alike(self._ownership, self._groups, by_rank, ranks.call, unmanaged=True)
        elif by_rank:
            without = [number for number, facts in enumerate(all_facts) if facts is None]
            raise RuntimeUsageError.of(
                "Only some ranks have an optimizer.",
                expected="an optimizer on every rank, or None on every rank",
                got=f"none on rank(s) {named(without)} of {ranks.count}",
                where=ranks.call,
                fix="pass the model's optimizer on every rank",
            )


def warn_of_left_out(names: Sequence[str], what: str, stacklevel: int) -> None:
    if names:
        warnings.warn(
            f"Optimizer states and settings that only pickle could save {what}: "
            f"{', '.join(names)}. A checkpoint holds numbers, strings, tensors, and containers of "
            "these.",
            stacklevel=stacklevel,
        )


def classes_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of an optimizer's class and its base classes, without Optimizer itself."""
    return tuple(
        f"{each.__module__}.{each.__qualname__}"
        for own in inner_optimizers(optimizer)
        for each in type(own).__mro__
        if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    )


def _ranks_beside(group: Group, axes: Sequence[Axis]) -> int:
    """Return how many ranks the axes have that lie in no axis of the group."""
    inside = {*group.shard.members, *group.replica.members}
    return math.prod(axis.ranks for axis in axes if len(inside & {*axis.members}) == 1)


def joined_param_groups(by_rank: Sequence[Any], call: str) -> list[Any]:
    """Return the groups to save: the first rank's, with parameters that only others hold, in the
    same groups or new ones. Raises UsageError if settings differ."""
    found: list[dict[str, Any]] = []
    places: dict[str, int] = {}  # by name of a parameter: its group
    for rank, groups in enumerate(by_rank):
        for position, group in enumerate(groups):
            if rank and not group["params"]:
                continue
            known = sorted({places[name] for name in group["params"] if name in places})
            for number in known:
                _require_same(found[number], group, rank, call)
            if known:
                number = known[0]
            elif rank and position < len(found) and not _differing(found[position], group, rank):
                number = position
            else:
                number = len(found)
                found.append({"params": [], "settings": group["settings"]})
            new = [name for name in group["params"] if name not in places]
            found[number]["params"] += new
            places.update(dict.fromkeys(new, number))
    return found


def _differing(one: dict[str, Any], other: dict[str, Any], rank: int) -> list[str]:
    whose = [f"on rank {rank}", "on a rank before it"]
    return differing_settings([other["settings"], one["settings"]], whose)


def _require_same(one: dict[str, Any], other: dict[str, Any], rank: int, call: str) -> None:
    """Raise UsageError if groups of the same parameters have different settings."""
    if different := _differing(one, other, rank):
        shared = next(name for name in other["params"] if name in one["params"])
        raise UsageError.of(
            "The optimizers of the ranks have different settings; a checkpoint holds one value of "
            "each.",
            expected="the same settings of a parameter on all ranks",
            got=joined(different, 4, "; "),
            where=f"the parameter group of {shared!r}, {call}",
            fix="give the parameter groups the same settings on all ranks before saving",
        )
