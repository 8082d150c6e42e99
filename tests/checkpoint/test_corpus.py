"""Checkpoints of other versions, of torch and of this package, hold what they held when they were
written. ``corpus/make.py`` wrote them, and noted the values before it saved them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType, checkpoint
from fsdp_compat.checkpoint._tools.archive import StoredTensor
from fsdp_compat.checkpoint._tools.opening import open_archive, problems_of
from fsdp_compat.checkpoint._tools.reading import Files, read
from fsdp_compat.checkpoint._tools.shapes import shapes_of
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.corpus import content
from tests.checkpoint.corpus.make import CORPUS, MINOR, TRUTH, ours
from tests.support.cases import about
from tests.support.ranks import on_ranks, run_ranks

NOTED = json.loads(TRUTH.read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = NOTED["entries"]
NATIVE = [path for path in ENTRIES if (CORPUS / path / "manifest.json").exists()]
FULL = [path for path in ENTRIES if path.endswith(".pt")]
PER_RANK = [path for path in ENTRIES if (CORPUS / path / "rank_0.pt").exists()]


def noted(path: str) -> dict[str, Any]:
    """Return the "model", "optimizer" and "groups" of a checkpoint as they were noted."""
    values = NOTED["contents"][ENTRIES[path]["content"]]
    if ENTRIES[path]["has_optimizer"]:
        return values
    return {"model": values["model"], "optimizer": {}, "groups": []}


def test_every_file_of_the_corpus_is_in_its_table() -> None:
    found = {path.relative_to(CORPUS).parts[:2] for path in CORPUS.glob("*/*/**/*")}
    found |= {path.relative_to(CORPUS).parts for path in CORPUS.glob("*/*.pt")}
    assert {"/".join(parts) for parts in found if parts[0] != "__pycache__"} == set(ENTRIES)


@pytest.mark.parametrize("path", ENTRIES)
def test_a_reader_finds_what_was_saved(path: str) -> None:
    entry, expected = ENTRIES[path], noted(path)
    shapes = shapes_of(content.Tiny()) if entry["needs_shapes"] else None
    archive = open_archive(CORPUS / path, shapes)
    assert problems_of(archive) == []
    with Files(archive.checksums) as files:
        model = _values(archive.tensors, files)
        model |= {alias: model[name] for alias, name in archive.aliases.items()}
        if not entry["has_ties"]:
            model |= {alias: model[name] for alias, name in content.TIES.items()}
        assert model == expected["model"]
        assert _values(archive.states, files) == expected["optimizer"]
        assert _values(archive.extra, files) == entry["extra"]
    assert _groups(archive.param_groups or []) == _groups(expected["groups"])
    assert archive.step == entry["step"]


@pytest.mark.parametrize("path", [path for path in ENTRIES if ENTRIES[path]["needs_shapes"]])
def test_torchs_full_state_dict_has_the_shapes_for_its_local_ones(path: str) -> None:
    """It holds a tied parameter twice, without a word about the tie."""
    archive = open_archive(CORPUS / path, CORPUS / path.replace("local-ranks", "full.pt"))
    assert problems_of(archive) == []
    assert archive.aliases == content.TIES
    with Files() as files:
        model = _values(archive.tensors, files)
    assert model == {
        name: facts for name, facts in noted(path)["model"].items() if name not in content.TIES
    }


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    for number, path in enumerate(
        [
            "ours/native-flat",
            "ours/safetensors",
            "torch-2.13.0/fsdp2-sharded",
            "clients/accelerate-sharded-ranks",
        ]
    ):
        copy = Path(shutil.copytree(CORPUS / path, tmp_path / str(number)))
        largest = max(copy.iterdir(), key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size - 64)
        with pytest.raises(CheckpointError):
            open_archive(copy)


def _values(value: Any, files: Files) -> Any:
    """Return the facts of values, those of tensors after these have been read."""
    if isinstance(value, dict):
        return {key: _values(item, files) for key, item in value.items()}
    return content.facts_of(read(value, files) if isinstance(value, StoredTensor) else value)


def _groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **{key: content.facts_of(group[key]) for key in content.SETTINGS if key in group},
            "params": sorted(group["params"]),
        }
        for group in groups
    ]


@pytest.mark.parametrize("path", FULL)
def test_torch_load_finds_what_was_saved_as_a_whole(path: str) -> None:
    states = torch.load(CORPUS / path, weights_only=True)
    expected = noted(path)
    assert content.facts_of(dict(states["model"])) == expected["model"]
    assert content.facts_of(states["optimizer"]["state"]) == expected["optimizer"]
    assert _groups(states["optimizer"]["param_groups"]) == _groups(expected["groups"])


def _whole(value: Tensor) -> Tensor:
    """Return a tensor from the parts of all ranks. Collective, as no rank has all parts."""
    if isinstance(value, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        parts = [(tuple(offsets), value.to_local())]
    elif isinstance(value, ShardedTensor):
        parts = [
            (tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()
        ]
    else:
        return value
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, parts)
    whole = torch.zeros(tuple(value.size()), dtype=value.dtype)
    for offsets, part in (found for of_rank in of_ranks for found in of_rank):
        if part.numel():
            place = tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))
            # of a 0-d tensor the part has one dimension
            whole.view(whole.shape or part.shape)[place] = part
    return whole


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_torch_load_finds_what_each_rank_saved(ranks: int) -> None:
    """Pickles of DTensors and ShardedTensors are for the version of torch that made them."""
    of_as_many = [path for path in PER_RANK if len(list((CORPUS / path).iterdir())) == ranks]
    assert of_as_many
    paths = [path for path in of_as_many if ENTRIES[path]["torch"] == MINOR]
    warnings.simplefilter("ignore")  # ShardedTensor is deprecated
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    for path in paths:
        with about(path):
            file = CORPUS / path / f"rank_{dist.get_rank()}.pt"
            # not weights_only: that refuses ShardedTensors
            states = torch.load(file, weights_only=False)
            expected = noted(path)
            for name, value in states["model"].items():
                if "_flat_param" not in name:
                    assert content.facts_of(_whole(value)) == expected["model"][name], name
            for name, state in states.get("optimizer", {"state": {}})["state"].items():
                found = {key: content.facts_of(_whole(value)) for key, value in state.items()}
                assert found == expected["optimizer"][name], name


def _require_loaded(path: str, kind: str, folder: Path, more: dict[str, Any] | None = None) -> None:
    """Require that a folder gives the values of an entry, and more extra values."""
    model, _ = ours(kind)
    entry, expected = ENTRIES[path], noted(path)
    optimizer = content.OPTIMIZERS[entry["content"]](model)
    is_rank_local = entry["content"] == "rank-local"
    if is_rank_local and (kind not in path or dist.get_world_size() != 2):
        return  # it is loaded with the layout that saved it
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    extra = checkpoint.load(folder, model, optimizer if expected["groups"] else None)
    if path in NATIVE and entry["extra"]:
        is_alike = len(list((CORPUS / path).glob("rank-*"))) == dist.get_world_size()
        rank = dist.get_rank() if is_alike else 0
        assert content.facts_of(extra) == {**entry["extra"], "rank": rank}
    else:
        assert content.facts_of(extra or {}) == {**entry["extra"], **(more or {})}
    loaded = content.facts_of(dict(checkpoint.iter_full_state_dict(model)))
    assert loaded == expected["model"]
    if is_rank_local:
        for group in optimizer.param_groups:
            assert group["lr"] == expected["groups"][0]["lr"]
            states = [optimizer.state[parameter] for parameter in group["params"]]
            assert any(states)
            for state in filter(None, states):
                assert torch.equal(state["codes"], content.codes_of(dist.get_rank()))
    elif expected["groups"]:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            saved = FSDP.optim_state_dict(model, optimizer)
        states = {
            name: {key: content.facts_of(_whole(value)) for key, value in state.items()}
            for name, state in saved["state"].items()
        }
        assert states == expected["optimizer"]
        assert _groups(saved["param_groups"]) == _groups(expected["groups"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["flat", "original", "rows"])
@on_ranks("ranks")
def test_every_checkpoint_loads_into_a_model_that_is_sharded_in_any_way(
    kind: str, ranks: int
) -> None:
    warnings.simplefilter("ignore")
    for path in ENTRIES:
        with about(path):
            _require_loaded(path, kind, CORPUS / path)


def _load_trainer(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for kind in ("flat", "rows"):
        _require_loaded(
            "clients/accelerate-sharded", kind, folder, {"scheduler": {"last_epoch": 7}}
        )


def test_a_checkpoint_of_the_trainer_loads_as_it_lies(tmp_path: Path) -> None:
    """The Trainer saves model and optimizer as Accelerate does, and other files beside them."""
    folder = tmp_path / "checkpoint-7"
    shutil.copytree(CORPUS / "clients/accelerate-sharded", folder)
    torch.save({"last_epoch": 7}, folder / "scheduler.pt")
    torch.save(argparse.Namespace(bf16=True, compute=print), folder / "training_args.bin")
    for rank in range(2):
        torch.save({"cpu": torch.zeros(8)}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7, "log_history": []}))
    run_ranks(3, _load_trainer, folder)


@on_ranks(2)
def test_the_first_rank_warns_of_what_a_load_does_not_read() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load(CORPUS / "clients/accelerate-full", ours("rows")[0])
    found = [str(each.message) for each in caught if "not read from" in str(each.message)]
    assert len(found) == (1 if dist.get_rank() == 0 else 0)
    assert all("random_states_0.pkl: state of one process" in message for message in found)
