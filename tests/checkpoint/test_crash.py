"""A process that is killed during a save leaves nothing that loads wrongly, and earlier checkpoints
still load.

The other ranks of the save get an error, and the next save removes the left-over files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_saves import CASES, EVERY
from tests.support.programs import python
from tests.support.same_host import NOT_MAPPED
from tests.support.time_limit import limit_s


def _printed(what: str, folder: Path) -> tuple[Any, str]:
    """Return what the program prints last, and its errors."""
    # NOT_MAPPED: each rank has a part of each parameter
    program = ("-m", "tests.support.killed_saves", what, folder)
    ran = python(*program, timeout=limit_s(500), **NOT_MAPPED)
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


@pytest.mark.slow
def test_a_save_killed_at_any_operation_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    found, err = _printed("resumed", tmp_path)
    *saves, load = found
    assert all(save["well"] for save in (*saves, load)), err
    newest = None
    for save in saves:
        if not save["killed"]:
            newest = save["step"]
        assert save["newest"] in (newest, save["step"]), save
        newest = save["newest"]
    assert not load["killed"], err
    assert [save["killed"] for save in saves[:2]] == [False, False]
    killed = [save for save in saves if save["killed"]]
    assert len(killed) >= 33 // EVERY
    # Some were killed before the checkpoint had its name, some after that.
    assert {save["newest"] == save["step"] for save in killed} == {True, False}
    assert any(save["left"] for save in killed)
    assert not any(save["left"] for save in saves if not save["killed"])


@pytest.mark.slow
def test_ranks_waiting_for_a_killed_rank_get_an_error_that_names_it(tmp_path: Path) -> None:
    told, err = _printed("survivors", tmp_path)
    for call, ranks, lost, operation in CASES:
        case = [call, ranks, lost, operation]
        assert sorted(rank for its, rank, _, _ in told if its == case) == [
            n for n in range(ranks) if n != lost
        ], err
    for case, _, kind, message in told:
        assert kind == "StateError", message
        assert re.search(rf"rank {case[2]} \(process \d+\) has ended", message), message
        assert all(fact in message for fact in ("expected:", "got:", "where:", "to do:"))
