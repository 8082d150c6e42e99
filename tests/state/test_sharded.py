"""SHARDED_STATE_DICT through torch.distributed.checkpoint: any world size, policy and strategy on
either side."""

from __future__ import annotations

import itertools
import math
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
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from fsdp_compat.wrap import ModuleWrapPolicy, always_wrap_policy
from tests.support.odd_model import (
    Block,
    Config,
    OddModel,
    assert_holds,
    assert_identical,
    sharded_state,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import at_most, sample

Shapes = Sequence[tuple[int, ...]]


class Model(OddModel):
    """Parameters smaller than the world, 0-d and empty."""

    def __init__(self) -> None:
        super().__init__(scalar=True)
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


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def shard(model: nn.Module, config: Config) -> FSDP:
    strategy, use_orig_params, policy = config
    policies: dict[str, Any] = {
        "none": None,
        "blocks": ModuleWrapPolicy({Block, nn.ParameterList}),
        "always": always_wrap_policy,
    }
    groups = None
    if strategy == "HYBRID_SHARD":  # given as a mesh, it would make DTensors
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        groups = mesh.get_group(1), mesh.get_group(0)
    return FSDP(
        model,
        process_group=groups,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        auto_wrap_policy=policies[policy],
    )


def save(path: str, config: Config, seed: int) -> None:
    dcp.save(sharded_state(shard(make_model(seed), config)), checkpoint_id=path)


def load(path: str, config: Config, seed: int) -> None:
    model, as_views = shard(make_model(99), config), seed % 2 == 0
    state = sharded_state(model, as_views=as_views)
    names, before = list(state), [value.clone() for value in _own(state)]
    dcp.load(state, checkpoint_id=path)
    assert list(state) == names
    after = [value.clone() for value in _own(sharded_state(model))]
    expected = _own(state) if as_views else before  # as views, into the shards themselves
    assert all(map(torch.equal, after, expected))
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert_holds(model, make_model(seed))


def _own(state: dict[str, Any]) -> list[Tensor]:
    """What this rank holds of the parameters."""
    values = (
        value
        for name, value in state.items()
        if not name.endswith(("mean", "var", "tracked", "count"))
    )
    return [
        t
        for v in values
        for t in (
            [shard.tensor for shard in v.local_shards()] if isinstance(v, ShardedTensor) else [v]
        )
    ]


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
    times = torch.zeros_like(whole)
    for offsets, sizes, placement in boxes:
        assert placement.startswith("rank:")
        times[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    assert torch.equal(times, torch.ones_like(whole)), "every element is in one box"
    assert value.sharding_spec().shards == metadata.shards_metadata


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        ("FULL_SHARD", False, "none"),
        ("SHARD_GRAD_OP", True, "blocks"),
        ("FULL_SHARD", False, "always"),
    ],
)
@pytest.mark.parametrize("world_size", [3, 4])
@on_ranks("world_size")
def test_sharded_values_copy_or_view_the_shard_and_send_nothing(
    world_size: int, config: Config, as_views: bool
) -> None:
    plain, model = make_model(), shard(make_model(), config)
    expected = plain.state_dict()
    groups = model._runtime.groups
    before = [
        (dict(comm.traffic.counts)) for group in groups for comm in (group.shard, group.replica)
    ]
    state = sharded_state(model, as_views=as_views)
    assert before == [
        (dict(comm.traffic.counts)) for group in groups for comm in (group.shard, group.replica)
    ], "nothing is sent"
    assert list(state) == list(expected)
    storages = {group.store.shard.untyped_storage().data_ptr() for group in groups}
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    assert not any("_metadata" in vars(v) for v in state.values()), (
        "metadata of all ranks is made when somebody asks for it"
    )
    without_part = 0
    boxes: dict[str, list[Any]] = {}
    for name, value in state.items():
        if name not in parameters:
            assert type(value) is Tensor, name
            assert torch.equal(value, expected[name]), name
            continue
        if not parameters[name].numel():
            assert type(value) is Tensor, name
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
            assert torch.equal(local.tensor, expected[name][place]), (
                f"{name}, which has no other owner"
            )
            own.append((offsets, sizes, str(local.metadata.placement)))
            assert (local.tensor.untyped_storage().data_ptr() in storages) is as_views, name
    assert without_part, "some parameters are smaller than the world"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, boxes)
    for name in boxes:
        _check_metadata(
            name, state[name], [box for its in found for box in its[name]], expected[name]
        )


@pytest.mark.parametrize(
    ("world_size", "config"),
    [(1, ("FULL_SHARD", True, "blocks")), (2, ("NO_SHARD", False, "blocks"))],
)
@on_ranks("world_size")
def test_on_one_rank_values_are_plain_tensors(world_size: int, config: Config) -> None:
    model = shard(make_model(), config)
    storages = {group.store.shard.untyped_storage().data_ptr() for group in model._runtime.groups}
    for as_views in (False, True):
        state = sharded_state(model, as_views=as_views)
        assert_identical(state, make_model().state_dict())
        assert (state["cube"].untyped_storage().data_ptr() in storages) is as_views


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


@settings(
    max_examples=at_most(8, of_all=20),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
@given(
    writers=st.integers(1, 4),
    readers=st.integers(1, 4),
    saved=configs,
    loaded=configs,
    shapes=shapes,
)
def test_any_shapes_load_between_any_two_configurations(
    writers: int, readers: int, saved: Config, loaded: Config, shapes: Shapes
) -> None:
    with tempfile.TemporaryDirectory() as path:
        run_ranks(writers, _save_bag, path, saved, shapes)
        run_ranks(readers, _load_bag, path, loaded, shapes)


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
