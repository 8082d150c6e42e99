"""The player, on programs that are written down. An operation's name is its seconds alone."""

from __future__ import annotations

import pytest

from tests.support.cost_model import Demand, Work
from tests.support.emulated.play import Played, play
from tests.support.order import (
    Allocate,
    DeviceSync,
    EventSync,
    Free,
    Happening,
    Op,
    Record,
    StreamSync,
    Wait,
)

A, B, C = 1, 2, 3
GREEDY = Demand(memory=1.0)


def alone(op: Op) -> Work:
    return Work(float(op.name), Demand())


def work(stream: int, seconds: float) -> Op:
    return Op(stream, str(seconds))


def times(played: Played) -> list[tuple[int, float, float]]:
    return [(ran.op.stream, ran.start, ran.end) for ran in played.ran]


# -- streams and events


RUNS: dict[str, tuple[list[Happening], float, list[tuple[int, float, float]]]] = {
    "streams run side by side, and each in order": (
        [work(A, 3), work(A, 1), work(B, 2)],
        0.0,
        [(B, 0, 2), (A, 0, 3), (A, 3, 4)],
    ),
    "a stream waits for what was enqueued before the event": (
        [work(A, 3), Record(7, A), work(A, 5), Wait(7, B), work(B, 1)],
        0.0,
        [(A, 0, 3), (B, 3, 4), (A, 3, 8)],
    ),
    "an event that was recorded again stands for the last record": (
        [work(A, 1), Record(7, A), work(A, 1), Record(7, A), Wait(7, B), work(B, 1)],
        0.0,
        [(A, 0, 1), (A, 1, 2), (B, 2, 3)],
    ),
    "a device that is faster than the host idles": (
        [work(A, 1), work(A, 1)],
        2.0,
        [(A, 0, 1), (A, 2, 3)],
    ),
}


@pytest.mark.parametrize(("program", "enqueue_s", "expected"), RUNS.values(), ids=RUNS)
def test_when_work_runs(
    program: list[Happening], enqueue_s: float, expected: list[tuple[int, float, float]]
) -> None:
    played = play(program, alone, enqueue_s=enqueue_s)
    assert times(played) == expected
    assert played.seconds == expected[-1][-1]


# -- the host


@pytest.mark.parametrize(
    "sync, end", [(EventSync(7), 2.0), (StreamSync(A), 5.0), (DeviceSync(), 6.0)]
)
def test_what_the_host_waits_for(sync: Happening, end: float) -> None:
    program = [work(A, 2), Record(7, A), work(A, 3), work(C, 6), sync, work(B, 1)]
    assert (B, end, end + 1) in times(play(program, alone))


def test_marks_are_when_the_host_gets_there_after_its_waits() -> None:
    program = [work(A, 2), StreamSync(A), work(A, 1), StreamSync(A)]
    assert play(program, alone, marks=[2, 4]).marks == [2, 3]


# -- contention


def test_works_slow_down_those_that_want_the_same() -> None:
    def cost(op: Op) -> Work:
        return Work(float(op.name), Demand(network=1.0) if op.stream == C else GREEDY)

    played = play([work(A, 2), work(B, 2), work(C, 3)], cost)
    assert times(played) == [(C, 0, 3), (A, 0, 4), (B, 0, 4)]


# -- memory


def block(begin: int, nbytes: int) -> tuple[int, int]:
    return begin, begin + nbytes


@pytest.mark.parametrize(("stream", "reserved"), [(A, 100), (B, 160)])
def test_a_pool_keeps_what_it_has_reserved_for_its_stream(stream: int, reserved: int) -> None:
    one, other = block(0, 100), block(100, 60)
    program = [Allocate(A, one), Free(A, one), Allocate(stream, other), Free(stream, other)]
    played = play(program, alone)
    assert (played.reserved, played.active) == (reserved, 100)


def reserved_with_readers(*between: Happening) -> int:
    one, other = block(0, 100), block(100, 100)
    program = [
        Allocate(A, one),
        work(B, 5),
        Free(A, one, frozenset({B})),
        *between,
        Allocate(A, other),
    ]
    return play(program, alone).reserved


def test_a_block_with_readers_comes_back_when_their_work_has_ended() -> None:
    assert reserved_with_readers() == 200
    assert reserved_with_readers(work(A, 9)) == 200  # the host is ahead
    assert reserved_with_readers(StreamSync(B)) == 100


# -- programs that cannot end


def test_a_wait_that_does_not_end_is_an_error() -> None:
    program = [Wait(7, B), Record(7, A), work(B, 1), EventSync(7)]
    play(program, alone)  # the wait came before the record: for nothing
    with pytest.raises(RuntimeError, match="does not end"):
        play([Record(7, A), Wait(8, A)], alone, marks=[9])
