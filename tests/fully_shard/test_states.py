"""State dicts: DTensors without any context, for torch's functions, its FSDP2 and dcp; and those by
the functions of FullyShardedDataParallel."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_compat import (
    CheckpointError,
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    StateError,
    UsageError,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.fully_sharded import (
    TORCH,
    Odd,
    adamw,
    api,
    batch_of,
    is_sharded,
    pair_of,
    shard_all,
    take_steps,
    trained,
    whole_states,
)
from tests.support.models import DIM, Stack
from tests.support.parity import (
    Pair,
    assert_same_values,
    plain_name,
    reshard,
    seeded,
    sgd,
    square,
    vectors,
    whole,
    whole_gradients,
)
from tests.support.ranks import on_ranks

WHOLE = StateDictOptions(full_state_dict=True)
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT

only_ours = pytest.mark.skipif(api is TORCH, reason="knows nothing of torch's FSDP2")
_trained = partial(trained, codes=True)


def _require(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Compare with an unsharded model. Collective."""
    expected = whole_states(*_trained("plain", seed=1))
    weights, found = whole_states(model, optim)
    assert_same_values(weights, expected[0], "state")
    assert_same_values({name: found[name] for name in expected[1]}, expected[1], "state of")
    assert len(found) == len(expected[1])


# -- state dicts


@pytest.mark.parametrize(("assign", "ranks"), [(False, 2), (True, 3)])
@on_ranks("ranks")
def test_state_dicts_are_dtensors_and_load_plainly_and_by_assignment(
    assign: bool, ranks: int
) -> None:
    model, _ = _trained("ours", seed=1)
    square(model, torch.ones(1, DIM))  # leaves the root unsharded
    assert not is_sharded(model.stem)
    state = copy.deepcopy(model.state_dict())
    assert is_sharded(model.stem)
    plain = Odd(codes=True)
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert isinstance(value, DTensor) is (name != "count"), name
        assert not value.requires_grad
    other, _ = _trained("ours", seed=2)
    before = dict(other.named_parameters())
    missing = other.load_state_dict({"few": state["few"]}, strict=False, assign=assign)
    assert len(missing.missing_keys) == len(state) - 1
    with pytest.raises(RuntimeError, match="nobody"):
        other.load_state_dict({**state, "nobody": torch.ones(1)}, assign=assign)
    other.load_state_dict(state, assign=assign)
    if assign:  # as with any module, every name gets a parameter of its own
        other.again.weight = other.head.weight
    assert all(p is before[name] for name, p in other.named_parameters()) is not assign
    plain.load_state_dict({name: whole(value) for name, value in state.items()})
    for each in (plain, other):
        take_steps(each, adamw(each), 9)
    found = {name: whole(value) for name, value in other.state_dict().items()}
    assert_same_values(found, plain.state_dict(), "state after a step")


# -- FullyShardedDataParallel's functions


ON_CASES = pytest.mark.parametrize(("kind", "ranks"), [("columns", 3), ("list", 2), ("mixed", 2)])


@only_ours
@on_ranks(2)
def test_the_state_dict_type_is_kept_and_followed() -> None:
    model, optim = trained("ours", seed=1)
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
    expected = {f"a.{name}": value for name, value in model.blocks.state_dict().items()}
    assert_same_values(nested, {"other": torch.ones(1)} | expected, "state")
    with pytest.raises(StateError, match="inside a sharded one"):
        model.stem.state_dict()
    model.load_state_dict(model.state_dict())  # the refusal leaves nothing behind
    FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
    saved = model.state_dict()["few"]
    with torch.no_grad():
        model.few += 1.0
    assert not torch.equal(whole(saved), whole(model.state_dict()["few"])), "copies, if offloaded"


# -- summon_full_params


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in values.items()}


@only_ours
@ON_CASES
@on_ranks("ranks")
def test_whole_parameters_are_shown_and_changes_are_kept(kind: str, ranks: int) -> None:
    model, _ = trained(kind, seed=1)
    plain, _ = trained("untied" if kind == "mixed" else "plain", seed=1)
    for each in (model, plain):
        square(each, batch_of(5)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert_same_values(_shown(whole_gradients(model)), whole_gradients(plain), "gradient")
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
        assert_same_values(_shown(whole_gradients(model)), whole_gradients(plain), "gradient")
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        assert is_sharded(model.head) is (dist.get_rank() != 0)
    with FSDP.summon_full_params(model):
        shown = _shown(dict(model.named_parameters()))
        assert_same_values(shown, dict(plain.named_parameters()), "value")


# -- what cannot work


@only_ours
@on_ranks(2)
def test_calls_that_cannot_work_are_refused_on_every_rank() -> None:
    model, _ = _trained("ours", seed=1)
    with pytest.raises(UsageError, match="no local state dicts"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(UsageError, match=r"torch\.nn\.utils\.clip_grad_norm_"):
        FSDP.clip_grad_norm_(model, 1.0)
    saved = {name: whole(value) for name, value in model.state_dict().items()}
    other, _ = _trained("ours", seed=2)
    with FSDP.state_dict_type(other, FULL, FullStateDictConfig(rank0_only=True)):
        with pytest.raises(CheckpointError, match="nobody"):
            other.load_state_dict({**saved, "nobody": saved["few"]} if dist.get_rank() == 0 else {})
        other.load_state_dict(saved if dist.get_rank() == 0 else {})
    found = {name: whole(value) for name, value in other.state_dict().items()}
    assert_same_values(found, saved, "state")
    mixed, its = trained("mixed", seed=1)
    with pytest.raises(AssertionError, match="different state dict types"):
        FSDP.optim_state_dict(mixed, its)
    take_steps(mixed, its, 1)


# -- before the first step


@on_ranks(3)
def test_a_model_may_begin_on_the_meta_device() -> None:
    """It is refused until it has values."""
    x = torch.ones(1, DIM)
    for resets in (False, True):
        with torch.device("meta"):
            model = shard_all(Stack())
        assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
        if api is not TORCH:  # which cannot go on
            for call in (partial(model, x), model.blocks[0].unshard):
                with pytest.raises(StateError, match="meta"):
                    call()
        model.to_empty(device="cpu")
        state = seeded(Stack).state_dict()
        if resets:
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            state = get_model_state_dict(model, options=WHOLE)
        else:
            set_model_state_dict(model, dict(state), options=WHOLE)
        pair = Pair(Stack(), model)
        pair.plain.load_state_dict(state)
        pair.step()


@on_ranks(2)
def test_the_dtype_may_change_before_the_first_step_and_later() -> None:
    for before_first in (True, False) if api is not TORCH else (True,):
        pair = pair_of(Stack, tolerance=1e-9, batch=lambda generator: vectors(generator).double())
        if not before_first:
            square(pair.model, torch.ones(1, DIM)).backward()
            pair.model.zero_grad()
        for model in (pair.plain, pair.model):
            model.to(torch.float64)
        for p in pair.model.parameters():
            assert p.dtype is torch.float64 and isinstance(p, DTensor)
        pair.plain_optim, pair.optim = sgd(pair.plain.parameters()), sgd(pair.model.parameters())
        pair.step()
        pair.step()
