"""A process that is killed in the middle of a save leaves nothing that loads wrongly, and what stood before still loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_save_that_is_killed_at_any_of_its_steps_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_saves", str(tmp_path), "66"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)
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
    assert {save["loads"] == save["step"] for save in killed} == {True, False}  # before it had its name, and after
