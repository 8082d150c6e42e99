"""Programs that use Accelerate have the losses of DDP, with every kind of checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.launch import (
    INSTALLED,
    PROGRAMS,
    TORCHRUN,
    assert_losses,
    marks,
    results,
)

pytestmark = marks

PROGRAM = "accelerate_program"

FP32 = (
    *("full", "sharded", "local", "flat", "flat_sharded", "offload"),
    *("checkpointing", "checkpointing_full", "compile", "compile_sharded"),
    *("fsdp2_full", "fsdp2_sharded", "fsdp2_offload"),
)
BF16 = ("bf16", "bf16_full", "autocast", "autocast_flat")


def test_accelerate(tmp_path: Path) -> None:
    """bf16 is compared with torch's FSDP1, which cannot take full state dicts on CPUs."""
    theirs = results(tmp_path / "theirs", PROGRAM, ["ddp", "bf16_losses"])
    found = results(tmp_path, PROGRAM, [*FP32, *BF16, "merge"], *TORCHRUN, *INSTALLED)
    ddp = theirs["ddp"]
    for case in FP32:
        assert_losses(case, found[case], ddp["losses"])
        assert found[case]["weights"] == pytest.approx(ddp["weights"], rel=1e-6), case
        assert ("FSDPModule" in found[case]["module"]) == case.startswith("fsdp2")
    for case in BF16:
        if case.startswith("bf16"):
            assert_losses(case, found[case], theirs["bf16_losses"]["losses"], rel=1e-4)
        else:  # autocast computes in other dtypes than mixed precision
            assert_losses(case, found[case], ddp["losses"], keys=["losses"], rel=5e-3)
            assert_losses(case, found[case], found[case]["losses"])
    assert found["merge"]["equal"]


def test_accelerate_launch_with_a_configuration_file(tmp_path: Path) -> None:
    launcher = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file")
    launched = results(
        tmp_path,
        PROGRAM,
        ["launched"],
        *(*launcher, str(PROGRAMS / "launch.yaml"), "--module", "fsdp_compat", "run"),
    )
    ddp = results(tmp_path, PROGRAM, ["ddp"])["ddp"]
    assert_losses("launched", launched["launched"], ddp["losses"])
