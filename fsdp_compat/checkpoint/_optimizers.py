"""Checks that all ranks save or load optimizers of the same parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._engine.group import Group
from .._state.model_units import units_of
from .._state.optim_alike import OptimizerFacts, describe, require_alike
from .._state.param_ownership import ParamOwnership, ownership_of
from ..errors import RuntimeUsageError, explain
from ._ranks import Ranks

__all__ = ["SharedOptimizer"]


class SharedOptimizer:
    """This rank's optimizer, to be compared with those of the other ranks."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
    ) -> None:
        """Raises UsageError for an optimizer with a parameter that is not the model's."""
        self._ranks, units = ranks, units_of(model)
        self._groups: list[Group] = [
            group
            for named in units
            for group in named.unit.groups
            if group.shard.ranks * group.replica.ranks == ranks.count
        ]
        self._ownership: ParamOwnership | None = None
        if optimizer is not None:
            self._ownership = ownership_of(
                optimizer.param_groups, f"the state of {type(optimizer).__name__}", units, model
            )

    def facts(self) -> list[Any] | None:
        """Return the facts to compare, as JSON values."""
        return (
            None
            if self._ownership is None
            else list(dataclasses.astuple(describe(self._ownership, self._groups)))
        )

    def require_alike(self, all_facts: Sequence[list[Any] | None], call: str) -> None:
        """Raise UsageError, on all ranks, unless the facts of all ranks match. all_facts: in rank
        order."""
        by_rank = [OptimizerFacts(*facts) for facts in all_facts if facts is not None]
        if self._ownership is not None and len(by_rank) == len(all_facts):
            require_alike(self._ownership, self._groups, by_rank, call, unmanaged=True)
        elif by_rank:
            raise RuntimeUsageError(
                explain(
                    "Only some ranks have an optimizer.",
                    expected="an optimizer on every rank, or None on every rank",
                    got="none on rank(s) "
                    f"{[number for number, facts in enumerate(all_facts) if facts is None]} of "
                    f"{self._ranks.count}",
                    where=call,
                    fix="pass the model's optimizer on every rank",
                )
            )
