"""Meetings in the store: what they cost, what ends them, and how a process is seen from outside."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateError
from fsdp_compat._comm import deadlock, progress
from fsdp_compat._comm.processes import Process
from fsdp_compat._engine import rendezvous
from tests.support.ranks import run_ranks

PROMPT_S = 8.0  # on a busy machine; every other time limit is far beyond it


@contextlib.contextmanager
def limits(idle_s: float = 0.6, patience_s: float = 0.4) -> Iterator[None]:
    before = os.environ.get("FSDP_COMPAT_MEET_TIMEOUT"), deadlock.PATIENCE
    os.environ["FSDP_COMPAT_MEET_TIMEOUT"], deadlock.PATIENCE = str(idle_s), patience_s
    try:
        yield
    finally:
        os.environ.pop("FSDP_COMPAT_MEET_TIMEOUT")
        if before[0] is not None:
            os.environ["FSDP_COMPAT_MEET_TIMEOUT"] = before[0]
        deadlock.PATIENCE = before[1]


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


def all_ranks() -> rendezvous._RollCall:
    found = rendezvous._roll_call(tuple(range(dist.get_world_size())))
    assert found is not None
    return found


# -- what it costs


class Recorded:
    """A store that keeps account of what is asked of it."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return getattr(self.store, name)(*args)

        return call


def meet(roll: rendezvous._RollCall, call: str = "call") -> None:
    roll.meet(call, 1, "no line")


def costs(num_meetings: int) -> tuple[list[list[str]], int]:
    """What each meeting asks of the store, and by how many keys that grows after the first one."""
    roll = all_ranks()
    recorded = roll._store = Recorded(roll._store)
    per_meeting, sizes = [], []
    for _ in range(num_meetings):
        recorded.calls = []
        meet(roll)
        per_meeting.append(recorded.calls)
        dist.barrier()
        sizes.append(recorded.store.num_keys())
        dist.barrier()
    return per_meeting, sizes[-1] - sizes[1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_meeting_takes_one_addition_and_reading_it_and_no_new_keys(ranks: int) -> None:
    found = run_ranks(ranks, costs, 50)
    for per_meeting, growth in found:
        assert growth <= 0
        for calls in per_meeting:
            assert calls[:2] == ["set", "add"]  # a set waits for no answer
            assert set(calls[2:]) <= {"add", "delete_key"}
    for meetings in zip(*(per_meeting for per_meeting, _ in found), strict=True):
        assert any("add" not in calls[2:] for calls in meetings), "who comes last reads nothing"


def is_quiet(passed_s: float) -> tuple[int, list[str]]:
    """What a process with a model asks of the store while nothing waits, in seconds by a clock that
    is moved on by hand."""
    model = FSDP(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    with deadlock._watch.lock:  # the thread stands still meanwhile
        lines = deadlock._watch.lines()
        deadlock._watch._at_door(lines)
        door = deadlock._watch._door
        assert door is not None
        recorded = door.board._store = Recorded(door.board._store)
        started, clock = time.monotonic(), time.monotonic
        try:
            for second in range(int(passed_s)):
                time.monotonic = lambda second=second: started + second
                deadlock._watch._at_door(lines)
                deadlock._watch._look(lines)
        finally:
            time.monotonic = clock
        return len(recorded.calls), sorted(set(recorded.calls))


def test_an_idle_process_reads_from_the_store_once_in_ten_seconds_and_writes_nothing() -> None:
    for num_calls, kinds in run_ranks(2, is_quiet, 100.0):
        assert num_calls <= 10 and kinds == ["check"]


def threads() -> int:
    return sum(thread.name == "fsdp_compat watch" for thread in threading.enumerate())


def answers_without_connections() -> tuple[int, str, float]:
    """There is no model, so no line of gloo's."""
    with limits():
        roll = all_ranks()
        rank, other = roll.members[roll.rank], 1 - roll.rank
        board = deadlock.StatusStore(roll._store)
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
        assert re.fullmatch(
            rf"is at {re.escape(__file__)}:\d+ in answers_without_connections\(\)", text
        )


# -- what ends it


def one_is_not_there() -> list[str]:
    """Of three ranks two call different things; all call the same then."""
    roll = all_ranks()
    found = []
    if roll.rank < 2:
        found.append(message_of(lambda: meet(roll, f"call_{roll.rank}")))
    dist.barrier()
    found.append(message_of(lambda: meet(roll)))
    return found


def test_two_that_differ_do_not_wait_for_the_third_and_all_can_go_on() -> None:
    *differed, third = run_ranks(3, one_is_not_there)
    assert third == [""]
    for message, again in differed:
        assert again == ""
        for rank in range(2):
            assert re.search(
                rf"rank {rank} called call_{rank}\(\) at {re.escape(__file__)}:\d+", message
            ), message
        assert "rank 2 has not come" in message


def calls_alone(times: int) -> list[str]:
    """Rank 0 makes a call that the others do not make, again and again; then all make one."""
    roll, found = all_ranks(), []
    if roll.rank == 0:
        found = [message_of(lambda: meet(roll, "alone")) for _ in range(times)]
    dist.barrier()
    for _ in range(3):
        found.append(message_of(lambda: meet(roll)))
    return found


def test_calls_that_were_refused_leave_ranks_that_raised_and_ranks_that_did_not_able_to_meet() -> (
    None
):
    first, *others = run_ranks(3, calls_alone, 2)
    assert all(
        re.search(r"rank [12] has not come: it is at .*, and has made no progress", message)
        for message in first[:2]
    )
    assert first[2:] == [""] * 3 and others == [[""] * 3] * 2


def is_interrupted() -> tuple[str, str]:
    """Rank 0 is interrupted in a meeting in which rank 1 waits as well."""
    roll = all_ranks()
    kind = message = ""
    if roll.rank == 0:
        timer = threading.Timer(0.5, _thread.interrupt_main)
        timer.start()
        try:
            meet(roll)
        except KeyboardInterrupt:
            kind = "interrupted"
    elif roll.rank == 1:
        message = message_of(lambda: meet(roll), idle_s=60.0)
    dist.barrier()
    meet(roll)
    return kind, message


def test_a_rank_that_is_interrupted_while_it_waits_does_not_leave_others_waiting() -> None:
    (kind, _), (_, message), _ = run_ranks(3, is_interrupted)
    assert kind == "interrupted"
    assert "rank 0 left call() with KeyboardInterrupt" in message


def is_needed_elsewhere() -> str:
    """Rank 0 comes to a meeting while the others are in a meeting of their own that needs it."""
    roll, other = all_ranks(), "the other call"
    message = message_of(lambda: meet(roll, "one call" if roll.rank == 0 else other), idle_s=60.0)
    meet(roll)
    return message


def test_calls_that_differ_are_told_at_once() -> None:
    for message in run_ranks(2, is_needed_elsewhere):
        assert "rank 0 called one call()" in message and "rank 1 called the other call()" in message


def has_failed() -> str:
    """The communication of rank 1 has failed; no limit is near."""
    model, message = FSDP(nn.Linear(4, 4)), ""
    wire = model._runtime.groups[0].shard
    if dist.get_rank() == 1:
        deadlock.give_up(wire, deadlock.Report(True, {1: "rank 1 lost its way"}))
    dist.barrier()
    if dist.get_rank() == 0:
        message = message_of(model.state_dict, idle_s=5.0, patience_s=60.0)
    dist.barrier()
    return message


def test_a_rank_whose_communication_has_failed_is_not_waited_for() -> None:
    first, _ = run_ranks(2, has_failed)
    assert re.search(
        r"rank 1 has not come: its communication has failed \(rank 1 lost its way\)", first
    )


def is_busy_for_too_long() -> str:
    roll = all_ranks()
    if roll.rank == 1:
        works(2.0)
        return ""
    return message_of(lambda: meet(roll), idle_s=30.0)


def test_a_busy_rank_is_waited_for_no_longer_than_the_process_group_would() -> None:
    first, _ = run_ranks(2, is_busy_for_too_long, group_timeout=1)
    assert "rank 1 has not come: the time limit of 1 s is over" in first


def meets_in_several_groups() -> list[tuple[int, ...]]:
    """Two models over all ranks, one of them with a part over the first two only."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    models = [FSDP(nn.Linear(4, 4), process_group=pair)] if rank < 2 else []
    models += [FSDP(nn.Linear(4, 4)), FSDP(nn.Linear(4, 4))]
    met: list[tuple[int, ...]] = []
    original = rendezvous._RollCall.meet

    def counting(self: Any, *args: Any) -> None:
        met.append(self.members)
        original(self, *args)

    rendezvous._RollCall.meet = counting
    try:
        rendezvous.require_all_ranks(
            "call", [group for model in models for group in model._runtime.groups]
        )
        with rendezvous.nested("outer", models[-1]._runtime.groups):
            models[-1].state_dict()
        if rank < 2:
            models[0].state_dict()
    finally:
        rendezvous._RollCall.meet = original
    return met


def test_ranks_that_have_met_in_a_larger_group_do_not_meet_in_a_smaller_one() -> None:
    first, second, third = run_ranks(3, meets_in_several_groups)
    assert first == second == [(0, 1, 2), (0, 1, 2), (0, 1)]
    assert third == [(0, 1, 2), (0, 1, 2)]


# -- who is asked


def inquire(*answers: deadlock.Answer | None) -> list[tuple[str, bool]]:
    """What is made of a rank that has given these answers, one by one; the first is there before it
    is asked."""
    board = deadlock.StatusStore(dist.HashStore())
    inquiry, found = rendezvous._Inquiry(board, "line"), []
    for answer in answers:
        if answer is not None:
            board.answer(1, answer)
        found.append(inquiry.of(1))
    return found


def test_a_rank_without_progress_is_waited_for_in_vain_and_one_with_some_is_not() -> None:
    moving, idle = deadlock.Answer(1, "is here", 5.0), deadlock.Answer(2, "is there", 10.0)
    first, second = inquire(moving, idle)
    assert first == ("it is here", False)
    assert second == ("it is there, and has made no progress for 10 s", True)


def test_a_rank_that_has_ended_is_waited_for_in_vain() -> None:
    assert inquire(deadlock.Answer(0, "has ended", 0.0, ended=True)) == [("it has ended", True)]


def test_a_rank_that_does_not_answer_is_waited_for_as_long_as_its_process_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be stopped."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    board = deadlock.StatusStore(dist.HashStore())
    board.answer(1, deadlock.Answer(0, "of somebody who asked before", 99.0))
    inquiry = rendezvous._Inquiry(board, "line")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        board._set("process/1", dataclasses.astuple(Process.with_id(other.pid)))
        os.kill(other.pid, signal.SIGSTOP)
        assert inquiry.of(1) == ("it has given no sign of life for 0 s", False)
        now[0] += 1000.0
        assert inquiry.of(1) == ("it has given no sign of life for 1000 s", False)
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert inquiry.of(1) == (
            "its process has ended without a word, as one that was killed does",
            True,
        ), "not waited for yet"
    assert inquiry.of(1)[1], "its number is free again"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "", "inf", "nan"])
def test_a_limit_that_is_no_time_is_refused_when_it_is_needed(text: str) -> None:
    """Not by the import, which programs make that never wait."""
    environment = os.environ | {"FSDP_COMPAT_MEET_TIMEOUT": text}
    program = (
        "import fsdp_compat\nfrom fsdp_compat._engine import "
        "watch\nprint('imported')\nwatch.idle_limit_s()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "imported\n"
    assert "UsageError" in ended.stderr and "FSDP_COMPAT_MEET_TIMEOUT" in ended.stderr


# -- how a process is seen


def looks(meanwhile: Callable[[], object], num_looks: int = 5) -> float:
    """For how long the last look finds nothing moved, while another thread stands in ``meanwhile``
    again and again or waits."""
    stop, started = threading.Event(), threading.Event()
    before = progress._followed, progress._native_id

    def followed() -> None:
        progress.follow()
        started.set()
        while not stop.is_set():
            meanwhile()
            stop.wait()

    thread = threading.Thread(target=followed)
    thread.start()
    started.wait()
    try:
        seen = progress.Progress()
        for _ in range(num_looks):
            threading.Event().wait(0.1)
            idle_s = seen.idle_s()
    finally:
        stop.set()
        thread.join()
        progress._followed, progress._native_id = before
    return idle_s


def test_a_thread_that_waits_is_idle_and_one_that_computes_or_moves_is_not() -> None:
    assert any(
        looks(lambda: None) > 0.25 for _ in range(10)
    )  # rank processes, children of this one, may be clearing up
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
        return progress.place_of(sys._getframe())

    class Model(nn.Module):
        def forward(self) -> str:
            return functools.reduce(
                lambda _, __: progress.place_of(stack()), [0, 0]
            )  # a frame of the library's is around the lambda

    def stack() -> types.FrameType | None:
        return sys._getframe(1).f_back  # the frame of forward

    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in ours\(\)", ours())
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in forward\(\)", Model()())
    library = next(
        frame
        for frame in (sys._getframe(depth) for depth in range(1, 60))
        if "_pytest" in frame.f_code.co_filename
    )
    assert "_pytest" in progress.place_of(library)  # installed by the user
    assert progress.place_of(None) == "a place outside of the user's code"


def test_a_forked_process_sees_itself() -> None:
    """It has one thread, of which the system gives it another number."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(
            writer, f"{progress._native_id == os.getpid()} {progress._frame() is not None}".encode()
        )
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"True True"
    os.close(reader)
