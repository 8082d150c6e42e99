"""Directories in the layouts of Accelerate, the Trainer, Lightning, Fabric and Megatron-FSDP are
read bit for bit. tests/clients has the libraries themselves."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from fsdp_compat.checkpoint._tools.archive import Archive
from fsdp_compat.checkpoint._tools.client_directories import read_client_directory
from fsdp_compat.checkpoint._tools.reading import Files, read
from fsdp_compat.checkpoint._tools.shapes import shapes_of
from fsdp_compat.checkpoint._tools.tree import without_ddp
from fsdp_compat.errors import CheckpointError
from tests.support.checkpoints import (
    assert_is_reference,
    assert_same,
    reference,
    torch_fsdp1,
    torch_fsdp2,
    trained,
    unsharded,
)
from tests.support.ranks import run_ranks


def opened(path: Path, **options: Any) -> Archive:
    archive = read_client_directory(path, **options)
    assert archive is not None
    without_ddp(archive)
    return archive


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def beside(path: Path) -> Path:
    """Write what Accelerate saves beside model and optimizer."""
    path.mkdir(parents=True, exist_ok=True)
    torch.save({"base_lrs": [0.1], "last_epoch": 2}, path / "scheduler.bin")
    torch.save({"cpu": torch.zeros(5)}, path / "random_states_0.pkl")
    return path


def assert_beside(archive: Archive) -> None:
    assert archive.extra["scheduler"] == {"base_lrs": [0.1], "last_epoch": 2}
    assert [text for text in archive.left_out if "random_states_0.pkl" in text]


# -- Accelerate and the Trainer


def test_full_and_sharded_states_of_accelerate_are_read(tmp_path: Path) -> None:
    expected = reference()
    full, sharded = beside(tmp_path / "full"), beside(tmp_path / "sharded")
    torch.save(expected["model"], full / "pytorch_model_fsdp.bin")
    torch.save(expected["optimizer"], full / "optimizer.bin")
    save_dcp({"model": expected["model"]}, sharded / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": expected["optimizer"]}, sharded / "optimizer_0")
    for path in (full, sharded):
        archive = opened(path)
        assert archive.kind == "Accelerate"
        assert_is_reference(archive, expected)
        assert_beside(archive)
    assert opened(full).aliases == expected["aliases"]


def save_per_rank(directory: str) -> None:
    """What Accelerate does for LOCAL state dicts of FSDP1, and with use_dcp=False for SHARDED ones
    of FSDP2."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    local, sharded = Path(directory, "local"), Path(directory, "sharded")
    for path in (local, sharded):
        path.mkdir(exist_ok=True)
    model = torch_fsdp1(unsharded(), use_orig_params=False)
    optimizer = trained(model)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), local / f"pytorch_model_fsdp_rank{rank}.bin")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        states = {"optimizer": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(states, checkpoint_id=local / "optimizer_0")
    model = torch_fsdp2(unsharded())
    state, optim = get_state_dict(model, trained(model))
    torch.save(state, sharded / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(optim, sharded / f"optimizer_0_rank{rank}.bin")
    dist.barrier()


def test_files_of_each_rank_of_accelerate_are_read(tmp_path: Path) -> None:
    run_ranks(2, save_per_rank, str(tmp_path))
    for name in ("local", "sharded"):
        archive = opened(tmp_path / name, shapes=shapes_of(unsharded()))
        assert_is_reference(archive, reference())
        assert archive.world_size == 2
    (tmp_path / "sharded" / "pytorch_model_fsdp_0_rank0.bin").unlink()
    with pytest.raises(CheckpointError, match="rank 0"):
        opened(tmp_path / "sharded")


def test_several_models_of_accelerate_keep_their_number(tmp_path: Path) -> None:
    beside(tmp_path)
    one, two = ({"w": torch.full((2,), float(number))} for number in (1, 2))
    optim = {"state": {"w": {"m": torch.ones(2)}}, "param_groups": [{"lr": 1, "params": ["w"]}]}
    torch.save(one, tmp_path / "pytorch_model_fsdp.bin")
    torch.save(two, tmp_path / "pytorch_model_fsdp_1.bin")
    torch.save(optim, tmp_path / "optimizer.bin")
    save_dcp({"optimizer": optim}, tmp_path / "optimizer_1")
    archive = opened(tmp_path)
    assert set(archive.tensors) == {"model.w", "model_1.w"}
    assert set(archive.states) == {"model.w", "model_1.w"}
    assert [group["params"] for group in archive.param_groups or ()] == [["model.w"], ["model_1.w"]]
    with Files() as files:
        assert_same(read(archive.tensors["model_1.w"], files), two["w"], "model_1.w")


def test_a_checkpoint_of_the_trainer_has_its_step(tmp_path: Path) -> None:
    """With FULL state dicts, the Trainer saves the model twice."""
    expected = reference()
    torch.save(expected["model"], tmp_path / "pytorch_model_fsdp.bin")
    torch.save(expected["optimizer"], tmp_path / "optimizer.bin")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    archive = opened(tmp_path)
    assert (archive.kind, archive.step) == ("Trainer", 500)
    assert_is_reference(archive, expected)
    assert any(text.startswith("model.safetensors") for text in archive.left_out)
    (tmp_path / "trainer_state.json").write_text('{"global_step": "no"}')
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        opened(tmp_path)


def test_ddp_checkpoints_keep_the_numbers_of_the_optimizer(tmp_path: Path) -> None:
    beside(tmp_path)
    model = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(2, 2)}
    save_file(model, tmp_path / "model.safetensors")
    states = {number: {"m": torch.zeros(shape)} for number, shape in enumerate([(3, 2), (2, 2)])}
    torch.save({"state": states, "param_groups": [{"params": [0, 1]}]}, tmp_path / "optimizer.bin")
    archive = opened(tmp_path)
    assert set(archive.tensors) == set(model)
    assert archive.is_by_number and set(archive.states) == {"0", "1"}
    # The same model in two files of torch.save, with an index.
    (tmp_path / "model.safetensors").unlink()
    places = {"a.weight": "part-1.bin", "b.weight": "part-2.bin"}
    for name, file in places.items():
        torch.save({name: model[name]}, tmp_path / file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    archive = opened(tmp_path)
    with Files() as files:
        for name, values in model.items():
            assert_same(read(archive.tensors[name], files), values, name)
    index.write_text(json.dumps({"weight_map": {**places, "b.weight": "../part-2.bin"}}))
    with pytest.raises(CheckpointError, match="outside"):
        opened(tmp_path)


def test_other_directories_are_not_of_a_client(tmp_path: Path) -> None:
    save_dcp({"w": torch.zeros(2)}, tmp_path / "dcp")
    hub, own = tmp_path / "hub", tmp_path / "own"
    for path in (hub, own):
        path.mkdir()
    save_file({"w": torch.zeros(2)}, hub / "model.safetensors")
    torch.save({}, own / "model.pt")
    torch.save({}, own / "optimizer.pt")
    for path in (tmp_path, tmp_path / "dcp", hub, own):
        assert read_client_directory(path) is None


def test_mixed_forms_and_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    path = beside(tmp_path / "c")
    torch.save({"w": torch.zeros(2)}, tmp_path / "outside.bin")
    (path / "pytorch_model_fsdp.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(CheckpointError, match="outside"):
        opened(path)
    (path / "pytorch_model_fsdp.bin").unlink()
    shutil.copy(tmp_path / "outside.bin", path / "pytorch_model_fsdp.bin")
    save_dcp({"model": {"w": torch.zeros(2)}}, path / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointError, match="several forms"):
        opened(path)


# -- Lightning, Fabric, Megatron-FSDP


def test_sharded_directories_of_lightning_and_fabric_are_read(tmp_path: Path) -> None:
    expected = reference()
    optim = copy.deepcopy(expected["optimizer"])
    save_dcp({"model": expected["model"], "optimizer_0": optim}, tmp_path / "l.ckpt")
    values = {"pytorch-lightning_version": "2.6.6", "global_step": 9, "loops": {"a": 1}}
    torch.save(values, tmp_path / "l.ckpt" / "meta.pt")
    save_dcp({"net": expected["model"], "opt": optim}, tmp_path / "f.ckpt")
    torch.save({"step": 4, "note": "x"}, tmp_path / "f.ckpt" / "meta.pt")
    lightning, fabric = opened(tmp_path / "l.ckpt"), opened(tmp_path / "f.ckpt")
    for archive in (lightning, fabric):
        assert_is_reference(archive, expected)
    assert (lightning.kind, lightning.step) == ("Lightning", 9)
    assert lightning.extra["loops"] == {"a": 1}
    assert (fabric.kind, fabric.step, fabric.extra["note"]) == ("Fabric", 4, "x")


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
    archive = opened(tmp_path / "c")
    assert_is_reference(archive, expected)
    assert (archive.kind, archive.step) == ("Megatron-FSDP", 7)


def test_values_that_would_run_code_are_named(tmp_path: Path) -> None:
    save_dcp({"model": {"w": torch.zeros(2)}}, tmp_path / "c")
    torch.save({"epoch": 1, "callbacks": print}, tmp_path / "c" / "meta.pt")
    archive = opened(tmp_path / "c")
    assert set(archive.tensors) == {"w"}
    (text,) = archive.left_out
    assert text.startswith("meta.pt: ")
    assert "print" in text
