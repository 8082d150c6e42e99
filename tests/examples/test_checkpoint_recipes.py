"""The recipes of the checkpoint tools in examples/CHECKPOINTS.md: every command runs as it stands
there, from a checkpoint of the kind that it is for, and does what the text says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("rich")

from safetensors.torch import load_file

from fsdp_compat import checkpoint
from tests.checkpoint.tools.program import run
from tests.examples.test_readme import blocks
from tests.support.checkpoints import make, reference

HEADING = "Checkpoint tools"


def lines() -> list[str]:
    return "".join(blocks("examples/CHECKPOINTS.md", "sh", HEADING)).splitlines()


def lay_out(folder: Path) -> None:
    """Make the checkpoints that the recipes begin with, as their frameworks write them."""
    for kind, ranks, name in (
        ("fsdp2-torch", 2, "rank_files"),
        ("fsdp2-dcp", 2, "dcp_checkpoint"),
        ("fsdp1-local", 2, "local_files"),
        ("ddp", 1, "last.pt"),
        ("ours-native", 4, "runs/7/step-00001200"),
    ):
        made = make(kind, ranks, folder / "made")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        made["path"].rename(folder / name)
    checkpoint.files.convert(
        folder / "runs/7/step-00001200",
        folder / "runs/7/step-00001100",
        to="native",
        dtype=torch.float16,
        weights=True,
    )
    names = reference()["optimizer"]["param_groups"][0]["params"]
    (folder / "names.json").write_text(json.dumps(names))
    accelerate = folder / "checkpoint-1000"
    accelerate.mkdir()
    (accelerate / "trainer_state.json").write_text(json.dumps({"global_step": 1000}))
    model = {"model": reference()["model"]}
    dcp.save(model, checkpoint_id=accelerate / "pytorch_model_fsdp_0", no_dist=True)
    (folder / "my_model.py").write_text(
        "from tests.support.checkpoints import unsharded as make_model\n"
    )


def assert_same(actual: dict[str, torch.Tensor], renamed: dict[str, str] | None = None) -> None:
    """The values are the model's, bit for bit. A tied tensor may be there once."""
    expected = reference()["model"]
    names = renamed or {name: name for name in expected}
    missing = set(names.values()) - set(actual)
    assert missing <= {"words.head.weight", "words.embed.weight"} and len(missing) < 2
    for old, new in names.items():
        if new in actual:
            assert torch.equal(actual[new], expected[old].to(actual[new].dtype)), new


def in_directory(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_every_recipe_of_the_checkpoint_tools_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert len(lines()) >= 12
    for line in lines():
        program, *arguments = shlex.split(line)
        result = run(*arguments)
        assert program == "fsdp-compat"
        # its weights are rounded, its optimizer is gone
        is_different = line.startswith("fsdp-compat diff runs/7/step-00001100")
        assert result.exit_code == is_different, f"{line}\n{result.output}"
        assert "--json" not in line or 'is_same": true' in result.stdout
    assert_targets_hold_the_model()


def assert_targets_hold_the_model() -> None:
    here = Path()
    assert_same(in_directory(here / "exported"))
    rounded = in_directory(here / "exported_bf16")
    assert rounded["cube"].dtype == torch.bfloat16
    assert_same(rounded)
    assert_same(in_directory(here / "exported_local"))
    assert_same(load_file("model.safetensors"))
    loaded: dict[str, Any] = torch.load("model.pt", weights_only=True)
    assert_same(loaded.get("model", loaded))
    blocks_only = load_file("blocks.safetensors")
    names = [name for name in reference()["model"] if name.startswith("blocks.")]
    assert len(blocks_only) == len(names)
    assert_same(blocks_only, {name: f"layers.{name.removeprefix('blocks.')}" for name in names})
    continued = checkpoint.files.diff(
        "runs/7/step-00001200", "runs/8/step-00001200", exclude=["^extra/"]
    )
    assert continued.is_same and len(continued.tensors) > len(reference()["model"])
    assert len(list(Path("for_two_ranks").glob("*.safetensors"))) == 2
    assert checkpoint.files.diff("runs/7/step-00001200", "for_two_ranks").is_same
