"""The guess of the next unit from the last pass."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_compat._engine.gathering import Order, Prefetch
from fsdp_compat._engine.runtime import Runtime, RuntimeOptions
from fsdp_compat._engine.unit import Unit
from tests.support.engine_build import lone_mesh, make_unit, members_of


def units(names: str) -> list[Unit]:
    made = []
    for _ in names:
        module = nn.Linear(1, 1)
        made.append(make_unit("flat", module, lone_mesh(), members_of(module)))
    Runtime(made[0], made, list(names), RuntimeOptions(False, Prefetch.PRE, False))
    for name, unit in zip(names, made, strict=True):
        unit.label = name
    return made


UNITS = {unit.label: unit for unit in units("rabc")}


def guesses(order: Order, used: str) -> str:
    """Use units in a new pass; return the name guessed after each, - for none."""
    order.restart()
    found = [order.advance(UNITS[name]) for name in used]
    return "".join(unit.label if unit is not None else "-" for unit in found)


def test_first_pass_guesses_nothing() -> None:
    assert guesses(Order(), "rabc") == "----"


def test_second_pass_guesses_the_order_of_the_first() -> None:
    order = Order()
    guesses(order, "rabc")
    assert guesses(order, "rabc") == "abc-"


def test_unit_used_several_times_is_guessed_each_time() -> None:
    order = Order()
    guesses(order, "rabab")
    assert guesses(order, "rabab") == "abab-"


@pytest.mark.parametrize(
    ("last", "now", "guessed"),
    [
        ("rabc", "rbc", "a--"),  # b came instead of a: later positions do not match
        ("rabc", "racb", "ab--"),
        ("rabc", "rabca", "abc--"),
        ("rab", "rabc", "ab--"),
        ("rabc", "rcbc", "a-c-"),
        ("abc", "rabc", "----"),
    ],
)
def test_after_a_wrong_guess_only_matching_positions_are_guessed(
    last: str, now: str, guessed: str
) -> None:
    order = Order()
    guesses(order, last)
    assert guesses(order, now) == guessed


def test_guesses_follow_the_latest_pass() -> None:
    order = Order()
    guesses(order, "rabc")
    guesses(order, "rcba")
    assert guesses(order, "rcba") == "cba-"


def test_empty_pass_keeps_the_order() -> None:
    order = Order()
    guesses(order, "rabc")
    guesses(order, "")
    assert guesses(order, "rab") == "abc"


def test_first_after_root_is_of_this_pass_or_else_the_last() -> None:
    order = Order()
    assert order.first_after_root() is None
    guesses(order, "rcba")
    assert order.first_after_root() is UNITS["c"]
    order.restart()
    assert order.first_after_root() is UNITS["c"]
    order.advance(UNITS["r"])
    assert order.first_after_root() is None
    order.advance(UNITS["a"])
    assert order.first_after_root() is UNITS["a"]


def test_every_pass_resets_the_units_to_issue() -> None:
    order = Order()
    order.restart([UNITS["r"], UNITS["a"]])
    order.to_issue.pop(0)
    assert order.to_issue == [UNITS["a"]]
    order.restart([UNITS["r"], UNITS["b"]])
    assert order.to_issue == [UNITS["r"], UNITS["b"]]
    order.restart()
    assert order.to_issue == []


def test_restart_copies_the_list_of_units_to_issue() -> None:
    order, mine = Order(), [UNITS["r"], UNITS["a"]]
    order.restart(mine)
    order.to_issue.clear()
    assert mine == [UNITS["r"], UNITS["a"]]
