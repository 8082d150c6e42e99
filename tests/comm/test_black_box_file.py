"""The file of a black box: which records are read of it, and what it survives."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest

from fsdp_compat._comm.board import events, ring


def test_keeps_the_last_records_and_forgets_an_error_that_a_rank_has_survived(
    tmp_path: Path,
) -> None:
    tell = ring.Ring(0, tmp_path).listener()
    tell(events.FORWARD, "root")
    tell(events.RAISED, "root", ValueError("no"))
    assert ring.read(tmp_path / "rank_0.box").error == "ValueError: no"
    tell(events.FORWARD, "root")
    for number in range(5000):  # more than the file holds
        tell(events.WAITING, f"unit {number % 7}")
        if number % 2:
            tell(events.UNSHARDED, f"unit {number % 7}")

    box = ring.read(tmp_path / "rank_0.box")

    assert box.error == "" and box.is_running and not box.has_ended
    assert [record.number for record in box.records] == list(range(5001 - 4095, 5001))
    last, before = box.records[-1], box.records[-2]
    assert (last.unit, last.forward) == (f"unit {4999 % 7}", 2)
    assert before.ns < last.ns < last.until and not before.until


def test_a_record_that_is_cut_short_is_not_read(tmp_path: Path) -> None:
    clock = mock.Mock(side_effect=range(1, 4102))  # then it raises, when the event is written
    with mock.patch.object(time, "perf_counter_ns", clock):
        tell = ring.Ring(0, tmp_path).listener()
    for _ in range(4100):
        tell(events.WAITING, "unit")
    with pytest.raises(StopIteration):
        tell(events.REDUCING, "other unit")

    records = ring.read(tmp_path / "rank_0.box").records

    assert [record.number for record in records] == list(range(4101 - 4095, 4101))
    assert {(record.event, record.unit) for record in records} == {(events.WAITING, "unit")}


def test_a_second_process_leaves_the_record_of_the_first_one_alone(tmp_path: Path) -> None:
    first = ring.Ring(0, tmp_path).listener()
    first(events.WAITING, "unit of the first")
    with pytest.warns(UserWarning, match="Another process has .*rank_0.box"):
        second = ring.Ring(0, tmp_path).listener()
    second(events.WAITING, "unit of the second")
    first(events.WAITING, "unit of the first")

    boxes = [ring.read(path) for path in sorted(tmp_path.glob("*.box"))]

    units = [[record.unit for record in box.records] for box in boxes]
    assert units == [["unit of the second"], ["unit of the first"] * 2]
    del first  # its process ends
    again = ring.Ring(0, tmp_path).listener()
    assert not ring.read(tmp_path / "rank_0.box").records
    again(events.WAITING, "unit")
