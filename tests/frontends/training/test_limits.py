"""Edge cases: losses that forward does not return, freed parameters, units called without their
root."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat import ShardingStrategy, StateError
from tests.support.models import DIM, WIDE, Stack, chain
from tests.support.pairwise import each_value
from tests.support.parity import (
    backward,
    both_forms,
    both_strategies,
    make_pair,
    one_backward,
    train,
    trains,
    wide_vectors,
)
from tests.support.ranks import on_ranks, run_ranks

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


@each_value
@both_forms
@both_strategies
@pytest.mark.parametrize("step", [_output_and_attribute, _attributes_alone])
@pytest.mark.parametrize("kind", [LossAside, LossAsideFromNone])
def test_a_loss_may_be_an_attribute_of_a_module(
    kind: type[nn.Module], step: Any, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    run_ranks(2, trains, partial(chain, *[kind] * 3), (kind,), step, batch=wide_vectors, **options)


def _losses_in_a_list(m: nn.Module, x: Tensor) -> Tensor:
    elsewhere.clear()
    m(x)
    return backward(sum(elsewhere))


@both_forms
def test_a_loss_in_a_list_works_where_parameters_stay_whole(use_orig_params: bool) -> None:
    options = {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "use_orig_params": use_orig_params,
    }
    build = partial(chain, *[LossElsewhere] * 3)
    run_ranks(2, trains, build, (LossElsewhere,), _losses_in_a_list, batch=wide_vectors, **options)


def _loses_a_loss(num_units: int, num_backwards: int, **options: Any) -> tuple[str, str]:
    pair = make_pair(partial(chain, *[LossElsewhere] * num_units), (LossElsewhere,), **options)
    try:
        for _ in range(num_backwards):
            _losses_in_a_list(pair.model, torch.randn(4, WIDE))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


@both_forms
def test_a_loss_in_a_list_is_an_error_where_parameters_are_freed(use_orig_params: bool) -> None:
    for _, message in run_ranks(2, _loses_a_loss, 3, 1, use_orig_params=use_orig_params):
        assert "storage of size 0" in message


@both_forms
def test_gradients_that_come_past_every_hook_are_an_error_that_names_the_unit(
    use_orig_params: bool,
) -> None:
    options = {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "use_orig_params": use_orig_params,
    }
    for kind, message in run_ranks(2, _loses_a_loss, 1, 2, **options):
        assert kind == StateError.__name__
        assert "unit '0'" in message
        assert "never reduced" in message


# -- freed parameters


@on_ranks(2)
def test_freed_parameters_are_not_within_reach() -> None:
    wrapped = "_fsdp_wrapped_module"
    expected = [
        f"{wrapped}._flat_param",
        *(f"{wrapped}.blocks.{i}.{wrapped}._flat_param" for i in range(3)),
    ]
    pair = train(Stack)
    for use in (
        lambda: pair.model.blocks[0].up.weight.data,
        lambda: pair.model.blocks[0].up(torch.randn(2, DIM)),
        lambda: pair.model.stem(torch.randn(2, DIM)),
    ):
        with pytest.raises(AttributeError, match="weight"):
            use()
    names = [name for name, _ in pair.model.named_parameters()]
    assert sorted(names) == expected


def _shows_original_parameters() -> list[tuple[str, int, int]]:
    pair = train(Stack, use_orig_params=True)
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in pair.model.named_parameters()]
    assert names == [name for name, _ in pair.plain.named_parameters()]
    return [(names[i], p.dim(), p.numel()) for i, p in enumerate(pair.model.parameters())]


def test_original_parameters_are_flat_parts_with_names_as_before_that_may_be_read() -> None:
    first, second = run_ranks(2, _shows_original_parameters)
    sizes = {name: p.numel() for name, p in Stack().named_parameters()}
    assert {name: a + b for (name, _, a), (_, _, b) in zip(first, second, strict=True)} == sizes
    assert {dim for _, dim, _ in first + second} == {1}


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
