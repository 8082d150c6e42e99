"""SHARDED_STATE_DICT through torch.distributed.checkpoint: any world size, policy and strategy on
either side."""

from __future__ import annotations

import copy
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
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardedStateDictConfig, ShardingStrategy, StateDictType
from fsdp_compat.wrap import ModuleWrapPolicy, always_wrap_policy
from tests.support.ranks import run_ranks
from tests.support.sampling import at_most, sample

Config = tuple[str, bool, str]  # strategy, use_orig_params, policy
Shapes = Sequence[tuple[int, ...]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 2, bias=False)
        self.norm = nn.BatchNorm1d(width + 2)
        self.back = nn.Linear(width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.norm(self.linear(x)))


class Model(nn.Module):
    """Ties, odd sizes, parameters smaller than the world, and with ``odd`` 0-d and empty ones,
    which torch refuses."""

    def __init__(self, odd: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(Block(5), Block(5))
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.one = nn.Parameter(torch.randn(1))
        self.gain = nn.Parameter(torch.randn(()) if odd else torch.randn(2))
        self.nothing = nn.Parameter(torch.randn(0, 3) if odd else torch.randn(2, 3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.randint(99, (2,)))

    def forward(self, tokens: Tensor) -> Tensor:
        return (
            self.head(self.blocks(self.embed(tokens)) * self.gain.sum())
            + self.cube.sum()
            + self.one
            + self.nothing.sum()
        )


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


def sharded_state(model: nn.Module, as_views: bool = False) -> dict[str, Any]:
    config = ShardedStateDictConfig(as_views=True) if as_views else None  # None: the default
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        return model.state_dict()


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def assert_holds(model: FSDP, plain: nn.Module) -> None:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        assert_equal(model.state_dict(), plain.state_dict())


def save(path: str, config: Config, seed: int) -> None:
    dcp.save(sharded_state(shard(make_model(seed), config)), checkpoint_id=path)


def load(path: str, config: Config, seed: int) -> None:
    model, as_views = shard(make_model(99), config), seed % 2 == 0
    state = sharded_state(model, as_views)
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


def _check_values(config: Config, as_views: bool) -> None:
    plain, model = make_model(), shard(make_model(), config)
    expected = plain.state_dict()
    groups = model._runtime.groups
    before = [
        (dict(comm.traffic.counts)) for group in groups for comm in (group.shard, group.replica)
    ]
    state = sharded_state(model, as_views)
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


@pytest.mark.parametrize("world_size", [3, 4])
def test_sharded_values_copy_or_view_the_shard_and_send_nothing(world_size: int) -> None:
    for config in (
        ("FULL_SHARD", False, "none"),
        ("SHARD_GRAD_OP", True, "blocks"),
        ("FULL_SHARD", False, "always"),
    ):
        for as_views in (False, True):
            run_ranks(world_size, _check_values, config, as_views)


def _whole_values(config: Config) -> None:
    model = shard(make_model(), config)
    storages = {group.store.shard.untyped_storage().data_ptr() for group in model._runtime.groups}
    for as_views in (False, True):
        state = sharded_state(model, as_views)
        assert_equal(state, make_model().state_dict())
        assert (state["cube"].untyped_storage().data_ptr() in storages) is as_views


def test_on_one_rank_values_are_plain_tensors() -> None:
    run_ranks(1, _whole_values, ("FULL_SHARD", True, "blocks"))
    run_ranks(2, _whole_values, ("NO_SHARD", False, "blocks"))


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
        assert_equal(state, make_model(writers).state_dict())


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


def _train(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([1, 2, 5, 3])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained(config: Config, seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    """A model after two steps, the same for every way of sharding it, up to rounding."""
    model = shard(make_model(seed), config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        _train(model, optimizer)
    return model, optimizer


def _both(model: FSDP, optimizer: torch.optim.Optimizer, form: StateDictType) -> dict[str, Any]:
    with FSDP.state_dict_type(model, form):
        return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({"model": state["model"], "state": state["optim"]["state"]})


def _save_both(path: str, config: Config) -> dict[str, Any]:
    """Save at once, and in the background while training goes on; return what was there, whole."""
    model, optimizer = _trained(config, 1)
    expected = _copied(_both(model, optimizer, StateDictType.FULL_STATE_DICT))
    dcp.save(_both(model, optimizer, StateDictType.SHARDED_STATE_DICT), checkpoint_id=f"{path}/now")
    future = dcp.async_save(
        _both(model, optimizer, StateDictType.SHARDED_STATE_DICT), checkpoint_id=f"{path}/later"
    )
    for _ in range(2):
        _train(model, optimizer)
    future.result()
    after = _both(model, optimizer, StateDictType.FULL_STATE_DICT)
    assert not torch.equal(after["model"]["cube"], expected["model"]["cube"]), (
        "training has gone on"
    )
    return expected


def _load_both(path: str, config: Config, expected: dict[str, Any]) -> None:
    for folder in ("now", "later"):
        model, optimizer = _trained(config, 2)
        state = _both(model, optimizer, StateDictType.SHARDED_STATE_DICT)
        dcp.load(state, checkpoint_id=f"{path}/{folder}")
        model.load_state_dict(state["model"])
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            optimizer.load_state_dict(
                FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
            )
        found = _both(model, optimizer, StateDictType.FULL_STATE_DICT)
        assert_equal(found["model"], expected["model"])
        assert found["optim"]["state"].keys() == expected["state"].keys()
        for name, entry in expected["state"].items():
            for key, value in entry.items():
                assert torch.equal(found["optim"]["state"][name][key], value), (folder, name, key)


@pytest.mark.parametrize(("writers", "readers"), sample([(1, 3), (3, 2)], 1))
def test_dcp_saves_model_and_optimizer_also_while_training_continues(
    writers: int, readers: int, tmp_path: Path
) -> None:
    expected = run_ranks(writers, _save_both, str(tmp_path), SPREAD[writers % 2])[0]
    run_ranks(readers, _load_both, str(tmp_path), SPREAD[readers % 2], expected)


# --- in memory ------------------------------------------------------------------------------------


def _from_other_layouts() -> None:
    for source, target in itertools.permutations((SPREAD[0], SPREAD[1], SPREAD[2]), 2):
        model = shard(make_model(1), target)
        model.load_state_dict(sharded_state(shard(make_model(2), source)))
        assert_holds(model, make_model(2))


def test_a_sharded_dict_of_another_layout_loads_in_memory() -> None:
    run_ranks(3, _from_other_layouts)


def _copies(directory: str) -> None:
    model = shard(make_model(1), SPREAD[0])
    state = sharded_state(model)
    path = f"{directory}/{dist.get_rank()}"
    torch.save(state, path)
    for number, copied in enumerate((copy.deepcopy(state), torch.load(path, weights_only=False))):
        other = shard(make_model(2 + number), SPREAD[0])
        other.load_state_dict(copied)
        assert_holds(other, make_model(1))


def test_a_sharded_dict_can_be_copied_and_pickled(tmp_path: Path) -> None:
    run_ranks(3, _copies, str(tmp_path))


# --- torch's FSDP1 and FSDP2 ----------------------------------------------------------------------


def _torch_fsdp1(seed: int, use_orig_params: bool) -> TorchFSDP:
    return TorchFSDP(
        make_model(seed, odd=False),
        auto_wrap_policy=TorchWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def _with_torchs_fsdp1(directory: str, use_orig_params: bool) -> None:
    theirs = _torch_fsdp1(1, use_orig_params)
    ours = shard(make_model(2, odd=False), ("FULL_SHARD", not use_orig_params, "always"))
    with TorchFSDP.state_dict_type(theirs, TorchType.SHARDED_STATE_DICT):
        dcp.save(theirs.state_dict(), checkpoint_id=f"{directory}/theirs")
        state = sharded_state(ours)
        dcp.load(state, checkpoint_id=f"{directory}/theirs")
        ours.load_state_dict(state)
        assert_holds(ours, make_model(1, odd=False))

        in_memory = shard(make_model(2, odd=False), ("SHARD_GRAD_OP", use_orig_params, "none"))
        in_memory.load_state_dict(theirs.state_dict())
        assert_holds(in_memory, make_model(1, odd=False))

        changed = shard(make_model(3, odd=False), ("FULL_SHARD", use_orig_params, "blocks"))
        dcp.save(sharded_state(changed), checkpoint_id=f"{directory}/ours")
        back = theirs.state_dict()
        dcp.load(back, checkpoint_id=f"{directory}/ours")
        theirs.load_state_dict(back)
    with TorchFSDP.summon_full_params(theirs):
        for name, parameter in make_model(3, odd=False).named_parameters():
            assert torch.equal(dict(theirs.named_parameters())[name], parameter), name


@pytest.mark.parametrize("use_orig_params", sample([False, True], 1))
def test_checkpoints_load_between_torchs_fsdp1_and_ours(
    tmp_path: Path, use_orig_params: bool
) -> None:
    run_ranks(2, _with_torchs_fsdp1, str(tmp_path), use_orig_params)


def _torch_fsdp2(seed: int) -> nn.Module:
    model = make_model(seed, odd=False)
    for block in model.blocks:
        torch_fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return torch_fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _with_torchs_fsdp2(directory: str) -> None:
    theirs = _torch_fsdp2(1)
    ours = shard(make_model(2, odd=False), SPREAD[0])
    dcp.save(theirs.state_dict(), checkpoint_id=f"{directory}/theirs")
    state = sharded_state(ours)
    dcp.load(state, checkpoint_id=f"{directory}/theirs")
    ours.load_state_dict(state)
    assert_holds(ours, make_model(1, odd=False))

    in_memory = shard(make_model(2, odd=False), SPREAD[1])
    assert isinstance(theirs.state_dict()["cube"], DTensor)
    in_memory.load_state_dict(theirs.state_dict())
    assert_holds(in_memory, make_model(1, odd=False))

    dcp.save(
        sharded_state(shard(make_model(3, odd=False), SPREAD[1])), checkpoint_id=f"{directory}/ours"
    )
    back = theirs.state_dict()
    dcp.load(back, checkpoint_id=f"{directory}/ours")
    theirs.load_state_dict(back)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(
            parameter.full_tensor(), dict(make_model(3, odd=False).named_parameters())[name]
        ), name


def test_checkpoints_load_between_torchs_fsdp2_and_ours(tmp_path: Path) -> None:
    run_ranks(3, _with_torchs_fsdp2, str(tmp_path))


def _misuses_a_value() -> None:
    value = sharded_state(FSDP(nn.Linear(4, 6)))["weight"]
    assert value.new_empty((6, 4)).shape == (6, 4)
    with pytest.raises(
        ValueError, match=r"of shape \(6, 4\) can only be copied as a whole, not as \(3, 4\)"
    ):
        value.new_empty((3, 4))
    with pytest.raises(ValueError, match="this rank holds no box of weight at offsets"):
        value.__get_tensor_shard__(MetadataIndex("weight", torch.Size((99, 0))))


def test_a_sharded_value_refuses_unsupported_operations() -> None:
    run_ranks(2, _misuses_a_value)
