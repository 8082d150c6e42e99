"""Sharded state dicts through torch.distributed.checkpoint's writer and reader of safetensors
files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.odd_model import Config, assert_same, make_model, shard, sharded_state
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample

FLAT: Config = ("FULL_SHARD", False, "blocks")
ORIGINAL: Config = ("SHARD_GRAD_OP", True, "always")
MESH: Config = ("HYBRID_SHARD", True, "blocks")


def _save(path: str, config: Config, seed: int, **options: Any) -> None:
    writer = HuggingFaceStorageWriter(path, save_distributed=True, **options)
    dcp.save(sharded_state(shard(make_model(seed), config)), storage_writer=writer)


def _load(path: str, config: Config, seed: int) -> None:
    model = shard(make_model(99), config)
    state = sharded_state(model)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    model.load_state_dict(state)
    assert_same(model.state_dict(), make_model(seed).state_dict(), f"{config}, seed {seed}")


# Several boxes per rank, ties, fewer elements than ranks, and buffers; DTensors, which have one
# piece per rank, beside.
@pytest.mark.parametrize(("writers", "readers"), sample([(1, 2), (3, 4), (4, 2)], 1))
def test_hugging_face_files_of_all_ranks_load_on_every_world_size(
    writers: int, readers: int, tmp_path: Path
) -> None:
    for seed, (saved, loaded) in enumerate([(FLAT, ORIGINAL), (MESH, FLAT)]):
        path = str(tmp_path / str(seed))
        run_ranks(writers, _save, path, saved, seed)
        run_ranks(readers, _load, path, loaded, seed)
        whole = make_model(99).state_dict()
        dcp.load(whole, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
        assert_same(whole, make_model(seed).state_dict(), "one process without a group")


class Floats(nn.Module):
    """Torch's consolidation knows no integers and no 0-d tensors; boxes it has to put together are
    there."""

    def __init__(self) -> None:
        super().__init__()
        self.cube, self.wide = nn.Parameter(torch.randn(3, 5, 7)), nn.Linear(11, 3)


def _save_consolidated(path: str) -> None:
    torch.manual_seed(3)
    names = {"cube": 1, "wide.weight": 2, "wide.bias": 2}
    writer = HuggingFaceStorageWriter(path, names, save_distributed=True, enable_consolidation=True)
    dcp.save(sharded_state(FSDP(Floats())), storage_writer=writer)


def test_consolidated_files_hold_the_whole_tensors(tmp_path: Path) -> None:
    run_ranks(3, _save_consolidated, str(tmp_path))
    torch.manual_seed(3)
    found = {
        name: value
        for file in sorted(tmp_path.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    assert_same(found, Floats().state_dict())


@on_ranks(2)
def test_writing_one_file_refuses_sharded_values(tmp_path: Path) -> None:
    model = shard(make_model(), FLAT)
    with pytest.raises(dcp.api.CheckpointException, match="save_distributed=True"):
        dcp.save(sharded_state(model), storage_writer=HuggingFaceStorageWriter(tmp_path))
    dist.barrier()
    assert not list(tmp_path.rglob("*.safetensors")), "nothing was written"
