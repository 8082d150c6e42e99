"""Programs that use client libraries have the losses of DDP, with every kind of checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.launch import (
    CLIENTS,
    INSTALLED,
    OURS,
    PROGRAMS,
    ROOT,
    TORCHRUN,
    assert_losses,
    needs,
    results,
    start,
)

pytestmark = pytest.mark.clients
clients = needs("clients", *CLIENTS)

# --- Accelerate -----------------------------------------------------------------------------------

FP32 = (
    *("full", "sharded", "local", "flat", "flat_sharded", "offload"),
    *("checkpointing", "checkpointing_full", "compile", "compile_sharded"),
    *("fsdp2_full", "fsdp2_sharded", "fsdp2_offload"),
)
BF16 = ("bf16", "bf16_full", "autocast", "autocast_flat")


@clients
def test_accelerate(tmp_path: Path) -> None:
    """bf16 is compared with torch's FSDP1, which cannot take full state dicts on CPUs."""
    program = "accelerate_program"
    theirs = results(tmp_path / "theirs", program, ["ddp", "bf16_losses"])
    found = results(tmp_path, program, [*FP32, *BF16, "merge"], *TORCHRUN, *INSTALLED)
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

    launcher = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file")
    command = (*launcher, str(PROGRAMS / "launch.yaml"), "--module", "fsdp_compat", "run")
    launched = results(tmp_path, program, ["launched"], *command)
    assert_losses("launched", launched["launched"], ddp["losses"])


# --- Lightning ------------------------------------------------------------------------------------

KINDS = (
    *("full", "sharded", "full_flat", "sharded_flat", "offload", "checkpointing"),
    *("full_in_place", "sharded_in_place"),
)


@clients
@pytest.mark.parametrize("part", ["trainer", "fabric"])
def test_lightning(part: str, tmp_path: Path) -> None:
    program, cases = "lightning_program", [f"{part}_{kind}" for kind in KINDS]
    theirs = results(tmp_path / "theirs", program, [f"{part}_ddp"])
    keys = ["losses", "resumed"] if part == "fabric" else ["losses"]
    for case, result in results(tmp_path, program, cases, *TORCHRUN, *INSTALLED).items():
        assert_losses(case, result, theirs[f"{part}_ddp"]["losses"], keys=keys)


# --- PEFT, TRL and the Trainer of Transformers ----------------------------------------------------


@clients
def test_adapters_and_generation(tmp_path: Path) -> None:
    program = "peft_trl_program"
    found = results(tmp_path, program, ["adapter", "generate"], *TORCHRUN, *INSTALLED)
    adapter = found["adapter"]
    assert_losses("adapter", adapter, adapter["whole"], keys=["losses"])
    assert 0 < adapter["bytes"] < 10_000  # the base has 100 kB
    assert adapter["loaded"] == adapter["reloaded"] == adapter["evaluated"]
    assert adapter["evaluated"] != pytest.approx(adapter["base"], rel=1e-5)
    assert found["generate"]["module"] in OURS
    assert found["generate"]["equal"] == [[True, True]] * 2


@clients
def test_trl(tmp_path: Path) -> None:
    program = "peft_trl_program"
    theirs = results(tmp_path / "theirs", program, ["sft_ddp", "sft_lora_ddp", "grpo_ddp"])
    cases = {"sft": "sft_ddp", "sft_fsdp2": "sft_ddp", "sft_lora": "sft_lora_ddp"}
    found = results(tmp_path, program, [*cases, "grpo", "grpo_fsdp2"], *TORCHRUN, *INSTALLED)
    for case, reference in cases.items():
        assert_losses(case, found[case], theirs[reference]["losses"])
    expected = theirs["grpo_ddp"]
    for grpo in (found["grpo"], found["grpo_fsdp2"]):
        assert grpo["module"] in OURS
        assert grpo["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
        assert grpo["rewards"] == expected["rewards"]


WHOLE = ("full", "flat", "sharded", "checkpointing", "fsdp2_full", "fsdp2_sharded")
LORA = ("lora_full", "lora_sharded", "lora_fsdp2")


@clients
def test_trainer(tmp_path: Path) -> None:
    """Its losses, evaluations and predictions."""
    program = "trainer_program"
    theirs = results(tmp_path / "theirs", program, ["ddp", "lora_ddp"])
    found = results(tmp_path, program, [*WHOLE, "bf16", *LORA], *TORCHRUN, *INSTALLED)
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


# --- torchtune and verl ---------------------------------------------------------------------------
# They pin older versions of what other clients use, so they have an extra of their own, and run
# without a GPU as far as that goes: verl's workers and torchtune's recipes ask for one.


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


# --- the examples with client libraries -----------------------------------------------------------


def example(name: str, *arguments: str | Path) -> str:
    return start(*TORCHRUN, *INSTALLED, ROOT / "examples" / name, *arguments)


@clients
@pytest.mark.parametrize("version", ["1", "2"])
def test_the_example_with_the_trainer_resumes(tmp_path: Path, version: str) -> None:
    options = ("--folder", tmp_path, "--fsdp-version", version)
    example("trainer.py", *options, "--steps", "10")
    resumed = example("trainer.py", *options, "--steps", "20", "--resume")
    found = re.findall(r"trained for 20 steps: loss (\S+)", resumed)
    assert len(found) == 1 and float(found[0]) < 4.5, resumed  # a uniform guess has 5.5


@clients
def test_the_example_with_an_adapter_loads_it_into_a_whole_model(tmp_path: Path) -> None:
    printed = example("accelerate_lora.py", "--folder", tmp_path, "--steps", "10")
    found = re.findall(r"sharded (\S+), the adapter in a whole model (\S+)", printed)
    assert len(found) == 1 and found[0][0] == found[0][1], printed
