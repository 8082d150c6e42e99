"""Edge cases: losses that forward does not return, freed parameters, units called without their
root."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import ShardingStrategy, StateError
from tests.support.models import WIDE, Stack, chain
from tests.support.pairwise import each_value, pairwise
from tests.support.parity import (
    backward,
    both_forms,
    both_strategies,
    make_pair,
    one_backward,
    train,
    wide_vectors,
)
from tests.support.ranks import on_ranks

# -- losses from elsewhere


class LossAside(nn.Module):
    """Stores a loss of its own as an attribute."""

    aux: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).tanh()
        self.aux = self.b(hidden).pow(2).mean()
        return hidden * 1


class LossAsideFromNone(LossAside):
    """The attribute exists from the beginning, as None."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = None


class LossElsewhere(LossAside):
    """Puts its loss into a list that belongs to no module."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        elsewhere.append(self.__dict__.pop("aux"))
        return hidden


elsewhere: list[Tensor] = []


def _output_and_attribute(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    return backward(y.pow(2).mean() + m[1].aux)


def _attributes_alone(m: nn.Module, x: Tensor) -> Tensor:
    m(x)
    return backward(sum(m[index].aux for index in range(3)))


def _losses_in_a_list(m: nn.Module, x: Tensor) -> Tensor:
    elsewhere.clear()
    m(x)
    return backward(sum(elsewhere))


@pairwise
@both_forms
@both_strategies
@pytest.mark.parametrize("step", [_output_and_attribute, _attributes_alone])
@pytest.mark.parametrize("kind", [LossAside, LossAsideFromNone])
@on_ranks(2)
def test_a_loss_may_be_an_attribute_of_a_module(
    kind: type[nn.Module], step: Any, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    train(partial(chain, *[kind] * 3), (kind,), step, batch=wide_vectors, **options)


KEPT = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}


@both_forms
@on_ranks(2)
def test_a_loss_in_a_list_works_where_parameters_stay_whole(use_orig_params: bool) -> None:
    options = {**KEPT, "batch": wide_vectors, "use_orig_params": use_orig_params}
    train(partial(chain, *[LossElsewhere] * 3), (LossElsewhere,), _losses_in_a_list, **options)


@both_forms
@pytest.mark.parametrize(
    ("num_units", "num_backwards", "options", "error", "facts"),
    [
        (3, 1, {}, RuntimeError, ["storage of size 0"]),  # of freed parameters
        (1, 2, KEPT, StateError, ["unit '0'", "never reduced"]),  # gradients pass every hook
    ],
)
@on_ranks(2)
def test_a_loss_in_a_list_is_an_error_where_it_cannot_work(
    num_units: int,
    num_backwards: int,
    options: dict[str, Any],
    error: type[Exception],
    facts: list[str],
    use_orig_params: bool,
) -> None:
    build = partial(chain, *[LossElsewhere] * num_units)
    model = make_pair(build, (LossElsewhere,), use_orig_params=use_orig_params, **options).model
    with pytest.raises(error) as caught:
        for _ in range(num_backwards):
            _losses_in_a_list(model, torch.randn(4, WIDE))
    assert all(fact in str(caught.value) for fact in facts)


# -- freed parameters


@both_forms
@on_ranks(2)
def test_parameters_between_steps_are_flat(use_orig_params: bool) -> None:
    """Original parameters are flat parts, with names as before. What else modules show is in
    test_entry_points."""
    pair = train(Stack, use_orig_params=use_orig_params)
    wrapped = "_fsdp_wrapped_module"
    found = dict(pair.model.named_parameters())
    assert {p.dim() for p in found.values()} == {1}
    if not use_orig_params:
        units = ["", *(f"blocks.{index}.{wrapped}." for index in range(3))]
        assert list(found) == [f"{wrapped}.{unit}_flat_param" for unit in units]
        return
    expected = {name: p.numel() for name, p in pair.plain.named_parameters()}
    assert [name.replace(f"{wrapped}.", "") for name in found] == list(expected)
    sizes = torch.tensor([p.numel() for p in found.values()])
    dist.all_reduce(sizes)
    assert sizes.tolist() == list(expected.values())


# -- units called without their root


def _two_blocks(m: nn.Module, x: Tensor) -> Tensor:
    return backward(m.blocks[1](m.blocks[0](x)).pow(2).mean())


@each_value
@both_forms
@both_strategies
@on_ranks(2)
def test_a_unit_may_be_called_without_its_root(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    pair = train(Stack, **options)
    for _ in range(2):
        pair.step(_two_blocks)
    pair.step(one_backward)
