"""How what ranks ask of the store grows with their number, counted around the real code."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import many_ranks
from tests.support.many_ranks import Clock, Cost

FEW, MANY = 64, 512


def costs(call: Callable[[int, Clock], Cost]) -> tuple[Cost, Cost]:
    with many_ranks.simulated() as clock:
        return call(FEW, clock), call(MANY, clock)


@pytest.mark.parametrize("call", many_ranks.CALLS)
def test_requests_grow_by_w_log_w_at_most(
    call: Callable[[int, Clock], Cost],
) -> None:
    few, many = costs(call)
    law = MANY * math.log(MANY) / (FEW * math.log(FEW))
    assert few.requests < many.requests <= law * few.requests
    assert many.nbytes <= law * few.nbytes


def test_a_few_ranks_warn_of_a_late_one(caplog: pytest.LogCaptureFixture) -> None:
    with many_ranks.simulated() as clock:
        many_ranks.late(FEW, clock, late_s=40.0)
    assert 1 <= len(caplog.records) <= 3
    assert all(f"for the ranks [{FEW - 1}]" in each.getMessage() for each in caplog.records)


def test_refused_ranks_name_a_few_ranks_and_the_one_that_differs() -> None:
    few, many = costs(many_ranks.refused)
    assert len(few.messages) == FEW and len(many.messages) == MANY
    for message in many.messages:
        assert f"rank {MANY - 1} called apply() at train.py:5 in main()" in message
        assert message.count(" called state_dict() at") <= 8  # its own, and seven others
        assert "504 more ranks, 0 of which have not arrived" in message
    assert max(map(len, many.messages)) < max(map(len, few.messages)) + 100


def test_ranks_of_a_save_tell_the_same(tmp_path: Path) -> None:
    """Also where a rank has no element of many parameters, so that each text is sent once."""
    for told in many_ranks.plans(MANY, [0, 1, MANY - 1], tmp_path).values():
        assert len(told[0]) > 100 and len({*told}) == 1, told
