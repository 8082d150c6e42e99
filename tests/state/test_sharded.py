"""SHARDED_STATE_DICT: what its values are, in memory and in the files of torch's writers."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import _state_dict_utils
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig as TorchOptimConfig
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compat import CheckpointError, ShardedStateDictConfig, UsageError
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.memory import NewBytes
from tests.support.odd_model import (
    Block,
    Config,
    Frozen,
    assert_holds,
    assert_identical,
    by_rank,
    make_model,
    make_optimizer,
    shard,
    sharded_state,
    stack,
    train,
)
from tests.support.optimizer_state import FULL, SHARDED, num_sent, storages_of
from tests.support.parity import local
from tests.support.ranks import on_ranks, run_ranks


def _check_metadata(name: str, value: ShardedTensor, boxes: list[Any], whole: Tensor) -> None:
    """boxes: (offsets, sizes, placement) of what all ranks hold."""
    metadata = value.metadata()
    described = [
        (tuple(m.shard_offsets), tuple(m.shard_sizes), str(m.placement))
        for m in metadata.shards_metadata
    ]
    assert sorted(described) == sorted(boxes), name
    assert tuple(metadata.size) == tuple(whole.shape) == tuple(value.size()), name
    assert metadata.tensor_properties.dtype == whole.dtype == value.dtype, name
    assert sum(math.prod(sizes) for _, sizes, _ in boxes) == whole.numel(), "each element once"
    assert value.sharding_spec().shards == metadata.shards_metadata


@pytest.mark.parametrize(
    ("world_size", "config"),
    [(3, ("SHARD_GRAD_OP", True, "blocks")), (4, ("FULL_SHARD", False, "always"))],
)
@on_ranks("world_size")
def test_sharded_values_copy_or_view_the_shard_and_send_nothing(
    world_size: int, config: Config
) -> None:
    plain, model = make_model(block=Block), shard(make_model(block=Block), config)
    expected, before = plain.state_dict(), num_sent(model)
    storages, managed = storages_of(model), dict(plain.named_parameters(remove_duplicate=False))
    for as_views in (False, True):
        state = sharded_state(model, as_views=as_views)
        assert before == num_sent(model), "nothing is sent"
        assert list(state) == list(expected)
        without_part = 0
        boxes: dict[str, list[Any]] = {}
        for name, value in state.items():
            if name not in managed or not managed[name].numel() or "ignored" in name:
                assert not isinstance(value, ShardedTensor), name
                continue
            assert "_metadata" not in vars(value)
            assert value.local_shards(), "dcp forgets values without a local shard"
            own = boxes[name] = []
            for each in value.local_shards():
                offsets, sizes = tuple(each.metadata.shard_offsets), tuple(each.tensor.shape)
                assert tuple(each.metadata.shard_sizes) == sizes
                if not math.prod(sizes):
                    without_part += 1
                    continue
                place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                assert torch.equal(each.tensor, expected[name][place]), name
                own.append((offsets, sizes, str(each.metadata.placement)))
                assert (each.tensor.untyped_storage().data_ptr() in storages) is as_views, name
        assert without_part, "some parameters are smaller than the world"
        everyones = by_rank(boxes)
        for name in boxes:
            of_all = [box for its in everyones for box in its[name]]
            _check_metadata(name, state[name], of_all, expected[name])
    with pytest.raises(ValueError, match="can only be copied as a whole"):
        state["embed.weight"].new_empty((3, 4))
    with pytest.raises(ValueError, match="this rank holds no box of w at offsets"):
        state["embed.weight"].__get_tensor_shard__(MetadataIndex("w", torch.Size((99, 0))))


@on_ranks(1)
def test_on_one_rank_values_are_plain_tensors() -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = shard(make_model(), (strategy, True, "blocks"))
        for as_views in (False, True):
            state = sharded_state(model, as_views=as_views)
            assert_identical(state, make_model().state_dict())
            assert (state["cube"].untyped_storage().data_ptr() in storages_of(model)) is as_views


@on_ranks(3)
def test_dcp_fills_views_in_place_and_copies_beside(tmp_path: Path) -> None:
    config: Config = ("FULL_SHARD", True, "always")
    dcp.save(sharded_state(shard(make_model(1), config)), checkpoint_id=tmp_path)
    for as_views in (False, True):
        model = shard(make_model(99), config)
        before = make_model(1 if as_views else 99)
        state = sharded_state(model, as_views=as_views)
        names = list(state)
        dcp.load(state, checkpoint_id=tmp_path)
        assert list(state) == names
        managed = {n for n, v in state.items() if isinstance(v, ShardedTensor)}
        found, wanted = model.state_dict(), before.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in managed)
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert_holds(model, make_model(1))


# --- files of safetensors -------------------------------------------------------------------------


def _save_files(path: str, config: Config) -> None:
    state, writer = sharded_state(shard(make_model(1, odd=False), config)), HuggingFaceStorageWriter
    if config[0] != "MESH":
        with pytest.raises(dcp.api.CheckpointException, match="save_distributed=True"):
            dcp.save(state, storage_writer=writer(path))
        assert not list(Path(path).rglob("*.safetensors")), "nothing was written"
    dist.barrier()
    dcp.save(state, storage_writer=writer(path, save_distributed=True))


def _load_files(path: str, config: Config) -> None:
    model = shard(make_model(99, odd=False), config)
    state = sharded_state(model)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    model.load_state_dict(state)
    assert_holds(model, make_model(1, odd=False))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "MESH"])
def test_hugging_face_files_of_all_ranks_load_on_every_world_size(
    strategy: str, tmp_path: Path
) -> None:
    run_ranks(2, _save_files, str(tmp_path), (strategy, False, "blocks"))
    run_ranks(3, _load_files, str(tmp_path), ("SHARD_GRAD_OP", True, "none"))
    whole = make_model(99, odd=False).state_dict()
    dcp.load(whole, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert_identical(whole, make_model(1, odd=False).state_dict())


# --- with a device mesh ---------------------------------------------------------------------------


def torchs_states(use_orig_params: bool, hybrid: bool) -> dict[str, Any]:
    world = dist.get_world_size()
    model = TorchFSDP(
        make_model(odd=False),
        device_mesh=init_device_mesh("cpu", (2, world // 2) if hybrid else (world,)),
        sharding_strategy=TorchStrategy.HYBRID_SHARD if hybrid else None,
        auto_wrap_policy=TorchWrapPolicy({Block, Frozen}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    optimizer = make_optimizer("SGD", model)
    train(model, optimizer, range(1))
    config = TorchOptimConfig(offload_to_cpu=False)
    with TorchFSDP.state_dict_type(model, TorchType.SHARDED_STATE_DICT, None, config):
        return {"model": model.state_dict(), **TorchFSDP.optim_state_dict(model, optimizer)}


def assert_as_torchs(found: Any, expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = found[name]
        assert type(got) is type(value), name
        if isinstance(value, dict):
            assert_as_torchs(got, value)
        elif isinstance(value, Tensor):
            if isinstance(value, DTensor):
                for attribute in ("placements", "device_mesh", "shape"):
                    assert getattr(got, attribute) == getattr(value, attribute), name
                assert got.stride() == value.stride(), name
                assert local(got).untyped_storage().nbytes() == local(got).nbytes, name
            torch.testing.assert_close(local(got), local(value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world_size", "hybrid"), [(1, False), (3, False), (4, True)])
@on_ranks("world_size")
def test_values_placements_and_chunks_are_those_of_torchs_fsdp1(
    world_size: int, hybrid: bool
) -> None:
    for use_orig_params in (False, True):
        expected = torchs_states(use_orig_params, hybrid)
        config = ("HYBRID_SHARD" if hybrid else "MESH", use_orig_params, "as torch")
        model = shard(make_model(odd=False), config)
        optimizer = make_optimizer("SGD", model)
        train(model, optimizer, range(1))
        for offload_to_cpu in (False, True):
            found = sharded_state(model, offload_to_cpu=offload_to_cpu)
            assert list(found) == list(make_model(odd=False).state_dict())
            assert_as_torchs(found, expected["model"])
        with FSDP.state_dict_type(model, SHARDED):
            optim = FSDP.optim_state_dict(model, optimizer)
        assert optim["param_groups"] == expected["param_groups"]
        if world_size > 1:  # torch's states of one rank are plain tensors
            assert_as_torchs(optim["state"], expected["state"])
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for again in copies if world_size > 1 else ():
            value, wanted = (sharded_state(its)["embed.weight"] for its in (again, model))
            assert torch.equal(value.device_mesh.mesh, wanted.device_mesh.mesh)
            assert value.placements == wanted.placements
            assert torch.equal(value.full_tensor(), wanted.full_tensor())


@on_ranks(2)
def test_models_with_a_mesh_save_dtensors_and_say_so_in_the_configuration() -> None:
    model = shard(make_model(), ("MESH", False, "blocks"))
    with FSDP.state_dict_type(model, SHARDED):
        chosen = FSDP.get_state_dict_type(model)
        assert chosen.state_dict_config._use_dtensor
        assert chosen.optim_state_dict_config._use_dtensor
    wanted = ShardedStateDictConfig(_use_dtensor=True)
    with FSDP.state_dict_type(model, SHARDED, wanted):
        assert isinstance(model.state_dict()["embed.weight"], DTensor)
    without = FSDP(nn.Linear(3, 3))
    with pytest.raises(UsageError, match="need a device mesh"):
        FSDP.set_state_dict_type(without, SHARDED, wanted)
    with FSDP.state_dict_type(without, SHARDED):
        assert not FSDP.get_state_dict_type(without).state_dict_config._use_dtensor
    mesh = init_device_mesh("cpu", (2,))
    other = FSDP(nn.ParameterList([torch.zeros(1, 5)]), device_mesh=mesh)
    with pytest.raises(CheckpointError, match="size mismatch for one"):
        model.load_state_dict({**sharded_state(model), "one": sharded_state(other)["0"]})
    assert_holds(model, make_model())


@on_ranks(2)
def test_one_unit_at_a_time_is_whole_in_memory() -> None:
    plain = stack(4)
    unit_nbytes, mesh = plain[0].weight.nbytes, init_device_mesh("cpu", (2,))
    model = FSDP(copy.deepcopy(plain), device_mesh=mesh, auto_wrap_policy={"Linear"})
    num_sent(model, clear=True)
    with NewBytes() as saving:
        state = sharded_state(model)
    assert num_sent(model) == 4, "one gather per unit"
    kept = 4 * unit_nbytes // dist.get_world_size()
    assert kept + unit_nbytes // 2 <= saving.peak <= kept + unit_nbytes, "one unit at a time"
    with NewBytes() as loading:
        model.load_state_dict(state)
    assert 0 < loading.peak <= 2.5 * unit_nbytes, "one parameter is put together at a time"
    assert_holds(model, plain)


# --- what torch does with ShardedTensors ----------------------------------------------------------


@pytest.mark.parametrize("config", [("FULL_SHARD", True, "blocks"), ("GROUPS", False, "none")])
@on_ranks(4)
def test_torchs_gathers_of_a_sharded_tensor_read_all_of_its_shards(config: Config) -> None:
    """They read the first shard of each rank, or take the numbers of ranks for those in a group."""
    model = shard(make_model(odd=False), config)
    optimizer = make_optimizer("Adam", model)
    train(model, optimizer, range(1))
    whole, sharded = (
        {"model": model.state_dict(), **FSDP.optim_state_dict(model, optimizer)["state"]}
        for form in (FULL, SHARDED)
        if FSDP.set_state_dict_type(model, form)
    )
    in_parts = {k: v for k, v in sharded["model"].items() if isinstance(v, ShardedTensor)}
    assert max(len(value.local_shards()) for value in in_parts.values()) > 1
    rank_in_group = dist.get_rank() % (2 if config[0] == "GROUPS" else 4)
    for name, value in in_parts.items():
        out = torch.empty_like(whole["model"][name]) if rank_in_group == 1 else None
        value.gather(1, out)
        assert out is None or torch.equal(out, whole["model"][name])
    offloaded = _state_dict_utils._create_cpu_state_dict(sharded)
    _state_dict_utils._copy_state_dict(sharded, offloaded)
    for value, group in ((sharded, None), (sharded, dist.group.WORLD), (offloaded, None)):
        gathered = _state_dict_utils._gather_state_dict(value, pg=group)
        assert_identical(gathered, whole)
