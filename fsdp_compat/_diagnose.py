"""``fsdp-compat diagnose``: compare the black boxes of all ranks (see `_engine/black_box.py`)."""

from __future__ import annotations

import argparse
import collections
import json
import socket
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._engine.black_box import BlackBox, Record, read
from ._engine.events import Event

DESCRIPTION = """Compare what the ranks of a run did last. The run must have had
FSDP_COMPAT_BLACK_BOX=FOLDER in its environment; it may still run, or have been killed."""
EPILOG = """FSDP_COMPAT_BLACK_BOX=/dev/shm/box torchrun --nproc-per-node 2 train.py
fsdp-compat diagnose /dev/shm/box --trace out.json"""
_COMMUNICATIONS = {Event.UNSHARDING: "all-gather", Event.REDUCING: "reduction"}
_MIN_EXCESS_MS = 20.0  # of a slow rank between two units: less is the machine's noise
_NOTHING = "nothing more"

Boxes = Mapping[int, BlackBox]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("folder", type=Path, help="that FSDP_COMPAT_BLACK_BOX named; of all hosts")
    parser.add_argument("--trace", type=Path, help="also write a timeline for ui.perfetto.dev")


def main(given: argparse.Namespace) -> int:
    """Print the report; return the exit status: 2 if there is nothing to read."""
    try:
        boxes = {box.rank: box for box in map(read, sorted(given.folder.glob("rank_*.box")))}
        if not any(box.records for box in boxes.values()):
            raise ValueError(f"{given.folder} has no rank_*.box with events")
    except (OSError, ValueError) as error:
        print(f"Nothing to diagnose: {error}")
        return 2
    print("\n".join(report(boxes)))
    if given.trace is not None:
        given.trace.write_text(json.dumps({"traceEvents": timeline(boxes)}))
    return 0


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
    if any(record.event is Event.ENDED for record in box.records[-1:]):
        return "ended by itself"
    if box.is_running:
        return f"is still running (process {box.pid})"
    if box.host != socket.gethostname():
        return f"did not end by itself (process {box.pid} of host {box.host})"
    return f"was killed, or aborted in C++ (process {box.pid})"


def _last(box: BlackBox, end: int) -> str:
    units = [record for record in box.records if record.event is not Event.ENDED]
    if not units:
        return "no event"
    last = units[-1]
    return (
        f"last event {last.event.name} of {last.unit}, forward {last.forwards}, "
        f"{(end - last.ns) / 1e6:.0f} ms before the last of any rank"
    )


# -- where ranks part


def _differences(boxes: Boxes) -> list[str]:
    """Return the first difference: in the units that ranks use, or in what they communicate."""
    uses = {rank: _sequence(box, (Event.WAITING,), "uses") for rank, box in boxes.items()}
    sent = {
        rank: _sequence(box, tuple(_COMMUNICATIONS), "communications")
        for rank, box in boxes.items()
    }
    found = [_first_difference(each) for each in (uses, sent)]
    parts = [each for each in found if each is not None]
    if not parts:
        return ["All ranks have used the same units, and communicated in the same order."]
    # the use of a unit says more than what was sent: prefetching sends ahead
    number, records = min(parts, key=lambda part: _forward(part[1]))
    sequences = uses if found[0] is not None and found[0][1] is records else sent
    what = "use" if sequences is uses else "communication"
    lines = [f"The ranks part in forward {_forward(records)}, at {what} {number}:"]
    lines += [f"  rank {rank}: {_named(record)}" for rank, record in records.items()]
    lines += _verdicts(number, records, sequences)
    return lines


def _sequence(box: BlackBox, events: Sequence[Event], counter: str) -> dict[int, Record]:
    return {getattr(each, counter): each for each in box.records if each.event in events}


def _first_difference(
    sequences: Mapping[int, Mapping[int, Record]],
) -> tuple[int, dict[int, Record | None]] | None:
    """Return the number of the first place where ranks differ, and what each has there."""
    if not all(sequences.values()):
        return None
    first = max(map(min, sequences.values()))
    last = max(map(max, sequences.values()))
    for number in range(first, last + 1):
        records = {rank: sequence.get(number) for rank, sequence in sequences.items()}
        if len(set(map(_named, records.values()))) > 1:
            return number, records
    return None


def _forward(records: Mapping[int, Record | None]) -> int:
    return min(record.forwards for record in records.values() if record is not None)


def _named(record: Record | None) -> str:
    if record is None:
        return _NOTHING
    return f"{_COMMUNICATIONS.get(record.event, 'use')} of {record.unit}"


def _verdicts(
    number: int,
    records: Mapping[int, Record | None],
    sequences: Mapping[int, Mapping[int, Record]],
) -> list[str]:
    """Say of each rank that is not with the most what it did; with two ranks, of the second."""
    usual = collections.Counter(map(_named, records.values())).most_common(1)[0][0]
    most = next(rank for rank, record in records.items() if _named(record) == usual)
    if usual == _NOTHING:  # those that stopped are to be explained
        most = next(rank for rank, record in records.items() if record is not None)
        usual = _named(records[most])
    lines = []
    for rank, record in records.items():
        if _named(record) == usual:
            continue
        later = sequences[most].get(number + 1), sequences[rank].get(number + 1)
        if record is None:
            lines.append(f"  Rank {rank} did not come to the {usual}.")
        elif _named(later[0]) == _named(record) and _named(later[1]) != usual:
            lines.append(f"  Rank {rank} skipped the {usual}, or rank {most} did it once more.")
        else:
            lines.append(
                f"  Rank {rank} has the {_named(record)} where rank {most} has the {usual}."
            )
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


def _times(
    records: Sequence[Record],
) -> tuple[float, dict[tuple[str, str], list[float]]]:
    """Return the share of the time that is spent in waits, and the milliseconds from the end of
    each wait to the next wait, by the units of both."""
    waited, since = 0, dict[str, int]()
    between = collections.defaultdict[tuple[str, str], list[float]](list)
    last: Record | None = None
    for record in records:
        if record.event is Event.WAITING:
            since[record.unit] = record.ns
            if last is not None:
                between[last.unit, record.unit].append((record.ns - last.ns) / 1e6)
        elif record.event is Event.UNSHARDED and record.unit in since:
            waited += record.ns - since.pop(record.unit)
            last = record
        elif record.event is Event.REDUCED:
            last = None  # what follows is the user's step
    span = records[-1].ns - records[0].ns if records else 0
    return waited / max(span, 1), between


# -- the timeline


def timeline(boxes: Boxes) -> list[dict[str, Any]]:
    """Return Chrome trace events: a process for each rank, with rows for all-gathers, for the time
    in which units are unsharded, and for reductions."""
    found: list[dict[str, Any]] = []
    for rank, box in boxes.items():
        since: dict[str, tuple[str, int]] = {}
        for record in box.records:
            of_all = {"pid": rank, "ts": record.ns / 1e3}
            if record.event in (Event.UNSHARDING, Event.UNSHARDED, Event.SHARDED, Event.PARTIAL):
                if record.unit in since:
                    row, start = since.pop(record.unit)
                    took = {"ts": start / 1e3, "dur": (record.ns - start) / 1e3}
                    found.append({**of_all, "ph": "X", "tid": row, "name": record.unit, **took})
                if record.event in (Event.UNSHARDING, Event.UNSHARDED):
                    row = "all-gather" if record.event is Event.UNSHARDING else "unsharded"
                    since[record.unit] = row, record.ns
            else:
                name = f"{record.event.name} {record.unit}"
                found.append({**of_all, "ph": "i", "s": "t", "tid": "events", "name": name})
    return found
