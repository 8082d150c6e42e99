"""The checkpoint code of torchtune and verl saves and resumes sharded models, with DDP's losses.

They pin older versions of what other clients use, so they have an extra of their own, and run
without a GPU as far as that goes: verl's workers and torchtune's recipes ask for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.launch import INSTALLED, TORCHRUN, assert_losses, needs, results

pytestmark = pytest.mark.clients


@needs("managers", "torchao", "torchtune")
def test_torchtune(tmp_path: Path) -> None:
    program, cases = "torchtune_program", ["whole", "whole_kept", "distributed"]
    theirs = results(tmp_path / "theirs", program, ["ddp", "whole", "distributed"])
    expected = theirs["ddp"]["losses"]
    for case, result in results(tmp_path, program, cases, *TORCHRUN, *INSTALLED).items():
        assert_losses(case, result, expected, keys=["losses"])
        # The second step after loading a whole optimizer state differs, with torch's FSDP2 too.
        resumed = theirs["distributed" if case == "distributed" else "whole"]["resumed"]
        assert result["resumed"] == pytest.approx(resumed, rel=1e-6), case
    assert result["resumed"] == pytest.approx(expected[2:], rel=1e-6)


@needs("managers", "verl", "ray")
def test_verl(tmp_path: Path) -> None:
    program, cases = "verl_program", ["flat", "original", "in_place"]
    expected = results(tmp_path / "theirs", program, ["ddp"])["ddp"]["losses"]
    for case, result in results(tmp_path, program, cases, *TORCHRUN, *INSTALLED).items():
        assert_losses(case, result, expected)
        assert result["version"] == (2 if case == "in_place" else 1)
        # verl exports in bf16
        assert result["exported"] == pytest.approx(expected[2], rel=2e-2), case
