"""The guess of the next unit from the last pass."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_compat._engine.runtime import Runtime
from fsdp_compat._engine.schedule import Order, Prefetch, RuntimeOptions
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


@pytest.mark.parametrize(
    ("passes", "guessed"),
    [
        (["rabc"], "----"),
        (["rabc", "rabc"], "abc-"),
        (["rabab", "rabab"], "abab-"),
        (["rabc", "rbc"], "a--"),  # b came instead of a: later positions do not match
        (["rabc", "racb"], "ab--"),
        (["rabc", "rabca"], "abc--"),
        (["rab", "rabc"], "ab--"),
        (["rabc", "rcbc"], "a-c-"),
        (["abc", "rabc"], "----"),
        (["rabc", "rcba", "rcba"], "cba-"),  # the latest pass
        (["rabc", "", "rab"], "abc"),  # an empty pass keeps the order
    ],
)
def test_units_are_guessed_from_the_latest_pass_while_positions_match(
    passes: list[str], guessed: str
) -> None:
    order = Order()
    assert [guesses(order, used) for used in passes][-1] == guessed


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


def test_every_pass_resets_the_units_to_issue_and_copies_their_list() -> None:
    order, mine = Order(), [UNITS["r"], UNITS["a"]]
    order.restart(mine)
    order.to_issue.pop(0)
    assert (order.to_issue, mine) == ([UNITS["a"]], [UNITS["r"], UNITS["a"]])
    order.restart([UNITS["r"], UNITS["b"]])
    assert order.to_issue == [UNITS["r"], UNITS["b"]]
    order.restart()
    assert order.to_issue == []
