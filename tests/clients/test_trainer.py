"""The Transformers Trainer has the losses, evaluations and predictions of DDP, also with LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.launch import INSTALLED, TORCHRUN, assert_losses, marks, results

pytestmark = marks

FP32 = ("full", "flat", "sharded", "checkpointing", "fsdp2_full", "fsdp2_sharded")
LORA = ("lora_full", "lora_sharded", "lora_fsdp2")


def test_trainer(tmp_path: Path) -> None:
    program = "trainer_program"
    theirs = results(tmp_path / "theirs", program, ["ddp", "lora_ddp"])
    found = results(tmp_path, program, [*FP32, "bf16", *LORA], *TORCHRUN, *INSTALLED)
    for case, result in found.items():
        expected = theirs["lora_ddp" if case in LORA else "ddp"]
        rel = 2e-3 if case == "bf16" else 1e-6
        assert_losses(case, result, expected["losses"], rel=rel)
        assert result["evaluated"] == pytest.approx(expected["evaluated"], rel=rel), case
        if case != "bf16":
            assert result["predicted"] == expected["predicted"], case
        if "sharded" in case or case == "checkpointing":  # the Trainer saves no weights then
            assert result["files"] == []
        else:
            weights = "adapter_model" if case in LORA else "model"
            assert f"{weights}.safetensors" in result["files"], case
            assert result["loaded"] == pytest.approx(result["evaluated"], rel=1e-4), case
