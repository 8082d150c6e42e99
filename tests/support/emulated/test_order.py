"""The checker of order, on programs that are written down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.emulated.order import (
    HOST,
    Allocate,
    DeviceSync,
    EventSync,
    Forget,
    Free,
    Happening,
    Op,
    Range,
    Record,
    StreamSync,
    Unordered,
    Wait,
    find_unordered,
)

A, B, C = 1, 2, 3
ALL = (0, 64)


def read(stream: int, bytes_: Range = ALL) -> Op:
    return Op(stream, "read", reads=(bytes_,), place=(f"read on {stream}",))


def write(stream: int, bytes_: Range = ALL) -> Op:
    return Op(stream, "write", writes=(bytes_,), place=(f"write on {stream}",))


def order_by_event(earlier: int, later: int, event: int = 1) -> list[Happening]:
    return [Record(event, earlier), Wait(event, later)]


def pairs(*program: Happening) -> list[tuple[str, int, str, int]]:
    return [
        (found.earlier.name, found.earlier.stream, found.later.name, found.later.stream)
        for found in find_unordered(program)
    ]


# -- streams and the host


@pytest.mark.parametrize(
    "program",
    [
        [write(A), StreamSync(A), write(HOST), write(B)],
        [write(A), Record(1, A), EventSync(1), write(HOST), write(B)],
        [write(A), DeviceSync(), write(HOST), write(B)],
        [Record(1, A), write(A), Record(1, A), Wait(1, B), read(B)],
    ],
)
def test_order_by_waits(program: list[Happening]) -> None:
    assert pairs(*program) == []


def test_an_event_marks_what_was_enqueued_before_it() -> None:
    assert pairs(Record(1, A), write(A), Wait(1, B), read(B)) == [("write", A, "read", B)]


def test_a_write_waits_for_every_reader() -> None:
    program = [write(A), *order_by_event(A, B, 1), *order_by_event(A, C, 2), read(B), read(C)]
    assert pairs(*program, *order_by_event(B, A, 3), write(A)) == [("read", C, "write", A)]
    both = [*order_by_event(B, A, 3), *order_by_event(C, A, 4)]
    assert pairs(*program, *both, write(A)) == []


def test_the_host_writes_while_a_copy_still_reads() -> None:
    copy = Op(A, "copy", reads=(ALL,), writes=((100, 164),))
    assert pairs(copy, write(HOST)) == [("copy", A, "write", HOST)]
    assert pairs(copy, Record(1, A), write(A, (200, 210)), EventSync(1), write(HOST)) == []
    assert pairs(copy, StreamSync(B), write(HOST)) == [("copy", A, "write", HOST)]


# -- bytes


def test_only_common_bytes_need_order() -> None:
    assert pairs(write(A, (0, 8)), write(B, (8, 16)), read(C, (16, 24))) == []
    (found,) = find_unordered([write(A, (0, 10)), read(B, (6, 20))])
    assert found.range == (6, 10)


def test_the_history_of_each_byte_is_kept() -> None:
    program = [write(A, (0, 100)), *order_by_event(A, B), write(B, (40, 60))]
    assert pairs(*program, read(A, (0, 40)), read(A, (60, 100))) == []
    assert pairs(*program, read(A, (59, 61))) == [("write", B, "read", A)]
    assert pairs(*program, read(C, (0, 100))) == [("write", A, "read", C), ("write", B, "read", C)]


def test_a_pair_of_places_is_reported_once() -> None:
    assert len(find_unordered([write(A), read(B), read(B), read(C)])) == 2


def test_a_report_names_operations_streams_and_places() -> None:
    (found,) = find_unordered([write(A), write(HOST, (60, 99))])
    assert str(found) == (
        "no wait orders\n"
        "  write on stream 1\n"
        "    write on 1\n"
        "  and, on 4 bytes,\n"
        "  write on the host\n"
        "    write on -1"
    )


# -- allocations


def test_freed_memory_is_used_again_by_the_stream_that_allocated_it() -> None:
    used = [Allocate(A, ALL), write(A), *order_by_event(A, B, 1), read(B)]
    again = Allocate(A, (100, 110))  # any later block may be cut from the freed one
    assert pairs(*used, Free(A, ALL), again) == [("read", B, "memory freed", A)]
    assert pairs(*used, Free(A, ALL), *order_by_event(B, A, 2), again) == []
    assert pairs(*used, *order_by_event(B, A, 2), Free(A, ALL), again) == []
    assert pairs(*used, Free(A, ALL, frozenset({B})), again) == []
    assert pairs(*used, Free(A, ALL), Allocate(B, (100, 110))) == []


def test_memory_that_went_back_to_the_system_has_no_history() -> None:
    assert pairs(write(A), Forget(ALL), write(B)) == []


# -- any program, beside a checker that is slow and simple


RANGES = st.tuples(st.integers(0, 6), st.integers(1, 3)).map(lambda x: (x[0], x[0] + x[1]))
STREAMS, EVENTS = st.sampled_from([A, B, C]), st.integers(1, 2)
OPS = st.builds(
    Op,
    STREAMS | st.just(HOST),
    st.just("op"),
    st.lists(RANGES, max_size=1).map(tuple),
    st.lists(RANGES, max_size=1).map(tuple),
)
SYNCS = st.builds(EventSync, EVENTS) | st.builds(StreamSync, STREAMS) | st.builds(DeviceSync)
PROGRAMS = st.lists(
    OPS | OPS | st.builds(Record, EVENTS, STREAMS) | st.builds(Wait, EVENTS, STREAMS) | SYNCS,
    max_size=14,
)


def direct_causes(program: Sequence[Happening]) -> Iterator[set[int]]:
    """Yield, per happening, the earlier ones that it waits for itself."""
    last: dict[int, int] = {}  # by stream
    records: dict[int, int] = {}  # by event
    for number, happening in enumerate(program):
        stream = HOST
        if isinstance(happening, (Op, Record, Wait)):
            stream = happening.stream
        causes = {last.get(stream), last.get(HOST)}
        match happening:
            case Wait(event, _) | EventSync(event):
                causes.add(records.get(event))
            case StreamSync(waited_for):
                causes.add(last.get(waited_for))
            case DeviceSync():
                causes.update(last.values())
            case Record(event, _):
                records[event] = number
        last[stream] = number
        yield causes - {None}  # type: ignore[misc]


def simple_check(program: Sequence[Happening]) -> set[tuple[int, int]]:
    """Return the numbers of all unordered pairs."""
    past: list[set[int]] = []
    for causes in direct_causes(program):
        past.append(causes.union(*(past[cause] for cause in causes)))
    found = set()
    for (i, one), (j, other) in itertools.combinations(enumerate(program), 2):
        if isinstance(one, Op) and isinstance(other, Op) and i not in past[j]:
            conflicts = itertools.chain(
                itertools.product(one.writes, other.reads + other.writes),
                itertools.product(one.reads, other.writes),
            )
            if any(max(b, d) < min(e, f) for (b, e), (d, f) in conflicts):
                found.add((i, j))
    return found


@given(PROGRAMS)
def test_every_report_is_true_and_some_pair_of_every_bad_program_is_reported(
    program: list[Happening],
) -> None:
    program = [
        happening._replace(place=(str(number),)) if isinstance(happening, Op) else happening
        for number, happening in enumerate(program)
    ]
    expected = simple_check(program)
    found = {numbers(report) for report in find_unordered(program)}
    assert found <= expected
    assert bool(found) == bool(expected)


def numbers(report: Unordered) -> tuple[int, int]:
    (earlier,), (later,) = report.earlier.place, report.later.place
    return int(earlier), int(later)
