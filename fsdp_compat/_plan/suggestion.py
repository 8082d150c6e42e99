"""``suggest_policy``: the settings with the shortest estimated step that fit."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from inspect import signature
from typing import Any, NamedTuple

from torch import nn

from ..api import ShardingStrategy
from .plan import Plan, plan

# From the fastest to the one with the least memory.
_SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    {
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
        "backward_prefetch": None,
        "forward_prefetch": False,
    },
)


class Suggestion(NamedTuple):
    """Arguments of FullyShardedDataParallel, the plan with them, and advice if it does not fit.
    ``print`` shows all three."""

    arguments: Mapping[str, Any]  # including those that suggest_policy was given
    plan: Plan
    advice: str  # "" if the plan fits

    def __repr__(self) -> str:
        given = "".join(f", {name}={value}" for name, value in self.arguments.items())
        call = f"FullyShardedDataParallel(model{given})"
        return "\n".join(filter(None, (call, self.advice, repr(self.plan))))


def suggest_policy(
    model: nn.Module, budget_bytes: int, world_size: int, batch: Any, **arguments: Any
) -> Suggestion:
    """Return the first settings of FullyShardedDataParallel that fit a device of ``budget_bytes``:
    SHARD_GRAD_OP, FULL_SHARD, or that without prefetching; if none does, the last, with advice.

    The other arguments are those of ``plan``; ``auto_wrap_policy`` is "auto" by default. Raises
    what ``plan`` raises."""
    arguments, of_plan = {"auto_wrap_policy": "auto", **arguments}, signature(plan).parameters
    for settings in _SETTINGS:
        chosen = {**arguments, **settings}
        made = plan(model, world_size, batch, **chosen)
        of_wrapper = {name: chosen[name] for name in chosen if name not in of_plan}
        if made.fits(budget_bytes):
            return Suggestion(of_wrapper, made, "")
    return Suggestion(of_wrapper, made, _advice(made, budget_bytes))


def _advice(made: Plan, budget_bytes: int) -> str:
    kinds = collections.Counter(made.peak.by_kind)
    ways = {
        "checkpoint activations, or use a smaller batch": kinds["activations"],
        "use more ranks, or CPUOffload": kinds["parameters"] + kinds["optimizer"],
        "wrap smaller modules as units": kinds["gathered"] + kinds["reducing"],
    }
    missing = (made.peak.nbytes + made.reserve - budget_bytes) / (1 << 30)
    way = max(ways, key=lambda each: ways[each])
    return f"{missing:.1f} GiB are missing in {made.peak.phase}: {way}"
