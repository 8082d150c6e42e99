"""What ``fsdp-compat diagnose`` says of ranks that wait, whatever has ended them.

Ranks train; rank 1 has a fault in its fourth forward. Ranks whose communication fails kill
themselves."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.programs import Ended, launch
from tests.support.same_host import MESSAGES

TRAINS = """
import datetime, os, signal, sys, time, torch, torch.distributed as dist
from torch import nn
from fsdp_compat import FullyShardedDataParallel as FSDP, StateError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import DIM, Block

rank, ranks, fault, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["FSDP_COMPAT_BLACK_BOX"] = folder


class Nameless(Exception):
    def __str__(self):
        raise ValueError(f"no text for {self}")  # without end


ERRORS = {
    "raise": ValueError("a fault of the user's"),
    "surrogate": ValueError("a \\udc80 file"),
    "huge": ValueError("x" * 10**6 + "\\n"),
    "nameless": Nameless(),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.forwards = nn.ModuleList(Block() for _ in range(5)), 0

    def forward(self, x):
        self.forwards += 1
        is_now = self.forwards == 4 and rank == min(1, ranks - 1)
        order = {"skip": [0, 1, 3, 4], "order": [0, 1, 3, 2, 4]}.get(fault if is_now else "")
        if fault == "experts":
            order = [0, 1, 2 + rank]
        for number in order or range(5):
            if number == 3 and is_now and fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 3 and is_now and fault in ERRORS:
                raise ERRORS[fault]
            if number == 3 and rank == 1 and fault == "slow":
                time.sleep(0.15)  # the fault itself
            x = self.blocks[number](x)
        return x


os.makedirs(folder, exist_ok=True)
store, limit = dist.FileStore(f"{folder}/store", ranks), datetime.timedelta(seconds=4)
dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=limit)
policy = ModuleWrapPolicy({Block})
model = FSDP(Net(), auto_wrap_policy=policy, allow_unused_units=fault == "experts")
try:
    for _ in range(6):
        model(torch.randn(4, DIM)).sum().backward()
        model.zero_grad()
except StateError:
    os.kill(os.getpid(), signal.SIGKILL)
except Exception as error:
    print(error is ERRORS[fault])
    if ranks > 1:
        raise
"""

FIRST = r"rank 1 raised ValueError: a fault of the user's at <program>:\d+"
FAULTS = {
    "skip": [
        "diverge in forward 4",
        "rank 1 skipped the use of unit 'blocks.2', or ranks 0 and 2 did",
    ],
    "order": [
        "diverge in forward 4",
        "rank 1 began the use of unit 'blocks.3' where ranks 0 and 2",
    ],
    "die": [
        "rank 1 has not begun the .*'blocks.3', which rank 0",
        r"rank 1: was killed.*blocks.[23]', forward 4",
    ],
    "raise": [FIRST, "rank 1 has not begun the .*'blocks.3', which rank 0"],
    "slow": ["The others wait for rank 1: .* from unit 'blocks.2' to unit 'blocks.3'"],
    "experts": ["may use different units", "rank 1: ended by itself"],
    "healthy": [
        "used the same units",
        "rank 1: ended by itself",
        r"model last at <program>:\d+ in <module>",
    ],
}
ERRORS = {
    "surrogate": r"ValueError: a \\udc80 file",
    "huge": "ValueError: " + "x" * 20,
    "nameless": "Nameless: its text raises an error",
}


def num_ranks(fault: str) -> int:
    return 3 if fault in ("skip", "order") else 2  # a majority names the one that diverges


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """A folder with the black boxes of every fault, and how rank 0 ended with each error."""
    folder = tmp_path_factory.mktemp("boxes")
    ranks = {fault: num_ranks(fault) for fault in FAULTS} | dict.fromkeys(ERRORS, 1)
    arguments = [
        (rank, count, fault, folder / fault)
        for fault, count in ranks.items()
        for rank in range(count)
    ]
    ended = launch(TRAINS, arguments, folder, **MESSAGES)
    return folder, dict(zip(ERRORS, ended[-len(ERRORS) :], strict=True))


def diagnose(*arguments: object) -> object:
    """Run the command, and return its exit status."""
    command = ["fsdp-compat", "diagnose", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", command)
        runpy.run_module("fsdp_compat", run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("fault", FAULTS)
def test_names_the_fault(
    recorded: tuple[Path, dict[str, Ended]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    status = diagnose(recorded[0] / fault, "--trace", tmp_path / "trace.json")

    said = capsys.readouterr().out
    diverges = fault not in ("slow", "healthy", "experts")
    assert status == diverges
    for pattern in FAULTS[fault]:
        assert re.search(pattern, said), said
    assert ("diverge in" in said) == diverges, said
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {row["pid"] for row in rows} == set(range(num_ranks(fault)))


@pytest.mark.parametrize("error", ERRORS)
def test_the_programs_own_error_arrives_whatever_its_text(
    recorded: tuple[Path, dict[str, Ended]], capsys: pytest.CaptureFixture[str], error: str
) -> None:
    folder, ended = recorded
    assert (ended[error].code, ended[error].out) == (0, "True\n"), ended[error].err
    diagnose(folder / error)
    assert re.search(ERRORS[error], capsys.readouterr().out)


def test_the_file_has_all_its_space_at_the_start_or_is_refused(
    recorded: tuple[Path, dict[str, Ended]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    full, file = launch(REFUSED, [[tmp_path, "full"], [tmp_path, "file"]], tmp_path)
    for ended, reason in ((full, "File too large"), (file, "File exists")):
        assert "FSDP_COMPAT_BLACK_BOX cannot be used." in ended.out and reason in ended.out

    used = (recorded[0] / "healthy" / "rank_0.box").stat()
    assert used.st_blocks * 512 >= used.st_size > 130_000


REFUSED = """
import os, resource, sys, torch.distributed as dist
from torch import nn
from fsdp_compat import FullyShardedDataParallel as FSDP, UsageError
os.environ["FSDP_COMPAT_BLACK_BOX"] = f"{sys.argv[1]}/{sys.argv[2]}"
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
try:
    FSDP(nn.Linear(2, 2))
except UsageError as error:
    print(error)
"""


def test_without_a_black_box_nothing_is_to_diagnose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(tmp_path) == 2
    said = capsys.readouterr()
    assert "rank_*.box" in said.err and not said.out


@pytest.mark.parametrize("damage", ["no names", "0xff"])
def test_diagnose_names_a_damaged_file(
    recorded: tuple[Path, dict[str, Ended]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    for name in ("rank_0.box", "rank_0.units"):
        shutil.copy(recorded[0] / "healthy" / name, tmp_path)
    if damage == "no names":
        (tmp_path / "rank_0.units").write_text("")
    else:
        data = (tmp_path / "rank_0.box").read_bytes()
        (tmp_path / "rank_0.box").write_bytes(data[:2048] + b"\xff" * len(data[2048:]))
    diagnose(tmp_path)
    assert "rank_0" in capsys.readouterr().err
