"""SHARDED_STATE_DICT of models that were given a device mesh: DTensors, cut as torch's FSDP1 cuts
them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compat import (
    CheckpointError,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    UsageError,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import NewBytes
from tests.support.odd_model import Block, Frozen, OddModel, assert_holds, sharded_state, stack
from tests.support.ranks import on_ranks

SHARDED = StateDictType.SHARDED_STATE_DICT


class Model(OddModel):
    """With an ignored layer, and with ``odd`` 0-d and empty parameters, which torch refuses."""

    def __init__(self, odd: bool) -> None:
        super().__init__(scalar=odd)
        self.left = nn.Linear(2, 2)
        if odd:
            self.nothing = nn.Parameter(torch.randn(0, 3))


def make_model(seed: int = 0, odd: bool = True) -> Model:
    torch.manual_seed(seed)
    return Model(odd)


def mesh_of(hybrid: bool) -> Any:
    world = dist.get_world_size()
    return init_device_mesh("cpu", (2, world // 2) if hybrid else (world,))


def ours(
    model: nn.Module, use_orig_params: bool = False, hybrid: bool = False, **options: Any
) -> FSDP:
    return FSDP(
        model,
        device_mesh=mesh_of(hybrid),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else None,
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        ignored_modules=[model.left],
        **options,
    )


def theirs(model: nn.Module, hybrid: bool = False) -> TorchFSDP:
    return TorchFSDP(
        model,
        device_mesh=mesh_of(hybrid),
        sharding_strategy=TorchStrategy.HYBRID_SHARD if hybrid else None,
        auto_wrap_policy=TorchWrapPolicy({Block, Frozen}),
        ignored_modules=[model.left],
        device_id=torch.device("cpu"),
    )


def torchs_state(model: nn.Module) -> dict[str, Any]:
    with TorchFSDP.state_dict_type(model, TorchType.SHARDED_STATE_DICT):
        return model.state_dict()


@pytest.mark.parametrize(("world_size", "hybrid"), [(1, False), (2, False), (3, False), (4, True)])
@on_ranks("world_size")
def test_values_placements_and_chunks_are_those_of_torchs_fsdp1(
    world_size: int, hybrid: bool
) -> None:
    expected = torchs_state(theirs(make_model(odd=False), hybrid))
    for use_orig_params in (False, True):
        model = ours(make_model(odd=False), use_orig_params, hybrid)
        for offload_to_cpu in (False, True):
            found = sharded_state(model, offload_to_cpu=offload_to_cpu)
            assert list(found) == list(make_model(odd=False).state_dict())
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert type(found[name]) is type(value), name
                if isinstance(value, DTensor):
                    assert found[name].placements == value.placements, name
                    assert found[name].device_mesh == value.device_mesh, name
                    assert (found[name].shape, found[name].stride()) == (
                        value.shape,
                        value.stride(),
                    ), name
                    own = found[name].to_local()
                    assert torch.equal(own, value.to_local()), name
                    assert own.untyped_storage().nbytes() == own.nbytes, name
                else:
                    assert torch.equal(found[name], value), name


@on_ranks(4)
def test_a_mesh_of_two_dimensions_is_pickled() -> None:
    model = ours(make_model(), hybrid=True)
    expected, value = (
        sharded_state(each)["embed.weight"] for each in (model, pickle.loads(pickle.dumps(model)))
    )
    assert (value.device_mesh.mesh.tolist(), value.placements) == (
        [[0, 1], [2, 3]],
        expected.placements,
    )
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
    expected = sharded_state(model)["embed.weight"]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        value = sharded_state(again)["embed.weight"]
        assert value.device_mesh == expected.device_mesh
        assert torch.equal(value.to_local(), expected.to_local())

    model = ours(make_model())
    value = sharded_state(model)
    value["one"] = sharded_state(
        FSDP(nn.ParameterList([torch.zeros(1, 5)]), device_mesh=mesh_of(False))
    )["0"]
    with pytest.raises(CheckpointError, match="size mismatch for one"):
        model.load_state_dict(value)
    assert_holds(model, make_model())


@on_ranks(2)
def test_one_unit_at_a_time_is_whole_in_memory() -> None:
    torch.manual_seed(0)
    plain = stack(4)
    unit_nbytes = plain[0].weight.nbytes
    model = FSDP(
        copy.deepcopy(plain),
        device_mesh=mesh_of(False),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    kept = 4 * unit_nbytes // dist.get_world_size()
    with NewBytes() as saving:
        state = sharded_state(model)
    assert kept + unit_nbytes // 2 <= saving.peak <= kept + unit_nbytes, (
        "one unit is gathered at a time"
    )
    with NewBytes() as loading:
        model.load_state_dict(state)
    assert 0 < loading.peak <= 2.5 * unit_nbytes, "one parameter is put together at a time"
    assert_holds(model, plain)
    traffic = model._runtime.groups[0].shard.traffic
    traffic.clear()
    sharded_state(model)
    assert sum(traffic.counts.values()) == 4, "one gather per unit"
