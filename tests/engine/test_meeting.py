"""Meetings in the store: what they cost, what ends them, and how a process is seen from outside."""

from __future__ import annotations

import _thread
import contextlib
import functools
import re
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateError, UsageError
from fsdp_compat._engine import meeting, pulse, watch
from tests.support.ranks import run_ranks

PROMPT_S = 8.0  # on a busy machine; every other time limit is far beyond it


@contextlib.contextmanager
def limits(idle_s: float = 0.6, patience_s: float = 0.4) -> Iterator[None]:
    before = meeting.LIMIT_S, watch.PATIENCE
    meeting.LIMIT_S, watch.PATIENCE = idle_s, patience_s
    try:
        yield
    finally:
        meeting.LIMIT_S, watch.PATIENCE = before


def message_of(call: Callable[[], object], idle_s: float = 0.6, patience_s: float = 0.4) -> str:
    """The message of the StateError that ``call`` raises soon, or nothing."""
    started = time.monotonic()
    with limits(idle_s, patience_s):
        try:
            call()
        except StateError as error:
            assert time.monotonic() - started < PROMPT_S, f"late: {error}"
            return str(error)
    return ""


def works(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


def all_ranks() -> meeting._RollCall:
    found = meeting._roll_call(tuple(range(dist.get_world_size())))
    assert found is not None
    return found


# -- what it costs


class Recorded:
    """A store that keeps account of what is asked of it."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls, self.keys = store, [], set[str]()

    def __getattr__(self, name: str) -> Any:
        def call(key: str, *args: Any) -> Any:
            self.calls.append(name)
            self.keys.add(key)
            return getattr(self.store, name)(key, *args)

        return call


def costs(num_meetings: int) -> tuple[list[list[str]], int]:
    roll = all_ranks()
    recorded = roll._store = Recorded(roll._store)
    per_meeting = []
    for _ in range(num_meetings):
        recorded.calls = []
        roll.meet("call", 1)
        per_meeting.append(recorded.calls)
    return per_meeting, len(recorded.keys)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_meeting_takes_one_addition_and_reading_it_and_no_new_keys(ranks: int) -> None:
    found = run_ranks(ranks, costs, 50)
    for per_meeting, num_keys in found:
        assert num_keys == 6  # counters and own posts, three of each
        for calls in per_meeting:
            assert calls[:3] == ["set", "set", "add"]  # a set waits for no answer
            assert set(calls[3:]) <= {"add"}
    for meetings in zip(*(per_meeting for per_meeting, _ in found), strict=True):
        assert any(len(calls) == 3 for calls in meetings), "who comes last reads nothing"


def threads() -> int:
    return sum(thread.name == "fsdp_compat watch" for thread in threading.enumerate())


def answers_without_connections() -> tuple[int, str, float]:
    """There is no model, so no line of gloo's."""
    with limits():
        roll = all_ranks()
        rank, other = roll.members[roll.rank], 1 - roll.rank
        board = watch.Board(roll._store)
        found = threads()
        answer, end = None, time.monotonic() + PROMPT_S
        while (answer is None or answer.idle_s == 0.0) and time.monotonic() < end:
            board.ask(other)
            threading.Event().wait(0.05)
            answer = board.answer_of(other)
        dist.barrier()
    assert rank != other and answer is not None
    return found, answer.text, answer.idle_s


def test_a_process_answers_whatever_its_backend() -> None:
    for num_threads, text, idle_s in run_ranks(2, answers_without_connections):
        assert num_threads == 1 and idle_s > 0
        assert re.fullmatch(rf"is at {re.escape(__file__)}:\d+ in answers_without_connections\(\)", text)


# -- what ends it


def one_is_not_there() -> list[str]:
    """Of three ranks two call different things; then rank 2 comes, and then all call the same."""
    roll = all_ranks()
    found = []
    if roll.rank < 2:
        found.append(message_of(lambda: roll.meet(f"call_{roll.rank}", 1)))
    dist.barrier()
    if roll.rank == 2:
        found.append(message_of(lambda: roll.meet("call_2", 1)))
    found.append(message_of(lambda: roll.meet("call", 1)))
    return found


def test_two_that_differ_do_not_wait_for_the_third_who_is_told_later() -> None:
    found = run_ranks(3, one_is_not_there)
    assert [again for _, again in found] == [""] * 3
    for message, _ in found:
        for rank in range(2):
            assert re.search(rf"rank {rank} called call_{rank}\(\) at {re.escape(__file__)}:\d+", message), message
    assert all("rank 2 has not come" in message for message, _ in found[:2])
    assert re.search(r"rank 2 called call_2\(\) at .*, which others had given up", found[2][0])


def is_interrupted() -> tuple[str, str]:
    roll = all_ranks()
    kind = message = ""
    if roll.rank == 0:
        timer = threading.Timer(0.2, _thread.interrupt_main)
        timer.start()
        try:
            roll.meet("call", 1)
        except KeyboardInterrupt:
            kind = "interrupted"
    dist.barrier()
    if roll.rank == 1:
        message = message_of(lambda: roll.meet("call", 1))
    roll.meet("call", 1)
    return kind, message


def test_a_rank_that_is_interrupted_while_it_waits_does_not_leave_others_waiting() -> None:
    (kind, _), (_, message) = run_ranks(2, is_interrupted)
    assert kind == "interrupted"
    assert "rank 0 left call() with KeyboardInterrupt" in message


def gives_up_elsewhere() -> str:
    """Rank 1 has failed while rank 0 did something else; no limit is near, and nobody is asked."""
    roll, message = all_ranks(), ""
    if roll.rank == 1:
        watch.give_up(roll, watch.Report(True, {1: "rank 1 lost its way"}))
    dist.barrier()
    if roll.rank == 0:
        message = message_of(lambda: roll.meet("call", 1), idle_s=60.0, patience_s=60.0)
    roll.meet("call", 1)
    return message


def test_a_rank_that_failed_elsewhere_is_not_waited_for() -> None:
    first, _ = run_ranks(2, gives_up_elsewhere)
    assert re.search(r"rank 0 called call\(\) at .*, which others had given up; rank 1 lost its way", first)


def is_busy_for_too_long() -> str:
    roll = all_ranks()
    if roll.rank == 1:
        works(2.0)
    return message_of(lambda: roll.meet("call", 1), idle_s=30.0)


def test_a_busy_rank_is_waited_for_no_longer_than_the_process_group_would() -> None:
    first, second = run_ranks(2, is_busy_for_too_long, group_timeout=1)
    assert "rank 1 has not come: the time limit of 1 s is over" in first
    assert "rank 1 called call()" in second and "which others had given up" in second


def meets_in_several_groups() -> list[tuple[int, ...]]:
    """Two models over all ranks, one of them with a part over the first two only."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    models = [FSDP(nn.Linear(4, 4), process_group=pair)] if rank < 2 else []
    models += [FSDP(nn.Linear(4, 4)), FSDP(nn.Linear(4, 4))]
    met: list[tuple[int, ...]] = []
    meet = meeting._RollCall.meet

    def counting(self: Any, *args: Any) -> None:
        met.append(self.members)
        meet(self, *args)

    meeting._RollCall.meet = counting
    try:
        meeting.meet("call", [group for model in models for group in model._runtime.groups])
        with meeting.together("outer", models[-1]._runtime.groups):
            models[-1].state_dict()
        if rank < 2:
            models[0].state_dict()
    finally:
        meeting._RollCall.meet = meet
    return met


def test_ranks_that_have_met_in_a_larger_group_do_not_meet_in_a_smaller_one() -> None:
    first, second, third = run_ranks(3, meets_in_several_groups)
    assert first == second == [(0, 1, 2), (0, 1, 2), (0, 1)]
    assert third == [(0, 1, 2), (0, 1, 2)]


# -- who is asked


def inquire(*answers: watch.Answer | None) -> list[tuple[str, bool]]:
    """What is made of a rank that has given these answers, one by one; the first is there before it is asked."""
    board = watch.Board(dist.HashStore())
    inquiry, found = meeting._Inquiry(board), []
    for answer in answers:
        if answer is not None:
            board.answer(1, answer)
        found.append(inquiry.of(1))
    return found


def test_a_rank_without_progress_is_waited_for_in_vain_and_one_with_some_is_not() -> None:
    moving, idle = watch.Answer(1, "is here", meeting.LIMIT_S / 2), watch.Answer(2, "is there", meeting.LIMIT_S)
    first, second = inquire(moving, idle)
    assert first == ("it is here", False)
    assert second == ("it is there, and has made no progress for 10 s", True)


def test_a_rank_that_has_ended_is_waited_for_in_vain() -> None:
    assert inquire(watch.Answer(0, "has ended", 0.0, ended=True)) == [("it has ended", True)]


def test_a_rank_that_does_not_answer_gets_three_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    board = watch.Board(dist.HashStore())
    board.answer(1, watch.Answer(0, "of somebody who asked before", 99.0))
    inquiry = meeting._Inquiry(board)
    found = []
    for passed_s in (0, 29, 31):
        now[0] = 100.0 + passed_s
        found.append(inquiry.of(1))
    assert [vain for _, vain in found] == [False, False, True]
    assert found[2][0] == "it has given no sign of life for 31 s"


@pytest.mark.parametrize("text", ["soon", "0", "-1", ""])
def test_a_limit_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="FSDP_COMPAT_MEET_TIMEOUT"):
        meeting._limit_s(text)


# -- how a process is seen


def looks(meanwhile: Callable[[], object], num_looks: int = 5) -> float:
    """For how long the last look finds nothing moved, while another thread stands in ``meanwhile`` again and again or waits."""
    stop, started = threading.Event(), threading.Event()
    before = pulse._followed, pulse._native_id

    def followed() -> None:
        pulse.follow()
        started.set()
        while not stop.is_set():
            meanwhile()
            stop.wait()

    thread = threading.Thread(target=followed)
    thread.start()
    started.wait()
    try:
        seen = pulse.Pulse()
        for _ in range(num_looks):
            threading.Event().wait(0.1)
            idle_s = seen.idle_s()
    finally:
        stop.set()
        thread.join()
        pulse._followed, pulse._native_id = before
    return idle_s


def test_a_thread_that_waits_is_idle_and_one_that_computes_or_moves_is_not() -> None:
    assert any(looks(lambda: None) > 0.25 for _ in range(10))  # rank processes, children of this one, may be clearing up
    assert looks(lambda: works(1.0)) < 0.25


def test_a_thread_that_sends_is_not_idle() -> None:
    near, far = socket.socketpair()

    def answers() -> None:
        for _ in range(200):
            threading.Event().wait(0.004)
            far.send(b"x")

    def receives() -> None:
        threading.Thread(target=answers).start()
        for _ in range(200):
            near.recv(1)

    with near, far:
        assert looks(receives) < 0.25


def test_a_child_process_that_computes_is_progress() -> None:
    end = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    child = subprocess.Popen([sys.executable, "-c", end])
    try:
        assert looks(lambda: None) < 0.25
    finally:
        child.kill()
        child.wait()


def test_the_place_of_a_thread_is_the_users_line() -> None:
    def ours() -> str:
        return pulse.place_of(sys._getframe())

    class Model(nn.Module):
        def forward(self) -> str:
            return functools.reduce(lambda _, __: pulse.place_of(stack()), [0, 0])  # a frame of the library's is around the lambda

    def stack() -> types.FrameType | None:
        return sys._getframe(1).f_back  # the frame of forward

    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in ours\(\)", ours())
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in forward\(\)", Model()())
    library = next(frame for frame in (sys._getframe(depth) for depth in range(1, 60)) if "_pytest" in frame.f_code.co_filename)
    assert "_pytest" in pulse.place_of(library)  # installed by the user
    assert pulse.place_of(None) == "a place outside of the user's code"
