"""Units of fully_shard train alike whichever way ranks exchange data. Where shards are mapped,
parameters are copied out of them: that sends nothing in a pass, and all-gathers outside of one."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.fully_sharded import NotedAllGather, api, shard_all
from tests.support.models import Block
from tests.support.parity import local, no_sync
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import COPIED, MAPPED, MESSAGES
from tests.support.transports import (
    copies_out_of_mapped_shards,
    num_gathers_sent,
    own_collectives,
)

WIDTH = 192  # a block has two large matrices, and four small parameters
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
KEPT = {"reshard_after_forward": False}


class Wide(nn.Sequential):
    """Shards of several pages on each rank. The root has a parameter of uneven parts, and an unused
    one."""

    def __init__(self) -> None:
        super().__init__(*(Block(WIDTH) for _ in range(3)), nn.Linear(WIDTH, 401))
        self.unused = nn.Parameter(torch.ones(3))
        for name, parameter in self.named_parameters():
            parameter.is_of_a_norm = "norm" in name


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    return shard_all(Wide(), **options)


def batch(step: int) -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1 + dist.get_rank())


# -- training


def keeps_norms_in_fp32(parameter: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if parameter.is_of_a_norm else None


TWO_DTYPES = BF16 | {"param_dtype_override_fn": keeps_norms_in_fp32}


def train(
    shape: tuple[int, ...], options: dict[str, Any], by_hand: bool, is_native: bool
) -> list[Tensor]:
    """What this rank has of gradients and parameters, and outputs, of steps after an evaluation: of
    one backward, of two, and with a frozen matrix. by_hand: units are also unsharded by calls."""
    names = ("replicate", "shard")[-len(shape) :]
    given = options | {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if "mp_policy" in given:
        given["mp_policy"] = api.MixedPrecisionPolicy(**given["mp_policy"])
    with own_collectives(is_native):
        model = make(**given)
        if by_hand:
            model[0].set_modules_to_forward_prefetch([model[1], model[2]])
            model[1].set_reshard_after_backward(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        found = []
        for step in range(4):
            with torch.no_grad():
                found.append(model(batch(step)))
            if by_hand and step > 1:
                model[2].unshard(async_op=True)
                model[1].unshard()
            if step == 2:
                with no_sync(model):
                    model(batch(step).flip(0)).pow(2).mean().backward()
            model[0].up.weight.requires_grad_(step != 3)
            model(batch(step)).pow(2).mean().backward()
            model.reshard()
            found += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    found += [local(parameter).clone() for parameter in model.parameters()]
    is_mapped = os.environ["FSDP_COMPAT_SAME_HOST"] == "mapped" and not is_native
    num_groups = 7 if "param_dtype_override_fn" in options.get("mp_policy", {}) else 4
    assert copies_out_of_mapped_shards(model) == [is_mapped] * num_groups
    return found


@pytest.mark.parametrize(
    ("shape", "options", "by_hand"),
    [
        ((3,), KEPT, False),
        ((2,), {"mp_policy": TWO_DTYPES}, True),
        ((2, 2), KEPT | {"mp_policy": BF16}, True),
    ],
)
def test_training_is_bit_equal_over_all_transports(
    shape: tuple[int, ...], options: dict[str, Any], by_hand: bool
) -> None:
    ranks, hows = math.prod(shape), [(MAPPED | how, False) for how in ({}, COPIED, MESSAGES)]
    if max(shape) == 2:  # where a sum has one order
        hows.append((MESSAGES, True))
    one, *others = (
        run_ranks(ranks, train, shape, options, by_hand, is_native, environment=how)
        for how, is_native in hows
    )
    for other in others:
        for rank in range(ranks):
            assert len(one[rank]) == len(other[rank])
            assert all(map(torch.equal, one[rank], other[rank]))


# -- messages


@on_ranks(2, environment=MAPPED)
def test_only_gathers_outside_of_a_pass_send() -> None:
    """Not those of a step, or of a user's all-gather."""
    model, own = make(), NotedAllGather()
    model(batch(0)).sum().backward()
    assert num_gathers_sent(model, lambda: model(batch(0)).sum().backward()) == 0
    assert num_gathers_sent(model, model[0].unshard) == 1
    assert num_gathers_sent(model, lambda: model[0](batch(0))) == 0
    model[1].set_custom_all_gather(own)
    assert num_gathers_sent(model, lambda: model(batch(0))) == 0
    assert len(own.calls) == 1


# -- passes without messages


@on_ranks(2, environment=MAPPED)
def test_ranks_may_evaluate_whole_parameters_a_different_number_of_times() -> None:
    model, x = make(**KEPT), torch.ones(1, WIDTH)
    with torch.no_grad():
        model(batch(0))
        first, *others = [model(x) for _ in range(3 + 2 * dist.get_rank())]
    of_first_rank = first.clone()
    dist.broadcast(of_first_rank, 0)
    assert all(copies_out_of_mapped_shards(model))
    assert all(torch.equal(output, of_first_rank) for output in (first, *others))


def all_are(module: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in module.parameters())


@on_ranks(2, environment=MAPPED)
def test_unsharded_parameters_keep_the_values_from_when_they_were_unsharded() -> None:
    """By hand between steps, and in a backward that did not use them."""
    model = make()
    model[2].set_reshard_after_backward(False)
    model[1].set_modules_to_backward_prefetch([model[2]])
    parts = [local(parameter) for parameter in model.parameters()]

    def fill(value: float) -> None:
        """Write to the shards without autograd seeing it."""
        for part in parts:
            part.data.fill_(value)
        dist.barrier()

    model(batch(0)).sum().backward()
    model[2].reshard()
    fill(2.0)
    model[1](batch(0)).sum().backward()
    model[0].unshard()
    dist.barrier()
    fill(3.0)
    model[2].unshard()
    assert all_are(model[0], 2.0) and all_are(model[2], 2.0)
