"""Optimizers that key their state by names, dicts without param_groups, and state of no parameter:
as torch's FSDP1 has them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.odd_model import train
from tests.support.optimizer_state import (
    OPTIMIZERS,
    Named,
    assert_equal_states,
    assert_four_facts,
    assert_state,
    from_rank0,
    full_state,
    load_into_new,
    loadable,
    make_model,
    settings,
    sharded_state,
    torchs_full,
    torchs_loadable,
    torchs_pair,
)
from tests.support.parity import flat_form
from tests.support.ranks import on_ranks


def groups_of(state: Any) -> list[list[Any]]:
    return [sorted(group["params"]) for group in state["param_groups"]]


@flat_form
@on_ranks(2)
def test_an_optimizer_may_key_its_state_by_names(use_orig_params: bool) -> None:
    (theirs, _), (ours, _) = torchs_pair(use_orig_params, steps=0)
    their_optimizer, optimizer = Named(theirs), Named(ours)
    for model, its in ((theirs, their_optimizer), (ours, optimizer)):
        train(model, its, range(2))
    expected, found = torchs_full(theirs, their_optimizer), full_state(ours, optimizer)
    assert_state(found["state"], expected["state"], tolerance=1e-5)
    assert groups_of(found) == groups_of(expected)
    assert settings(found) == settings(expected)

    named = loadable(ours, optimizer, found, is_named_optimizer=True)
    torchs = torchs_loadable(
        theirs, their_optimizer, copy.deepcopy(expected), is_named_optimizer=True
    )
    parts = {name for name, p in ours.named_parameters() if p.numel()}
    their_parts = {name for name, p in theirs.named_parameters() if p.numel()}
    assert named["state"].keys() & parts == torchs["state"].keys() & their_parts
    assert groups_of(named) == groups_of(torchs)
    train(ours, optimizer, range(2, 4))
    boxes = sharded_state(ours, optimizer)
    again = loadable(ours, optimizer, boxes, is_named_optimizer=True)
    assert again["state"].keys() == named["state"].keys()
    for state in (named, from_rank0(ours, optimizer, found, is_named_optimizer=True)):
        train(ours, optimizer, range(2, 4))
        optimizer.load_state_dict(state)
        assert_state(full_state(ours, optimizer)["state"], found["state"])
    assert_state(load_into_new(ours, "Adam", found), found["state"])
    with pytest.raises(UsageError, match="is not keyed by its parameters") as caught:
        FSDP.optim_state_dict(ours, optimizer, found)
    assert_four_facts(caught.value)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_param_groups_may_be_missing_both_ways(use_orig_params: bool) -> None:
    (theirs, their_optimizer), (ours, optimizer) = torchs_pair(use_orig_params)
    whole = full_state(ours, optimizer)
    state_alone = {"state": optimizer.state_dict()["state"]}
    theirs_alone = {"state": their_optimizer.state_dict()["state"]}
    expected = torchs_full(theirs, their_optimizer, theirs_alone)
    found = FSDP.optim_state_dict(ours, optimizer, state_alone)
    assert found.keys() == expected.keys() == {"state"}
    assert_state(found["state"], expected["state"], tolerance=1e-5)
    torchs = torchs_loadable(theirs, their_optimizer, copy.deepcopy(expected))
    names = [name for name, _ in make_model(0, odd=False).named_parameters()]
    numbered = {"state": {number: found["state"][name] for number, name in enumerate(names)}}
    for given in (found, numbered):
        its = loadable(ours, optimizer, given)
        assert its.keys() == torchs.keys() == {"state"}
        other = OPTIMIZERS["Adam"](ours.parameters())
        other.load_state_dict({**its, "param_groups": optimizer.state_dict()["param_groups"]})
        if given is found or not use_orig_params:  # numbers count what the optimizer has
            assert_state(full_state(ours, other)["state"], whole["state"])


@on_ranks(2)
def test_state_of_no_parameter_is_saved_and_loaded() -> None:
    (theirs, their_optimizer), (ours, optimizer) = torchs_pair(False, steps=1)
    own = {"seen": torch.arange(3.0), "note": "text"}
    theirs_given, given = (copy.deepcopy(its.state_dict()) for its in (their_optimizer, optimizer))
    theirs_given["state"].update(own)
    given["state"].update(own)
    with pytest.warns(UserWarning, match="seen, note") as caught:
        found = FSDP.optim_state_dict(ours, optimizer, given)
    assert {warning.filename for warning in caught if "seen, note" in str(warning.message)} == {
        __file__
    }
    expected = torchs_full(theirs, their_optimizer, theirs_given)
    for entries in (found["state"], expected["state"]):
        assert torch.equal(entries["seen"], own["seen"]) and entries["note"] == "text"
    alone = from_rank0(ours, optimizer, found)
    torchs = torchs_loadable(theirs, their_optimizer, expected)
    for its in (loadable(ours, optimizer, found), alone, torchs):
        assert torch.equal(its["state"].pop("seen"), own["seen"])
        assert its["state"].pop("note") == "text"
    assert_equal_states(alone, loadable(ours, optimizer, full_state(ours, optimizer)))
    found["state"]["tables"] = {"rows": torch.ones(2)}
    with pytest.raises(CheckpointError, match="is_named_optimizer") as refused:
        loadable(ours, optimizer, found)
    assert_four_facts(refused.value)
    passed_on = loadable(ours, optimizer, found, is_named_optimizer=True)
    assert torch.equal(passed_on["state"]["tables"]["rows"], torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        full_state(ours, optimizer)
