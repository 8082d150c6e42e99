"""Ranks that use different parameters, or different modules: gradients are those of the unsharded
model on all ranks' data, and parameters that no rank has used have none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compat
from tests.support.ranks import run_ranks

NUM_BRANCHES = 4


class Branches(nn.Module):
    """Computes one branch, or all of them and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM_BRANCHES))

    def forward(self, x: torch.Tensor, number: int, compute_all: bool = False) -> torch.Tensor:
        if compute_all:
            return [branch(x) for branch in self.branches][number]
        return self.branches[number](x)


def trains_as_unsharded(branches_are_units: bool, allow: bool, zeros: bool) -> None:
    """Every rank uses the branch of its number. Collective."""
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    for branch in model.branches if branches_are_units else ():
        fsdp_compat.fully_shard(branch, reshard_after_forward=not zeros)
    fsdp_compat.fully_shard(model, allow_unused_units=allow)
    model.set_reduce_scatter_unused_params(zeros)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain_optim = torch.optim.AdamW(plain.parameters(), lr=0.1)
    ranks, x = dist.get_world_size(), torch.ones(2, 4)
    for _ in range(3):
        model(x, dist.get_rank(), zeros).square().sum().backward()
        losses = [plain(x, rank).square().sum() for rank in range(ranks)]
        (torch.stack(losses).sum() / ranks).backward()
        for sharded, parameter in zip(model.parameters(), plain.parameters(), strict=True):
            if zeros and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if sharded.to_local().numel():  # a rank without rows cannot tell
                assert (sharded.grad is None) == (parameter.grad is None)
        optim.step()
        plain_optim.step()
        optim.zero_grad()
        plain_optim.zero_grad()
    for sharded, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_use_different_parameters_of_a_unit(ranks: int) -> None:
    run_ranks(ranks, trains_as_unsharded, branches_are_units=False, allow=False, zeros=False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_use_different_units_if_allowed(ranks: int) -> None:
    run_ranks(ranks, trains_as_unsharded, branches_are_units=True, allow=True, zeros=False)


def test_ranks_reduce_zeros_for_units_that_only_others_reach_in_backward() -> None:
    run_ranks(3, trains_as_unsharded, branches_are_units=True, allow=False, zeros=True)
