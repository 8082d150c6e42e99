"""The guess which unit is used next: from the last pass, and never more than a guess."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_compat._engine.schedule import Order
from fsdp_compat._engine.unit import Unit
from tests.support.engine_build import lone_mesh, make_unit, members_of


def units(names: str) -> list[Unit]:
    made = []
    for name in names:
        module = nn.Linear(1, 1)
        made.append(make_unit("flat", module, lone_mesh(), members_of(module)))
        made[-1].label, made[-1].is_root = name, name == "r"
    return made


UNITS = {unit.label: unit for unit in units("rabc")}


def guesses(order: Order, used: str) -> str:
    """Use units in a new pass; return the name guessed after each, - for none."""
    order.restart()
    found = [order.advance(UNITS[name]) for name in used]
    return "".join(unit.label if unit is not None else "-" for unit in found)


def test_the_first_pass_has_nothing_to_guess_from() -> None:
    assert guesses(Order(), "rabc") == "----"


def test_the_second_pass_guesses_the_order_of_the_first_and_nothing_after_its_end() -> None:
    order = Order()
    guesses(order, "rabc")
    assert guesses(order, "rabc") == "abc-"


def test_a_unit_used_several_times_is_guessed_where_it_was_used() -> None:
    order = Order()
    guesses(order, "rabab")
    assert guesses(order, "rabab") == "abab-"


@pytest.mark.parametrize(
    ("last", "now", "guessed"),
    [
        ("rabc", "rbc", "a--"),  # b came where a was expected: from there on positions do not fit
        ("rabc", "racb", "ab--"),
        ("rabc", "rabca", "abc--"),
        ("rab", "rabc", "ab--"),
        ("rabc", "rcbc", "a-c-"),
        ("abc", "rabc", "----"),
    ],
)
def test_a_wrong_guess_is_followed_by_guesses_only_where_the_positions_fit(
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


def test_a_pass_that_used_nothing_does_not_make_the_order_forgotten() -> None:
    order = Order()
    guesses(order, "rabc")
    guesses(order, "")
    assert guesses(order, "rab") == "abc"


def test_the_first_unit_after_the_root_is_that_of_the_running_pass_or_else_of_the_last_one() -> (
    None
):
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


def test_what_is_still_to_issue_is_set_anew_by_every_pass() -> None:
    order = Order()
    order.restart([UNITS["r"], UNITS["a"]])
    order.to_issue.pop(0)
    assert order.to_issue == [UNITS["a"]]
    order.restart([UNITS["r"], UNITS["b"]])
    assert order.to_issue == [UNITS["r"], UNITS["b"]]
    order.restart()
    assert order.to_issue == []


def test_the_caller_keeps_its_own_list_of_what_is_to_issue() -> None:
    order, mine = Order(), [UNITS["r"], UNITS["a"]]
    order.restart(mine)
    order.to_issue.clear()
    assert mine == [UNITS["r"], UNITS["a"]]
