"""Waits that can never end raise an error on all ranks, with what each rank waits for;
communication that has failed stays failed; and slow ranks get no error."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import ShardingStrategy, StateError, UsageError
from fsdp_compat._comm.divergence import deadlock, progress
from fsdp_compat._comm.divergence.deadlock import PATIENCE, find_cycle
from fsdp_compat._comm.divergence.status_store import Answer, Post, StatusStore
from fsdp_compat._comm.divergence.waits import (
    COLLECTIVE,
    RENDEZVOUS,
    Activity,
    Report,
    Wait,
    Waiter,
    Waiting,
)
from fsdp_compat._comm.gloo_connections import ACK_TAG, GlooConnections
from tests.support.collectives import connect, gathered
from tests.support.errors import PROMPT_S, limits, message_of
from tests.support.models import DIM, Block, Switch
from tests.support.parity import Pair, backward, make_pair
from tests.support.ranks import on_ranks
from tests.support.same_host import MAPPED, MESSAGES, NOT_MAPPED
from tests.support.simulation import RecordedStore, Simulation


def assert_circle(message: str, *facts: str) -> None:
    """Assert that it is the error of a circle, with these facts."""
    beginning = r"Waiting for .* can never end: ranks wait for each other\."
    assert re.match(beginning, message), message or "nothing was noticed"
    assert "allow_unused_units=True" in message
    for fact in facts:
        assert fact in message, f"{fact!r} is not in\n{message}"


# -- the search, over posts in a store in memory


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


# -- following the waits of one process, on a clock that the test moves


class FakeWaiter(Waiter):
    """Connections that record the calls of deadlock detection."""

    is_alive = True
    is_connected = True

    def __init__(self, rank: int, name: str = "all") -> None:
        self.activity = Activity(name, rank, (0, 1), thread=threading.get_ident())
        self.calls: list[str] = []
        self.lost: int | None = None  # what it finds when it looks at its connections
        self.num_looks = 0

    def begin(self, tag: int = 4) -> Waiting:
        """Begin a message and wait for it."""
        counts = self.activity.counts
        counts[tag] = counts.get(tag, 0) + 1
        self.activity.waiting = waiting = (tag, counts[tag], 1), 0, f"tag {tag}"
        return waiting

    def describe(self, waiting: Waiting) -> Wait:
        (tag, number, _), _, what = waiting
        rank = self.activity.rank
        peers = tuple(r for r in self.activity.members if r != rank)
        return Wait(rank, peers, self.activity.name, tag, number, f"rank {rank} waits for {what}")

    def lost_peer(self, wait: Wait, is_gone: Callable[[int], bool]) -> int | None:
        self.num_looks += 1
        return self.lost

    def end_wait(self) -> None:
        self.calls.append("end_wait")

    def close(self, report: Report | None) -> None:
        self.calls.append(f"close: {report}")


class Process:
    """A rank with one waiter and the search of its thread."""

    def __init__(self, rank: int, store: StatusStore, clock: Simulation) -> None:
        self.waiter, self.search = FakeWaiter(rank), deadlock.Search()
        self.store, self.clock = store, clock
        self.waiters = [self.waiter]

    def look(self, *after_s: float) -> None:
        """Look now, or after each of some pauses."""
        for seconds in after_s or (0.0,):
            self.clock.now += seconds
            self.search.look(self.waiters, self.store)

    def wait(self, *looks_after_s: float, tag: int = 4) -> None:
        """Begin a message, and look at once and later."""
        self.waiter.begin(tag)
        self.look(0.0, *looks_after_s)

    @property
    def posted(self) -> Post | None:
        return self.store.post_of(self.waiter.activity.rank)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    clock = Simulation()
    monkeypatch.setattr(deadlock, "time", clock)
    return clock


@pytest.fixture
def own(clock: Simulation) -> Process:
    return Process(0, StatusStore(dist.HashStore()), clock)


@pytest.fixture
def peer(own: Process) -> Process:
    return Process(1, own.store, own.clock)


def test_search_publishes_a_wait_after_the_patience_and_withdraws_it(own: Process) -> None:
    own.wait(PATIENCE - 0.1)
    assert own.posted is None
    own.look(0.2)
    assert own.posted == Post(own.waiter.describe(((4, 1, 1), 0, "tag 4")), {"all": {4: 1}})
    own.wait()  # the next one
    assert own.posted is None
    own.look(PATIENCE)
    assert own.posted is not None and own.posted.wait.number == 2
    own.waiter.activity.waiting = None
    own.look()
    assert own.posted is None
    assert own.waiter.calls == []


def test_search_ends_the_wait_of_every_rank_of_a_circle(own: Process, peer: Process) -> None:
    own.wait(tag=4)
    peer.wait(tag=8)
    own.look(PATIENCE)
    assert own.waiter.calls == [], "the other rank may compute"
    peer.look()
    own.look()
    expected = Report({0: "rank 0 waits for tag 4", 1: "rank 1 waits for tag 8"})
    for process in (own, peer):
        assert process.waiter.calls == ["end_wait"]
        assert process.waiter.activity.diagnosis == expected
        assert process.store.failure_of("all") == expected
        process.look(100.0)
        assert process.waiter.calls == ["end_wait"] * 2, "until it has ended"
        process.waiter.activity.waiting = None
        process.look(100.0)
        assert process.waiter.calls == ["end_wait"] * 2


def test_search_ends_a_long_wait_whose_connection_is_lost(own: Process) -> None:
    own.wait(PATIENCE, 0.9 * PATIENCE)
    assert own.waiter.num_looks == 1, "each one costs a message"
    own.waiter.lost = 1
    own.look(0.2 * PATIENCE)
    assert own.waiter.calls == ["end_wait"]
    assert own.waiter.activity.diagnosis == Report({}, "rank 1 closed its connection", 1)


def test_search_reports_the_failure_of_all_connections(own: Process) -> None:
    other, closed = FakeWaiter(0, "other"), FakeWaiter(0, "closed")
    closed.is_connected = False
    own.waiters = [own.waiter, other, closed]
    own.store.report_failure("all", 1, Report({1: "rank 1 was interrupted"}, "an interrupt"))
    own.wait(PATIENCE)
    assert own.waiter.calls == ["end_wait"]
    assert own.store.failure_of("other") is not None
    assert own.store.failure_of("closed") is None


def test_search_ignores_a_rank_that_has_started_the_message(own: Process, peer: Process) -> None:
    """It is slow, or its message is in flight."""
    own.wait(tag=4)
    peer.wait(tag=4)
    peer.wait(tag=8)
    for _ in range(100):
        own.look(PATIENCE)
        peer.look()
    assert own.waiter.calls == peer.waiter.calls == []


def test_search_stops_while_several_threads_communicate(own: Process) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    other = FakeWaiter(0, "other")
    other.activity.thread = thread.ident or 0
    own.waiters = [own.waiter, other]
    own.wait(PATIENCE)
    assert own.posted is None
    stop.set()
    thread.join()
    own.look(0.0, PATIENCE)
    assert own.posted is not None, "that thread has ended"


def test_search_drops_a_wait_that_ended_while_it_was_described(
    own: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = own.waiter.describe(own.waiter.begin())

    def describe(_: Waiting) -> Wait:
        own.waiter.begin()
        return described

    monkeypatch.setattr(own.waiter, "describe", describe)
    own.look(0.0, PATIENCE)
    assert own.posted is None


# -- warnings


@pytest.mark.parametrize("text", ["soon", "-1", "", "inf", "nan"])
def test_time_of_the_first_warning_must_be_a_time(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("FSDP_COMPAT_WARN_AFTER", text)
    not_used: Any = None
    with pytest.raises(UsageError, match="FSDP_COMPAT_WARN_AFTER is not a number of seconds"):
        GlooConnections(not_used, not_used)


@pytest.mark.parametrize(
    ("setting", "expected"), [("30", [30, 60, 120, 240]), ("100", [100, 200]), ("0", [])]
)
def test_search_warns_at_growing_intervals_of_one_wait(
    own: Process,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    expected: list[int],
) -> None:
    monkeypatch.setenv("FSDP_COMPAT_WARN_AFTER", setting)
    own.wait(25.0)  # a short wait before
    own.wait()
    found = []
    for second in range(1, 301):
        own.look(1.0)
        found += [second] * len(caplog.records)
        caplog.clear()
    assert found == expected


# -- failing for good


def test_give_up_fails_all_connections_and_tells_their_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, watcher = StatusStore(dist.HashStore()), deadlock._Watcher()
    monkeypatch.setattr(deadlock, "_watcher", watcher)  # without its thread
    monkeypatch.setattr(deadlock, "status_store", lambda: store)
    waiters = [FakeWaiter(0, name) for name in ("all", "other", "closed")]
    waiters[2].is_connected = False
    for waiter in waiters:
        watcher._waiters.add(waiter)
    report = Report({0: "rank 0 has left"}, "an exception")
    deadlock.give_up(waiters[0], report)
    assert [waiter.calls for waiter in waiters] == [["close: rank 0 has left"]] * 2 + [[]]
    wait = waiters[1].describe(waiters[1].begin())
    assert deadlock.reason_of(waiters[1], dataclasses.replace(wait, rank=1), False) == report
    assert deadlock.reason_of(waiters[1], wait, False) is None, "its own"
    assert store.failure_of("closed") is None


# -- answers to other ranks


class Asked:
    """Rank 1, which answers, and counts what it measures for that."""

    def __init__(self, clock: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(progress, "Progress", lambda: self)
        monkeypatch.setattr(progress, "location", self.location)
        self.clock, self.num_measured = clock, 0
        self.recorded = RecordedStore(dist.HashStore())
        self.store = StatusStore(self.recorded.store)
        self.responder = deadlock.Responder(1, StatusStore(self.recorded))

    def idle_s(self) -> float:
        self.num_measured += 1
        return 3.0

    def location(self) -> str:
        self.num_measured += 1
        return "train.py:7 in main()"

    def ask(self, *waiters: FakeWaiter, after_s: float = 0.0) -> Answer:
        self.store.ask(1)
        self.clock.now += after_s
        self.responder.look(waiters)
        answer = self.store.answer_of(1)
        assert answer is not None
        return answer


@pytest.fixture
def asked(clock: Simulation, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(clock, monkeypatch)


def test_responder_answers_each_question_once(asked: Asked) -> None:
    asked.responder.look([])
    assert asked.store.answer_of(1) is None
    asked.store.ask(1)
    answer = asked.ask(after_s=10.0)
    assert (answer.number, answer.text, answer.idle_s) == (2, "is at train.py:7 in main()", 3.0)
    assert asked.ask().number == 3, "at once while questions come"


def test_responder_says_that_it_waits_or_has_ended(asked: Asked) -> None:
    waiter = FakeWaiter(1)
    waiter.begin()
    answer = asked.ask(waiter)
    assert (answer.text, answer.idle_s) == ("waits for tag 4", 0.0), "a wait counts as progress"
    asked.responder.announce_end("has ended with KeyError: 'x'")
    last = asked.store.answer_of(1)
    assert last is not None and last.ended and last.text == "has ended with KeyError: 'x'"


def test_quiet_process_measures_nothing_and_reads_the_store_once_in_ten_seconds(
    asked: Asked,
) -> None:
    search, waiter = deadlock.Search(), FakeWaiter(1)
    asked.recorded.calls.clear()
    for _ in range(100):
        asked.clock.now += 1.0
        asked.responder.look([waiter])
        search.look([waiter], asked.store)
    assert len(asked.recorded.calls) <= 10 and set(asked.recorded.calls) == {"compare_set"}
    assert asked.num_measured == 0
    asked.ask(waiter, after_s=10.0)
    assert asked.num_measured > 0, "the count counts"


def test_what_was_seen_before_a_pause_between_questions_does_not_count(asked: Asked) -> None:
    seconds = [asked.ask(after_s=pause_s).since_s for pause_s in (10.0, 1.0, 1.0, 60.0, 1.0)]
    assert seconds == [0.0, 1.0, 2.0, 0.0, 1.0]


# -- the connections of gloo as waiters, without ranks


def connections(rank: int = 1) -> GlooConnections:
    """Connections of ranks 10, 11, 12, not connected."""
    found = GlooConnections.__new__(GlooConnections)
    found.activity = Activity("all", rank, (10, 11, 12))
    found.peers = [((rank - step) % 3, (rank + step) % 3) for step in (1, 2)]
    found.names, found.unfinished, found.sent = {4: "'a'"}, {}, {}
    found.gloo = found
    return found


@pytest.mark.parametrize(
    ("tag", "num_receives", "index", "text", "peers"),
    [
        (4, 2, 0, "rank 11 waits for 'b' from rank 10", (10,)),
        (4, 2, 1, "rank 11 waits for 'b' from rank 12", (12,)),
        (4, 2, 2, "rank 11 waits for rank 12 to take 'b'", (12,)),
        (4, 0, 1, "rank 11 waits for rank 10 to take 'a'", (10,)),
        (4 + ACK_TAG, 0, 0, "rank 11 waits for rank 12 to take 'a'", (12,)),
        (COLLECTIVE, 0, 0, "rank 11 waits in 'b' for ranks [10, 12]", (10, 12)),
    ],
)
def test_connections_describe_every_kind_of_wait(
    tag: int, num_receives: int, index: int, text: str, peers: tuple[int, ...]
) -> None:
    found = connections().describe(((tag, 7, num_receives), index, "'b'"))
    assert found.text.startswith(f"{text}, at ")
    assert (found.rank, found.peers, found.name, found.tag, found.number) == (
        *(11, peers, "all"),
        *(tag, 7),
    )


def test_connections_refuse_a_second_thread_in_the_middle_of_an_exchange() -> None:
    found = connections()
    assert found.begin(4) == 1
    found.activity.thread = -1  # it was another one
    assert found.begin(4) == 2, "threads may take turns"
    found.activity.thread, found.sent = -1, {(4, 1): ([], None, (4, 1, 0))}
    with pytest.raises(StateError, match="Two threads communicate over one process group at once"):
        found.begin(4)


# -- end to end


def use_all(model: nn.Module, x: Tensor) -> Tensor:
    return backward(model(x, "ab").pow(2).mean())


class Joined(nn.Module):
    """Two units beside each other, between two that every backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = Block(), Block(), Block(), Block()

    def forward(self, x: Tensor, detached: bool) -> Tensor:
        x = self.first(x)
        right = self.right(x)
        return self.last(self.left(x) + (right.detach() if detached else right))


def assert_stays_failed(model: nn.Module, forward: Callable[[], object]) -> None:
    """Every later use of the model raises at once, with the first failure."""
    started = time.monotonic()
    for use in (forward, model.state_dict, lambda: model.clip_grad_norm_(1.0), forward):
        with pytest.raises(
            StateError, match=r"has failed before, and stays failed\.[\s\S]*rank \d waits for"
        ):
            use()
    assert time.monotonic() - started < PROMPT_S / 2


def skips_a_unit(use: str, *facts: str) -> None:
    """All later uses fail, and a new process group trains."""
    pair, x = make_pair(Switch), torch.ones(2, DIM)
    assert_circle(message_of(lambda: pair.model(x, use).sum().backward()), *facts)
    assert_stays_failed(pair.model, lambda: pair.model(x, "ab"))
    with pytest.raises(StateError, match="has failed before"):
        make_pair(Switch)
    make_pair(Switch, process_group=dist.new_group()).step(use_all)


@pytest.mark.parametrize(("ranks", "other"), [(3, "b"), (2, "ba")])
@on_ranks("ranks", environment=NOT_MAPPED)
def test_unit_skipped_or_moved_by_a_rank_fails_on_all_ranks_for_good(
    ranks: int, other: str
) -> None:
    skips_a_unit(
        other if dist.get_rank() == 1 else "ab",
        "the parameters of unit 'a' from rank 1",
        "rank 1 waits for the parameters of unit 'b'",
    )


@on_ranks(3, environment=MAPPED)
def test_mapped_unit_skipped_by_a_rank_fails_in_backward_on_all_ranks_for_good() -> None:
    use = "b" if dist.get_rank() == 1 else "ab"
    skips_a_unit(use, "waits for the gradients of unit 'a' from rank 1")


def gathers(comm: Any, tag: int, numel: int = 3) -> Tensor:
    return gathered(comm, torch.full((numel,), float(comm.rank)), tag)


@on_ranks(2, environment=NOT_MAPPED)
def test_circles_of_empty_messages_and_collectives_are_found() -> None:
    rank, comm = dist.get_rank(), connect(dist.new_group())
    message = message_of(lambda: gathers(comm, 4 + 4 * rank, numel=0))
    assert_circle(message, "tag 4 from rank 1", "tag 8 from rank 0")
    other = connect(dist.new_group())
    diverging = (lambda: gathers(other, 4), lambda: other.sum_of(torch.ones(()), "a sum"))
    message = message_of(diverging[rank == 0])
    assert_circle(message, "rank 0 waits for a sum from rank 1", "tag 4 from rank 0")
    mine = torch.full((), float(rank + 1))
    dist.all_reduce(mine)  # the user's own messages are not affected
    assert mine.item() == 3.0


@pytest.mark.parametrize(
    ("strategy", "facts"),
    [
        (
            ShardingStrategy.FULL_SHARD,
            [
                "the parameters of unit 'right' from rank 1",
                "the parameters of unit 'first' from rank 0",
            ],
        ),
        (
            ShardingStrategy.SHARD_GRAD_OP,
            ["rank 0 waits for the gradients of unit 'right' from rank 1"],
        ),
    ],
)
@on_ranks(2, environment=NOT_MAPPED)
def test_circles_in_backward_are_found(strategy: ShardingStrategy, facts: list[str]) -> None:
    pair = make_pair(Joined, sharding_strategy=strategy)
    loss = pair.model(torch.ones(2, DIM), pair.rank == 1).sum()
    assert_circle(message_of(loss.backward), *facts)


@on_ranks(4, environment=NOT_MAPPED)
def test_all_ranks_of_a_hybrid_mesh_and_late_ranks_get_the_error() -> None:
    """The replicas 2 and 3 wait for 0 and 1 in backward only; rank 3 is late."""
    pair = make_pair(Switch, replicas=2)
    if pair.rank == 3:
        time.sleep(2.0)  # far longer than the patience of the others
    use = "b" if pair.rank == 0 else "ab"
    message = message_of(lambda: pair.model(torch.ones(2, DIM), use).sum().backward())
    assert_circle(message, "unit 'a' from rank 0", "unit 'b' from rank 1")


LARGE = 1 << 24  # numbers in a message: far more than fit into the buffers of a connection


@pytest.mark.parametrize("is_collective", [False, True])
@pytest.mark.parametrize(
    ("is_told", "reason"),
    [
        (True, "rank 1 left its communication with KeyboardInterrupt"),
        (False, "rank 1 closed its connection"),
    ],
)
@on_ranks(2, environment=MESSAGES)
def test_message_that_is_under_way_when_its_connection_closes_fails(
    is_collective: bool, is_told: bool, reason: str
) -> None:
    """Rank 1 closes its connections while a message is arriving. It tells why, or not, as a killed
    process."""
    comm = connect(dist.new_group())
    full = torch.full((2 * LARGE,), float(comm.rank))
    segments, found = full.chunk(2), list[str]()

    def communicate() -> None:
        if is_collective:
            comm.broadcast(segments[:1], "a model")
        else:
            comm.end_gather(comm.begin_gather(segments[comm.rank], full, segments, 4), "a model")
            comm.settle("a model")

    def communicate_until_it_fails() -> None:
        while not found:  # the first message may be too fast
            message = message_of(communicate)
            found.extend([message] if message else [])

    silent = mock.patch.object(StatusStore, "report_failure")
    with contextlib.nullcontext() if is_told else silent:
        if comm.rank == 0:
            communicate_until_it_fails()
            assert re.match(f"Waiting for a .*model failed: {reason}", found[0]), found
            assert "to do:    look at rank 1's own error first" in found[0]
        else:
            thread = threading.Thread(target=communicate_until_it_fails)
            thread.start()
            while segments[0][0].item():  # until it is that of rank 0
                pass
            comm.connections.abandon("its communication", KeyboardInterrupt())
            thread.join()


@on_ranks(2, group_timeout=2)
def test_slow_rank_is_waited_for_up_to_the_time_limit() -> None:
    """Messages that no rank waited for are no obstacle; a slow rank is waited for; a rank that is
    slower than the time limit is not."""
    comm = connect()
    full = torch.empty(6)
    for tag in (4, 12):  # and then an exception comes
        comm.begin_gather(torch.full((3,), 7.0), full, full.chunk(2), tag)
    del full
    found = [gathers(comm, tag).tolist() for tag in (8, 4)]
    with limits(patience_s=0.1):
        if comm.rank == 1:
            time.sleep(0.7)
        assert gathers(comm, 8).tolist() == found[0]
        if comm.rank == 1:
            time.sleep(3.0)
        message = message_of(lambda: gathers(comm, 8))
    assert found == [[0, 0, 0, 1, 1, 1]] * 2
    assert message.startswith("Waiting for tag 8 failed: no message within 2 s, the time limit")


# -- the thread


def threads() -> list[threading.Thread]:
    name = "fsdp_compat deadlock detection"
    return [thread for thread in threading.enumerate() if thread.name == name]


@on_ranks(2)
def test_one_thread_runs_while_there_are_process_groups() -> None:
    with limits(patience_s=0.1):
        first = make_pair(Switch)
        [thread] = threads()
        store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        rank = dist.get_rank()
        dist.destroy_process_group()
        del first
        gc.collect()
        thread.join(5)
        assert threads() == []
        again = dist.PrefixStore("again", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
        make_pair(Switch).step(use_all)
        assert len(threads()) == 1


@on_ranks(2)
def test_two_models_train_in_two_threads_over_two_process_groups() -> None:
    pairs = [make_pair(Switch, process_group=dist.new_group()) for _ in range(2)]
    found: list[str] = []

    def trains(pair: Pair) -> None:
        try:
            for _ in range(60):
                pair.model(torch.ones(2, DIM), "ab").sum().backward()
        except StateError as error:
            found.append(str(error))

    workers = [threading.Thread(target=trains, args=(pair,)) for pair in pairs]
    with limits():
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert found == []
