"""Ranks that use different parameters, or different modules: gradients are those of the unsharded
model on all ranks' data, and parameters that no rank has used have none."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compat
from tests.support.fully_sharded import pair_of
from tests.support.parity import backward
from tests.support.ranks import on_ranks
from tests.support.same_host import MAPPED, MESSAGES
from tests.support.transports import own_collectives, usage_read_late

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


def uses_branch(number: int, compute_all: bool, model: Any, x: torch.Tensor) -> torch.Tensor:
    return backward(model(x, number, compute_all).square().sum())


def trains_as_unsharded(allow: bool) -> None:
    """Every rank uses the branch of its number; if that is not allowed, all branches, of which the
    other ones get zeros. Collective."""

    def shard(model: Any) -> Any:
        for branch in model.branches:
            fsdp_compat.fully_shard(branch, reshard_after_forward=allow)
        fsdp_compat.fully_shard(model, allow_unused_units=allow)
        model.set_reduce_scatter_unused_params(not allow)
        return model

    optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    pair = pair_of(Branches, shard, optimizer, batch=lambda _: torch.ones(2, 4))
    for _ in range(3):
        pair.backwards([functools.partial(uses_branch, n, not allow) for n in range(pair.ranks)])
        for parameter in pair.plain.parameters():
            if not allow and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        pair.compare_and_update()


@pytest.mark.parametrize("is_native", [False, True])
@on_ranks(3)
def test_ranks_use_different_units(is_native: bool) -> None:
    with own_collectives(is_native):
        for allow in (True, False):
            trains_as_unsharded(allow)


class Tables(nn.Module):
    """Reads ``first`` or not, and never ``never``."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(num_rows, 2), nn.Embedding(num_rows, 2)
        self.head, self.never = nn.Linear(2, 3), nn.Linear(2, 2)

    def forward(self, reads_first: bool) -> torch.Tensor:
        rows = torch.tensor([0, 1])  # on the first rank
        x = self.last(rows)
        return self.head(x + self.first(rows) if reads_first else x).sum()


def reads_tables(kind: str, readers: tuple[int, ...]) -> tuple[list[str], torch.Tensor]:
    """Return the parameters that have a gradient, and the norm of all. Collective."""
    torch.manual_seed(0)
    model = Tables(40_000 if kind == "large" else 8)
    if kind == "gradients of zero":
        nn.init.zeros_(model.head.weight)
    plain, ranks = copy.deepcopy(model), dist.get_world_size()
    shape = (2, ranks // 2) if kind == "replicas" else (1, ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    dtype = torch.bfloat16 if kind == "bf16" else None
    fsdp_compat.fully_shard(
        model,
        mesh=mesh if kind == "replicas" else mesh["shards"],
        mp_policy=fsdp_compat.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        allow_unused_units=kind == "allowed",
    )
    if kind == "accumulated":
        model.set_requires_gradient_sync(False)
        model(dist.get_rank() in readers).backward()
        model.set_requires_gradient_sync(True)
    model(dist.get_rank() in readers and kind != "accumulated").backward()
    if readers:
        plain(True).backward()
        torch.testing.assert_close(
            model.first.weight.grad.full_tensor(),
            plain.first.weight.grad * len(readers) / ranks,
            rtol=1e-2 if kind == "bf16" else 1e-5,
            atol=0,
        )
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [name for name, p in model.named_parameters() if p.grad is not None], norm.full_tensor()


KINDS = ["small", "large", "bf16", "allowed", "accumulated", "gradients of zero", "replicas"]


@pytest.mark.parametrize(
    ("ranks", "environment", "is_native", "reads_at_end"),
    [(2, MAPPED, False, False), (4, MESSAGES, False, True), (2, MESSAGES, True, False)],
)
@on_ranks("ranks")
def test_all_ranks_have_gradients_of_the_parameters_that_some_rank_has_used(
    ranks: int, environment: dict[str, str], is_native: bool, reads_at_end: bool
) -> None:
    """Also ranks whose own rows of the gradient are zero, and those without rows. reads_at_end: as
    on a device."""
    head = ["last.weight", "head.weight", "head.bias"]
    with own_collectives(is_native), usage_read_late(reads_at_end):
        for kind in KINDS:
            for readers in ((), (0,), (0, ranks - 1)):
                names, norm = reads_tables(kind, readers)
                assert names == ["first.weight"] * bool(readers) + head, (kind, readers)
                norms = [torch.empty_like(norm) for _ in range(ranks)]
                dist.all_gather(norms, norm)
                assert all(torch.equal(each, norm) for each in norms), (kind, readers)


@on_ranks(2)
def test_with_an_all_reduce_hook_parameters_that_no_rank_has_used_get_zeros() -> None:
    """The hook may have added what further ranks have."""
    model = Tables(8)
    fsdp_compat.fully_shard(model)
    sums = []
    model.set_all_reduce_hook(lambda total: sums.append(total.count_nonzero().item()))
    model(False).backward()
    parts = [p.grad.to_local().count_nonzero().item() for p in model.parameters()]
    assert sums == [sum(parts)]  # the hook sees gradients, and zeros around them
