"""The checker of order, on programs that are written down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.order import (
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
    Wait,
    find_unordered,
)
from tests.support.sampling import at_most

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


RANGES = st.tuples(st.integers(0, 6), st.integers(1, 3)).map(lambda r: (r[0], r[0] + r[1]))
TOUCHED = st.lists(RANGES, max_size=1).map(tuple)
STREAMS, EVENTS = st.sampled_from([A, B, C]), st.sampled_from([1, 2])
OPS = st.builds(Op, st.sampled_from([A, B, C, HOST]), st.just("op"), TOUCHED, TOUCHED)
HAPPENINGS = st.one_of(
    *(OPS, OPS, OPS, OPS),
    *(st.builds(kind, EVENTS, STREAMS) for kind in (Record, Wait)),
    *(st.builds(EventSync, EVENTS), st.builds(StreamSync, STREAMS), st.just(DeviceSync())),
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


@settings(max_examples=at_most(300, of_all=5000), derandomize=True)
@given(st.lists(HAPPENINGS, min_size=6, max_size=16))
def test_every_report_is_true_and_some_pair_of_every_bad_program_is_reported(
    drawn: list[Happening],
) -> None:
    program = [
        each._replace(place=(str(number),)) if isinstance(each, Op) else each
        for number, each in enumerate(drawn)
    ]
    expected, found = simple_check(program), set()
    for report in find_unordered(program):
        (earlier,), (later,) = report.earlier.place, report.later.place
        found.add((int(earlier), int(later)))
    assert found <= expected
    assert bool(found) == bool(expected)
