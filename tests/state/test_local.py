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
from tests.support.odd_model import (
    assert_holds,
    assert_same,
    local_tensors,
)
from tests.support.optimizer_state import num_sent, storages_of
from tests.support.ranks import on_ranks, run_ranks

LOCAL = StateDictType.LOCAL_STATE_DICT


class Model(nn.Module):
    """plain: sizes that need no padding, which torch lays out as we do."""

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


def torchs(use_orig_params: bool, seed: int = 0) -> TorchFSDP:
    inner = make_model(seed, plain=True)
    model = TorchFSDP(
        inner,
        auto_wrap_policy=TorchWrapPolicy({nn.Linear}),
        ignored_modules=[inner.ignored],
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    TorchFSDP.set_state_dict_type(model, TorchType.LOCAL_STATE_DICT)
    return model


def assert_equal_entries(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same keys in the same order, with values of the same shapes, placements and elements."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].size() == value.size(), name
        assert described(found[name]) == described(value), name
        for own, other in zip(local_tensors(found[name]), local_tensors(value), strict=True):
            assert torch.equal(own, other), name


def described(value: Any) -> list[Any] | None:
    if not isinstance(value, ShardedTensor):
        assert not value.requires_grad
        return None
    shards = value.metadata().shards_metadata
    return [(each.shard_offsets, each.shard_sizes, str(each.placement)) for each in shards]


@on_ranks(2)
def test_entries_are_those_of_torchs_fsdp1_and_each_loads_the_others() -> None:
    forms = (False, True)
    theirs = {form: torchs(form).state_dict() for form in forms}
    ours = {}
    for form in forms:
        model = shard(make_model(plain=True), form)
        ours[form] = local_state(model)
        for offload_to_cpu in (False, True):
            assert_equal_entries(local_state(model, offload_to_cpu), theirs[form])
    for form in forms:
        for given in (*theirs.values(), *ours.values()):
            other = shard(make_model(1, plain=True), form)
            assert str(other.load_state_dict(given)) == "<All keys matched successfully>"
            assert_holds(other, make_model(plain=True))
        # Torch's own finds some keys of its own unexpected with original parameters.
        other = torchs(form, seed=1)
        result = other.load_state_dict(dict(ours[form]), strict=not form)
        assert not result.missing_keys
        assert_equal_entries(other.state_dict(), theirs[form])


PLAIN, ROOTS = ["ignored.weight", "ignored.bias"], ["_flat_param", "_flat_param_1", "_flat_param_2"]
# The tied weight belongs to the root; the two modules that hold it are no units.
KEYS = {
    False: [*ROOTS, "count", "first._flat_param", *PLAIN],
    True: [
        *("own", "frozen", "wide", "count", "first.weight", "first.bias", "first._flat_param"),
        *("second.weight", *PLAIN, "tied.weight", *ROOTS),
    ],
}


def storage_of(value: torch.Tensor) -> int:
    return local_tensors(value)[0].untyped_storage().data_ptr()


@on_ranks(3)
def test_local_dicts_hold_views_with_each_element_once_also_when_saved(tmp_path: Path) -> None:
    """Copies in memory and in files are in test_copies_of_values.py."""
    for use_orig_params in (False, True):
        model = shard(make_model(1), use_orig_params)
        before = num_sent(model)
        state = local_state(model)
        assert num_sent(model) == before, "nothing is sent"
        assert list(state) == KEYS[use_orig_params]
        shards = storages_of(model)
        own = {key for key in state if key not in (*PLAIN, "count")}
        assert all(storage_of(state[key]) in {0, *shards} for key in own), "views"

        path, file = f"{tmp_path}/{use_orig_params}", f"{tmp_path}/{dist.get_rank()}.pt"
        dcp.save({"model": state}, checkpoint_id=path)
        written = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        assert {key.removeprefix("model.") for key in written} == set(KEYS[False]), "nothing twice"
        torch.save(state, file)
        for loaded in (torch.load(file, weights_only=True), copy.deepcopy(state)):
            assert len({storage_of(loaded[key]) for key in own} - {0}) == len(shards)
            assert not {storage_of(loaded[key]) for key in own} & shards
            other = shard(make_model(2), not use_orig_params)
            other.load_state_dict(loaded)
            assert_holds(other, make_model(1))
        other = shard(make_model(3), use_orig_params)
        loaded = local_state(other)
        dcp.load({"model": loaded}, checkpoint_id=path)
        other.load_state_dict(loaded)
        assert_holds(other, make_model(1))


@on_ranks(2)
def test_parts_of_parameters_load_without_the_flat_parameters() -> None:
    """A client drops ShardedTensors."""
    state = local_state(shard(make_model(1), True))
    parts = {k: v.clone() for k, v in state.items() if not isinstance(v, ShardedTensor)}
    for use_orig_params in (True, False):
        model = shard(make_model(2), use_orig_params)
        with pytest.raises(CheckpointError, match=r"part.* set StateDictType.LOCAL_STATE_DICT"):
            model.load_state_dict(parts)
        FSDP.set_state_dict_type(model, LOCAL)
        assert str(model.load_state_dict(dict(parts))) == "<All keys matched successfully>"
        assert_holds(model, make_model(1))
        with pytest.raises(CheckpointError, match=r"second\.weight"):
            model.load_state_dict({**parts, "second.weight": parts["second.weight"][:1]})
        others = {key: value for key, value in parts.items() if key != "first.weight"}
        with pytest.raises(CheckpointError, match=r'Missing key.*"first\.weight"'):
            model.load_state_dict(others)
        model.load_state_dict(make_model(3).state_dict())
        assert_holds(model, make_model(3))


@on_ranks(2)
def test_other_values_than_in_the_flat_parameter_are_refused() -> None:
    state, key = local_state(shard(make_model(1), True)), "second.weight"
    whole = make_model(1).second.weight.detach()
    for use_orig_params in (True, False):
        model = shard(make_model(2), use_orig_params)
        for changed in (state[key] + 1, state[key][1:], whole, 3.0):
            with pytest.raises(CheckpointError, match=f"{key}: its values .*'_flat_param'"):
                model.load_state_dict({**state, key: changed})
        assert_holds(model, make_model(2))
        model.load_state_dict({**state, key: state[key].double()})
        assert_holds(model, make_model(1))


@on_ranks(1)
def test_on_one_rank_local_dicts_have_parameter_names_as_in_torch() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        state = local_state(shard(make_model(1), False, sharding_strategy=strategy))
        assert list(state) == list(make_model().state_dict())
        other = shard(make_model(2), True, sharding_strategy=strategy)
        other.load_state_dict(state)
        assert_holds(other, make_model(1))


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
        before = other.state_dict()
        with pytest.raises(CheckpointError, match="SHARDED_STATE_DICT") as caught:
            other.load_state_dict(state, strict=False)
        assert words in str(caught.value), words
        assert_same(other.state_dict(), before)
    for wrong in ([1.0], torch.ones(3)):
        with pytest.raises(CheckpointError):
            model.load_state_dict({**state, "_flat_param": wrong})
    torch.save(state, f"{directory}/{dist.get_rank()}.pt")
    dist.barrier()
    of_other = torch.load(f"{directory}/{1 - dist.get_rank()}.pt", weights_only=True)
    with pytest.raises(CheckpointError, match=f"part of global rank {1 - dist.get_rank()}"):
        model.load_state_dict(of_other)


def _more_ranks(directory: str) -> None:
    model = shard(make_model(2), False)
    state = torch.load(f"{directory}/{dist.get_rank() % 2}.pt", weights_only=False)
    with pytest.raises(CheckpointError, match="by as many ranks"):
        model.load_state_dict(state)
    assert_holds(model, make_model(2))


def test_another_layout_is_refused_with_advice_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(2, _other_layouts, str(tmp_path))
    run_ranks(3, _more_ranks, str(tmp_path))


@on_ranks(2)
def test_the_form_is_set_and_read_for_submodules_and_containers() -> None:
    model = shard(make_model(), False, device_mesh=init_device_mesh("cpu", (2,)))
    before = FSDP.set_state_dict_type(model, LOCAL)
    settings = FSDP.get_state_dict_type(model)
    assert settings.state_dict_type is LOCAL
    assert settings.state_dict_config == LocalStateDictConfig()
    assert settings.optim_state_dict_config == LocalOptimStateDictConfig()
    assert next(iter(model.state_dict())) == "_flat_param"
    assert list(model.first.state_dict(prefix="a.")) == ["a._flat_param"], "a nested unit by itself"
    other = shard(make_model(1), True)
    other.first.load_state_dict(model.first.state_dict())
    FSDP.set_state_dict_type(model, before.state_dict_type)
    assert torch.equal(other.state_dict()["first.weight"], model.state_dict()["first.weight"])
    assert not torch.equal(other.state_dict()["own"], model.state_dict()["own"])

    around, target = (
        nn.ModuleDict({"unit": FSDP(nn.Linear(3, 5)), "plain": nn.Linear(2, 2)}) for _ in range(2)
    )
    with FSDP.state_dict_type(around, LOCAL):
        state = around.state_dict()
    assert list(state) == ["unit._flat_param", "plain.weight", "plain.bias"]
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    assert_same(target.state_dict(), around.state_dict())
