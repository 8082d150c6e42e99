"""PEFT without a trainer, generation of different lengths, and TRL's trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.launch import INSTALLED, OURS, TORCHRUN, assert_losses, marks, results

pytestmark = marks

PROGRAM = "peft_trl_program"


def test_adapters_and_generation(tmp_path: Path) -> None:
    found = results(tmp_path, PROGRAM, ["adapter", "generate"], *TORCHRUN, *INSTALLED)
    adapter = found["adapter"]
    assert_losses("adapter", adapter, adapter["whole"], keys=["losses"])
    assert 0 < adapter["bytes"] < 10_000  # the base has 100 kB
    assert adapter["loaded"] == adapter["reloaded"] == adapter["evaluated"]
    assert adapter["evaluated"] != pytest.approx(adapter["base"], rel=1e-5)
    assert found["generate"]["module"] in OURS
    assert found["generate"]["equal"] == [[True, True]] * 2


def test_trl(tmp_path: Path) -> None:
    theirs = results(tmp_path / "theirs", PROGRAM, ["sft_ddp", "sft_lora_ddp", "grpo_ddp"])
    cases = {"sft": "sft_ddp", "sft_fsdp2": "sft_ddp", "sft_lora": "sft_lora_ddp"}
    found = results(tmp_path, PROGRAM, [*cases, "grpo", "grpo_fsdp2"], *TORCHRUN, *INSTALLED)
    for case, reference in cases.items():
        assert_losses(case, found[case], theirs[reference]["losses"])
    expected = theirs["grpo_ddp"]
    for grpo in (found["grpo"], found["grpo_fsdp2"]):
        assert grpo["module"] in OURS
        assert grpo["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
        assert grpo["rewards"] == expected["rewards"]
