"""Optimizers that key their state by names, dicts without param_groups, and state of no parameter:
as torch's FSDP1 has them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig as TorchFullOptimConfig
from torch.distributed.fsdp import FullStateDictConfig as TorchFullConfig
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy

from fsdp_compat import FullOptimStateDictConfig, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import CheckpointError, UsageError
from tests.state.test_optim import (
    OPTIMIZERS,
    Block,
    assert_equal_states,
    assert_four_facts,
    assert_state,
    full_state,
    make_model,
    shard,
    train,
)
from tests.support.parity import flat_form
from tests.support.ranks import run_ranks

FULL = (
    TorchFullConfig(offload_to_cpu=False),
    TorchFullOptimConfig(offload_to_cpu=False, rank0_only=False),
)


def pair(use_orig_params: bool) -> tuple[Any, Any]:
    """Torch's model and ours."""
    theirs = TorchFSDP(
        make_model(0, odd=False),
        auto_wrap_policy=TorchWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    return theirs, shard(make_model(0, odd=False), ("FULL_SHARD", use_orig_params, "blocks"))


class Named(torch.optim.Adam):
    """Its state dict is keyed by what the model calls its parameters, as torch.distributed.optim's
    and TorchRec's are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.02)
        self.names = [name for name, _ in model.named_parameters()]

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        groups = [
            {**group, "params": [self.names[number] for number in group["params"]]}
            for group in found["param_groups"]
        ]
        return {
            "state": {self.names[number]: entry for number, entry in found["state"].items()},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        groups = [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        state = {numbers[name]: entry for name, entry in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": groups})


def torchs_full(model: Any, optimizer: Any, state: Any = None) -> Any:
    with TorchFSDP.state_dict_type(model, TorchType.FULL_STATE_DICT, *FULL):
        return TorchFSDP.optim_state_dict(model, optimizer, state)


def torchs_loadable(model: Any, optimizer: Any, state: Any, **kwargs: Any) -> Any:
    with TorchFSDP.state_dict_type(model, TorchType.FULL_STATE_DICT, *FULL):
        return TorchFSDP.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state), **kwargs)


def _by_names(use_orig_params: bool) -> None:
    theirs, ours = pair(use_orig_params)
    their_optimizer, optimizer = Named(theirs), Named(ours)
    numbered = OPTIMIZERS["Adam"](ours.parameters())
    for model, its in ((theirs, their_optimizer), (ours, optimizer)):
        train(model, its, range(2))
    expected, found = torchs_full(theirs, their_optimizer), full_state(ours, optimizer)
    assert_state(found["state"], expected["state"], tolerance=1e-5)
    assert [sorted(group.pop("params")) for group in found["param_groups"]] == [
        sorted(group.pop("params")) for group in expected["param_groups"]
    ]
    assert found["param_groups"] == expected["param_groups"]

    found, expected = full_state(ours, optimizer), torchs_full(theirs, their_optimizer)
    loadable = FSDP.optim_state_dict_to_load(ours, optimizer, found, is_named_optimizer=True)
    torchs = torchs_loadable(theirs, their_optimizer, expected, is_named_optimizer=True)
    parts = {name for name, p in ours.named_parameters() if p.numel()}
    assert loadable["state"].keys() & parts == torchs["state"].keys() & {
        n for n, p in theirs.named_parameters() if p.numel()
    }
    assert [sorted(g["params"]) for g in loadable["param_groups"]] == [
        sorted(g["params"]) for g in torchs["param_groups"]
    ]
    before = copy.deepcopy(full_state(ours, optimizer))
    train(ours, optimizer, range(2, 4))
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT):
        sharded = FSDP.optim_state_dict(ours, optimizer)
        again = FSDP.optim_state_dict_to_load(ours, optimizer, sharded, is_named_optimizer=True)
    assert again["state"].keys() == loadable["state"].keys()
    alone = before if dist.get_rank() == 0 else None
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(ours, StateDictType.FULL_STATE_DICT, None, config):
        from_first = FSDP.optim_state_dict_to_load(ours, optimizer, alone, is_named_optimizer=True)
    for state in (loadable, from_first):
        train(ours, optimizer, range(2, 4))
        optimizer.load_state_dict(state)
        assert_state(full_state(ours, optimizer)["state"], before["state"])
    numbered.load_state_dict(FSDP.optim_state_dict_to_load(ours, numbered, before))
    assert_state(full_state(ours, numbered)["state"], before["state"])
    with pytest.raises(UsageError, match="is not keyed by its parameters") as caught:
        FSDP.optim_state_dict(ours, optimizer, before)
    assert_four_facts(caught.value)


@flat_form
def test_an_optimizer_may_key_its_state_by_names(use_orig_params: bool) -> None:
    run_ranks(2, _by_names, use_orig_params)


def _without_groups(use_orig_params: bool) -> None:
    theirs, ours = pair(use_orig_params)
    their_optimizer, optimizer = (OPTIMIZERS["Adam"](m.parameters()) for m in (theirs, ours))
    for model, its in ((theirs, their_optimizer), (ours, optimizer)):
        train(model, its, range(2))
    whole = full_state(ours, optimizer)
    state_alone = {"state": optimizer.state_dict()["state"]}
    expected = torchs_full(
        theirs, their_optimizer, {"state": their_optimizer.state_dict()["state"]}
    )
    found = FSDP.optim_state_dict(ours, optimizer, state_alone)
    assert found.keys() == expected.keys() == {"state"}
    assert_state(found["state"], expected["state"], tolerance=1e-5)
    torchs = torchs_loadable(theirs, their_optimizer, expected)
    names = [name for name, _ in make_model(0, odd=False).named_parameters()]
    for given in (
        found,
        {"state": {number: found["state"][name] for number, name in enumerate(names)}},
    ):
        loadable = FSDP.optim_state_dict_to_load(ours, optimizer, given)
        assert loadable.keys() == torchs.keys() == {"state"}
        other = OPTIMIZERS["Adam"](ours.parameters())
        other.load_state_dict({**loadable, "param_groups": optimizer.state_dict()["param_groups"]})
        if given is found or not use_orig_params:  # numbers count what the optimizer has
            assert_state(full_state(ours, other)["state"], whole["state"])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_param_groups_may_be_missing_both_ways(use_orig_params: bool) -> None:
    run_ranks(2, _without_groups, use_orig_params)


def _of_no_parameter() -> None:
    theirs, ours = pair(False)
    their_optimizer, optimizer = (OPTIMIZERS["Adam"](m.parameters()) for m in (theirs, ours))
    for model, its in ((theirs, their_optimizer), (ours, optimizer)):
        train(model, its, range(1))
    own = {"seen": torch.arange(3.0), "note": "text"}
    theirs_given, given = (
        copy.deepcopy(their_optimizer.state_dict()),
        copy.deepcopy(optimizer.state_dict()),
    )
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
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(ours, StateDictType.FULL_STATE_DICT, None, config):
        alone = FSDP.optim_state_dict_to_load(
            ours, optimizer, found if dist.get_rank() == 0 else None
        )
    torchs = torchs_loadable(theirs, their_optimizer, expected)
    for loadable in (FSDP.optim_state_dict_to_load(ours, optimizer, found), alone, torchs):
        assert torch.equal(loadable["state"].pop("seen"), own["seen"])
        assert loadable["state"].pop("note") == "text"
    assert_equal_states(
        alone, FSDP.optim_state_dict_to_load(ours, optimizer, full_state(ours, optimizer))
    )
    found["state"]["tables"] = {"rows": torch.ones(2)}
    with pytest.raises(CheckpointError, match="is_named_optimizer") as refused:
        FSDP.optim_state_dict_to_load(ours, optimizer, found)
    assert_four_facts(refused.value)
    passed_on = FSDP.optim_state_dict_to_load(ours, optimizer, found, is_named_optimizer=True)
    assert torch.equal(passed_on["state"]["tables"]["rows"], torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        full_state(ours, optimizer)


def test_state_of_no_parameter_is_saved_and_loaded() -> None:
    run_ranks(2, _of_no_parameter)
