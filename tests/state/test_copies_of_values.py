"""Values of SHARDED state dicts are copies, those of LOCAL ones are views; copies do not change
while training goes on, and load again."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import (
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from tests.support.odd_model import (
    STEPS,
    Block,
    Config,
    assert_same,
    cloned,
    each_tensor,
    local_tensors,
    make_model,
    make_optimizer,
    shard,
    train,
)
from tests.support.parity import local
from tests.support.programs import python
from tests.support.ranks import on_ranks, run_ranks

SHARDED, LOCAL = StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
FULL = StateDictType.FULL_STATE_DICT
State = dict[str, Any]

FLAT: Config = ("FULL_SHARD", False, "blocks")
ORIGINAL: Config = ("SHARD_GRAD_OP", True, "always")
MESH: Config = ("HYBRID_SHARD", True, "blocks")  # whose sharded values are DTensors
FORMS = [(FLAT, SHARDED), (ORIGINAL, SHARDED), (FLAT, LOCAL), (MESH, SHARDED)]


def model_state(model: nn.Module, form: StateDictType) -> State:
    with FSDP.state_dict_type(model, form):
        return model.state_dict()


def states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    form: StateDictType,
    to_cpu: bool = False,
    **options: bool,
) -> State:
    """The model's state and, except for local ones, the optimizer's. options: of sharded ones."""
    if form is LOCAL:
        with FSDP.state_dict_type(model, form, LocalStateDictConfig(offload_to_cpu=to_cpu)):
            return {"model": model.state_dict()}
    configs: tuple[Any, ...] = ()
    if form is SHARDED:
        configs = (
            ShardedStateDictConfig(offload_to_cpu=to_cpu, **options),
            ShardedOptimStateDictConfig(offload_to_cpu=to_cpu),
        )
    with FSDP.state_dict_type(model, form, *configs):
        return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def trained(config: Config, seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    model = shard(make_model(seed, block=Block), config)
    optimizer = make_optimizer("Adam", model)
    train(model, optimizer, range(STEPS))
    return model, optimizer


def load(model: FSDP, optimizer: torch.optim.Optimizer, state: State) -> None:
    assert str(model.load_state_dict(state["model"])) == "<All keys matched successfully>"
    if "optim" in state:
        with FSDP.state_dict_type(model, SHARDED):
            optim = FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
        optimizer.load_state_dict(optim)


def assert_loads(state: State, expected: State, config: Config, where: str) -> None:
    """Into another model, which has what was expected afterwards."""
    model = shard(make_model(7, block=Block), config)
    optimizer = make_optimizer("Adam", model)
    load(model, optimizer, state)
    found = states(model, optimizer, FULL)
    assert_same(found["model"], expected["model"], where)
    if "optim" in state:
        assert_same(found["optim"]["state"], expected["optim"]["state"], where)


def as_it_is(state: State, form: StateDictType) -> State:
    """A state dict with copies of local shards and of what no unit manages: the rest is copied."""
    if form is LOCAL:
        return copy.deepcopy(state)
    names = {name for name, _ in make_model().named_buffers()} | {"ignored.weight", "ignored.bias"}
    beside = {name: state["model"][name].clone() for name in names & state["model"].keys()}
    return {**state, "model": {**state["model"], **beside}}


@pytest.mark.parametrize(("config", "form"), FORMS)
@on_ranks(2)
def test_copies_do_not_change_with_training_and_load_again(
    config: Config, form: StateDictType, tmp_path: Path
) -> None:
    model, optimizer = trained(config, 1)
    expected = cloned(states(model, optimizer, FULL))
    live = states(model, optimizer, form, as_views=True)
    path = f"{tmp_path}/{dist.get_rank()}.pt"
    torch.save(live, path)
    copies = {
        "nothing": as_it_is(states(model, optimizer, form), form),
        **{way: copied(live) for way, copied in COPIES.items()},
        "detach and clone": each_tensor(live, lambda value: value.detach().clone()),
        "to(copy=True)": each_tensor(live, lambda value: value.to("cpu", copy=True)),
        "torch.save": torch.load(path, weights_only=True),
        "offload_to_cpu": states(model, optimizer, form, to_cpu=True),
        "copy of a copy": copy.deepcopy(each_tensor(live, torch.clone)),
    }
    views = each_tensor(live, lambda value: value.detach())
    if config != MESH:  # DTensors' parts are copies in the first place
        for one, other in zip(local_tensors(views), local_tensors(live), strict=True):
            assert one.data_ptr() == other.data_ptr(), "detach() views the same memory"
        tensors = [value for value in live["model"].values() if isinstance(value, Tensor)]
        assert all(value.cpu() is value for value in tensors)
    train(model, optimizer, range(STEPS, STEPS + 2))
    assert not torch.equal(model.state_dict()["cube"], expected["model"]["cube"])
    for way, copied in copies.items():
        assert_loads(copied, expected, config, way)
    if config != MESH:
        now = states(model, optimizer, FULL)
        assert_loads({"model": live["model"]}, now, config, "the views have followed")


READ = """
import dataclasses, json, sys, types
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from fsdp_compat import checkpoint
import torch.distributed.tensor  # as torch.load asks for where a file holds DTensors
from torch.serialization import get_safe_globals
from tests.state.test_copies_of_values import sums_of

states = [torch.load(path, weights_only=True) for path in sys.argv[1:]]
for each in get_safe_globals():  # descriptions, and the function that makes values of them
    if "fsdp_compat" in each.__module__:
        assert dataclasses.is_dataclass(each) or isinstance(each, types.FunctionType), each
from fsdp_compat import FullyShardedDataParallel as FSDP
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
state = get_model_state_dict(FSDP(torch.nn.Linear(2, 3)), options=StateDictOptions(True))
assert state["weight"].shape == (3, 2)  # the function was imported before the package
print(json.dumps([sums_of(state) for state in states]))
"""


def sums_of(state: Any) -> list[float]:
    return [local(value).double().sum().item() for value in local_tensors(state)]


def _write_files(directory: str) -> list[float]:
    """One file per rank with everything in it; return the sums of what the rank holds."""
    found: State = {}
    for number, (config, form) in enumerate(FORMS):
        found[str(number)] = states(*trained(config, 1), form)
    torch.save(found, f"{directory}/{dist.get_rank()}.pt")
    return sums_of(found)


def test_a_fresh_process_reads_files_with_weights_only(tmp_path: Path) -> None:
    expected = run_ranks(2, _write_files, str(tmp_path))
    done = python("-c", READ, *(tmp_path / f"{rank}.pt" for rank in range(2)))
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def replace_shards(state: State, change: Callable[[Tensor], Tensor]) -> State:
    """Put ``change(tensor)`` into every local shard, as callers do who convert what they load."""
    for value in {id(value): value for value in state.values()}.values():  # a tie's once
        for each in value.local_shards() if isinstance(value, ShardedTensor) else ():
            each.tensor = change(each.tensor)
    return state


def column_major(tensor: Tensor) -> Tensor:
    """Three times the values, laid out in another order."""
    reverse = tuple(reversed(range(tensor.dim())))
    return (tensor * 3).permute(reverse).contiguous().permute(reverse)


COPIES: dict[str, Callable[[State], State]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "clone": lambda state: each_tensor(state, torch.clone),
}


@pytest.mark.parametrize(("world_size", "form"), [(2, LOCAL), (3, SHARDED)])
@on_ranks("world_size")
def test_replaced_local_shards_are_copied_saved_and_loaded(
    world_size: int, form: StateDictType, tmp_path: Path
) -> None:
    model, _ = trained(FLAT, 1)
    named = make_model().named_parameters(remove_duplicate=False)
    names = {name for name, p in named if p.numel() and "ignored" not in name}
    before = cloned(model.state_dict())
    tripled = {name: value * 3 if name in names else value for name, value in before.items()}
    changes = (lambda tensor: tensor * 3, lambda tensor: tensor.double() * 3, column_major)
    ways = ("same layout", "deepcopy", "pickle", "clone", "dcp", "other layout")
    # local ones load at one layout alone
    for way, change in zip(ways[: 5 if form is LOCAL else 6], 2 * changes, strict=False):
        state = replace_shards(model_state(model, form), change)
        if way in COPIES:
            state = COPIES[way](state)
        target = shard(make_model(7, block=Block), ORIGINAL if way == "other layout" else FLAT)
        if way == "dcp":
            dcp.save(state, checkpoint_id=tmp_path)
            state = replace_shards(model_state(target, form), column_major)
            dcp.load(state, checkpoint_id=tmp_path)
        target.load_state_dict(state)
        assert_same(target.state_dict(), tripled, way)
    assert_same(model.state_dict(), before, "the model's own shards are untouched")
