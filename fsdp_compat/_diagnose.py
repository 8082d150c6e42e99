"""``fsdp-compat diagnose``: compare the black boxes of all ranks (see `_engine/black_box.py`)."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import socket
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._engine import events
from ._engine.black_box import BlackBox, Record, read

DESCRIPTION = """Compare what the ranks of a run did last. The run must have had
FSDP_COMPAT_BLACK_BOX=FOLDER in its environment; it may still run, or have been killed."""
EPILOG = """FSDP_COMPAT_BLACK_BOX=/dev/shm/box torchrun --nproc-per-node 2 train.py
fsdp-compat diagnose /dev/shm/box --trace out.json"""
_COMMUNICATIONS = {
    events.UNSHARDING: "all-gather",
    events.REDUCING: "reduction",
    events.GATHERING_STATE: "gather of state",
}
_MIN_EXCESS_MS = 20.0  # of a slow rank between two units: less is the machine's noise
_NOTHING = "nothing more"
_SAME = "All ranks have used the same units, and communicated in the same order."

Boxes = Mapping[int, BlackBox]
Sequences = Mapping[int, Sequence[Record]]  # of each rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    help_text = "the folder set in FSDP_COMPAT_BLACK_BOX; for several hosts, all files in one"
    parser.add_argument("folder", type=Path, help=help_text)
    parser.add_argument("--trace", type=Path, help="also write a timeline for ui.perfetto.dev")


def main(given: argparse.Namespace) -> int:
    """Print the report; return the exit status: 1 if ranks diverge or raised, 2 if there is nothing
    to read."""
    try:
        boxes = {box.rank: box for box in map(read, sorted(given.folder.glob("rank_*.box")))}
        if not any(box.records for box in boxes.values()):
            raise ValueError(f"{given.folder} has no rank_*.box with events")
    except (OSError, ValueError) as error:
        print(f"Nothing to diagnose: {error}", file=sys.stderr)
        return 2
    lines = report(boxes)
    print("\n".join(lines))
    if given.trace is not None:
        given.trace.write_text(json.dumps({"traceEvents": timeline(boxes)}))
    return 0 if _SAME in lines and not any(box.error for box in boxes.values()) else 1


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
        f"last {_named(last)}{waits}, forward {last.forward}, "
        f"{(end - last.ns) / 1e6:.0f} ms before the last of any rank"
    )


# -- where ranks part


def _differences(boxes: Boxes) -> list[str]:
    """Return the first difference: in the units that ranks use, or in what they communicate."""
    found = []
    # Of the same forward, the use of a unit says more than what was sent: prefetching sends ahead.
    for kinds in ((events.WAITING,), tuple(_COMMUNICATIONS)):
        sequences = _sequences(boxes, kinds)
        for number, records in enumerate(itertools.zip_longest(*sequences.values())):
            if len(set(map(_named, records))) > 1:
                found.append((min(each.forward for each in records if each), number, sequences))
                break
    if not found:
        return [_SAME]
    forward, number, sequences = min(found, key=lambda each: each[0])
    before = _at(sequences, number - 1) if number else {}
    where = "".join({f", after the {_named(record)}" for record in before.values()})
    lines = [f"The ranks diverge in forward {forward}{where}:"]
    lines += [f"  rank {rank}: {_named(each)}" for rank, each in _at(sequences, number).items()]
    return lines + _verdicts(number, sequences)


def _sequences(boxes: Boxes, kinds: Collection[int]) -> Sequences:
    """Return the events of some kinds, from the first that all boxes hold."""
    start = max(box.records[0].number for box in boxes.values() if box.records)
    return {
        rank: [each for each in box.records if each.event in kinds and each.number >= start]
        for rank, box in boxes.items()
    }


def _at(sequences: Sequences, number: int) -> dict[int, Record | None]:
    return {
        rank: sequence[number] if number < len(sequence) else None
        for rank, sequence in sequences.items()
    }


def _named(record: Record | None) -> str:
    if record is None:
        return _NOTHING
    return f"{_COMMUNICATIONS.get(record.event, 'use')} of {record.unit}"


def _verdicts(number: int, sequences: Sequences) -> list[str]:
    """Say of each rank that is not with the most what it did; with two ranks, of the second."""
    records, later = _at(sequences, number), _at(sequences, number + 1)
    usual = collections.Counter(map(_named, records.values())).most_common(1)[0][0]
    most = next(rank for rank, record in records.items() if _named(record) == usual)
    if usual == _NOTHING:  # those that stopped are to be explained
        most = next(rank for rank, record in records.items() if record is not None)
        usual = _named(records[most])
    lines = []
    for rank, record in records.items():
        if _named(record) == usual:
            continue
        if record is None:
            lines.append(f"  Rank {rank} never reached the {usual}.")
        elif _named(later[most]) == _named(record) and _named(later[rank]) != usual:
            lines.append(f"  Rank {rank} skipped the {usual}, or rank {most} did it once more.")
        else:
            has = f"  Rank {rank} has the {_named(record)}"
            lines.append(f"{has} where rank {most} has the {usual}.")
    return lines


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
                found.append({**at, "ph": "i", "s": "t", "name": _named(record)})
    return found


def _span(rank: int, row: str, name: str, start: int, end: int) -> dict[str, Any]:
    took = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"pid": rank, "tid": row, "name": name, "ph": "X", **took}
