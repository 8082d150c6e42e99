"""Units of fully_shard whose parameters are copied out of every rank's shard, where it is mapped:
they train as units that all-gather, send nothing in a pass, and all-gather outside of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat._comm.transport import Kind
from tests.fully_shard import test_programs
from tests.support.fully_sharded import NotedAllGather, api, shard_all
from tests.support.models import Block
from tests.support.parity import whole
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import COPIED, MAPPED, MESSAGES
from tests.support.sampling import at_most

WIDTH = 48


class Wide(nn.Sequential):
    """Shards of several pages on each rank; the last one has parameters of uneven parts."""

    def __init__(self) -> None:
        blocks = [Block(WIDTH) for _ in range(3)]
        super().__init__(*blocks, nn.Linear(WIDTH, 41))
        for block in blocks:
            block.norm.weight.is_of_a_norm = block.norm.bias.is_of_a_norm = True


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    return shard_all(Wide(), **options)


def batch(step: int) -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1 + dist.get_rank())


def groups_of(model: Any) -> list[Any]:
    return list(model._get_fsdp_state().runtime.groups)


def is_mapped(model: Any) -> list[bool]:
    """Of every group, whether parameters are copied out of mapped shards."""
    return [group.memory.mapped_copy is not None for group in groups_of(model)]


# -- training


def keeps_norms_in_fp32(parameter: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if hasattr(parameter, "is_of_a_norm") else None


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
TWO_DTYPES = BF16 | {"param_dtype_override_fn": keeps_norms_in_fp32}


def train(options: dict[str, Any], shape: tuple[int, ...] | None, by_hand: bool) -> list[Tensor]:
    """Losses and parameters of five steps. by_hand: units are also unsharded by calls."""
    given = dict(options)
    if shape is not None:
        given["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if "mp_policy" in given:
        given["mp_policy"] = api.MixedPrecisionPolicy(**given["mp_policy"])
    model = make(**given)
    if by_hand:
        model[0].set_modules_to_forward_prefetch([model[1], model[2]])
        model[1].set_reshard_after_backward(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in range(5):
        if step == 2:
            with torch.no_grad():
                found.append(model(batch(step)))
            continue
        if by_hand and step > 2:
            model[2].unshard(async_op=True)
            model[1].unshard()
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    found += [whole(parameter).clone() for parameter in model.parameters()]
    expected = os.environ["FSDP_COMPAT_SAME_HOST"] == "mapped"
    num_groups = 7 if "param_dtype_override_fn" in options.get("mp_policy", {}) else 4
    assert is_mapped(model) == [expected] * num_groups
    return found


CASES: list[tuple[int, dict[str, Any], tuple[int, ...] | None, bool]] = [
    (2, {}, None, False),
    (3, {"reshard_after_forward": False}, None, False),
    (2, {"mp_policy": BF16}, None, True),
    (2, {"mp_policy": TWO_DTYPES}, None, True),
    (4, {"reshard_after_forward": 2}, None, False),
    (4, {}, (2, 2), True),
]


@pytest.mark.parametrize(("ranks", "options", "shape", "by_hand"), CASES)
def test_training_is_bit_equal_to_gathers(
    ranks: int, options: dict[str, Any], shape: tuple[int, ...] | None, by_hand: bool
) -> None:
    one, *others = (
        run_ranks(ranks, train, options, shape, by_hand, environment=MAPPED | how)
        for how in ({}, COPIED, MESSAGES)
    )
    for other in others:
        for rank in range(ranks):
            assert all(map(torch.equal, one[rank], other[rank]))


# -- messages


@on_ranks(2, environment=MAPPED)
def test_only_gathers_outside_of_a_pass_send() -> None:
    """Not those of a step, or of a user's all-gather."""
    model = make()
    model(batch(0)).sum().backward()
    traffic, found = groups_of(model)[0].shard.traffic, []

    def count(action: Callable[[], object]) -> None:
        traffic.clear()
        action()
        found.append(traffic.counts[Kind.GATHER])

    count(lambda: model(batch(0)).sum().backward())
    count(model[0].unshard)
    count(lambda: model[0](batch(0)))
    own = NotedAllGather()
    model[1].set_custom_all_gather(own)
    count(lambda: model(batch(0)))
    assert [*found, len(own.calls)] == [0, 1, 0, 0, 1]


# -- passes without messages


@on_ranks(2, environment=MAPPED)
def test_ranks_may_evaluate_whole_parameters_a_different_number_of_times() -> None:
    model, x = make(reshard_after_forward=False), torch.ones(1, WIDTH)
    with torch.no_grad():
        model(batch(0))
        first, *others = [model(x) for _ in range(3 + 2 * dist.get_rank())]
    of_first_rank = first.clone()
    dist.broadcast(of_first_rank, 0)
    assert all(is_mapped(model))
    assert all(torch.equal(output, of_first_rank) for output in (first, *others))


def fill(model: Any, value: float) -> None:
    """Write to the shards without autograd seeing it."""
    for group in groups_of(model):
        group.store.shard.data.fill_(value)


def all_are(module: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in module.parameters())


@on_ranks(2, environment=MAPPED)
def test_unsharded_parameters_keep_the_values_from_when_they_were_unsharded() -> None:
    """By hand between steps, and in a backward that did not use them."""
    model = make()
    model[2].set_reshard_after_backward(False)
    model[1].set_modules_to_backward_prefetch([model[2]])
    model(batch(0)).sum().backward()
    model[2].reshard()
    fill(model, 2.0)
    dist.barrier()
    model[1](batch(0)).sum().backward()
    model[0].unshard()
    dist.barrier()
    fill(model, 3.0)
    dist.barrier()
    model[2].unshard()
    assert all_are(model[0], 2.0) and all_are(model[2], 2.0)


# -- what other files test with gathers


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (2, (0, at_most(2, of_all=6), (2,))),
        (3, (3000, at_most(2, of_all=6), (3,))),
        (4, (5000, at_most(1, of_all=4), (2, 2))),
    ],
)
def test_random_programs_train_mapped(ranks: int, args: tuple[Any, ...]) -> None:
    run_ranks(ranks, test_programs.runs_programs, *args, environment=MAPPED)
