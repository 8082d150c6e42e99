"""State that belongs to one rank, or to one layout, is refused elsewhere with what to do."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import CheckpointError, ShardingStrategy, StateDictType, fully_shard
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.odd_model import assert_same, by_rank
from tests.support.parity import both_forms
from tests.support.ranks import on_ranks, run_ranks


def trained(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model on which one step was made, and its optimizer. in_place: by fully_shard."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    if options.pop("in_place", False):
        model: Any = fully_shard(net)
    else:
        model = FSDP(net, **options)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def loaded(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=True)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def of_rank0(value: Any) -> Any:
    """Return what every rank loads from a file that rank 0 has saved."""
    return loaded(by_rank(saved(value))[0])


def refusal(load: Any, given: Any) -> str:
    try:
        load(given)
    except CheckpointError as error:
        return str(error)
    return ""


def _loads_optimizer_state(options: dict[str, Any]) -> str:
    model, optimizer = trained(**options)
    before = FSDP.optim_state_dict(model, optimizer)
    own = optimizer.state_dict()
    optimizer.load_state_dict(loaded(saved(own)))
    given = FSDP.optim_state_dict(model, optimizer, optim_state_dict=own)
    assert set(given) == {"state", "param_groups"}
    fresh = torch.optim.Adam(model.parameters())
    assert set(optimizer.param_groups[0]) == set(fresh.param_groups[0])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, given))
    assert_same(FSDP.optim_state_dict(model, optimizer)["state"], before["state"])
    return refusal(optimizer.load_state_dict, of_rank0(own))


@both_forms
def test_an_optimizers_own_state_dict_of_another_rank_raises_unless_it_is_a_replica(
    use_orig_params: bool,
) -> None:
    first, second = run_ranks(2, _loads_optimizer_state, {"use_orig_params": use_orig_params})
    assert first == ""
    assert "expected: the parts of rank 1 of 2" in second
    assert "got:      the parts of rank 0 of 2" in second
    assert "FSDP.optim_state_dict(model, optimizer)" in second
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": use_orig_params}
    assert run_ranks(2, _loads_optimizer_state, options) == ["", ""]


def _saves() -> bytes:
    return saved(trained(use_orig_params=True)[1].state_dict())


def _loads(packed: bytes, wrapped: bool) -> str:
    policy = ModuleWrapPolicy({nn.Linear}) if wrapped else None
    _, optimizer = trained(use_orig_params=True, auto_wrap_policy=policy)
    return refusal(optimizer.load_state_dict, loaded(packed))


def test_an_optimizers_own_state_dict_of_another_layout_raises() -> None:
    packed, _ = run_ranks(2, _saves)
    assert "parameters that were wrapped or cut" in run_ranks(2, _loads, packed, True)[0]
    assert "expected: the state of whole parameters" in run_ranks(1, _loads, packed, False)[0]


@on_ranks(2)
def test_sharded_values_without_optim_state_dict_to_load_raise_in_the_next_step() -> None:
    model, optimizer = trained(use_orig_params=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        optimizer.load_state_dict(FSDP.optim_state_dict(model, optimizer))
    text = refusal(lambda _: optimizer.step(), None)
    assert "a sharded value as 'exp_avg'" in text and "optim_state_dict_to_load" in text


@pytest.mark.parametrize("values", ["rows", "dtensors", "boxes"])
@on_ranks(2)
def test_sharded_values_of_another_rank_raise(values: str) -> None:
    in_place = values == "rows"
    options: dict[str, Any] = {"in_place": True} if in_place else {}
    if values == "dtensors":
        options["device_mesh"] = init_device_mesh("cpu", (2,))
    model, optimizer = trained(**options)
    if not in_place:
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    state, own = model.state_dict(), optimizer.state_dict()
    assert refusal(model.load_state_dict, loaded(saved(state))) == ""
    given = [(model.load_state_dict, of_rank0(state))]
    if in_place:
        assert refusal(optimizer.load_state_dict, loaded(saved(own))) == ""
        given.append((optimizer.load_state_dict, of_rank0(own)))
    for load, theirs in given if dist.get_rank() else ():  # into another layout is collective
        assert "with the part of global rank 0, on global rank 1" in refusal(load, theirs)
