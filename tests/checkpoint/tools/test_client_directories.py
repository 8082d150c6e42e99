"""Directories in the layouts of Accelerate, the Trainer, Lightning, Fabric and Megatron-FSDP are
read bit for bit. tests/clients has the libraries themselves."""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_compat.checkpoint.files import inspect
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import assert_model, assert_reference
from tests.support.checkpoints import reference, save_dcp


def test_several_models_of_accelerate_keep_their_number(tmp_path: Path) -> None:
    one, two = ({"w": torch.full((2,), float(number))} for number in (1, 2))
    optim = {"state": {"w": {"m": torch.ones(2)}}, "param_groups": [{"lr": 1, "params": ["w"]}]}
    torch.save(one, tmp_path / "pytorch_model_fsdp.bin")
    torch.save(two, tmp_path / "pytorch_model_fsdp_1.bin")
    torch.save(optim, tmp_path / "optimizer.bin")
    save_dcp({"optimizer": optim}, tmp_path / "optimizer_1")
    content = assert_model(tmp_path, {"model.w": one["w"], "model_1.w": two["w"]})
    assert set(content.states) == {"model.w", "model_1.w"}
    assert [group["params"] for group in content.groups or ()] == [["model.w"], ["model_1.w"]]


def test_a_checkpoint_of_the_trainer_has_its_step_and_other_values(tmp_path: Path) -> None:
    """With FULL state dicts, the Trainer saves the model twice."""
    expected = reference()
    torch.save(expected["model"], tmp_path / "pytorch_model_fsdp.bin")
    torch.save(expected["optimizer"], tmp_path / "optimizer.bin")
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    torch.save({"last_epoch": 7}, tmp_path / "scheduler.pt")
    torch.save(argparse.Namespace(bf16=True, compute=print), tmp_path / "training_args.bin")
    torch.save({"cpu": torch.zeros(8)}, tmp_path / "rng_state_0.pth")
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 500, "log_history": []}))
    content = assert_reference(tmp_path, expected)
    assert (content.facts.kind, content.facts.step) == ("Trainer", 500)
    assert content.extra == {"scheduler": {"last_epoch": 7}}
    left = {text.partition(":")[0] for text in content.facts.left_out}
    assert left >= {"model.safetensors", "training_args.bin", "rng_state_0.pth"}
    state.write_text('{"global_step": "no"}')
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        inspect(tmp_path)


def test_ddp_checkpoints_keep_the_numbers_of_the_optimizer(tmp_path: Path) -> None:
    torch.save({"cpu": torch.zeros(5)}, tmp_path / "random_states_0.pkl")
    model = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(2, 2)}
    save_file(model, tmp_path / "model.safetensors")
    states = {number: {"m": torch.zeros(shape)} for number, shape in enumerate([(3, 2), (2, 2)])}
    torch.save({"state": states, "param_groups": [{"params": [0, 1]}]}, tmp_path / "optimizer.bin")
    assert set(assert_model(tmp_path, model).states) == {0, 1}
    # The same model in two files of torch.save, with an index.
    (tmp_path / "model.safetensors").unlink()
    places = {"a.weight": "part-1.bin", "b.weight": "part-2.bin"}
    for name, file in places.items():
        torch.save({name: model[name]}, tmp_path / file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert_model(tmp_path, model)
    index.write_text(json.dumps({"weight_map": {**places, "b.weight": "../part-2.bin"}}))
    with pytest.raises(CheckpointError, match="not the name of a file"):
        inspect(tmp_path)


def test_other_directories_are_not_of_a_client(tmp_path: Path) -> None:
    save_dcp({"w": torch.zeros(2)}, tmp_path / "dcp")
    hub, own = tmp_path / "hub", tmp_path / "own"
    for path in (hub, own):
        path.mkdir()
    save_file({"w": torch.zeros(2)}, hub / "model.safetensors")
    torch.save({}, own / "model.pt")
    torch.save({}, own / "optimizer.pt")
    kinds = [inspect(path).kind for path in (tmp_path / "dcp", hub)]
    assert kinds == ["torch.distributed.checkpoint", "safetensors"]
    for path in (tmp_path, own):
        with pytest.raises(CheckpointError, match="No checkpoint was recognised"):
            inspect(path)


def test_mixed_forms_and_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    torch.save({"w": torch.zeros(2)}, tmp_path / "outside.bin")
    (path / "pytorch_model_fsdp.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(CheckpointError, match="outside"):
        inspect(path)
    (path / "pytorch_model_fsdp.bin").unlink()
    shutil.copy(tmp_path / "outside.bin", path / "pytorch_model_fsdp.bin")
    save_dcp({"model": {"w": torch.zeros(2)}}, path / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointError, match="several forms"):
        inspect(path)


def test_names_of_megatron_fsdp_lose_its_wrappers(tmp_path: Path) -> None:
    expected = reference()

    def wrapped(values: dict[str, Any]) -> dict[str, Any]:
        return {f"module.module.{name}": value for name, value in values.items()}

    optim = copy.deepcopy(expected["optimizer"])
    optim["state"] = wrapped(optim["state"])
    for group in optim["param_groups"]:
        group["params"] = list(wrapped(dict.fromkeys(group["params"])))
    save_dcp({"model": wrapped(expected["model"]), "optimizer": optim}, tmp_path / "c")
    torch.save({"iteration": 7}, tmp_path / "c" / "common.pt")
    facts = assert_reference(tmp_path / "c", expected).facts
    assert (facts.kind, facts.step) == ("Megatron-FSDP", 7)
