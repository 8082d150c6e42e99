"""A rendezvous over a store in memory: its cost, the reasons for which it is refused, and that all
ranks can go on afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_compat import StateError
from fsdp_compat._comm.divergence import deadlock, progress, status_store, store_rendezvous
from fsdp_compat._comm.divergence.processes import Process
from fsdp_compat._comm.divergence.status_store import Answer, MissingRanks, Post, StatusStore
from fsdp_compat._comm.divergence.store_rendezvous import Attempt, StoreRendezvous
from fsdp_compat._comm.divergence.waits import Activity, Report, Wait
from tests.support.simulation import RecordedStore, Simulation

IDLE_S = 10.0  # the limit
TIMEOUT_S = 600.0  # of the process group
CONNECTIONS = "connections"  # the name of those that the calls would use


class Ranks:
    """The members of one rendezvous."""

    def __init__(self, simulation: Simulation, num_ranks: int, store: Any, name: str) -> None:
        self.simulation, self.store, self.status = simulation, store, StatusStore(store)
        self.num_ranks, members = num_ranks, tuple(range(num_ranks))
        self.stores = [RecordedStore(store) for _ in members]
        self.rendezvous = [
            StoreRendezvous(Activity(name, rank, members), self.stores[rank], TIMEOUT_S)
            for rank in members
        ]

    def call(self, rank: int, name: str = "call", *, after_s: float = 0.0) -> Callable[[], str]:
        """A function for the simulation: the error of the call, or ""."""

        def make() -> str:
            if after_s:
                self.simulation.sleep(after_s)
            try:
                self.rendezvous[rank].meet(f"{name}()", "a model", CONNECTIONS)
            except StateError as error:
                return str(error)
            return ""

        return make

    def answers(self, rank: int, idle_s: Callable[[], float], for_s: float) -> Callable[[], None]:
        """A function for the simulation: a rank that does something else and answers questions."""

        def act() -> None:
            number, end = 0, self.simulation.now + for_s
            self.status.introduce(rank, None)
            while self.simulation.now < end:
                asked = self.status.num_asked(rank)
                if asked != number:
                    number = asked
                    self.status.answer(rank, Answer(number, "is at train.py:5", idle_s()))
                self.simulation.sleep(deadlock.LOOK_S)

        return act

    def assert_all_can_go_on(self) -> None:
        calls = [self.call(rank, "next") for rank in range(self.num_ranks)]
        assert self.simulation.run(*calls) == [""] * self.num_ranks


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    simulation = Simulation()
    monkeypatch.setattr(store_rendezvous, "time", simulation)
    monkeypatch.setattr(deadlock, "time", simulation)
    monkeypatch.setattr(status_store, "time", simulation)
    monkeypatch.setenv("FSDP_COMPAT_MEET_TIMEOUT", str(IDLE_S))
    monkeypatch.setattr(progress, "location", lambda: "train.py:1 in main()")
    yield simulation


@pytest.fixture
def make(simulation: Simulation) -> Callable[..., Ranks]:
    def make(num_ranks: int, store: Any = None, name: str = "rendezvous") -> Ranks:
        return Ranks(simulation, num_ranks, store or dist.HashStore(), name)

    return make


# -- cost


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rendezvous_costs_one_add_and_polls_and_does_not_grow_the_store(
    make: Callable[..., Ranks], num_ranks: int
) -> None:
    ranks, sizes = make(num_ranks), []
    for _ in range(20):
        for store in ranks.stores:
            store.calls.clear()
        calls = [ranks.call(rank, after_s=rank / 10) for rank in range(num_ranks)]
        assert ranks.simulation.run(*calls) == [""] * num_ranks
        sizes.append(ranks.store.num_keys())
        for store in ranks.stores:
            assert store.calls[:2] == ["set", "add"]  # a set waits for no reply
            assert set(store.calls[2:]) <= {"compare_set", "delete_key"}
        assert "compare_set" not in ranks.stores[-1].calls, "the last rank polls nothing"
    assert sizes[-1] == sizes[1]


def test_refused_rendezvous_do_not_grow_the_store(make: Callable[..., Ranks]) -> None:
    ranks, sizes = make(2), []
    for _ in range(6):
        assert all(ranks.simulation.run(ranks.call(0, "a"), ranks.call(1, "b")))
        ranks.assert_all_can_go_on()
        sizes.append(ranks.store.num_keys())
    assert sizes[-1] == sizes[1]


def test_pauses_between_polls_grow_up_to_a_limit(make: Callable[..., Ranks]) -> None:
    ranks = make(2)
    assert ranks.simulation.run(ranks.call(0), ranks.call(1, after_s=8.0)) == ["", ""]
    assert 30 < ranks.stores[0].calls.count("compare_set") < 200
    assert ranks.simulation.now == pytest.approx(1008.0, abs=store_rendezvous.PAUSE_S + 0.01)


def test_waiting_does_not_grow_the_file_of_a_file_store(
    make: Callable[..., Ranks], tmp_path: Path
) -> None:
    path, grown = tmp_path / "store", []
    ranks = make(2, dist.FileStore(str(path), 2))
    for after_s in (0.1, 0.1, 0.9):  # the second one deletes a counter too
        before = path.stat().st_size
        assert ranks.simulation.run(ranks.call(0), ranks.call(1, after_s=after_s)) == ["", ""]
        grown.append(path.stat().st_size - before)
    assert grown[2] == grown[1]


# -- refusals


def test_different_calls_are_refused_without_waiting_for_missing_ranks(
    make: Callable[..., Ranks],
) -> None:
    ranks = make(3)
    messages = ranks.simulation.run(ranks.call(0, "state_dict"), ranks.call(1, "clip_grad_norm_"))
    assert ranks.simulation.now < 1001.0
    for message, call in zip(messages, ("state_dict()", "clip_grad_norm_()"), strict=True):
        assert message.startswith(f"Not all ranks called {call}.")
        assert "rank 0 called state_dict() at train.py:1 in main()" in message
        assert "rank 1 called clip_grad_norm_() at train.py:1 in main()" in message
        assert "rank 2 has not arrived" in message
    ranks.assert_all_can_go_on()


def test_rank_that_arrives_while_the_rendezvous_is_closed_is_told_its_own_call(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 arrives after rank 0 has seen that the calls differ, and before that rank closes the
    rendezvous."""
    ranks, close, pauses_s = make(3), Attempt.close, (0.1, 0.2, 1.0)

    def close_late(attempt: Attempt, known: dict[int, str]) -> None:
        ranks.simulation.sleep(pauses_s[attempt._activity.rank])
        close(attempt, known)

    monkeypatch.setattr(Attempt, "close", close_late)
    messages = ranks.simulation.run(
        ranks.call(0, "state_dict"), ranks.call(1, "apply"), ranks.call(2, "apply", after_s=0.05)
    )
    for message in messages:
        assert "rank 2 called apply() at train.py:1 in main()" in message
    ranks.assert_all_can_go_on()


def test_idle_rank_is_waited_for_up_to_the_limit(make: Callable[..., Ranks]) -> None:
    ranks, simulation = make(3), make(1).simulation
    for _ in range(2):  # the second time as the first
        started = simulation.now
        idle = [
            ranks.answers(rank, lambda start=started: simulation.now - start, 30.0)
            for rank in (1, 2)
        ]
        message, *_ = simulation.run(ranks.call(0), *idle)
        assert "rank 0 called call() at train.py:1" in message
        assert re.search(
            r"rank [12] has not arrived: it is at train\.py:5, and has made no progress for 1\d s",
            message,
        )
        simulation.now += 60
    ranks.assert_all_can_go_on()


def test_rank_that_makes_progress_is_waited_for_up_to_the_time_limit(
    make: Callable[..., Ranks],
) -> None:
    ranks = make(2)
    late, busy = ranks.call(1, after_s=400.0), ranks.answers(1, lambda: 0.0, 400.0)
    assert ranks.simulation.run(ranks.call(0), late, busy)[:2] == ["", ""]
    started = ranks.simulation.now
    message, _ = ranks.simulation.run(ranks.call(0), ranks.answers(1, lambda: 0.0, 700.0))
    limit = "rank 1 has not arrived: the time limit of 600 s is over; it is at train.py:5"
    assert limit in message
    assert ranks.simulation.now < started + 702


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (None, "rank 1 has not arrived: it has ended with KeyError: 'x'"),
        (Report({1: "lost"}), "rank 1 has not arrived: its communication has failed (lost)"),
    ],
)
def test_rank_whose_program_or_communication_has_ended_is_not_waited_for(
    make: Callable[..., Ranks], report: Report | None, told: str
) -> None:
    ranks = make(2)
    if report is None:
        ranks.status.answer(1, Answer(0, "has ended with KeyError: 'x'", 0.0, ended=True))
    else:
        ranks.status.report_failure(CONNECTIONS, 1, report)
    (message,) = ranks.simulation.run(ranks.call(0))
    assert told in message
    assert ranks.simulation.now < 1000 + 2 * store_rendezvous.ASK_S + 1


def test_refused_rank_that_does_not_come_back_is_missed_by_late_ranks(
    make: Callable[..., Ranks],
) -> None:
    ranks = make(2)
    ranks.status.answer(1, Answer(0, "has ended", 0.0, ended=True))
    (first,) = ranks.simulation.run(ranks.call(0))
    ranks.status.answer(1, None)
    ranks.status.answer(0, Answer(0, "has ended", 0.0, ended=True))
    (late,) = ranks.simulation.run(ranks.call(1))
    assert "rank 1 has not arrived" in first and "rank 0 has not arrived" in late


def test_interrupted_rank_does_not_leave_others_waiting(make: Callable[..., Ranks]) -> None:
    ranks = make(3)
    ranks.simulation.interrupts[0] = ranks.simulation.now + 0.5
    interrupt, message = ranks.simulation.run(ranks.call(0), ranks.call(1))
    assert isinstance(interrupt, KeyboardInterrupt)
    assert "rank 0 left call() with KeyboardInterrupt" in message
    assert ranks.simulation.now < 1002.0
    ranks.assert_all_can_go_on()


def test_second_thread_of_a_rank_is_refused(make: Callable[..., Ranks]) -> None:
    ranks = make(2)
    calls = ranks.call(0), ranks.call(0, "other"), ranks.call(1, after_s=1.0)
    first, second, other_rank = ranks.simulation.run(*calls)
    assert first == other_rank == ""
    assert "while another thread of this rank waits" in second


def test_lost_store_raises_a_state_error(make: Callable[..., Ranks]) -> None:
    class Lost:
        def set(self, *args: object) -> None:
            raise RuntimeError("connection refused")

    ranks = make(2)
    ranks.rendezvous[0].store = StatusStore(Lost())
    (message,) = ranks.simulation.run(ranks.call(0))
    assert "rank 0 cannot reach the store (connection refused)" in message


def test_ranks_of_different_groups_do_not_affect_each_other(make: Callable[..., Ranks]) -> None:
    store = dist.HashStore()
    one, other = make(2, store, "one"), make(2, store, "other")
    found = one.simulation.run(
        one.call(0, "a"), one.call(1, "b"), other.call(0), other.call(1, after_s=2.0)
    )
    assert found[0] and found[1] and found[2:] == ["", ""]
    other.assert_all_can_go_on()
    one.assert_all_can_go_on()


def test_rank_that_waits_for_a_waiting_rank_ends_the_rendezvous(make: Callable[..., Ranks]) -> None:
    """Rank 1 waits for a message of rank 0, which waits for rank 1 in a rendezvous."""
    ranks, search = make(2), deadlock.Search()
    wait = Wait(1, (0,), CONNECTIONS, 4, 1, "rank 1 waits for the parameters of unit 'a'")
    ranks.status.post(1, Post(wait, {CONNECTIONS: {4: 1}}))

    def look() -> None:
        """As the thread of deadlock.py."""
        end = ranks.simulation.now + 20.0
        while ranks.simulation.now < end:
            search.look([ranks.rendezvous[0]], ranks.status)
            ranks.simulation.sleep(deadlock.LOOK_S)

    message, _ = ranks.simulation.run(ranks.call(0, "state_dict"), look)
    assert "rank 0 waits in state_dict() for the ranks [1], at train.py:1 in main()" in message
    assert "rank 1 waits for the parameters of unit 'a'" in message
    assert ranks.status.failure_of(ranks.rendezvous[0].activity.name) is None
    assert ranks.status.post_of(0) is None, "withdrawn"
    ranks.assert_all_can_go_on()


# -- what a waiting rank makes of answers


def test_answer_to_an_earlier_question_does_not_count(simulation: Simulation) -> None:
    store = StatusStore(dist.HashStore())
    store.answer(1, Answer(0, "was idle", 99.0))
    assert MissingRanks(store, CONNECTIONS).ask(1) == ("it has not answered for 0 s", False)


def test_silent_rank_is_waited_for_while_its_process_lives(simulation: Simulation) -> None:
    """It may be stopped."""
    store = StatusStore(dist.HashStore())
    missing = MissingRanks(store, CONNECTIONS)
    with subprocess.Popen(["sleep", "60"]) as other:
        process = Process.with_id(other.pid)
        assert process is not None
        store.introduce(1, process)
        os.kill(other.pid, signal.SIGSTOP)
        assert missing.ask(1) == ("it has not answered for 0 s", False)
        simulation.now += 1000.0
        assert missing.ask(1) == ("it has not answered for 1000 s", False)
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        gone = "its process ended without a message, as a killed one does", True
        assert missing.ask(1) == gone, "a zombie"
    assert missing.ask(1) == gone
