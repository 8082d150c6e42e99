"""The static methods of FullyShardedDataParallel on models that fully_shard was applied to: state
dict types, optimizer state and summon_full_params."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_compat import (
    CheckpointError,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    StateError,
    UsageError,
    fully_shard,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._state.units import clean_name
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.fully_sharded import TORCH, Odd, api, batch_of, is_sharded, shard_all, take_steps
from tests.support.models import Block
from tests.support.parity import assert_same_values, reshard, square, whole, whole_gradients
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT

pytestmark = [
    pytest.mark.skipif(api is TORCH, reason="torch takes such models for unsharded ones"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def _second_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def _sharded(kind: str, model: Any) -> Any:
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return shard_all(model, mesh=mesh)
    if kind == "second dim":
        return shard_all(model, shard_placement_fn=_second_dim)
    if kind == "list":
        fully_shard([model.blocks, model.head, model.again])
        return fully_shard(model)
    if kind == "mixed":
        cpu = torch.device("cpu")
        model.stem = FSDP(model.stem, use_orig_params=True, device_id=cpu)
        model.blocks[1] = FSDP(model.blocks[1], device_id=cpu)
        shard_all(model.blocks[0], (nn.Linear,))
        for module in (model.head, model.again):
            module.weight = nn.Parameter(module.weight.detach().clone())
            fully_shard(module)
        return model
    return model if kind in ("plain", "untied") else shard_all(model)


def _built(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = Odd(seed)
    if kind in ("mixed", "untied"):
        model.again.weight = nn.Parameter(model.again.weight.detach().clone())
    model = _sharded(kind, model)
    # One operation on all DTensors takes a fraction of the time; it takes no other tensors beside.
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=kind != "mixed")


def _trained(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and an optimizer after two steps with the same batch on every rank."""
    model, optim = _built(kind, seed)
    take_steps(model, optim, 0, 1)
    return model, optim


def _flattened(optim_state: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, entry in optim_state["state"].items()
        for key, value in entry.items()
    }


@functools.cache
def _expected(kind: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optim = _trained("untied" if kind == "mixed" else "plain", seed)
    names = {p: name for name, p in model.named_parameters()}
    return dict(model.state_dict()), _flattened(
        {"state": {names[p]: entry for p, entry in optim.state.items()}}
    )


def _require(kind: str, model: Any, optim: torch.optim.Optimizer, seed: int) -> None:
    """Assert that model and optimizer hold what an unsharded one holds. Collective."""
    weights, states = _expected(kind, seed)
    with FSDP.state_dict_type(model, FULL):
        found = model.state_dict()
        assert all(type(value) is Tensor for value in found.values())
        assert_same_values(found, weights, "state")
        held = _flattened(FSDP.optim_state_dict(model, optim))
    assert all(type(value) is Tensor for value in held.values())
    assert_same_values({name: held[name] for name in states}, states, "state of")
    assert len(held) == len(states)


CASES = [("ours", 3), ("second dim", 2), ("list", 2), ("hybrid", 4), ("mixed", 2)]
ON_CASES = pytest.mark.parametrize(("kind", "ranks"), CASES)


# -- model and optimizer state

FORMS = {"ours": (0, 1), "second dim": (1,), "list": (0,), "hybrid": (1,), "mixed": (1, 2)}


@ON_CASES
@on_ranks("ranks")
def test_states_equal_those_of_an_unsharded_model_and_load(kind: str, ranks: int) -> None:
    rank0 = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    first = dist.get_rank() == 0
    forms: list[tuple[StateDictType, Any]] = [(FULL, rank0), (SHARDED, ()), (FULL, ())]
    for form, configs in sample(forms, *FORMS[kind]):
        model, optim = _trained(kind, seed=1)
        _require(kind, model, optim, seed=1)
        other, other_optim = _trained(kind, seed=2)
        with about(f"{form.name} {configs}"), FSDP.state_dict_type(model, form, *configs):
            weights, states = model.state_dict(), FSDP.optim_state_dict(model, optim)
            assert bool(states) is (first or not configs)
            if kind != "mixed":  # whose root is not sharded
                assert bool(weights) is bool(states)
                assert form is FULL or isinstance(states["state"]["stem.bias"]["exp_avg"], DTensor)
        with FSDP.state_dict_type(other, form, *configs):
            if configs:
                given: list[Any] = [weights]
                dist.broadcast_object_list(given)
                other.load_state_dict(given[0])
            else:
                other.load_state_dict(weights)
            states = FSDP.optim_state_dict_to_load(other, other_optim, states)
            other_optim.load_state_dict(states)
        if kind != "mixed":  # DTensors have state on every rank
            assert all(other_optim.state.get(p) for p in other.parameters())
        _require(kind, other, other_optim, seed=1)
        take_steps(model, optim, 9)
        take_steps(other, other_optim, 9)
        with FSDP.state_dict_type(model, FULL), FSDP.state_dict_type(other, FULL):
            assert_same_values(other.state_dict(), model.state_dict(), "state after a step")


@on_ranks(2)
def test_the_older_calls_give_and_take_the_same_states() -> None:
    model, optim = _trained("ours", seed=1)
    expected = _expected("ours", seed=1)[1]
    full = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(model, optim)
    for states in (full, sharded):
        found = {name: whole(value) for name, value in _flattened(states).items()}
        assert_same_values({name: found[name] for name in expected}, expected, "state of")
    first = full if dist.get_rank() == 0 else None
    for load in (
        lambda model, optim: FSDP.shard_full_optim_state_dict(full, model, optim=optim),
        lambda model, optim: FSDP.scatter_full_optim_state_dict(first, model, optim=optim),
        lambda model, optim: FSDP.flatten_sharded_optim_state_dict(sharded, model, optim),
    ):
        _, optim = other = _trained("ours", seed=2)
        optim.load_state_dict(load(*other))
        other[0].load_state_dict(model.state_dict())
        _require("ours", *other, seed=1)


@on_ranks(3)
def test_an_optimizer_without_state_gives_what_its_first_step_makes() -> None:
    model, optim = _built("ours", seed=1)
    with FSDP.state_dict_type(model, SHARDED):
        states = FSDP.optim_state_dict(model, optim)["state"]
    for name, parameter in model.named_parameters():
        state = states[name]["exp_avg"]
        assert isinstance(state, DTensor) and not whole(state).any()
        assert (state.shape, state.placements) == (parameter.shape, parameter.placements)
    assert not optim.state


def _prefixed(state: dict[str, Any]) -> dict[str, Any]:
    return {f"a.{name}": value for name, value in state.items()}


@on_ranks(2)
def test_the_state_dict_type_is_kept_and_followed() -> None:
    model, optim = _trained("ours", seed=1)
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    assert FSDP.fsdp_modules(model) == []
    assert isinstance(FSDP.optim_state_dict(model, optim)["state"]["few"]["exp_avg"], DTensor)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    before = FSDP.set_state_dict_type(model, FULL, config)
    assert before.state_dict_type is SHARDED
    assert list(model.state_dict()) == (list(Odd(1).state_dict()) if dist.get_rank() == 0 else [])
    model.to(torch.float64)  # the units are made anew
    assert FSDP.get_state_dict_type(model).state_dict_config == config
    FSDP.set_state_dict_type(model, FULL)
    nested: dict[str, Tensor] = {"other": torch.ones(1)}
    model.blocks.state_dict(destination=nested, prefix="a.")
    expected = model.blocks.state_dict()
    assert_same_values(nested, {"other": torch.ones(1)} | _prefixed(expected), "state")
    with pytest.raises(StateError, match="inside a sharded one"):
        model.stem.state_dict()
    model.load_state_dict(model.state_dict())  # the refusal leaves nothing behind
    FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
    saved = model.state_dict()
    with torch.no_grad():
        model.few += 1.0
        model.count += 1
    assert not any(
        torch.equal(whole(saved[n]), whole(model.state_dict()[n])) for n in ("few", "count")
    )


# -- summon_full_params


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {clean_name(name): p for name, p in model.named_parameters()}


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {clean_name(name): grad for name, grad in whole_gradients(model).items()}


@ON_CASES
@on_ranks("ranks")
def test_whole_parameters_are_shown_and_changes_are_kept(kind: str, ranks: int) -> None:
    model, _ = _trained(kind, seed=1)
    plain, _ = _trained("untied" if kind == "mixed" else "plain", seed=1)
    for each in (model, plain):
        square(each, batch_of(5)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert_same_values(_parameters(model), _parameters(plain), "value")
        assert_same_values(_gradients(model), _gradients(plain), "gradient")
        assert_same_values({"": model(batch_of(6))}, {"": plain(batch_of(6))}, "output")
        assert_same_values(dict(model.state_dict()), dict(plain.state_dict()), "state")
        with torch.no_grad():
            for each in (*model.parameters(), *plain.parameters()):
                each.add_(1.0)
                assert each.grad is not None
                each.grad.mul_(2.0)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    assert_same_values({"": model(batch_of(6))}, {"": plain(batch_of(6))}, "output")
    reshard(model)
    if kind != "mixed":
        assert_same_values(_gradients(model), _gradients(plain), "gradient")
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        assert is_sharded(model.head) is (dist.get_rank() != 0)
    with FSDP.summon_full_params(model):
        assert_same_values(_parameters(model), _parameters(plain), "value")


# -- what cannot work


@on_ranks(2)
def test_calls_that_cannot_work_are_refused_on_every_rank() -> None:
    model, optim = _trained("ours", seed=1)
    with pytest.raises(UsageError, match="no local state dicts"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(UsageError, match=r"torch\.nn\.utils\.clip_grad_norm_"):
        FSDP.clip_grad_norm_(model, 1.0)
    saved = {name: whole(value) for name, value in model.state_dict().items()}
    with (
        FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)),
        pytest.raises(CheckpointError, match="broadcast_from_rank0"),
    ):
        model.load_state_dict(saved if dist.get_rank() == 0 else {})
    _require("ours", model, optim, seed=1)
    mixed, its = _trained("mixed", seed=1)
    with pytest.raises(AssertionError, match="different state dict types"):
        FSDP.optim_state_dict(mixed, its)
    with pytest.raises(UsageError):  # one inside the other
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    take_steps(model, optim, 1)
    take_steps(mixed, its, 1)
