"""LOCAL_STATE_DICT: every rank's flat shards, for the same wrapping and the same ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy

from fsdp_compat import (
    CheckpointError,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks

LOCAL = StateDictType.LOCAL_STATE_DICT


class Model(nn.Module):
    """Without more, sizes that need no padding: where torch lays out as we do. A buffer and an
    ignored module beside."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4, bias=False)
        self.own = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("count", torch.randint(99, (2,)))
        self.ignored = nn.Linear(2, 2)
        if not plain:
            self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
            self.wide = nn.Parameter(torch.randn(3).double())
            self.tied = nn.Linear(8, 4, bias=False)
            self.tied.weight = self.second.weight


def make_model(seed: int = 0, plain: bool = False) -> Model:
    torch.manual_seed(seed)
    return Model(plain)


LINEARS = ModuleWrapPolicy({nn.Linear})


def shard(model: nn.Module, use_orig_params: bool, policy: Any = LINEARS, **options: Any) -> FSDP:
    return FSDP(
        model,
        use_orig_params=use_orig_params,
        auto_wrap_policy=policy,
        ignored_modules=[model.ignored],
        **options,
    )


def local_state(model: nn.Module, offload_to_cpu: bool = False) -> dict[str, Any]:
    with FSDP.state_dict_type(model, LOCAL, LocalStateDictConfig(offload_to_cpu=offload_to_cpu)):
        return model.state_dict()


def assert_holds(model: nn.Module, plain: nn.Module) -> None:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        found = model.state_dict()
    expected = plain.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _as_torchs() -> None:
    inner = make_model(plain=True)
    theirs = TorchFSDP(
        inner,
        auto_wrap_policy=TorchWrapPolicy({nn.Linear}),
        ignored_modules=[inner.ignored],
        device_id=torch.device("cpu"),
    )
    with TorchFSDP.state_dict_type(theirs, TorchType.LOCAL_STATE_DICT):
        expected = theirs.state_dict()
    for use_orig_params in (False, True):
        model = shard(make_model(plain=True), use_orig_params)
        for offload_to_cpu in (False, True):
            found = local_state(model, offload_to_cpu)
            assert list(found) == list(expected)
            for name, value in expected.items():
                if not isinstance(value, ShardedTensor):
                    assert torch.equal(found[name], value), name
                    continue
                assert isinstance(found[name], ShardedTensor), name
                assert found[name].metadata().size == value.metadata().size
                assert [
                    (m.shard_offsets, m.shard_sizes, str(m.placement))
                    for m in found[name].metadata().shards_metadata
                ] == [
                    (m.shard_offsets, m.shard_sizes, str(m.placement))
                    for m in value.metadata().shards_metadata
                ]
                for own, other in zip(
                    found[name].local_shards(), value.local_shards(), strict=True
                ):
                    assert torch.equal(own.tensor, other.tensor), name
        other = shard(make_model(1, plain=True), use_orig_params)
        assert str(other.load_state_dict(expected)) == "<All keys matched successfully>"
        assert_holds(other, make_model(plain=True))


def test_keys_types_and_shards_are_those_of_torchs_fsdp1_with_flat_parameters() -> None:
    run_ranks(2, _as_torchs)


KEYS = ["_flat_param", "_flat_param_1", "_flat_param_2", "count", "first._flat_param"]


def _round_trips(directory: str) -> None:
    for use_orig_params in (False, True):
        model = shard(make_model(1), use_orig_params)
        traffic = [group.shard.traffic for group in model._runtime.groups]
        before = [dict(each.counts) for each in traffic]
        state = local_state(model)
        assert before == [dict(each.counts) for each in traffic], "nothing is sent"
        # the tied weight belongs to the root; the two modules that hold it are no units
        assert list(state) == [*KEYS, "ignored.weight", "ignored.bias"]
        shards = {group.store.shard.untyped_storage().data_ptr() for group in model._runtime.groups}
        views = [
            each.tensor
            for v in state.values()
            if isinstance(v, ShardedTensor)
            for each in v.local_shards()
        ]
        assert all(
            not view.numel() or view.untyped_storage().data_ptr() in shards for view in views
        )

        path = f"{directory}/{use_orig_params}"
        dcp.save(state, checkpoint_id=path)
        torch.save(state, f"{directory}/{dist.get_rank()}.pt")
        for number, read in enumerate(("dcp", "torch", "memory", "other form")):
            other = shard(
                make_model(2 + number),
                use_orig_params if read != "other form" else not use_orig_params,
            )
            loaded = local_state(other)
            if read == "dcp":
                dcp.load(loaded, checkpoint_id=path)
                other.load_state_dict(loaded)
            elif read == "torch":
                other.load_state_dict(
                    torch.load(f"{directory}/{dist.get_rank()}.pt", weights_only=False)
                )
            else:
                other.load_state_dict(copy.deepcopy(state))
            assert_holds(other, make_model(1))
        dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_local_dicts_are_saved_and_loaded_by_dcp_torch_and_memory(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(world_size, _round_trips, str(tmp_path))


def _one_shard() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)[
        dist.get_world_size() - 1 :
    ]:
        model = shard(make_model(1), False, sharding_strategy=strategy)
        state = local_state(model)
        assert list(state) == list(make_model().state_dict())
        other = shard(make_model(2), True, sharding_strategy=strategy)
        other.load_state_dict(state)
        assert_holds(other, make_model(1))


def test_on_one_rank_local_dicts_have_parameter_names_as_in_torch() -> None:
    run_ranks(1, _one_shard)
    run_ranks(2, _one_shard)


def _other_layouts(directory: str) -> None:
    model = shard(make_model(1), False)
    state = local_state(model)
    narrow = make_model(2)
    narrow.wide = nn.Parameter(torch.randn(2).double())
    others = {
        "no such flat parameter": shard(make_model(2), False, None),
        "1 parameter(s) over 2 rank(s)": shard(narrow, True),
        "over 1 rank(s)": shard(make_model(2), True, sharding_strategy=ShardingStrategy.NO_SHARD),
    }
    for words, other in others.items():
        with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
            before = other.state_dict()
        for strict in (True, False):
            with pytest.raises(CheckpointError, match="SHARDED_STATE_DICT") as caught:
                other.load_state_dict(state, strict=strict)
            assert words in str(caught.value), words
        with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
            after = other.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(CheckpointError, match="expected a ShardedTensor, got list"):
        model.load_state_dict({**state, "_flat_param": [1.0]})
    with pytest.raises(CheckpointError, match="LOCAL_STATE_DICT"):
        model.load_state_dict({**state, "_flat_param": torch.ones(3)})
    torch.save(state, f"{directory}/{dist.get_rank()}.pt")


def _more_ranks(directory: str) -> None:
    model = shard(make_model(2), False)
    with pytest.raises(CheckpointError, match="by as many ranks"):
        model.load_state_dict(
            torch.load(f"{directory}/{dist.get_rank() % 2}.pt", weights_only=False)
        )
    assert_holds(model, make_model(2))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(make_model(3).state_dict())
    assert_holds(model, make_model(3))


def test_another_layout_is_refused_with_advice_before_anything_changes(
    tmp_path: Path,
) -> None:
    run_ranks(2, _other_layouts, str(tmp_path))
    run_ranks(3, _more_ranks, str(tmp_path))


def _form_and_parts() -> None:
    model = shard(make_model(), False, device_mesh=init_device_mesh("cpu", (2,)))
    before = FSDP.set_state_dict_type(model, LOCAL)
    settings = FSDP.get_state_dict_type(model)
    assert settings.state_dict_type is LOCAL
    assert (settings.state_dict_config, settings.optim_state_dict_config) == (
        LocalStateDictConfig(),
        LocalOptimStateDictConfig(),
    )
    assert next(iter(model.state_dict())) == "_flat_param"
    assert list(model.first.state_dict()) == ["_flat_param"], "a nested unit by itself"
    assert list(model.first.state_dict(prefix="a.")) == ["a._flat_param"]
    other = shard(make_model(1), True)
    other.first.load_state_dict(model.first.state_dict())
    FSDP.set_state_dict_type(model, before.state_dict_type)
    assert torch.equal(other.state_dict()["first.weight"], model.state_dict()["first.weight"])
    assert not torch.equal(other.state_dict()["own"], model.state_dict()["own"])

    torch.manual_seed(0)
    around = nn.ModuleDict({"unit": FSDP(nn.Linear(3, 5)), "plain": nn.Linear(2, 2)})
    with FSDP.state_dict_type(around, LOCAL):
        state = around.state_dict()
    assert list(state) == ["unit._flat_param", "plain.weight", "plain.bias"]
    target = nn.ModuleDict({"unit": FSDP(nn.Linear(3, 5)), "plain": nn.Linear(2, 2)})
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(target["unit"].state_dict()["weight"], around["unit"].state_dict()["weight"])


def test_the_form_is_set_and_read_for_submodules_and_containers() -> None:
    run_ranks(2, _form_and_parts)
