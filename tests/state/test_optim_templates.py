"""What a load reads into: the state of an optimizer that has made no step, as its first step would
make it. That nothing changes, and that checkpoints load into it: test_optim."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.optimizer_state import (
    FEW_CONFIGS,
    OPTIMIZERS,
    SHARDED,
    Named,
    NeedsClosure,
    by_rank,
    full_state,
    make_model,
    shard,
    sharded_state,
)
from tests.support.ranks import on_ranks


class KeepsMasters(torch.optim.SGD):
    """Keeps a copy of what it trains, and a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[p]:
                self.state[p].update(master=p.detach().clone(), rounds=3)
            self.state[p]["master"].sub_(p.grad, alpha=0.1)
            p.copy_(self.state[p]["master"])


@on_ranks(2)
def test_template_entries_equal_those_of_a_first_step() -> None:
    model = shard(make_model(), FEW_CONFIGS[1])
    masters = sharded_state(model, KeepsMasters(model.parameters(), weight_decay=0.5))["state"]
    by_names = sharded_state(model, Named(model))["state"]
    with pytest.warns(UserWarning, match="no closure"):
        assert sharded_state(model, NeedsClosure(model.parameters()))["state"] == {}
    with FSDP.state_dict_type(model, SHARDED):
        parts = {name: value for name, value in model.state_dict().items() if name in masters}
    assert by_names.keys() == parts.keys() == dict(make_model().named_parameters()).keys()
    for name, entry in masters.items():
        assert entry["rounds"] == 3
        mine, kept = parts[name], entry["master"]
        if mine.dim() and mine.numel():
            for a, b in zip(mine.local_shards(), kept.local_shards(), strict=True):
                assert torch.equal(a.tensor, b.tensor)
    assert full_state(model, OPTIMIZERS["Adam"](model.parameters()))["state"] == {}, "as with torch"


class OneUnitUsed(nn.Module):
    """Its first unit is so small that only the first rank has a part of it; the other one never
    runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(1, 2, bias=False)
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@on_ranks(3)
def test_a_rank_without_state_adds_none_to_the_others(tmp_path: Path) -> None:
    model = FSDP(
        OneUnitUsed(), use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.numel()])
    model(torch.ones(3, 1)).sum().backward()
    for p in model.parameters():
        p.grad = p.grad if p.numel() else None
    optimizer.step()
    assert by_rank(bool(optimizer.state)) == [True, False, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state = sharded_state(model, optimizer)
    assert state["state"].keys() == {"used.weight"}
    assert all(entry["step"] == 1 for entry in state["state"].values())
    dcp.save(state, checkpoint_id=tmp_path)
