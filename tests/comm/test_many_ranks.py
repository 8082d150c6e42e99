"""How what ranks ask of the store grows with their number, counted around the real code."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from fsdp_compat._comm.board.status_store import StatusStore
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


def test_ranks_that_wait_log_one_warning_of_a_late_one(caplog: pytest.LogCaptureFixture) -> None:
    told = mock.patch.object(StatusStore, "warn", autospec=True, side_effect=StatusStore.warn)
    with many_ranks.simulated() as clock, told as warn:
        many_ranks.late(FEW, clock, late_s=55.0)
    assert warn.call_count == 1 and len(caplog.records) == FEW - 1
    (message,) = {each.getMessage() for each in caplog.records}
    assert message.startswith(f"rank {FEW - 1} has not begun state_dict(), which ranks 0, 1, ")
    assert f"\n  rank {FEW - 1}: is at train.py:9 in main()\n" in message


UNHEARD = "cannot be heard: stopped, killed, or busy elsewhere"
MOST = "ranks 0, 1, 2, 3, 4, 5, 6, 7 and {more} more"


STANDSTILLS = [  # what the last but one begins, how many are silent, seconds until it is told
    ("the head", 0, (6, 12), f"rank {{odd}} began the head where {MOST} began the norm"),
    ("", 0, (30, 35), f"rank {{odd}} has not begun the norm, which {MOST} wait for ("),
    ("the norm", 1, (30, 35), f"rank 0 {UNHEARD}; ranks 1, 2, 3, 4, 5"),
    ("the norm", 128, (30, 35), f"4, 5, 6, 7 and 120 more {UNHEARD}; "),
    ("the norm", 0, (50, 60), ""),  # all compute
]


@pytest.mark.parametrize(
    ("ranks", "other", "silent", "seconds", "text"),
    [(1024, *each) for each in STANDSTILLS]
    + [pytest.param(16384, *each, marks=pytest.mark.slow) for each in STANDSTILLS[:2]],
)
def test_verdict_reaches_all_ranks_by_w_log_w_requests(
    ranks: int, other: str, silent: int, seconds: tuple[int, int], text: str
) -> None:
    with many_ranks.simulated() as clock:
        store, members = many_ranks.stand_still(ranks, clock, other, silent)
    warning = store.values.get("fsdp_compat/warning", b"").decode()
    (failure,) = {each.failure for each in members}
    assert seconds[0] <= clock.now - 1000.0 <= seconds[1]
    assert store.requests.total() <= ranks * math.log2(ranks) * (1 if text else 2)
    assert bool(failure) == (other == "the head") and bool(warning) == (seconds[0] == 30)
    assert text.format(odd=ranks - 2, more=ranks - 9) in failure + warning
    assert (
        other == "the norm" or f"rank {ranks - 2}: is at train.py:{ranks - 2} " in failure + warning
    )


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("last_first", [False, True])
def test_no_rank_fails_before_all_that_stand_still_have_told(silent: int, last_first: bool) -> None:
    with many_ranks.simulated() as clock:
        _, members = many_ranks.stand_still(4, clock, "the head", silent, last_first=last_first)
    assert 5.0 <= clock.now - 1000.0 <= 12.0
    (failure,) = {each.failure for each in members[silent:]}
    most = ["ranks 0, 1 and 3", "ranks 1 and 3"][silent]
    assert failure.startswith(f"rank 2 began the head where {most} began the norm")
    assert (f"\n  rank 0: {UNHEARD}" in failure) == (silent == 1)


def test_ranks_that_go_on_ask_nothing_and_log_no_old_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with many_ranks.simulated() as clock:
        store, members = many_ranks.stand_still(MANY, clock, "")
        caplog.clear()
        for second in range(80):
            store.requests.clear()
            for each in members:
                if second <= 60:
                    each.activity.begin("the norm")
                each.board.look([each])
            assert second == 0 or second > 60 or not store.requests
            clock.sleep(1.0)
    assert not caplog.records


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
