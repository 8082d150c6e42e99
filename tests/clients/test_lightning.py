"""Lightning's Trainer and Fabric have the losses of DDP, with both kinds of checkpoints."""

from __future__ import annotations

from pathlib import Path

from tests.clients.launch import INSTALLED, TORCHRUN, assert_losses, marks, results

pytestmark = marks

CASES = (
    *("full", "sharded", "full_flat", "sharded_flat", "offload", "checkpointing"),
    *("full_in_place", "sharded_in_place"),
)


def test_lightning(tmp_path: Path) -> None:
    program = "lightning_program"
    theirs = results(tmp_path / "theirs", program, ["trainer_ddp", "fabric_ddp"])
    for kind in ("trainer", "fabric"):
        cases = [f"{kind}_{case}" for case in CASES]
        found = results(tmp_path, program, cases, *TORCHRUN, *INSTALLED)
        for case, result in found.items():
            keys = ["losses", "resumed"] if kind == "fabric" else ["losses"]
            assert_losses(case, result, theirs[f"{kind}_ddp"]["losses"], keys=keys)
