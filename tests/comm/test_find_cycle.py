"""The search for waits that can never end, over posts in a store in memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist

from fsdp_compat._comm.divergence.deadlock import find_cycle
from fsdp_compat._comm.divergence.status_store import Post, StatusStore
from fsdp_compat._comm.divergence.waits import COLLECTIVE, RENDEZVOUS, Report, Wait


def wait(rank: int, *peers: int, number: int = 1, tag: int = 4) -> Wait:
    return Wait(rank, peers, "all", tag, number, f"{rank} waits for {peers}")


def post(of: Wait, begun: dict[int, int] | None = None) -> Post:
    return Post(of, {"all": begun or {}})


def cycle(*posts: Post, failed: dict[int, Report] | None = None) -> Report | None:
    """What the rank of the first post concludes."""
    store = StatusStore(dist.HashStore())
    for each in posts:
        store.post(each.wait.rank, each)
    for rank, report in (failed or {}).items():
        store.report_failure("all", rank, report)
    return find_cycle(store, posts[0])


def test_find_cycle_finds_circles_and_waits_for_their_ranks() -> None:
    circle = post(wait(1, 2)), post(wait(2, 1))
    assert cycle(*circle) == Report({1: "1 waits for (2,)", 2: "2 waits for (1,)"})
    found = cycle(post(wait(0, 1)), *circle)
    assert found is not None and set(found.lines) == {0, 1, 2}


SENT, MET = post(wait(1, 0), {4: 1}), {RENDEZVOUS: 1}
REFUSED = post(wait(0, 1, tag=RENDEZVOUS), MET)
OTHER_GATHER = post(wait(1, 0, tag=8), {4: 1, 8: 1})
# Rank 1 waits for rank 2, which has come to the rendezvous that waits for rank 1. Only rank 0,
# which came first, has asked who is missing.
WAITS_FOR_SECOND, SECOND = post(wait(1, 2)), post(wait(2, tag=RENDEZVOUS), MET)
COLLECTIVE_OF_4 = post(wait(0, 1, 2, 3, tag=COLLECTIVE), {COLLECTIVE: 1})

# Posts, and whether they are a circle for the rank of the first one.
CIRCLES: dict[str, tuple[list[Post], bool]] = {
    "a rank at the end computes": ([post(wait(0, 1)), post(wait(1, 2))], False),
    "a message is in flight": ([post(wait(0, 1), {4: 1}), OTHER_GATHER], False),
    "the next one is not": ([post(wait(0, 1, number=2), {4: 2}), OTHER_GATHER], True),
    "a rendezvous can be refused": ([REFUSED, SENT], True),
    "a message cannot": ([SENT, REFUSED], False),
    "rank 1 goes on, and then rank 2": ([post(wait(2, 1), {4: 1}), REFUSED, SENT], False),
    "beyond a rendezvous": ([REFUSED, post(wait(1, 2)), post(wait(2, 1))], True),
    "a rendezvous is one place": ([REFUSED, WAITS_FOR_SECOND, SECOND], True),
    "its first rank looks": ([SECOND, WAITS_FOR_SECOND, REFUSED], False),
    "a peer of a collective": ([COLLECTIVE_OF_4, post(wait(2, 0))], True),
    "a peer that waits for another": ([COLLECTIVE_OF_4, post(wait(2, 1))], False),
    "a peer that has come": ([COLLECTIVE_OF_4, post(wait(2, 0), {COLLECTIVE: 1})], False),
}


@pytest.mark.parametrize("name", CIRCLES)
def test_find_cycle_finds_waits_that_cannot_end(name: str) -> None:
    posts, is_circle = CIRCLES[name]
    assert (cycle(*posts) is not None) == is_circle


def test_find_cycle_passes_through_a_rendezvous_by_what_its_first_rank_has_told() -> None:
    """Rank 0 waits in a rendezvous for rank 1, which waits in another one, as the second to come:
    its first rank has told that it waits for rank 2, which waits for rank 0."""
    store = StatusStore(dist.HashStore())
    own = post(wait(0, 1, tag=RENDEZVOUS), {RENDEZVOUS: 1})
    store.post(1, Post(dataclasses.replace(wait(1, tag=RENDEZVOUS), name="other"), {}))
    store.post(2, post(wait(2, 0)))
    assert find_cycle(store, own) is None
    store.tell_missing("other", 1, [2])
    assert find_cycle(store, own) is not None
    store.tell_missing("other", 2, [2])
    assert find_cycle(store, own) is None, "of another number"


def test_find_cycle_returns_the_report_of_a_failed_peer() -> None:
    report = Report({1: "1 has waited for 5"}, "time")
    expected = Report({0: "0 waits for (1,)", 1: "1 has waited for 5"}, "time")
    assert cycle(post(wait(0, 1)), failed={1: report}) == expected
    assert cycle(post(wait(0, 1, tag=RENDEZVOUS)), failed={1: report}) is None


def test_find_cycle_returns_the_first_report_of_any_member() -> None:
    """The awaited rank was killed: a neighbour on its host reports that."""
    first = Report({2: "2 waits for (1,)"}, "rank 1 was killed", 1)
    found = cycle(post(wait(0, 1)), failed={2: first, 3: Report({3: "rank 2 closed"}, "closed")})
    assert found == Report({0: "0 waits for (1,)", **first.lines}, first.cause, 1)
