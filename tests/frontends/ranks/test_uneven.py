"""Ranks that use different units: correct with allow_unused_units=True, and otherwise an error that
names the unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from fsdp_compat import BackwardPrefetch, ShardingStrategy
from tests.support.errors import assert_told, prompt_message_of
from tests.support.models import Switch, TwoHeads
from tests.support.pairwise import each_value
from tests.support.parity import Step, backward, both_forms, both_strategies, make_pair, train
from tests.support.ranks import on_ranks, run_ranks


def _uses(inner: str, m: nn.Module, x: Tensor) -> Tensor:
    return backward(m(x, inner).pow(2).mean())


def _uses_outputs(number: int, m: nn.Module, x: Tensor) -> Tensor:
    return backward(sum(out.pow(2).mean() for out in m(x)[:number]))


# Every rank runs the unit, but the loss of one does not depend on it.
FIRST_USES_BOTH = [partial(_uses_outputs, 2), partial(_uses_outputs, 1)]


def _rank_uses(*uses: str) -> list[Step]:
    """Rank r runs the inner units that ``uses[r]`` names."""
    return [partial(_uses, inner) for inner in uses]


@each_value
@both_forms
@both_strategies
@on_ranks(2)
def test_every_rank_may_use_other_units_in_every_step(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    pair = make_pair(Switch, allow_unused_units=True, **options)
    both = ("ab", "a"), ("a", "ab"), ("ab", "ab"), ("", "b"), ("ba", "ab"), ("a", "a"), ("", "")
    for uses in both:
        pair.step(_rank_uses(*uses))


@both_forms
@on_ranks(2)
def test_an_output_may_be_used_on_one_rank_only(use_orig_params: bool) -> None:
    options = {"allow_unused_units": True, "use_orig_params": use_orig_params}
    train(TwoHeads, step=FIRST_USES_BOTH, **options)


@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, None])
@on_ranks(2)
def test_ranks_may_use_units_in_different_orders(prefetch: BackwardPrefetch | None) -> None:
    pair = make_pair(Switch, allow_unused_units=True, backward_prefetch=prefetch)
    for _ in range(3):
        pair.step(_rank_uses("ab", "ba"))


@on_ranks(4)
def test_replicas_may_use_other_units_too() -> None:
    train(Switch, step=_rank_uses("ab", "a", "", "b"), replicas=2, allow_unused_units=True)


@both_forms
@on_ranks(2)
def test_a_unit_that_no_rank_uses_has_no_gradient(use_orig_params: bool) -> None:
    pair = make_pair(Switch, use_orig_params=use_orig_params)
    for uses in ("a", "a", "ab", "a"):  # in the last step the optimizer has momentum for b
        pair.step(partial(_uses, uses))


def _fails(build: Callable[[], nn.Module], step: Any, **options: Any) -> str:
    return prompt_message_of(lambda: train(build, step=step, **options))


@pytest.mark.parametrize(
    ("build", "step", "units", "use_orig_params"),
    [
        (Switch, _rank_uses("ab", "a"), "b", True),
        (TwoHeads, FIRST_USES_BOTH, "right", False),
    ],
    ids=["a unit", "an output"],
)
def test_other_units_on_one_rank_are_an_error_after_the_time_limit(
    build: Callable[[], nn.Module], step: list[Step], units: str, use_orig_params: bool
) -> None:
    options = {"use_orig_params": use_orig_params, "group_timeout": 2}
    messages = run_ranks(2, _fails, build, step, **options)
    assert_told("\n".join(messages), f"unit '({units})'")
    for message in messages:  # a rank that did not notice would train on
        assert_told(message, "^Waiting for ", "allow_unused_units=True", "within 2 s")
