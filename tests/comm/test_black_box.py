"""What ``fsdp-compat diagnose`` says of ranks that wait, whatever has ended them.

``python -m tests.comm.test_black_box FAULT FOLDER`` trains on three forked ranks. Rank 1 has a
fault in its fourth forward. Ranks whose communication fails kill themselves."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateError
from fsdp_compat.__main__ import main
from fsdp_compat._engine import black_box, events
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block
from tests.support.programs import python
from tests.support.ranks import on_ranks
from tests.support.same_host import MESSAGES

RANKS, UNITS, STEPS, FAULTY_RANK, FAULTY_FORWARD = 3, 5, 6, 1, 4


class Net(nn.Module):
    """Blocks whose order, or presence, a fault changes."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(UNITS))
        self.fault, self.forwards = fault, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        order = list(range(UNITS))
        fault = self.fault if dist.get_rank() == FAULTY_RANK else ""
        is_now = self.forwards == FAULTY_FORWARD
        if fault == "skip" and is_now:
            order.remove(2)
        if fault == "order" and is_now:
            order[2], order[3] = 3, 2
        for number in order:
            if number == 3:
                if fault == "die" and is_now:
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "raise" and is_now:
                    raise ValueError("a fault of the user's")
                if fault == "slow":
                    time.sleep(0.15)  # the fault itself
            x = self.blocks[number](x)
        return x


def train(rank: int, fault: str, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), RANKS)
    limit = datetime.timedelta(seconds=4)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=limit)
    model = FSDP(Net(fault), auto_wrap_policy=ModuleWrapPolicy({Block}))
    try:
        for _ in range(STEPS):
            model(torch.randn(4, DIM)).sum().backward()
            model.zero_grad()
    except StateError:
        os.kill(os.getpid(), signal.SIGKILL)


def run(fault: str, folder: Path) -> None:
    """Fork the ranks, and return when they have ended."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(ValueError):
                train(rank, fault, folder)
                status = 0
            events.tell(events.ENDED, "")  # atexit does not come before _exit
            os._exit(status)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


FIRST = "rank 1 raised ValueError: a fault of the user's at .*test_black_box.py:\\d+"
CASES = [
    ("skip", ["diverge in forward 4", "Rank 1 skipped the use of unit 'blocks.2'"]),
    ("order", ["diverge in forward 4", "Rank 1 has the use of unit 'blocks.3' where rank 0 has"]),
    (
        "die",
        ["Rank 1 never reached the .*'blocks.3'", r"rank 1: was killed.*blocks.[23]', forward 4"],
    ),
    ("raise", [FIRST, "Rank 1 never reached the .*'blocks.3'"]),
    ("slow", ["The others wait for rank 1: .* from unit 'blocks.2' to unit 'blocks.3'"]),
    (
        "none",
        ["used the same units", "rank 1: ended by itself", r"model last at .*\.py:\d+ in train"],
    ),
]


@pytest.mark.parametrize(("fault", "patterns"), CASES, ids=[case[0] for case in CASES])
def test_names_the_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, patterns: list[str]
) -> None:
    environment = {black_box.VARIABLE: str(tmp_path), "OMP_NUM_THREADS": "1", **MESSAGES}
    python("-m", "tests.comm.test_black_box", fault, tmp_path, **environment)

    with pytest.raises(SystemExit) as ended:
        main(["diagnose", str(tmp_path), "--trace", str(tmp_path / "trace.json")])

    said = capsys.readouterr().out
    assert ended.value.code == (fault not in ("slow", "none"))
    for pattern in patterns:
        assert re.search(pattern, said), said
    assert ("diverge in" in said) == (fault not in ("slow", "none")), said
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {row["pid"] for row in rows} == set(range(RANKS))


def test_keeps_the_last_records_and_forgets_an_error_that_a_rank_has_survived(
    tmp_path: Path,
) -> None:
    tell = black_box.listener(tmp_path, 0)
    tell(events.FORWARD, "root")
    tell(events.RAISED, "root", ValueError("no"))
    assert black_box.read(tmp_path / "rank_0.box").error == "ValueError: no"
    tell(events.FORWARD, "root")
    for number in range(5000):  # more than the file holds
        tell(events.WAITING, f"unit {number % 7}")
        if number % 2:
            tell(events.UNSHARDED, f"unit {number % 7}")

    box = black_box.read(tmp_path / "rank_0.box")

    assert box.error == "" and box.is_running and not box.has_ended
    assert [record.number for record in box.records] == list(range(5001 - 4095, 5001))
    last, before = box.records[-1], box.records[-2]
    assert (last.unit, last.forward) == (f"unit {4999 % 7}", 2)
    assert before.ns < last.ns < last.until and not before.until


def test_a_record_that_is_cut_short_is_not_read(tmp_path: Path) -> None:
    clock = mock.Mock(side_effect=range(1, 4102))  # then it raises, when the event is written
    with mock.patch.object(time, "perf_counter_ns", clock):
        tell = black_box.listener(tmp_path, 0)
    for _ in range(4100):
        tell(events.WAITING, "unit")
    with pytest.raises(StopIteration):
        tell(events.REDUCING, "other unit")

    records = black_box.read(tmp_path / "rank_0.box").records

    assert [record.number for record in records] == list(range(4101 - 4095, 4101))
    assert {(record.event, record.unit) for record in records} == {(events.WAITING, "unit")}


def test_a_second_process_leaves_the_record_of_the_first_one_alone(tmp_path: Path) -> None:
    first = black_box.listener(tmp_path, 0)
    first(events.WAITING, "unit of the first")
    with pytest.warns(UserWarning, match="Another process has .*rank_0.box"):
        second = black_box.listener(tmp_path, 0)
    second(events.WAITING, "unit of the second")
    first(events.WAITING, "unit of the first")

    boxes = [black_box.read(path) for path in sorted(tmp_path.glob("*.box"))]

    units = [[record.unit for record in box.records] for box in boxes]
    assert units == [["unit of the second"], ["unit of the first"] * 2]
    del first  # its process ends
    again = black_box.listener(tmp_path, 0)
    assert not black_box.read(tmp_path / "rank_0.box").records
    again(events.WAITING, "unit")


class Nameless(Exception):
    def __str__(self) -> str:
        raise ValueError(f"no text for {self}")  # without end


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a \udc80 file"), r"ValueError: a \udc80 file"),
        (ValueError(None), "ValueError: None"),
        (ValueError("x" * 10**6 + "\n"), "ValueError: " + "x" * 700),
        (Nameless(), "Nameless: its text raises an error"),
    ],
    ids=["surrogate", "none", "huge", "raises"],
)
@on_ranks(1)
def test_the_programs_own_error_arrives_whatever_its_text(error: Exception, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = events.listen(black_box.listener(Path(folder), 0))
        try:
            model = FSDP(Block())
            model.module.forward = mock.Mock(side_effect=error)
            with pytest.raises(type(error)) as caught:
                model(torch.randn(4, DIM))
        finally:
            events.listen(before)
        assert caught.value is error
        assert black_box.read(Path(folder) / "rank_0.box").error.startswith(text)


def test_names_for_which_there_was_no_space_are_written_later(tmp_path: Path) -> None:
    tell, write = black_box.listener(tmp_path, 0), os.write
    outcomes = [OSError(errno.ENOSPC, "full"), 3, None]
    with mock.patch.object(os, "write") as faulty:
        faulty.side_effect = lambda fd, data: write(fd, data[: _or_raise(outcomes.pop(0))])
        for name in ("\udc80", "second\nline", "third"):
            tell(events.WAITING, name)

    records = black_box.read(tmp_path / "rank_0.box").records

    assert [record.unit for record in records] == [r"\udc80", "second line", "third"]


def _or_raise(outcome: OSError | int | None) -> int | None:
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


def test_the_file_has_all_its_space_at_the_start_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = python("-c", REFUSED, tmp_path, OMP_NUM_THREADS="1").stdout
    assert said.count("FSDP_COMPAT_BLACK_BOX cannot be used.") == 2, said
    assert "File too large" in said and "File exists" in said

    black_box.listener(tmp_path / "new", 0)
    used = (tmp_path / "new" / "rank_0.box").stat()
    assert used.st_blocks * 512 >= used.st_size > 130_000


REFUSED = """
import os, resource, sys, torch.distributed as dist
from torch import nn
from fsdp_compat import FullyShardedDataParallel as FSDP, UsageError
for name in ("full", "file"):
    if not os.fork():
        os.environ["FSDP_COMPAT_BLACK_BOX"] = f"{sys.argv[1]}/{name}"
        if name == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            FSDP(nn.Linear(2, 2))
        except UsageError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_without_a_black_box_nothing_is_to_diagnose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", str(tmp_path)])

    assert ended.value.code == 2
    assert "rank_*.box" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["no names", "0xff"])
@pytest.mark.xfail(strict=True, reason="reading does not check what the files hold")
def test_diagnose_names_a_damaged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    black_box.listener(tmp_path, 0)(events.WAITING, "unit")
    if damage == "no names":
        (tmp_path / "rank_0.units").write_text("")
    else:
        data = (tmp_path / "rank_0.box").read_bytes()
        (tmp_path / "rank_0.box").write_bytes(data[:2048] + b"\xff" * len(data[2048:]))

    with pytest.raises(SystemExit):
        main(["diagnose", str(tmp_path)])

    assert "rank_0" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["error", "divergence", "version"])
def test_the_exit_status_says_what_was_found_and_errors_are_on_stderr(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = {"error": 2, "divergence": 1, "version": 0}
    for rank in range(2 if what == "divergence" else 0):
        tell = black_box.listener(tmp_path, rank)
        for unit in ("root", f"blocks.{rank}"):
            tell(events.WAITING, unit)
    with pytest.raises(SystemExit) as ended:
        main(["--version"] if what == "version" else ["diagnose", str(tmp_path)])
    said = capsys.readouterr()
    assert ended.value.code == statuses[what]
    assert what != "error" or ("rank_*.box" in said.err and not said.out)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
