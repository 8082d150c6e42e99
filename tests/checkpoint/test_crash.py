"""A process that is killed during a save leaves nothing that loads wrongly, and earlier checkpoints
still load.

The other ranks of the save get an error, and the next save removes the left-over files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.killed_saves import CASES, EVERY
from tests.support.programs import launch
from tests.support.same_host import NOT_MAPPED

PROGRAM = "import sys; from tests.support.killed_saves import main; main(sys.argv[1])"


@pytest.mark.slow
def test_a_killed_save_leaves_a_checkpoint_that_loads_and_waiting_ranks_get_its_name(
    tmp_path: Path,
) -> None:
    # NOT_MAPPED: each rank has a part of each parameter
    (ran,) = launch(PROGRAM, [[tmp_path]], tmp_path, **NOT_MAPPED)
    assert ran.code == 0, ran.err
    ([*saves, load], told), err = json.loads(ran.out.splitlines()[-1]), ran.err
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
    for call, ranks, lost, operation in CASES:
        case = [call, ranks, lost, operation]
        assert sorted(rank for its, rank, _, _ in told if its == case) == [
            n for n in range(ranks) if n != lost
        ], err
    for case, _, kind, message in told:
        assert kind == "StateError", message
        assert re.search(rf"rank {case[2]} \(process \d+\) has ended", message), message
        assert all(fact in message for fact in ("expected:", "got:", "where:", "to do:"))
