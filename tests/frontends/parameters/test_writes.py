"""What a write to parameters means from forward to the end of backward, however ranks exchange
data: to unsharded parameters for a while, on this rank only; to sharded ones an error, as in plain
torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from tests.support.cases import about
from tests.support.models import Block, chain, made_of
from tests.support.parity import make_pair
from tests.support.ranks import on_ranks
from tests.support.same_host import COPIED, MAPPED, MESSAGES

WIDTH = 48  # shards of several pages
# The same padding everywhere.
WAYS = [MAPPED, MAPPED | COPIED, MAPPED | MESSAGES]
FULL, KEPT, NONE = "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"


def wrapped(strategy: str) -> FSDP:
    """Two blocks and, in the root unit, a layer."""
    build = partial(chain, *[partial(Block, WIDTH)] * 2, partial(nn.Linear, WIDTH, WIDTH))
    strategies = {"sharding_strategy": ShardingStrategy[strategy]}
    return make_pair(build, use_orig_params=True, **strategies).model


def batch() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + dist.get_rank())


in_every_way = pytest.mark.parametrize("environment", WAYS, ids=["mapped", "copied", "messages"])


def by_data(weight: Tensor) -> None:
    weight.data[0, 0] = 3.0


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[0, 0] = 3.0


# Whether a layer of the first unit, and one of the root, have what one forward has written: in that
# forward, in its backward, in the next forward, and whether a shard has it.
LASTS = [
    (FULL, [True, False, False, False], [True, True, False, False]),
    (KEPT, [True, True, False, False], [True, True, False, False]),
    (NONE, [True, True, True, True], [True, True, True, True]),
]


@in_every_way
@on_ranks(2)
def test_a_write_in_forward_lasts_until_its_unit_is_resharded(environment: dict[str, str]) -> None:
    for (strategy, *expected), write in itertools.product(LASTS, (by_data, by_numpy)):
        model = wrapped(strategy)
        layers = model.module[0].module.up, model[2]
        with about((strategy, write)):
            assert [_writes(model, layer, write) for layer in layers] == expected


def _writes(model: FSDP, layer: Any, write: Callable[[Tensor], None]) -> list[bool]:
    seen: list[bool] = []

    def look(module: nn.Module, *_: object) -> None:
        seen.append(module.weight[0, 0].item() == 3.0)  # type: ignore[index,operator]

    handles = [
        layer.register_forward_pre_hook(lambda module, _: write(module.weight)),
        layer.register_forward_hook(look),
        layer.register_full_backward_pre_hook(look),
    ]
    loss = model(batch()).sum()
    handles.pop(0).remove()
    loss.backward()
    model(batch()).sum().backward()
    for handle in handles:
        handle.remove()
    return [*seen[:3], any(bool((parameter == 3.0).any()) for parameter in model.parameters())]


IN_PLACE = "modified by an inplace operation"
CHANGED = "changed between forward and backward"
REFUSED = [  # strategy, fused optimizer, whether a backward comes before the step
    (FULL, False, False, CHANGED),
    (KEPT, True, False, CHANGED),
    (FULL, True, True, IN_PLACE),
    (KEPT, False, True, IN_PLACE),
    (NONE, False, False, IN_PLACE),
]


@in_every_way
@on_ranks(2)
def test_a_step_between_forward_and_backward_is_refused(environment: dict[str, str]) -> None:
    for strategy, fused, retains, message in REFUSED:
        model = wrapped(strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        for _ in range(2):  # as in plain training
            model(batch()).sum().backward()
            optimizer.step()
        loss = model(batch()).pow(2).sum()
        if retains:
            loss.backward(retain_graph=True)
        optimizer.step()
        with (
            about((strategy, fused, retains)),
            pytest.raises((RuntimeError, AssertionError), match=message),
        ):
            loss.backward()


# A generator and a discriminator in one unit.
ADVERSARIES = made_of(
    lambda m, x, which: getattr(m, which)(x),
    generator=partial(Block, WIDTH),
    discriminator=partial(Block, WIDTH),
)


def train_adversaries(model: nn.Module, inner: Any, batches: list[Tensor]) -> None:
    """The discriminator's optimizer steps between the generator's forward and backward."""
    first = torch.optim.AdamW(inner.generator.parameters(), lr=0.01)
    second = torch.optim.AdamW(inner.discriminator.parameters(), lr=0.01)
    for x in batches:
        made = model(x, "generator")
        second.zero_grad()
        model(made.detach(), "discriminator").pow(2).mean().backward()
        second.step()
        first.zero_grad()
        model(made, "discriminator").mean().backward()
        first.step()


@in_every_way
@on_ranks(2)
def test_a_step_of_parameters_that_the_graph_has_not_saved_is_legitimate(
    environment: dict[str, str],
) -> None:
    for strategy in (FULL, KEPT):
        options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
        pair = make_pair(ADVERSARIES, auto_wrap_policy=None, **options)
        batches = [torch.randn(3, WIDTH) for _ in range(3)]  # the same on all ranks
        train_adversaries(pair.plain, pair.plain, batches)
        train_adversaries(pair.model, pair.model.module, batches)
        pair.assert_state_equal()
