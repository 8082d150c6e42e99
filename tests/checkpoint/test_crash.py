"""A process that is killed in the middle of a save leaves nothing that loads wrongly, and what
stood before still loads.

The other processes of the save hear of it, and the next save clears up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.survivors import CASES

ROOT = Path(__file__).resolve().parents[2]


def test_a_save_that_is_killed_at_any_of_its_steps_leaves_the_checkpoint_before_it(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.support.killed_saves", str(tmp_path), "66"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=ROOT, check=False
    )
    assert ran.returncode == 0, ran.stderr
    saves = json.loads(ran.stdout.splitlines()[-1])
    assert all(save["well"] for save in saves), ran.stderr
    newest = -1
    for save in saves:
        if not save["killed"]:
            newest = save["step"]
        assert save["loads"] in (newest, save["step"]), save
        newest = save["loads"]
    assert [save["killed"] for save in saves[:2]] == [False, False]
    killed = [save for save in saves if save["killed"]]
    assert len(killed) >= 50
    assert {save["loads"] == save["step"] for save in killed} == {
        True,
        False,
    }  # before it had its name, and after
    assert any(save["left"] for save in killed)
    assert not any(save["left"] for save in saves if not save["killed"])


def test_ranks_that_wait_in_a_save_for_one_that_is_killed_get_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.support.survivors", str(tmp_path)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=ROOT, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    for call, ranks, lost, operation in CASES:
        case = [call, ranks, lost, operation]
        assert sorted(rank for its, rank, _, _ in told if its == case) == [
            n for n in range(ranks) if n != lost
        ], ran.stderr
    for case, _, kind, message in told:
        assert kind == "StateError", message
        assert re.search(rf"rank {case[2]} \(process \d+\) has ended", message), message
        assert all(fact in message for fact in ("expected:", "got:", "where:", "to do:"))
