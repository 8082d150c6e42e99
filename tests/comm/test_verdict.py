"""Who is named when ranks part, as a function of what they have begun."""

from __future__ import annotations

import pytest

from fsdp_compat._comm.board.verdict import State, judge, merged, parting, ranks_text


def state(first: int, *last: str, count: int = 1, ended: bool = False) -> State:
    """Ranks that have begun these calls after 5 others, one each second from 1,000."""
    ranks, doing = tuple(range(first, first + count)), "has ended" if ended else "computes"
    return State(ranks, count, dict(enumerate(last, 5)), 1000.0 + len(last), doing, ended)


MOST = state(0, "the embedding", "the layers", "the norm", count=3)
BEHIND = "rank 3 has not begun the norm, which ranks 0, 1 and 2 wait for"
UNHEARD = "rank 3 cannot be heard: stopped, killed, or busy elsewhere"
SILENT = f"{UNHEARD}; ranks 0, 1 and 2 began the norm last"
OTHER = "rank 3 began the head where ranks 0, 1 and 2 began the norm"
SKIPPED = "rank 3 skipped the layers, or ranks 0, 1 and 2 did it once more"


@pytest.mark.parametrize(
    ("odd", "text", "never_ends"),  # with tags, and without
    [
        (state(3, "the embedding", "the layers"), BEHIND, [False, False]),
        (state(3, "the embedding", "the layers", ended=True), BEHIND, [True, True]),
        (State((3,), 1), SILENT, [False, False]),
        (State((3,), 1, doing="was killed", ended=True), "rank 3 was killed; ", [True, True]),
        (state(3, "the embedding", "the layers", "the head"), OTHER, [False, True]),
        (state(3, "the embedding", "the norm"), SKIPPED, [False, True]),
    ],
)
def test_rank_that_differs_is_named(odd: State, text: str, never_ends: list[bool]) -> None:
    found = [judge([odd, MOST], in_order, 1040.0) for in_order in (False, True)]
    assert [each and each.never_ends for each in found] == never_ends
    assert all(each and each.text.startswith(text) for each in found), found


def test_ranks_that_have_begun_the_same_wait_for_nobody() -> None:
    calls = (MOST.calls or {}).values()
    both = merged([state(3, *calls), MOST])
    assert both == [state(0, *calls, count=4)] and judge(both, True, 1040.0) is None
    assert judge([], True, 1040.0) is None and judge([State((3,), 1)], True, 1040.0) is None
    assert parting([{1: "a", 2: "b"}, {2: "b"}]) is None  # the second has forgotten place 1
    assert parting([{1: "a", 2: "b"}, {1: "a", 2: "b", 3: "c"}, {1: "b"}]) == 1
    assert [ranks_text([3], 1), ranks_text([0, 1], 2)] == ["rank 3", "ranks 0 and 1"]
    assert ranks_text(range(9), 9) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (["the layers"], ["the norm"], "rank 1 began the norm where rank 0 began the layers ("),
        (["the norm"], ["the layers", "the norm"], "rank 1 began the layers where rank 0 began"),
        (["the layers", "the norm"], ["the norm"], "rank 1 skipped the layers, or rank 0 did it"),
    ],
)
def test_of_two_ranks_none_is_said_to_be_wrong(
    first: list[str], second: list[str], text: str
) -> None:
    verdict = judge([state(1, *second), state(0, *first)], True, 1040.0)
    assert verdict and verdict.never_ends and verdict.text.startswith(text)
