"""How often a model communicates."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any


def collectives(model: Any, call: Callable[[], object]) -> collections.Counter[str]:
    """Return how many collectives over parameters and gradients of ``model`` the call begins on
    this rank: "GATHER", "REDUCE" over shards, "REPLICATE" over replicas."""
    axes = {
        id(axis): axis for group in model._runtime.groups for axis in (group.shard, group.replica)
    }
    counts = [axis.traffic.counts for axis in axes.values()]
    before = [each.copy() for each in counts]
    call()
    found = collections.Counter[str]()
    for old, new in zip(before, counts, strict=True):
        found.update({kind.name: new[kind] - old[kind] for kind in new})
    return found
