"""``fsdp-compat diagnose``: compare the black boxes of all ranks (see `_comm/board/ring.py`)."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._comm.board import events
from ._comm.board.ring import BlackBox, Record, read
from ._comm.board.verdict import State, merged, parting, sentences

DESCRIPTION = """Compare what the ranks of a run did last. The run must have had
FSDP_COMPAT_BLACK_BOX=FOLDER in its environment; it may still run, or have been killed."""
EPILOG = """FSDP_COMPAT_BLACK_BOX=/dev/shm/box torchrun --nproc-per-node 2 train.py
fsdp-compat diagnose /dev/shm/box --trace out.json"""
_COMMUNICATIONS = events.UNSHARDING, events.REDUCING, events.GATHERING_STATE
_MIN_EXCESS_MS = 20.0  # of a slow rank between two units: less is the machine's noise
_SAME = "All ranks have used the same units, and communicated in the same order."
_MAY_DIFFER = "The ranks may use different units, so that their order says nothing."

Boxes = Mapping[int, BlackBox]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    help_text = "the folder set in FSDP_COMPAT_BLACK_BOX; for several hosts, all files in one"
    parser.add_argument("folder", type=Path, help=help_text)
    parser.add_argument("--trace", type=Path, help="also write a timeline for ui.perfetto.dev")


def main(given: argparse.Namespace) -> int:
    """Print the report; return the exit status: 1 if ranks diverge or raised, 2 if there is nothing
    to read."""
    boxes: dict[int, BlackBox] = {}
    damaged = False
    for path in sorted(given.folder.glob("rank_*.box")):
        try:
            box = read(path)
        except (OSError, ValueError) as error:
            print(f"Not read: {error}", file=sys.stderr)
            damaged = True
        else:
            boxes[box.rank] = box
    if not any(box.records for box in boxes.values()):
        print(f"{given.folder} has no rank_*.box with events", file=sys.stderr)
        return 2
    lines = report(boxes)
    print("\n".join(lines))
    if given.trace is not None:
        given.trace.write_text(json.dumps({"traceEvents": timeline(boxes)}))
    is_well = lines[0] in (_SAME, _MAY_DIFFER)
    return 0 if is_well and not damaged else 1


def report(boxes: Boxes) -> list[str]:
    """Return what is wrong, the most telling first, and then a line for each rank."""
    raised = [f"rank {rank} raised {box.error}" for rank, box in boxes.items() if box.error]
    lines = sorted(raised, key=lambda line: " StateError: Waiting" in line)  # a consequence
    lines += _differences(boxes)
    lines += _slowest(boxes)
    end = max(box.records[-1].ns for box in boxes.values() if box.records)
    for rank, box in boxes.items():
        lines.append(f"rank {rank}: {_fate(box)}; {_last(box, end)}")
        if box.line:
            lines.append(f"    called the model last at {box.line}")
    return lines


def _fate(box: BlackBox) -> str:
    if box.has_ended:
        return "ended by itself"
    if box.is_running:
        return f"is still running (process {box.pid})"
    if box.host != socket.gethostname():
        return f"did not end by itself (process {box.pid} of host {box.host})"
    return f"was killed, or aborted in C++ (process {box.pid})"


def _last(box: BlackBox, end: int) -> str:
    if not box.records:
        return "used no unit"
    last = box.records[-1]
    is_waiting = last.event == events.WAITING and not last.until
    waits = ", whose all-gather never finished" if is_waiting else ""
    return (
        f"last {last}{waits}, forward {last.forward}, "
        f"{(end - last.ns) / 1e6:.0f} ms before the last of any rank"
    )


def _differences(boxes: Boxes) -> list[str]:
    """Return where ranks part first: in the units that they use, or in what they communicate."""
    if any(box.may_differ for box in boxes.values()):
        return [_MAY_DIFFER]
    found: list[Any] = []
    # Of the same forward, the use of a unit says more than what was sent: prefetching sends ahead.
    for kinds in ((events.WAITING,), _COMMUNICATIONS):
        calls = [_calls(box, kinds) for box in boxes.values()]
        place = parting(calls)
        if place is not None:
            found.append((place[0], len(found), place, calls))
    if not found:
        return [_SAME]
    forward, _, place, calls = min(found)
    before = [call for at, call in calls[0].items() if at < place]
    where = f", after {before[-1]}" if before else ""
    states = merged(
        State((rank,), 1, {at: call for at, call in each.items() if at >= place})
        for rank, each in zip(boxes, calls, strict=True)
    )
    told = sentences(states, place)
    return [f"The ranks diverge in forward {forward}{where}:", *(f"  {line}" for line in told)]


def _calls(box: BlackBox, kinds: Sequence[int]) -> dict[tuple[int, int], str]:
    """Return the events of some kinds by forward, which aligns ranks that used units differently
    often, and by number within it, without a forward whose first events may be forgotten."""
    records = [each for each in box.records if each.event in kinds]
    if box.records and box.records[0].number > 1:
        records = [each for each in records if each.forward > box.records[0].forward]
    by_forward = itertools.groupby(records, key=lambda each: each.forward)
    return {(f, n): f"the {each}" for f, group in by_forward for n, each in enumerate(group)}


# -- slow ranks


def _slowest(boxes: Boxes) -> list[str]:
    """Say which rank the others wait for, and where it spends its time. Each rank waits for the
    slowest, so that one waits least. Only where waits for all-gathers block the host."""
    waits, between = {}, {}
    for rank, box in boxes.items():
        waits[rank], between[rank] = _times(box.records)
    if len(waits) < 2 or max(waits.values()) < 0.2:
        return []
    slow = min(waits, key=lambda rank: waits[rank])
    excess = {
        units: statistics.median(times)
        - statistics.median(statistics.median(between[rank][units]) for rank in others)
        for units, times in between[slow].items()
        if (others := [rank for rank in boxes if rank != slow and units in between[rank]])
    }
    where = max(excess, key=lambda units: excess[units], default=None)
    if where is None or excess[where] < _MIN_EXCESS_MS:
        return []
    shares = ", ".join(f"rank {rank} {100 * share:.0f} %" for rank, share in waits.items())
    return [
        f"The others wait for rank {slow}: it takes {excess[where]:.0f} ms more from {where[0]} to "
        f"{where[1]}. Time spent waiting for all-gathers: {shares}"
    ]


def _times(records: Sequence[Record]) -> tuple[float, dict[tuple[str, str], list[float]]]:
    """Return the share of time spent in waits, and the ms between two in a forward, by units."""
    waits = [record for record in records if record.event == events.WAITING and record.until]
    between = collections.defaultdict[tuple[str, str], list[float]](list)
    for last, record in itertools.pairwise(waits):
        if last.forward == record.forward:  # else the user's step is between them
            between[last.unit, record.unit].append((record.ns - last.until) / 1e6)
    span = records[-1].ns - records[0].ns if records else 0
    return sum(record.until - record.ns for record in waits) / max(span, 1), between


# -- the timeline


def timeline(boxes: Boxes) -> list[dict[str, Any]]:
    """Return Chrome trace events: a process for each rank, with rows for all-gathers, for the waits
    for them, and for what else has happened."""
    found: list[dict[str, Any]] = []
    for rank, box in boxes.items():
        since: dict[str, int] = {}  # by unit, of its all-gather
        for record in box.records:
            if record.event == events.UNSHARDING:
                since[record.unit] = record.ns
            elif record.until:
                start = since.pop(record.unit, record.ns)
                found.append(_span(rank, "all-gather", record.unit, start, record.until))
                found.append(_span(rank, "wait", record.unit, record.ns, record.until))
            else:
                at = {"pid": rank, "tid": "events", "ts": record.ns / 1e3}
                found.append({**at, "ph": "i", "s": "t", "name": str(record)})
    return found


def _span(rank: int, row: str, name: str, start: int, end: int) -> dict[str, Any]:
    took = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"pid": rank, "tid": row, "name": name, "ph": "X", **took}
