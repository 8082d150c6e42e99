"""Calls inside of a pass, without this rank or its group, and with functions of the user's that
raise: an error on every rank, after which the model trains. And what looks odd, but is allowed."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, ones
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy
from fsdp_compat.errors import StateError, UsageError
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from fsdp_compat.wrap import CustomPolicy, enable_wrap, wrap
from tests.support.cases import about
from tests.support.parity import both_forms
from tests.support.ranks import on_ranks
from tests.support.refusals import (
    FULL,
    SHARDED,
    Call,
    adam,
    assert_four_facts,
    batch,
    caught,
    difference,
    loss_of,
    net,
    no_sync,
    reference,
    sgd,
    shard,
    snapshot,
    step,
    summon,
)

HYBRID, NO_SHARD = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD


def load_optimizer(m: FSDP, o: torch.optim.Optimizer) -> None:
    with FSDP.state_dict_type(m, SHARDED):
        FSDP.optim_state_dict_to_load(m, o, FSDP.optim_state_dict(m, o))


# -- inside of forward and of backward

INSIDE: dict[str, tuple[Call, type[Exception]]] = {  # the call, and the class that torch raises
    "state_dict": (lambda m, o: m.state_dict(), RuntimeError),
    "load": (lambda m, o: m.load_state_dict(added_to(reference(0))), RuntimeError),
    "clip_grad_norm_": (lambda m, o: m.clip_grad_norm_(1e-9), ValueError),
    "summon_full_params": (lambda m, o: summon(m), AssertionError),
    "apply": (lambda m, o: m.apply(lambda child: None), ValueError),
    "deepcopy": (lambda m, o: copy.deepcopy(m), RuntimeError),
    "pickle": (lambda m, o: pickle.dumps(m), RuntimeError),
    "optim_state_dict": (lambda m, o: FSDP.optim_state_dict(m, o), RuntimeError),
    "optim_state_dict to load": (load_optimizer, RuntimeError),
    "register_comm_hook": (lambda m, o: m.register_comm_hook(None, raises), RuntimeError),
    "no_sync": (lambda m, o: no_sync(m), ValueError),
    "step": (lambda m, o: o.step(), RuntimeError),
}
# {place: (the module from where, use_orig_params)}
PLACES: dict[str, tuple[Callable[[Any], nn.Module], bool]] = {
    "forward of the root": (lambda m: m.module, False),
    "forward of a unit": (lambda m: m.layers[1].module, True),
    "backward of the root": (lambda m: m.module, True),
    "backward of a unit": (lambda m: m.layers[0].module, False),
}


def added_to(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + 1 for name, value in state.items()}


def step_calling(
    model: FSDP, optimizer: torch.optim.Optimizer, place: str, call: Callable[[], Any]
) -> list[Any]:
    """Take a step, and call inside the forward or the backward of a module."""
    found = []

    def act(grad: Tensor | None = None) -> None:
        found.append(call())

    def inside(module: nn.Module, args: object, output: Tensor) -> None:
        if place.startswith("forward"):
            act()
        elif output.requires_grad:
            output.register_hook(act)

    handle = PLACES[place][0](model).register_forward_hook(inside)
    try:
        step(model, optimizer)
    finally:
        handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_call_during_forward_or_backward_raises_and_the_pass_completes(place: str) -> None:
    """Each call is in one forward and in one backward, where its error is caught and is not."""
    for name, (call, kind) in list(INSIDE.items())[list(PLACES).index(place) % 2 :: 2]:
        model, messages = shard(use_orig_params=PLACES[place][1]), [""] * 2
        optimizer = sgd(model)
        given = {"m": model, "o": optimizer}
        with about(name):
            outcome = step_calling(model, optimizer, place, partial(caught, call, given))[0]
            assert {"StateError", "RuntimeError", kind.__name__} <= set(outcome.kinds), outcome
            assert_four_facts(outcome.message)
            assert name.split()[0] in outcome.message and place.split()[0] in outcome.message
            dist.all_gather_object(messages, outcome.message)
            assert messages[0] == messages[1]
            assert not difference(model, 1)
            with pytest.raises(StateError):
                step_calling(model, optimizer, place, partial(call, **given))
            step(model, optimizer)
            assert not difference(model, 2)


# -- groups and meshes without this rank, and none at all

OUTSIDE: dict[str, Call] = {
    "process_group": lambda m, alone, mine: FSDP(m, alone),
    "a tuple of groups": lambda m, alone, mine: FSDP(m, (alone, mine), HYBRID),
    "device_mesh": lambda m, alone, mine: FSDP(m, device_mesh=DeviceMesh("cpu", [0])),
    "a scaler": lambda m, alone, mine: ShardedGradScaler("cpu", process_group=alone),
}


@on_ranks(2)
def test_rank_outside_the_group_gets_a_clear_error() -> None:
    """The rank inside wraps a module of its own."""
    alone, pair = dist.new_group([0]), dist.new_group([0, 1])
    each, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    for name, call in OUTSIDE.items():
        module = net()
        before = snapshot(module)
        with about(name):
            if dist.get_rank() == 0:
                call(module, alone, each)
            else:
                with pytest.raises(UsageError, match=r"is not (a member of|in) the") as error:
                    call(module, alone, pair)
                assert_four_facts(str(error.value))
                assert snapshot(module) == before
        dist.barrier()
    ShardedGradScaler("cpu", process_group=alone, enabled=False)  # needs no group


def test_missing_process_group_error_names_the_remedy() -> None:
    module = net()
    before = snapshot(module)
    for arguments in ({}, {"sharding_strategy": HYBRID}, {"sharding_strategy": NO_SHARD}):
        with pytest.raises(UsageError, match="init_process_group") as error:
            FSDP(module, **arguments)
        assert_four_facts(str(error.value))
        assert snapshot(module) == before


@on_ranks(2)
def test_hybrid_strategy_with_uneven_nodes_raises() -> None:
    for number, words in (("3", "a multiple of 3 ranks"), ("two", "LOCAL_WORLD_SIZE")):
        os.environ["LOCAL_WORLD_SIZE"] = number
        with pytest.raises(UsageError, match=words) as error:
            FSDP(net(), sharding_strategy=HYBRID)
        assert_four_facts(str(error.value))
        dist.barrier()


AFTER: dict[str, Call] = {
    "another model": lambda: shard(),
    "backward": lambda m: m(batch(0)).sum().backward(),
    "forward": lambda m: torch.no_grad()(m)(ones(2, 4)),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(reference(0)),
    "clip_grad_norm_": lambda m: m.clip_grad_norm_(1.0),
    "summon_full_params": summon,
    "optim_state_dict": lambda m, o: FSDP.optim_state_dict(m, o),
    "deepcopy": lambda m: copy.deepcopy(m),
}


@pytest.mark.parametrize("used_before", [False, True])
@on_ranks(2, group_timeout=5)
def test_model_works_or_raises_after_its_process_group_is_destroyed(used_before: bool) -> None:
    model = shard()
    given = {"m": model, "o": adam(model)}
    if used_before:
        step(model, given["o"])
    dist.barrier()
    dist.destroy_process_group()
    for name, call in AFTER.items():
        outcome = caught(call, given)
        assert outcome.kinds or name != "another model"
        if outcome.kinds:
            assert "FsdpCompatError" in outcome.kinds, outcome
            assert_four_facts(outcome.message)
            assert "init_process_group" in outcome.message, name


# -- functions of the user's that raise


class Odd(Exception):
    """An exception class that only these tests raise."""


def raises(*args: Any, **kwargs: Any) -> Any:
    raise Odd


def wrap_with_one_that_raises(m: nn.Module) -> None:
    with enable_wrap(wrapper_cls=raises):
        wrap(m)


RAISING: dict[str, Call] = {  # of a module, and of the same wrapped model in all
    "auto_wrap_policy": lambda m, w: FSDP(m, auto_wrap_policy=raises),
    "CustomPolicy": lambda m, w: FSDP(m, auto_wrap_policy=CustomPolicy(raises)),
    "param_init_fn": lambda m, w: FSDP(m.to("meta"), param_init_fn=raises),
    "ignored_modules": lambda m, w: FSDP(m, ignored_modules=(raises() for _ in range(1))),
    "wrap": lambda m, w: wrap_with_one_that_raises(m),
    "apply": lambda m, w: w.apply(raises),
    "summon_full_params": lambda m, w: summon(w, raises),
    "no_sync": lambda m, w: no_sync(w, raises),
}


@on_ranks(2)
def test_exceptions_of_user_functions_propagate_unchanged() -> None:
    model = shard()
    for name, call in RAISING.items():
        with about(name), pytest.raises(Odd):
            call(net(), model)
        dist.barrier()
    module = net()
    assert wrap(module) is module, "outside of a block nothing is wrapped"
    step(model)
    assert not difference(model, 1)
    model.register_comm_hook(None, raises)
    with pytest.raises(Odd):
        step(model)


# -- allowed, although it looks odd


@both_forms
@on_ranks(2)
def test_values_loaded_while_gradients_wait_leave_them(use_orig_params: bool) -> None:
    moved, plain = added_to(reference(0)), net()
    for _ in range(2):
        torch.stack([loss_of(plain, rank) for rank in range(2)]).mean().backward()
        plain.load_state_dict(moved)
    sgd(plain).step()
    for kind in (FULL, SHARDED):
        model = shard(use_orig_params=use_orig_params)
        with FSDP.state_dict_type(model, kind):
            no_sync(model, loss_of(model).backward)
            model.load_state_dict(model.state_dict())
            model.load_state_dict(moved)
        loss_of(model).backward()
        sgd(model).step()
        assert not difference(model, plain.state_dict())
