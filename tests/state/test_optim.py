"""optim_state_dict and optim_state_dict_to_load beyond values, which test_matrix.py compares: what
is sent, what may be missing, what is refused."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp_compat import FullOptimStateDictConfig, OptimStateKeyType, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import CheckpointError, FsdpCompatError, UsageError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.checkpoints import sharded as in_front_end
from tests.support.memory import NewBytes
from tests.support.odd_model import (
    Block,
    Config,
    OddModel,
    assert_same,
    by_rank,
    each_tensor,
    make_model,
    shard,
    stack,
    state_by_name,
    train,
    whole,
)
from tests.support.optimizer_state import (
    FEW_CONFIGS,
    FULL,
    OPTIMIZERS,
    SHARDED,
    Named,
    NeedsClosure,
    Trained,
    assert_compact,
    assert_equal_states,
    from_rank0,
    full_state,
    load,
    load_into_new,
    loadable,
    num_sent,
    older,
    params_of,
    refuses,
    settings,
    sharded,
    sharded_state,
    torchs_full,
    torchs_loadable,
    torchs_pair,
    trained,
)
from tests.support.parity import both_forms, flat_form, groups_of
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

# --- trained beside the unsharded model -----------------------------------------------------------


def assert_same_groups(found: Any, expected: Any) -> None:
    assert settings(found) == settings(expected)
    for group, wanted in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert sorted(group["params"]) == sorted(wanted["params"])


@pytest.mark.parametrize("world_size", sample([1, 2, 3], 2))
@on_ranks("world_size")
def test_the_full_form_equals_the_unsharded_optimizers_state(world_size: int) -> None:
    for number, kind in enumerate(OPTIMIZERS):
        config = FEW_CONFIGS[(number + dist.get_world_size()) % 4]
        plain, reference = trained(make_model(), kind, steps=0)
        model, optimizer = sharded(config, kind, steps=0)
        # Adagrad has state before the first step
        before = state_by_name(plain, reference)["state"]
        assert_same(full_state(model, optimizer)["state"], before)
        losses = train(plain, reference, range(3))
        assert train(model, optimizer, range(3)) == pytest.approx(losses, rel=1e-5)
        found, expected = full_state(model, optimizer), state_by_name(plain, reference)
        assert_same(found["state"], expected["state"], rtol=1e-4, atol=1e-4)
        assert_same_groups(found, expected)
        own = {number: dict(entry) for number, entry in enumerate(optimizer.state.values())}
        assert_compact(found["state"] | own)


def with_spare() -> OddModel:
    """A model with a block that never runs."""
    model = make_model()
    model.spare = Block()
    return model


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_parameter_groups_keep_their_settings_and_missing_state_stays_missing(
    world_size: int,
) -> None:
    plain, reference = trained(with_spare(), groups=True)
    expected = state_by_name(plain, reference)
    assert not [name for name in expected["state"] if name.startswith(("spare", "frozen"))]
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model, optimizer = trained(shard(with_spare(), (strategy, True, "blocks")), groups=True)
        found = full_state(model, optimizer)
        assert_same(found["state"], expected["state"], rtol=1e-4, atol=1e-4)
        assert_same_groups(found, expected)
        other = torch.optim.AdamW(params_of(model, True), lr=7.0)
        other.param_groups[0]["weight_decay"] = 5.0
        assert_same(load(model, other, found), found["state"])
        assert settings(state_by_name(model, other)) == settings(found)
        by_number = OptimStateKeyType.PARAM_ID
        numbered = older("rekey_optim_state_dict", found, by_number, plain, optim=reference)
        wanted = loadable(model, optimizer, found)
        for given in (found, numbered):
            assert_same(from_rank0(model, optimizer, given)["state"], wanted["state"])


# --- what is sent, and who has what ---------------------------------------------------------------


@on_ranks(2)
def test_a_full_dict_takes_one_collective_per_group_and_state_others_none() -> None:
    for config in FEW_CONFIGS:
        model, optimizer = trained(shard(make_model(odd=False), config), "Adam")
        num_sent(model, clear=True)
        found = full_state(model, optimizer)
        frozen = {"frozen.weight", "frozen.bias"}
        sharded_groups = [
            group
            for group, names in groups_of(model)
            if group.shard.ranks > 1 and not frozen & set(names)
        ]
        # exp_avg, exp_avg_sq, max_exp_avg_sq
        assert num_sent(model, clear=True) == 3 * len(sharded_groups)
        for state in (found, sharded_state(model, optimizer)):
            optimizer.load_state_dict(loadable(model, optimizer, state))
        assert num_sent(model) == 0
        assert_same(full_state(model, optimizer)["state"], found["state"])


@on_ranks(2)
def test_rank_0_broadcasts_its_dict_one_unit_at_a_time() -> None:
    model = FSDP(stack(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    full, unit_nbytes = full_state(model, optimizer), 64 * 64 * 4
    expected = loadable(model, optimizer, full)
    for given in (None, {}):
        mine = full if dist.get_rank() == 0 else given
        with NewBytes() as new:
            found = older("scatter_full_optim_state_dict", mine, model, optim=optimizer)
        assert_equal_states(found, expected)
        assert new.peak - new.now <= 2 * unit_nbytes
    before = num_sent(model)
    found = older("scatter_full_optim_state_dict", full, model, optim=optimizer)
    assert num_sent(model) == before, "where every rank has the dict nothing is sent"
    assert_equal_states(found, expected)


@on_ranks(4)
def test_disjoint_process_groups_load_from_their_own_rank_0() -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = dist.get_rank() // 2
    half = halves[number]
    model = shard(make_model(number), FEW_CONFIGS[0], process_group=half)
    optimizer = trained(model, "Adam", 1 + number)[1]
    expected = loadable(model, optimizer, full_state(model, optimizer))
    for group in (None, half):
        alone = older("full_optim_state_dict", model, optimizer, group=group)
        assert bool(alone) is (dist.get_rank() in (0, 2))
        given, options = alone or None, {"optim": optimizer, "group": group}
        found = older("scatter_full_optim_state_dict", given, model, **options)
        assert_equal_states(found, expected)


@on_ranks(2)
def test_units_over_different_ranks_do_not_load_from_one_rank() -> None:
    """Rank 0 does not have the state of a part that the other rank has for itself."""
    halves = [dist.new_group([0]), dist.new_group([1])]
    model = make_model()
    model.blocks[0] = FSDP(model.blocks[0], process_group=halves[dist.get_rank()])
    model, optimizer = trained(FSDP(model), steps=1)
    full = full_state(model, optimizer)
    loadable(model, optimizer, full)
    with refuses(UsageError, "over different ranks"):
        from_rank0(model, optimizer, full)


def in_container() -> tuple[Any, Any]:
    """A container with parameters beside the wrapped model, and an optimizer of all."""
    model = shard(make_model(), FEW_CONFIGS[0])
    container = nn.ModuleDict({"model": model, "plain": nn.Linear(2, 2)})
    optimizer = OPTIMIZERS["Adam"](container.parameters())
    (model(torch.tensor([1, 2])).sum() + container["plain"](torch.ones(2)).sum()).backward()
    optimizer.step()
    return container, optimizer


@on_ranks(2)
def test_rank_0_broadcasts_state_of_unmanaged_parameters() -> None:
    container, optimizer = in_container()
    full = full_state(container, optimizer)
    full["state"]["plain.weight"].update(note="text", pair=[torch.ones(2), 3])
    full["state"]["model.embed.weight"].update(count=3, note="text")
    expected, found = loadable(container, optimizer, full), from_rank0(container, optimizer, full)
    for its in (found, expected):
        ((values, number),) = [e.pop("pair") for e in its["state"].values() if "pair" in e]
        assert torch.equal(values, torch.ones(2)) and number == 3
    assert_equal_states(found, expected)


@pytest.mark.parametrize(
    "config", [*FEW_CONFIGS[:2], ("HYBRID_SHARD", False, "blocks"), ("HYBRID_SHARD", True, "none")]
)
@on_ranks(4)
def test_ranks_load_whole_values_in_turns_and_raise_alone(config: Config) -> None:
    model, optimizer = sharded(config, steps=1)
    state, values, rank = full_state(model, optimizer), model.state_dict(), dist.get_rank()

    def by_older(model: FSDP, optimizer: Any, state: Any) -> dict[str, Any]:
        return older("shard_full_optim_state_dict", state, model, optim=optimizer)

    for load_on in (loadable, by_older):
        optimizer.state.clear()
        for turn in range(dist.get_world_size()):
            if turn == rank:
                optimizer.load_state_dict(load_on(model, optimizer, state))
                model.load_state_dict(values)
                for wrong in (None, {}):
                    with refuses(UsageError, "None or {}"):
                        load_on(model, optimizer, wrong)
                with refuses(CheckpointError, "another model"):
                    load_on(model, optimizer, {"state": {"other": {}}})
            dist.barrier()
        assert_same(full_state(model, optimizer)["state"], state["state"])


@both_forms
@on_ranks(2)
def test_whole_states_without_optim_state_dict_to_load_are_cut_or_refused(
    use_orig_params: bool,
) -> None:
    model, optimizer = sharded(("FULL_SHARD", use_orig_params, "blocks"), steps=1)
    state = full_state(model, optimizer)
    if not use_orig_params:
        with refuses(CheckpointError, "optim_state_dict_to_load"):
            optimizer.load_state_dict(state)
        return
    train(model, optimizer, range(1, 2))
    wanted = full_state(model, optimizer)
    other, its = sharded(("FULL_SHARD", use_orig_params, "blocks"), steps=1)
    its.load_state_dict(state)
    train(other, its, range(1, 2))
    assert_equal_states(full_state(other, its), wanted)


@pytest.mark.parametrize("config", FEW_CONFIGS[:2])
@on_ranks(2)
def test_a_dict_missing_or_refused_on_one_rank_is_refused_on_all(config: Config) -> None:
    model, optimizer = sharded(config, steps=1)
    state: Any = full_state(model, optimizer)
    mine = dist.get_rank() == 0

    def given(given: Any, rank0_only: bool) -> Any:
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        with FSDP.state_dict_type(model, FULL, None, config):
            return loadable(model, optimizer, given)

    renamed = {**state, "state": {f"other.{name}": value for name, value in state["state"].items()}}
    misshapen = copy.deepcopy(state)
    misshapen["state"]["blocks.0.up.weight"]["exp_avg"] = torch.zeros(5, 4)
    boxes = sharded_state(model, optimizer)
    cases: tuple[tuple[Any, bool, type[FsdpCompatError], str], ...] = (
        (None if mine else state, True, UsageError, "on the first rank"),
        (None, True, UsageError, "on the first rank"),
        (renamed if mine else None, True, CheckpointError, "other."),
        (renamed if mine else state, True, CheckpointError, "other."),
        (boxes if mine else None, True, CheckpointError, "cannot send a sharded"),
        ([1] if mine else state, True, FsdpCompatError, "not an optimizer state dict"),
        (renamed, False, CheckpointError, "other."),
        (misshapen, False, CheckpointError, "blocks.0.up.weight"),
        *((wrong, False, UsageError, "") for wrong in ({}, {"param_groups": []}, [1], "text")),
        (optimizer.state_dict(), False, FsdpCompatError, ""),
    )
    for its, rank0_only, kind, text in cases:
        with refuses(kind, text):
            given(its, rank0_only)
    with pytest.raises(FsdpCompatError, match="expected:"):  # another order of arguments
        FSDP.optim_state_dict_to_load(state, model, optimizer)  # type: ignore[arg-type]
    assert_same(full_state(model, optimizer)["state"], state["state"])
    found = given(state if mine else None, True)
    assert_equal_states(found, given(state, False))  # nothing is left behind


@on_ranks(2)
def test_containers_given_dicts_and_load_directly_work() -> None:
    container, optimizer = in_container()
    found = FSDP.optim_state_dict(container, optimizer)
    given = FSDP.optim_state_dict(container, optimizer, optimizer.state_dict())
    assert_same(given["state"], found["state"])
    assert {"model.blocks.0.up.weight", "plain.weight"} <= found["state"].keys()
    assert found["state"]["plain.weight"]["exp_avg"].shape == (2, 2)
    other = OPTIMIZERS["Adam"](container.parameters())
    answer = FSDP.optim_state_dict_to_load(
        model=container, optim=other, optim_state_dict=found, load_directly=True
    )
    assert_same(full_state(container, other)["state"], found["state"])
    assert_equal_states(answer, loadable(container, other, found))
    lr_changed = copy.deepcopy(optimizer.state_dict())
    lr_changed["param_groups"][0]["lr"] = 0.5
    assert FSDP.optim_state_dict(container, optimizer, lr_changed)["param_groups"][0]["lr"] == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.02


@on_ranks(2)
def test_an_optimizer_of_some_parameters_loads_their_part_of_a_dict() -> None:
    model, everything = sharded(("FULL_SHARD", True, "blocks"), "Adam")
    full = full_state(model, everything)
    part = OPTIMIZERS["Adam"](model.module.blocks[1].parameters())
    expected = {n: entry for n, entry in full["state"].items() if n.startswith("blocks.1.")}
    assert_same(load(model, part, full), expected)


# --- before the first step ------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate's, whose attributes no copy can be made of."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.secret = dist.group.WORLD

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pytest.fail("it is asked for its state, not for a step")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_a_template_is_what_a_first_step_makes_and_changes_nothing(kind: str) -> None:
    for config in FEW_CONFIGS[:3]:
        model, optimizer = sharded(config, kind, steps=0)
        before = [p.detach().clone() for p in model.parameters()]
        had_state = bool(optimizer.state)  # Adagrad's
        hook = optimizer.register_step_pre_hook(lambda *_: pytest.fail("no step is made"))
        state = sharded_state(model, Wrapper(optimizer))["state"]
        assert bool(optimizer.state) is had_state
        for p, value in zip(model.parameters(), before, strict=True):
            assert p.grad is None and torch.equal(p, value)
        assert all(entry.get("step", 0) == 0 for entry in state.values())
        hook.remove()
        train(model, optimizer, range(1))
        after = full_state(model, optimizer)["state"]
        assert {name: set(entry) for name, entry in state.items() if entry} == {
            name: set(entry) for name, entry in after.items()
        }
        steps = [entry["step"] for entry in optimizer.state.values() if "step" in entry]
        assert len({id(step) for step in steps}) == len(steps), "each has a count of its own"


class KeepsMasters(torch.optim.SGD):
    """Keeps a copy of what it trains, and a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[p]:
                self.state[p].update(master=p.detach().clone(), rounds=3)
            self.state[p]["master"].sub_(p.grad, alpha=0.1)
            p.copy_(self.state[p]["master"])


@on_ranks(2)
def test_template_entries_equal_those_of_a_first_step() -> None:
    model = shard(make_model(), FEW_CONFIGS[1])
    masters = sharded_state(model, KeepsMasters(model.parameters(), weight_decay=0.5))["state"]
    by_names = sharded_state(model, Named(model))["state"]
    with pytest.warns(UserWarning, match="no closure"):
        assert sharded_state(model, NeedsClosure(model.parameters()))["state"] == {}
    with FSDP.state_dict_type(model, SHARDED):
        parts = {name: value for name, value in model.state_dict().items() if name in masters}
    trainable = {name for name, p in make_model().named_parameters() if p.requires_grad}
    assert by_names.keys() == parts.keys() == trainable
    assert all(entry["rounds"] == 3 for entry in masters.values())
    assert_same({name: entry["master"] for name, entry in masters.items()}, whole(parts))
    assert full_state(model, OPTIMIZERS["Adam"](model.parameters()))["state"] == {}, "as with torch"


class OneUnitUsed(nn.ModuleDict):
    """Only the first rank has a part of its first unit; the other one never runs."""

    def __init__(self) -> None:
        super().__init__({"used": nn.Linear(1, 2, bias=False), "spare": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        return self["used"](x)


@on_ranks(3)
def test_a_rank_without_state_adds_none_to_the_others(tmp_path: Path) -> None:
    units = ModuleWrapPolicy({nn.Linear})
    model = FSDP(OneUnitUsed(), use_orig_params=True, auto_wrap_policy=units)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.numel()])
    model(torch.ones(3, 1)).sum().backward()
    for p in model.parameters():
        p.grad = p.grad if p.numel() else None
    optimizer.step()
    assert by_rank(bool(optimizer.state)) == [True, False, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state = sharded_state(model, optimizer)
    assert state["state"].keys() == {"used.weight"}
    assert all(entry["step"] == 1 for entry in state["state"].values())
    dcp.save(state, checkpoint_id=tmp_path)


# --- torch's FSDP1 --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use_orig_params", "kind"),
    sample([(False, "Adam"), (False, "SGD"), (True, "AdamW"), (True, "Adagrad")], 0, 1),
)
@on_ranks(2)
def test_optimizer_dicts_equal_torchs_and_torchs_load(use_orig_params: bool, kind: str) -> None:
    (theirs, their_optimizer), (ours, optimizer) = torchs_pair(use_orig_params, kind)
    expected, found = torchs_full(theirs, their_optimizer), full_state(ours, optimizer)
    assert found.keys() == expected.keys()
    if not use_orig_params:  # otherwise torch sorts by name
        assert list(found["state"]) == list(expected["state"])
    assert_same(found["state"], expected["state"], rtol=1e-5, atol=1e-5)
    assert found["param_groups"] == expected["param_groups"]

    # torch's own, in which names may share a step, and one of other values
    for state in (expected["state"], each_tensor(expected["state"], lambda value: value * 2)):
        assert_same(load_into_new(ours, kind, {**expected, "state": state}), state)


@flat_form
@on_ranks(2)
def test_an_optimizer_may_key_its_state_by_names(use_orig_params: bool) -> None:
    (theirs, _), (ours, _) = torchs_pair(use_orig_params, steps=0)
    their_optimizer, optimizer = Named(theirs), Named(ours)
    for model, its in ((theirs, their_optimizer), (ours, optimizer)):
        train(model, its, range(2))
    expected, found = torchs_full(theirs, their_optimizer), full_state(ours, optimizer)
    assert_same(found["state"], expected["state"], rtol=1e-5, atol=1e-5)
    assert_same_groups(found, expected)

    named = loadable(ours, optimizer, found, is_named_optimizer=True)
    torchs = torchs_loadable(theirs, their_optimizer, expected, is_named_optimizer=True)
    parts = {name for name, p in ours.named_parameters() if p.numel()}
    their_parts = {name for name, p in theirs.named_parameters() if p.numel()}
    assert named["state"].keys() & parts == torchs["state"].keys() & their_parts
    assert_same_groups(named, torchs)
    train(ours, optimizer, range(2, 4))
    boxes = sharded_state(ours, optimizer)
    again = loadable(ours, optimizer, boxes, is_named_optimizer=True)
    assert again["state"].keys() == named["state"].keys()
    for state in (named, from_rank0(ours, optimizer, found, is_named_optimizer=True)):
        train(ours, optimizer, range(2, 4))
        optimizer.load_state_dict(state)
        assert_same(full_state(ours, optimizer)["state"], found["state"])
    assert_same(load_into_new(ours, "Adam", found), found["state"])
    with refuses(UsageError, "is not keyed by its parameters"):
        FSDP.optim_state_dict(ours, optimizer, found)


@both_forms
@on_ranks(2)
def test_param_groups_may_be_missing_both_ways(use_orig_params: bool) -> None:
    (theirs, their_optimizer), (ours, optimizer) = torchs_pair(use_orig_params)
    expected = torchs_full(
        theirs, their_optimizer, {"state": their_optimizer.state_dict()["state"]}
    )
    state = optimizer.state_dict()
    found = FSDP.optim_state_dict(ours, optimizer, {"state": state["state"]})
    assert found.keys() == expected.keys() == {"state"}
    assert_same(found["state"], expected["state"], rtol=1e-5, atol=1e-5)
    its = loadable(ours, optimizer, found)
    torchs = torchs_loadable(theirs, their_optimizer, copy.deepcopy(expected))
    assert its.keys() == torchs.keys() == {"state"}
    other = OPTIMIZERS["Adam"](ours.parameters())
    other.load_state_dict({**its, "param_groups": state["param_groups"]})
    assert_same(full_state(ours, other)["state"], found["state"])


@on_ranks(2)
def test_state_of_no_parameter_is_saved_and_loaded() -> None:
    (theirs, their_optimizer), (ours, optimizer) = torchs_pair(False, steps=1)
    own = {"seen": torch.arange(3.0), "note": "text"}
    theirs_given, given = (copy.deepcopy(its.state_dict()) for its in (their_optimizer, optimizer))
    theirs_given["state"].update(own)
    given["state"].update(own)
    with pytest.warns(UserWarning, match="seen, note") as caught:
        found = FSDP.optim_state_dict(ours, optimizer, given)
    assert {each.filename for each in caught if "seen, note" in str(each.message)} == {__file__}
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
    without = {"state": found["state"]}
    with refuses(CheckpointError, "is_named_optimizer"):  # no groups list the parameters
        loadable(ours, optimizer, without)
    for passed_on in (
        loadable(ours, optimizer, found),
        from_rank0(ours, optimizer, found),
        loadable(ours, optimizer, without, is_named_optimizer=True),
    ):
        assert torch.equal(passed_on["state"]["tables"]["rows"], torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        full_state(ours, optimizer)


def in_groups(front_end: str, *settings: dict[str, Any]) -> Trained:
    """A model, and an optimizer of it after a step, with a group for each of the settings."""
    torch.manual_seed(0)
    model = in_front_end(front_end, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    params = [*model.parameters()]
    parts = (params[:2], params[2:]) if len(settings) > 1 else (params,)
    groups = [{"params": p, **its} for p, its in zip(parts, settings, strict=True)]
    optimizer = torch.optim.AdamW(groups)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("front_end", ["flat original", "rows"])
@on_ranks(2)
def test_groups_that_were_saved_with_other_settings_are_refused(front_end: str) -> None:
    one, other = {"lr": 0.1, "betas": (0.8, 0.9)}, {"lr": 0.1, "betas": (0.7, 0.9)}
    flat, is_flat = StateDictOptions(flatten_optimizer_state_dict=True), front_end != "rows"
    for had, have in (((one, other), (one,)), ((one,), (one, other))):
        (model, optimizer), (new_model, new) = (in_groups(front_end, *each) for each in (had, have))
        new.state.clear()
        for form in (FULL, SHARDED, *[StateDictType.LOCAL_STATE_DICT] * is_flat):
            with FSDP.state_dict_type(model, form):
                saved = FSDP.optim_state_dict(model, optimizer)
            with refuses(CheckpointError, "betas.*0.8.*0.7"):
                loadable(new_model, new, saved)
        with refuses(CheckpointError, "betas.*0.8.*0.7"):
            full = full_state(model, optimizer)
            older("shard_full_optim_state_dict", full, new_model, optim=new)
        for options in (None, flat) if is_flat else ():  # torch's own functions
            if options is None or len(had) == 2:  # else each parameter has its settings
                saved = get_optimizer_state_dict(model, optimizer, options=options)
                with refuses(CheckpointError, "betas.*0.8.*0.7"):
                    set_optimizer_state_dict(new_model, new, saved, options=options)
        assert not new.state
    reordered = in_groups(front_end, other, one)
    model, optimizer = in_groups(front_end, one, other)
    optimizer.load_state_dict(loadable(model, optimizer, full_state(*reordered)))
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.7, 0.8]
