"""The six older calls for optimizer state: torch's signatures and layouts, one deprecation each,
the values of the newer calls."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import OptimStateKeyType as TorchKeyType

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import OptimStateKeyType
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.odd_model import assert_same, train, whole
from tests.support.optimizer_state import (
    OPTIMIZERS,
    SHARDED,
    Block,
    assert_equal_states,
    assert_state,
    by_name,
    full_state,
    load_into_new,
    loadable,
    make_model,
    num_sent,
    params_of,
    refuses,
    rekeyed_as,
    shard,
    sharded,
    sharded_state,
    split_decay,
    trained,
)
from tests.support.ranks import on_ranks

NAME, NUMBER = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
NEW = {
    "full_optim_state_dict": "optim_state_dict",
    "sharded_optim_state_dict": "optim_state_dict",
    "shard_full_optim_state_dict": "optim_state_dict_to_load",
    "flatten_sharded_optim_state_dict": "optim_state_dict_to_load",
    "scatter_full_optim_state_dict": "optim_state_dict_to_load",
    "rekey_optim_state_dict": "optim_state_dict_to_load",
}


def test_signatures_are_torchs() -> None:
    for name in NEW:
        ours, theirs = (
            inspect.signature(getattr(cls, name)).parameters.values() for cls in (FSDP, TorchFSDP)
        )
        assert [(p.name, p.kind, p.default) for p in ours] == [
            (p.name, p.kind, p.default) for p in theirs
        ], name


def called(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an older call, which says once, to this file, that it is deprecated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = getattr(FSDP, name)(*args, **kwargs)
    (warning,) = [warning for warning in caught if "deprecated; use" in str(warning.message)]
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    assert str(warning.message).endswith(f"use FullyShardedDataParallel.{NEW[name]} instead.")
    return answer


def refused(kind: type[Exception], name: str, *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings(), refuses(kind):
        warnings.simplefilter("ignore")
        getattr(FSDP, name)(*args, **kwargs)


def numbers_in(state: dict[str, Any]) -> list[list[Any]]:
    return [group["params"] for group in state["param_groups"]]


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_dicts_are_those_of_the_newer_calls(use_orig_params: bool) -> None:
    for kind in OPTIMIZERS:
        config = ("FULL_SHARD", use_orig_params, "blocks")
        model, optimizer = sharded(config, kind, groups=use_orig_params)
        full, boxes = full_state(model, optimizer), sharded_state(model, optimizer)
        with FSDP.state_dict_type(model, SHARDED):  # the form that is set does not matter
            found = called("full_optim_state_dict", model, optimizer, rank0_only=False)
        assert found["param_groups"] == full["param_groups"]
        assert_state(found["state"], full["state"])
        alone = called("full_optim_state_dict", model, optimizer)
        assert bool(alone) is (dist.get_rank() == 0)
        before = num_sent(model)
        found = called("sharded_optim_state_dict", model, optimizer)
        assert num_sent(model) == before
        assert found["param_groups"] == boxes["param_groups"]
        assert any(isinstance(v, ShardedTensor) for v in found["state"]["embed.weight"].values())
        assert_same(found["state"], whole(boxes["state"]))
        wanted = loadable(model, optimizer, full)
        for name, *given in (
            ("shard_full_optim_state_dict", full, model, None, optimizer),
            ("flatten_sharded_optim_state_dict", found, model, optimizer),
            ("scatter_full_optim_state_dict", alone or None, model, None, optimizer),
        ):
            assert_equal_states(called(name, *given), wanted)


@on_ranks(2)
def test_numbers_follow_the_optimizer_input() -> None:
    model = shard(make_model(), ("FULL_SHARD", True, "blocks"))
    for given in (list(model.parameters())[::-1], split_decay(model)[::-1]):
        optimizer = OPTIMIZERS["AdamW"](given)
        train(model, optimizer, range(2))
        full = full_state(model, optimizer)
        found = called("full_optim_state_dict", model, optimizer, given, rank0_only=False)
        assert_state(found["state"], full["state"])
        assert found["param_groups"] == full["param_groups"]
        wanted = loadable(model, optimizer, full)
        for name in ("shard_full_optim_state_dict", "scatter_full_optim_state_dict"):
            mine = full if name.startswith("shard") or dist.get_rank() == 0 else None
            one = called(name, mine, model, given)
            assert_state(one["state"], wanted["state"])
            assert numbers_in(one) == numbers_in(wanted)
            optimizer.load_state_dict(one)
        assert_state(full_state(model, optimizer)["state"], full["state"])
    model, optimizer = trained(model, steps=1)
    full = full_state(model, optimizer)  # without input and optimizer: the model's parameters
    found = called("shard_full_optim_state_dict", full, model)
    assert_equal_states(found, loadable(model, optimizer, full))
    states = dict(enumerate(full["state"].values()))
    numbered = {"state": states, "param_groups": [{"params": list(states)}]}
    found = called("shard_full_optim_state_dict", numbered, model)["state"].keys()
    present = {number for number, p in enumerate(model.parameters()) if p.numel()}
    assert present <= found <= states.keys()
    for wrong, kind in (
        (3, TypeError),
        ([], ValueError),
        ([1, 2], TypeError),
        ([{"lr": 1}], AssertionError),
    ):
        for name, *args in (
            ("full_optim_state_dict", model, optimizer, wrong),
            ("shard_full_optim_state_dict", full, model, wrong),
        ):
            refused(kind, name, *args)
            refused(UsageError, name, *args)


# --- keys -----------------------------------------------------------------------------------------


def rekeyed(state: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
    return called("rekey_optim_state_dict", state, kind, *args, **kwargs)


@pytest.mark.filterwarnings("ignore:The `optim_input` argument")
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("by", ["optim", "optim_input", "groups", "nothing"])
def test_rekeying_equals_torchs(kind: str, by: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))  # torch refuses ties
    optimizer = OPTIMIZERS[kind](params_of(model, by == "groups"))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    how: dict[str, Any] = {
        "optim": {"optim": optimizer},
        "optim_input": {"optim_input": list(model.parameters())},
        "groups": {"optim_input": split_decay(model)},
    }.get(by, {})
    numbered, named = optimizer.state_dict(), by_name(model, optimizer)
    for state, key_type, expected in (
        (numbered, "PARAM_NAME", named),
        (named, "PARAM_ID", numbered),
        (named, "PARAM_NAME", named),
        (numbered, "PARAM_ID", numbered),
    ):
        found = rekeyed(state, OptimStateKeyType[key_type], model, **how)
        assert_state(found["state"], expected["state"])
        if state is not expected:
            torchs = TorchFSDP.rekey_optim_state_dict(state, TorchKeyType[key_type], model, **how)
            assert_state(found["state"], torchs["state"])
            expected = torchs
        assert found["param_groups"] == expected["param_groups"]


def test_a_dict_without_state_is_rekeyed_and_keys_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = rekeyed(optimizer.state_dict(), NAME, model, optim=optimizer)
    assert named["state"] == {}
    assert numbers_in(named) == [["bias", "weight"]]
    groups = [{"params": ["weight", "bias"]}]
    for state in (
        {"state": {"weight": {}, 1: {}}, "param_groups": groups},
        {"state": {("weight",): {}}, "param_groups": []},
        {"state": {"other": {}}, "param_groups": groups},
        {"state": {}, "param_groups": [{"params": ["other"]}]},
        {"param_groups": groups},
        [1],
    ):
        refused(CheckpointError, "rekey_optim_state_dict", state, NUMBER, model, optim=optimizer)
    state = optimizer.state_dict()
    for kind in ("PARAM_ID", None):
        refused(UsageError, "rekey_optim_state_dict", state, kind, model, optim=optimizer)


@on_ranks(2)
def test_wrong_arguments_are_refused_on_every_rank() -> None:
    model, optimizer = sharded(("FULL_SHARD", False, "blocks"), "Adam", steps=0)
    full = "full_optim_state_dict"
    shard_full, scatter = "shard_full_optim_state_dict", "scatter_full_optim_state_dict"
    for name, *arguments in (
        (full, optimizer, model),
        (full, model, optimizer, None, "yes"),
        (full, nn.Linear(2, 2), optimizer),
        ("sharded_optim_state_dict", model, optimizer, "group"),
        (shard_full, model, {}),
        (shard_full, {}, model, None, model),
        ("flatten_sharded_optim_state_dict", {}, model, None),
        (scatter, None, model, None, optimizer),
        (scatter, {}, nn.Linear(2, 2), None, optimizer),
    ):
        refused(UsageError, name, *arguments)
    called(full, model, optimizer)


@on_ranks(2)
def test_a_dict_is_rekeyed_for_a_model_of_flat_parameters() -> None:
    """Numbers are those of the model without wrapping, whatever order its units have."""
    plain, reference = trained(make_model())
    expected = reference.state_dict()
    for policy in ("blocks", "always"):
        model, optimizer = sharded(("FULL_SHARD", False, policy))
        full = full_state(model, optimizer)
        for how in ({}, {"optim": optimizer}, {"optim_input": list(model.parameters())}):
            numbered = rekeyed(full, NUMBER, model, **how)
            assert numbers_in(numbered) == numbers_in(expected)
            assert_state(numbered["state"], expected["state"], tolerance=1e-4)
            named = rekeyed(numbered, NAME, model, **how)
            assert_state(named["state"], full["state"])
            assert sorted(named["param_groups"][0]["params"]) == sorted(full["state"])
            assert_state(load_into_new(model, "AdamW", named), full["state"])
        part = {"state": {"other": full["state"]["gain"]}, "param_groups": []}
        refused(CheckpointError, "rekey_optim_state_dict", part, NUMBER, model)
        prefixed = {
            name: f"_fsdp_wrapped_module.{name.replace('blocks.', 'blocks._fsdp_wrapped_module.')}"
            for name in full["state"]
        }
        raw = rekeyed_as(full, prefixed)  # names with what nested wrappers add
        assert_state(rekeyed(raw, NUMBER, plain, optim=reference)["state"], numbered["state"])
        assert_state(load_into_new(model, "AdamW", raw), full["state"])


class Beside(nn.Sequential):
    """A unit after a layer of no unit, and with ``extra`` one more parameter outside or inside."""

    def __init__(self, extra: str = "") -> None:
        first, block = nn.Linear(5, 5), Block()
        if extra == "inside":
            block.linear.register_parameter("extra", nn.Parameter(torch.ones(3)))
        super().__init__(first, FSDP(block))
        if extra == "outside":
            self.register_parameter("extra", nn.Parameter(torch.ones(3)))


LOADS: dict[str, Callable[..., Any]] = {
    "shard": lambda s, m, o: called("shard_full_optim_state_dict", s, m, optim=o),
    "input": lambda s, m, o: called("shard_full_optim_state_dict", s, m, list(m.parameters())),
    "scatter": lambda s, m, o: called(
        "scatter_full_optim_state_dict", None if dist.get_rank() else s, m, optim=o
    ),
    "flatten": lambda s, m, o: called("flatten_sharded_optim_state_dict", s, m, o),
}


@pytest.mark.parametrize("way", LOADS)
@on_ranks(2)
def test_only_missing_state_of_managed_parameters_is_an_error(way: str) -> None:
    """As in torch; a program may keep the state of the other ones itself."""
    for kind in ("Adam", "SGD"):
        model, outside, inside = Beside(), Beside("outside"), Beside("inside")
        make = OPTIMIZERS[kind]
        optimizer = make(model.parameters())
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        if way == "flatten":
            saved = called("sharded_optim_state_dict", model, optimizer)
        else:
            saved = called("full_optim_state_dict", model, optimizer, rank0_only=False)
        optimizer = make(outside.parameters())
        its = LOADS[way](saved, outside, optimizer)
        listed = its["param_groups"][0]["params"]
        assert set(its["state"]) == set(listed) == {1, 2, 3}  # the first one is missing
        listed.insert(0, 0)
        optimizer.load_state_dict(its)
        optimizer = make(inside.parameters())
        if kind == "Adam":
            with pytest.raises(ValueError):  # a count, and none
                LOADS[way](saved, inside, optimizer)
        else:
            assert set(LOADS[way](saved, inside, optimizer)["state"]) == {0, 1, 2}
