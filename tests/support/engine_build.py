"""Stores without a front end, and how they lay out gathered parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_compat._engine.ownership import OrigParam, assign_owners
from fsdp_compat._engine.store import ParamStore, ReduceForm
from fsdp_compat._stores.flat_store import FlatStore
from fsdp_compat._stores.placement import RowPlacement
from fsdp_compat._stores.row_store import RowStore
from fsdp_compat._stores.row_views import cut_up

CPU = torch.device("cpu")
# one FlatParameter; the original parameters over a flat shard; rows
STORES = ("flat", "original", "row")


def make_store(
    kind: str,
    members: Sequence[OrigParam],
    *,
    rank: int,
    ranks: int,
    flat_slot: tuple[nn.Module, str],
) -> ParamStore:
    """Return a store of one of the STORES."""
    if kind == "row":  # of plain parameters instead of DTensors
        placements = [RowPlacement(0 if m.parameter.dim() else None) for m in members]
        return RowStore(members, placements, rank=rank, ranks=ranks, device=CPU)
    return FlatStore(
        members,
        rank=rank,
        ranks=ranks,
        flat_slot=flat_slot,
        use_orig_params=kind == "original",
        device=CPU,
    )


class RowGatherForm(ReduceForm):
    """How the parameters of a RowStore lie in the output of an all-gather."""

    def __init__(self, store: RowStore) -> None:
        self._store, self._views = store, store.layout
        self.numel, self.dtype = store.numel, store.dtype

    def param_views(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        indices = range(len(self._views.cuts))
        return [*(self._views.param_views(buffer, i) for i in indices), self._views.padding(buffer)]

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        parallel = self._store.parallel[index]
        value = value if parallel is None else parallel.local(value)
        return cut_up(value, self._views.cuts[index])


def gather_form(store: ParamStore) -> Any:
    """Return how parameters lie in the output of an all-gather, as a ReduceForm tells it of
    gradients: its places, and how to split a parameter into them."""
    return RowGatherForm(store) if isinstance(store, RowStore) else store


def members_of(module: nn.Module) -> list[OrigParam]:
    """Return all parameters of a module, as members of one unit."""
    return assign_owners(module, [module], (), ())[module]
