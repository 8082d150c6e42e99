"""The six older calls for optimizer state: torch's signatures and layouts, one deprecation each;
their values are also in test_matrix.py."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import OptimStateKeyType
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.odd_model import (
    assert_same,
    make_model,
    shard,
    train,
)
from tests.support.optimizer_state import (
    OPTIMIZERS,
    assert_equal_states,
    full_state,
    load_into_new,
    loadable,
    params_of,
    refuses,
    rekeyed_as,
    sharded,
    trained,
)
from tests.support.ranks import on_ranks

NAME, NUMBER = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
SAVES = ("full_optim_state_dict", "sharded_optim_state_dict")
FULL, IN_PARTS = SAVES
LOADS = (
    *("shard_full_optim_state_dict", "scatter_full_optim_state_dict"),
    *("flatten_sharded_optim_state_dict", "rekey_optim_state_dict"),
)
SHARD, SCATTER, FLATTEN, REKEY = LOADS


def called(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an older call, which says once, to this file, that it is deprecated."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = getattr(FSDP, name)(*args, **kwargs)
    (warning,) = [warning for warning in caught if "deprecated; use" in str(warning.message)]
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    instead = "optim_state_dict" if name in SAVES else "optim_state_dict_to_load"
    assert str(warning.message).endswith(f"use FullyShardedDataParallel.{instead} instead.")
    return answer


def refused(kind: type[Exception], name: str, *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings(), refuses(kind):
        warnings.simplefilter("ignore")
        getattr(FSDP, name)(*args, **kwargs)


def numbers_in(state: dict[str, Any]) -> list[list[Any]]:
    return [group["params"] for group in state["param_groups"]]


@on_ranks(2)
def test_numbers_follow_the_optimizer_input() -> None:
    model = shard(make_model(), ("FULL_SHARD", True, "blocks"))
    for given in (list(model.parameters())[::-1], params_of(model, True)[::-1]):
        optimizer = OPTIMIZERS["AdamW"](given)
        train(model, optimizer, range(2))
        full = full_state(model, optimizer)
        found = called(FULL, model, optimizer, given, rank0_only=False)
        assert_same(found["state"], full["state"])
        wanted = loadable(model, optimizer, full)
        for name in (SHARD, SCATTER):
            its = full if name == SHARD or dist.get_rank() == 0 else None
            one = called(name, its, model, given)
            assert_same(one["state"], wanted["state"])
            assert numbers_in(one) == numbers_in(wanted)
    model, optimizer = trained(model, steps=1)
    full = full_state(model, optimizer)  # without input and optimizer: the model's parameters
    assert_equal_states(called(SHARD, full, model), loadable(model, optimizer, full))
    states = dict(enumerate(full["state"].values()))
    numbered = {"state": states, "param_groups": [{"params": list(states)}]}
    refused(CheckpointError, SHARD, {**numbered, "state": {**states, 99: {}}}, model)
    for wrong, kind in (([], ValueError), ([1, 2], TypeError), ([{"lr": 1}], AssertionError)):
        for name, *args in ((FULL, model, optimizer, wrong), (SHARD, full, model, wrong)):
            refused(kind, name, *args)
            refused(UsageError, name, *args)


def rekeyed(state: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
    return called(REKEY, state, kind, *args, **kwargs)


@on_ranks(2)
def test_a_dict_is_rekeyed_for_a_model_of_flat_parameters() -> None:
    """Numbers are those of the model without wrapping, whatever order its units have."""
    plain, reference = trained(make_model())
    expected = reference.state_dict()
    model, optimizer = sharded(("FULL_SHARD", False, "always"))
    full = full_state(model, optimizer)
    for how in ({}, {"optim": optimizer}, {"optim_input": list(model.parameters())}):
        numbered = rekeyed(full, NUMBER, model, **how)
        assert numbers_in(numbered) == numbers_in(expected)
        assert_same(numbered["state"], expected["state"], rtol=1e-4, atol=1e-4)
        named = rekeyed(numbered, NAME, model, **how)
        assert_same(named["state"], full["state"])
        assert_same(load_into_new(model, "AdamW", named), full["state"])
    part = {"state": {"other": full["state"]["gain"]}, "param_groups": []}
    refused(CheckpointError, REKEY, part, NUMBER, model)
    names = [name for group in full["param_groups"] for name in group["params"]]
    wrapper = "_fsdp_wrapped_module."
    prefixed = {n: wrapper + n.replace("blocks.", f"blocks.{wrapper}") for n in names}
    raw = rekeyed_as(full, prefixed)  # names with what nested wrappers add
    assert_same(rekeyed(raw, NUMBER, plain, optim=reference)["state"], numbered["state"])
    assert_same(load_into_new(model, "AdamW", raw), full["state"])
    of_ddp = rekeyed_as(full, {name: f"module.{name}" for name in names})
    assert_same(load_into_new(model, "AdamW", of_ddp), full["state"])
