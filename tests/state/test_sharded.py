"""SHARDED_STATE_DICT through torch.distributed.checkpoint: any world size, policy and strategy on
either side."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import _state_dict_utils
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compat import CheckpointError, ShardedStateDictConfig, StateDictType, UsageError
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support import odd_model
from tests.support.memory import NewBytes
from tests.support.odd_model import (
    Block,
    Config,
    Frozen,
    OddModel,
    assert_holds,
    assert_identical,
    local_tensors,
    sharded_state,
    stack,
    wrap_as,
)
from tests.support.optimizer_state import by_rank, num_sent
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import at_most, sample

Shapes = Sequence[tuple[int, ...]]


class Model(OddModel):
    """Parameters smaller than the world; with ``odd`` also 0-d and empty ones."""

    def __init__(self, odd: bool) -> None:
        super().__init__(scalar=odd)
        if odd:
            self.nothing = nn.Parameter(torch.randn(0, 3))


class Bag(nn.Module):
    """Parameters of any shapes, two in each child."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        pairs = [shapes[i : i + 2] for i in range(0, len(shapes), 2)]
        self.parts = nn.ModuleList(
            nn.ParameterList(torch.randn(shape) for shape in pair) for pair in pairs
        )


def make_model(seed: int = 0, odd: bool = True) -> Model:
    torch.manual_seed(seed)
    return Model(odd)


def shard(model: nn.Module, config: Config) -> FSDP:
    """config: "MESH" and "HYBRID MESH" make DTensors, HYBRID_SHARD does not."""
    strategy, *others = config
    if "MESH" in strategy:
        return odd_model.shard(model, (strategy.replace("HYBRID MESH", "HYBRID_SHARD"), *others))
    groups = None
    if strategy == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        groups = mesh.get_group(1), mesh.get_group(0)
    return wrap_as(config, model, {Block, nn.ParameterList}, process_group=groups)


def save(path: str, config: Config, seed: int, files: bool = False) -> None:
    """files: of safetensors."""
    writer = HuggingFaceStorageWriter(path, save_distributed=True) if files else None
    state = sharded_state(shard(make_model(seed), config))
    dcp.save(state, checkpoint_id=path, storage_writer=writer)


def load(path: str, config: Config, seed: int, files: bool = False) -> None:
    model, as_views = shard(make_model(99), config), seed % 2 == 0
    state = sharded_state(model, as_views=as_views)
    names, before = list(state), [value.clone() for value in _own(state)]
    reader = HuggingFaceStorageReader(path) if files else None
    dcp.load(state, checkpoint_id=path, storage_reader=reader)
    assert list(state) == names
    after = [value.clone() for value in _own(sharded_state(model))]
    expected = _own(state) if as_views else before  # as views, into the shards themselves
    assert all(map(torch.equal, after, expected))
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert_holds(model, make_model(seed))


def _own(state: dict[str, Any]) -> list[Tensor]:
    """What this rank holds of the parameters."""
    names = dict(make_model().named_parameters(remove_duplicate=False))
    return local_tensors([state[name] for name in names])


# --- values ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        (3, ("FULL_SHARD", False, "none")),
        (3, ("SHARD_GRAD_OP", True, "blocks")),
        (4, ("FULL_SHARD", False, "always")),
    ],
)
@on_ranks("world_size")
def test_sharded_values_copy_or_view_the_shard_and_send_nothing(
    world_size: int, config: Config, as_views: bool
) -> None:
    plain, model = make_model(), shard(make_model(), config)
    expected = plain.state_dict()
    before = num_sent(model)
    state = sharded_state(model, as_views=as_views)
    assert before == num_sent(model), "nothing is sent"
    assert list(state) == list(expected)
    storages = storages_of(model)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    assert not any("_metadata" in vars(v) for v in state.values()), "it is made when asked for"
    without_part = 0
    boxes: dict[str, list[Any]] = {}
    for name, value in state.items():
        if name not in parameters or not parameters[name].numel():
            assert type(value) is Tensor and torch.equal(value, expected[name]), name
            continue
        assert isinstance(value, ShardedTensor), name
        assert value.local_shards(), "dcp forgets values without a local shard"
        own = boxes[name] = []
        for local in value.local_shards():
            offsets, sizes = tuple(local.metadata.shard_offsets), tuple(local.metadata.shard_sizes)
            assert tuple(local.tensor.shape) == sizes
            if not math.prod(sizes):
                without_part += 1
                continue
            place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            assert torch.equal(local.tensor, expected[name][place]), name
            own.append((offsets, sizes, str(local.metadata.placement)))
            assert (local.tensor.untyped_storage().data_ptr() in storages) is as_views, name
    assert without_part, "some parameters are smaller than the world"
    everyones = by_rank(boxes)
    for name in boxes:
        of_all = [box for its in everyones for box in its[name]]
        _check_metadata(name, state[name], of_all, expected[name])


def storages_of(model: FSDP) -> set[int]:
    return {group.store.shard.untyped_storage().data_ptr() for group in model._runtime.groups}


@pytest.mark.parametrize(
    ("world_size", "config"),
    [(1, ("FULL_SHARD", True, "blocks")), (2, ("NO_SHARD", False, "blocks"))],
)
@on_ranks("world_size")
def test_on_one_rank_values_are_plain_tensors(world_size: int, config: Config) -> None:
    model = shard(make_model(), config)
    for as_views in (False, True):
        state = sharded_state(model, as_views=as_views)
        assert_identical(state, make_model().state_dict())
        assert (state["cube"].untyped_storage().data_ptr() in storages_of(model)) is as_views


# --- files ----------------------------------------------------------------------------------------

SPREAD: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("SHARD_GRAD_OP", True, "none"),
    ("NO_SHARD", False, "always"),
    ("FULL_SHARD", True, "always"),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """A checkpoint per world size, each of another configuration; the seed is the world size."""
    found = {}
    for world_size, config in zip((1, 2, 3, 4), SPREAD, strict=True):
        found[world_size] = str(tmp_path_factory.mktemp("dcp") / str(world_size))
        run_ranks(world_size, save, found[world_size], config, world_size)
    return found


@pytest.mark.parametrize(
    ("writers", "readers"),
    sample([(1, 3), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (4, 1)], 0, 2, 5, 6),
)
def test_a_checkpoint_loads_bit_equal_on_every_world_size(
    checkpoints: dict[int, str], writers: int, readers: int
) -> None:
    run_ranks(readers, load, checkpoints[writers], SPREAD[(readers + writers) % 4], writers)


def test_hybrid_meshes_save_and_load(checkpoints: dict[int, str], tmp_path: Path) -> None:
    hybrid = ("HYBRID_SHARD", True, "blocks")
    run_ranks(4, load, checkpoints[3], hybrid, 3)
    run_ranks(4, save, str(tmp_path), hybrid, 5)
    run_ranks(2, load, str(tmp_path), SPREAD[1], 5)
    run_ranks(2, load, str(tmp_path), hybrid, 5)


def test_one_process_without_a_group_reads_a_checkpoint_into_plain_tensors(
    checkpoints: dict[int, str],
) -> None:
    for writers, path in checkpoints.items():
        state = make_model(99).state_dict()
        dcp.load(state, checkpoint_id=path, no_dist=True)
        assert_identical(state, make_model(writers).state_dict())


def _save_bag(path: str, config: Config, shapes: Shapes) -> None:
    dcp.save({"model": sharded_state(shard(Bag(shapes, 1), config))}, checkpoint_id=path)


def _load_bag(path: str, config: Config, shapes: Shapes) -> None:
    model = shard(Bag(shapes, 2), config)
    state = {"model": sharded_state(model)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    assert_holds(model, Bag(shapes, 1))


# The Bag's forward is never called, so it need not follow the rules for units.
configs = st.tuples(
    st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
    st.booleans(),
    st.sampled_from(["none", "blocks"]),
)
shapes = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=5)


NUM_EXAMPLES, SLOW = at_most(8, of_all=20), [HealthCheck.too_slow]


@settings(max_examples=NUM_EXAMPLES, suppress_health_check=SLOW, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), configs, configs, shapes)
def test_any_shapes_load_between_any_two_configurations(
    writers: int, readers: int, saved: Config, loaded: Config, shapes: Shapes
) -> None:
    with tempfile.TemporaryDirectory() as path:
        run_ranks(writers, _save_bag, path, saved, shapes)
        run_ranks(readers, _load_bag, path, loaded, shapes)


# --- files of safetensors -------------------------------------------------------------------------


@pytest.mark.parametrize(("writers", "readers"), sample([(1, 2), (3, 4), (4, 2)], 1))
def test_hugging_face_files_of_all_ranks_load_on_every_world_size(
    writers: int, readers: int, tmp_path: Path
) -> None:
    for seed, (saved, loaded) in enumerate(
        [(SPREAD[0], SPREAD[1]), (("MESH", True, "blocks"), SPREAD[0])]
    ):
        path = str(tmp_path / str(seed))
        run_ranks(writers, save, path, saved, seed, files=True)
        run_ranks(readers, load, path, loaded, seed, files=True)
        whole = make_model(99).state_dict()
        dcp.load(whole, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
        assert_identical(whole, make_model(seed).state_dict())


@on_ranks(2)
def test_writing_one_file_refuses_sharded_values(tmp_path: Path) -> None:
    model = shard(make_model(), SPREAD[0])
    with pytest.raises(dcp.api.CheckpointException, match="save_distributed=True"):
        dcp.save(sharded_state(model), storage_writer=HuggingFaceStorageWriter(tmp_path))
    dist.barrier()
    assert not list(tmp_path.rglob("*.safetensors")), "nothing was written"


# --- with a device mesh ---------------------------------------------------------------------------

SHARDED = StateDictType.SHARDED_STATE_DICT


def mesh_of(hybrid: bool) -> Any:
    world = dist.get_world_size()
    return init_device_mesh("cpu", (2, world // 2) if hybrid else (world,))


def ours(model: nn.Module, use_orig_params: bool = False, hybrid: bool = False) -> FSDP:
    return shard(model, ("HYBRID MESH" if hybrid else "MESH", use_orig_params, "blocks"))


def torchs_state(hybrid: bool) -> dict[str, Any]:
    model = TorchFSDP(
        make_model(odd=False),
        device_mesh=mesh_of(hybrid),
        sharding_strategy=TorchStrategy.HYBRID_SHARD if hybrid else None,
        auto_wrap_policy=TorchWrapPolicy({Block, Frozen}),
        device_id=torch.device("cpu"),
    )
    with TorchFSDP.state_dict_type(model, TorchType.SHARDED_STATE_DICT):
        return model.state_dict()


@pytest.mark.parametrize(("world_size", "hybrid"), [(1, False), (2, False), (3, False), (4, True)])
@on_ranks("world_size")
def test_values_placements_and_chunks_are_those_of_torchs_fsdp1(
    world_size: int, hybrid: bool
) -> None:
    expected = torchs_state(hybrid)
    for use_orig_params in (False, True):
        model = ours(make_model(odd=False), use_orig_params, hybrid)
        for offload_to_cpu in (False, True):
            found = sharded_state(model, offload_to_cpu=offload_to_cpu)
            assert list(found) == list(make_model(odd=False).state_dict())
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                got = found[name]
                assert type(got) is type(value), name
                if isinstance(value, DTensor):
                    for attribute in ("placements", "device_mesh", "shape"):
                        assert getattr(got, attribute) == getattr(value, attribute), name
                    assert got.stride() == value.stride(), name
                    got, value = got.to_local(), value.to_local()
                    assert got.untyped_storage().nbytes() == got.nbytes, name
                assert torch.equal(got, value), name


@pytest.mark.parametrize(("world_size", "hybrid"), [(2, False), (4, True)])
@on_ranks("world_size")
def test_copies_of_a_model_keep_its_mesh(world_size: int, hybrid: bool) -> None:
    model = ours(make_model(), hybrid=hybrid)
    expected = sharded_state(model)["embed.weight"]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        value = sharded_state(again)["embed.weight"]
        assert torch.equal(value.device_mesh.mesh, expected.device_mesh.mesh)
        assert value.placements == expected.placements
        assert torch.equal(value.full_tensor(), make_model().embed.weight)


@on_ranks(2)
def test_models_with_a_mesh_save_dtensors_and_say_so_in_the_configuration() -> None:
    model = ours(make_model())
    with FSDP.state_dict_type(model, SHARDED):
        settings = FSDP.get_state_dict_type(model)
        assert settings.state_dict_config._use_dtensor
        assert settings.optim_state_dict_config._use_dtensor
    given = ShardedStateDictConfig(_use_dtensor=True)
    with FSDP.state_dict_type(model, SHARDED, given):
        assert isinstance(model.state_dict()["embed.weight"], DTensor)
    without = FSDP(nn.Linear(3, 3))
    with pytest.raises(UsageError, match="need a device mesh"):
        FSDP.set_state_dict_type(without, SHARDED, given)
    with FSDP.state_dict_type(without, SHARDED):
        assert not FSDP.get_state_dict_type(without).state_dict_config._use_dtensor
    other = FSDP(nn.ParameterList([torch.zeros(1, 5)]), device_mesh=mesh_of(False))
    with pytest.raises(CheckpointError, match="size mismatch for one"):
        model.load_state_dict({**sharded_state(model), "one": sharded_state(other)["0"]})
    assert_holds(model, make_model())


@on_ranks(2)
def test_one_unit_at_a_time_is_whole_in_memory() -> None:
    torch.manual_seed(0)
    plain = stack(4)
    unit_nbytes, units = plain[0].weight.nbytes, ModuleWrapPolicy({nn.Linear})
    model = FSDP(copy.deepcopy(plain), device_mesh=mesh_of(False), auto_wrap_policy=units)
    kept = 4 * unit_nbytes // dist.get_world_size()
    with NewBytes() as saving:
        state = sharded_state(model)
    assert kept + unit_nbytes // 2 <= saving.peak <= kept + unit_nbytes, "one unit at a time"
    with NewBytes() as loading:
        model.load_state_dict(state)
    assert 0 < loading.peak <= 2.5 * unit_nbytes, "one parameter is put together at a time"
    assert_holds(model, plain)
    traffic = model._runtime.groups[0].shard.traffic
    traffic.clear()
    sharded_state(model)
    assert sum(traffic.counts.values()) == 4, "one gather per unit"


# --- in memory ------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_sharded_dict_of_another_layout_loads_in_memory() -> None:
    for source, target in itertools.permutations((SPREAD[0], SPREAD[1], SPREAD[2]), 2):
        model = shard(make_model(1), target)
        model.load_state_dict(sharded_state(shard(make_model(2), source)))
        assert_holds(model, make_model(2))


@on_ranks(2)
def test_a_sharded_value_refuses_unsupported_operations() -> None:
    value = sharded_state(FSDP(nn.Linear(4, 6)))["weight"]
    assert value.new_empty((6, 4)).shape == (6, 4)
    with pytest.raises(
        ValueError, match=r"of shape \(6, 4\) can only be copied as a whole, not as \(3, 4\)"
    ):
        value.new_empty((3, 4))
    with pytest.raises(ValueError, match="this rank holds no box of weight at offsets"):
        value.__get_tensor_shard__(MetadataIndex("weight", torch.Size((99, 0))))


@pytest.mark.parametrize(
    "config", [("FULL_SHARD", True, "blocks"), ("HYBRID_SHARD", False, "none")]
)
@on_ranks(4)
def test_torchs_gathers_of_a_sharded_tensor_read_all_of_its_shards(config: Config) -> None:
    """They read the first shard of each rank, or take the numbers of ranks for those in a group."""
    model = shard(odd_model.make_model(), config)
    optimizer = odd_model.make_optimizer("Adam", model)
    odd_model.train(model, optimizer, range(1))
    whole, sharded = (
        {"model": model.state_dict(), **FSDP.optim_state_dict(model, optimizer)["state"]}
        for each in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT)
        if FSDP.set_state_dict_type(model, each)
    )
    assert (
        max(
            len(value.local_shards())
            for value in sharded["model"].values()
            if isinstance(value, ShardedTensor)
        )
        > 1
    )
    rank_in_group = dist.get_rank() % (2 if config[0] == "HYBRID_SHARD" else 4)
    for name, value in sharded["model"].items():
        if isinstance(value, ShardedTensor):
            out = torch.empty_like(whole["model"][name]) if rank_in_group == 1 else None
            value.gather(1, out)
            assert out is None or torch.equal(out, whole["model"][name])
    offloaded = _state_dict_utils._create_cpu_state_dict(sharded)
    _state_dict_utils._copy_state_dict(sharded, offloaded)
    for value, group in ((sharded, None), (sharded, dist.group.WORLD), (offloaded, None)):
        gathered = _state_dict_utils._gather_state_dict(value, pg=group)
        assert_identical(gathered, whole)
