"""optim_state_dict and optim_state_dict_to_load beyond values, which test_matrix.py compares: what
is sent, what may be missing or differ between ranks, what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp_compat import FullOptimStateDictConfig, StateDictType, checkpoint
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.errors import CheckpointError, FsdpCompatError, UsageError
from tests.support.checkpoints import sharded as in_front_end
from tests.support.memory import NewBytes
from tests.support.odd_model import (
    Block,
    Config,
    assert_same,
    make_model,
    shard,
    stack,
    state_by_name,
    train,
)
from tests.support.optimizer_state import (
    FEW_CONFIGS,
    FULL,
    OPTIMIZERS,
    SHARDED,
    Named,
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
    torchs_pair,
    trained,
)
from tests.support.parity import groups_of
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
        plain, inner = make_model(), make_model()
        config = FEW_CONFIGS[(number + dist.get_world_size()) % 4]
        if config[2] != "none":  # a unit of its own, which never runs
            plain.spare, inner.spare = Block(), Block()
        groups = config[1]  # flat parameters have one
        _, reference = trained(plain, kind, steps=0, groups=groups)
        model, optimizer = trained(shard(inner, config), kind, steps=0, groups=groups)
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
        _, other = trained(model, kind, steps=0, groups=groups)
        for group in other.param_groups:
            group["lr"] = 7.0
        assert_same(load(model, other, found), found["state"])
        assert settings(full_state(model, other)) == settings(found)


# --- what is sent, and who has what ---------------------------------------------------------------


@on_ranks(2)
def test_a_full_dict_takes_one_collective_per_group_and_state_others_none() -> None:
    for config in FEW_CONFIGS:
        model, optimizer = trained(shard(make_model(odd=False), config), "Adam")
        num_sent(model, clear=True)
        found = full_state(model, optimizer)
        frozen = {"frozen.weight", "frozen.bias"}
        units = [names for group, names in groups_of(model) if group.shard.ranks > 1]
        # exp_avg, exp_avg_sq, max_exp_avg_sq
        assert num_sent(model, clear=True) == 3 * sum(not frozen & set(names) for names in units)
        for state in (found, sharded_state(model, optimizer)):
            optimizer.load_state_dict(loadable(model, optimizer, state))
        assert num_sent(model) == 0
        assert_same(full_state(model, optimizer)["state"], found["state"])


@on_ranks(2)
def test_rank_0_broadcasts_its_dict_one_unit_at_a_time() -> None:
    model = FSDP(stack(), auto_wrap_policy={"Linear"})
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    full, unit_nbytes = full_state(model, optimizer), 64 * 64 * 4
    expected = loadable(model, optimizer, full)
    with NewBytes() as new:
        mine = None if dist.get_rank() else full
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
    # and rank 0 does not have the state of a part that the other rank has for itself
    alone = [dist.new_group([rank]) for rank in range(4)]
    model = make_model()
    model.blocks[0] = FSDP(model.blocks[0], process_group=alone[dist.get_rank()])
    model, optimizer = trained(FSDP(model), steps=1)
    full = full_state(model, optimizer)
    loadable(model, optimizer, full)
    with refuses(UsageError, "over different ranks"):
        from_rank0(model, optimizer, full)


@on_ranks(2)
def test_parameters_beside_units_given_dicts_and_load_directly_work() -> None:
    model = shard(make_model(), FEW_CONFIGS[0])
    container = nn.ModuleDict({"model": model, "plain": nn.Linear(2, 2)})
    optimizer = OPTIMIZERS["Adam"](container.parameters())
    (model(torch.tensor([1, 2])).sum() + container["plain"](torch.ones(2)).sum()).backward()
    optimizer.step()
    full = FSDP.optim_state_dict(container, optimizer)
    assert {"model.blocks.0.up.weight", "plain.weight"} <= full["state"].keys()
    given = FSDP.optim_state_dict(container, optimizer, optimizer.state_dict())
    assert_same(given["state"], full["state"])
    other = OPTIMIZERS["Adam"](container.parameters())
    answer = loadable(container, other, full, load_directly=True)
    assert_same(full_state(container, other)["state"], full["state"])
    assert_equal_states(answer, loadable(container, other, full))
    lr_changed = copy.deepcopy(optimizer.state_dict())
    lr_changed["param_groups"][0]["lr"] = 0.5
    assert FSDP.optim_state_dict(container, optimizer, lr_changed)["param_groups"][0]["lr"] == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.02

    full["state"]["plain.weight"].update(note="text", pair=[torch.ones(2), 3])
    full["state"]["model.embed.weight"].update(count=3, note="text")
    expected, found = loadable(container, optimizer, full), from_rank0(container, optimizer, full)
    for its in (found, expected):
        ((pair, number),) = [e.pop("pair") for e in its["state"].values() if "pair" in e]
        assert torch.equal(pair, torch.ones(2)) and number == 3
    assert_equal_states(found, expected)


@pytest.mark.parametrize("config", [FEW_CONFIGS[0], ("HYBRID_SHARD", True, "none")])
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


@on_ranks(2)
def test_whole_states_without_optim_state_dict_to_load_are_cut_or_refused() -> None:
    model, optimizer = sharded(FEW_CONFIGS[0], steps=1)
    with refuses(CheckpointError, "optim_state_dict_to_load"):
        optimizer.load_state_dict(full_state(model, optimizer))
    model, optimizer = sharded(("FULL_SHARD", True, "blocks"), steps=1)
    state = full_state(model, optimizer)
    train(model, optimizer, range(1, 2))
    other, its = sharded(("FULL_SHARD", True, "blocks"), steps=1)
    its.load_state_dict(state)
    train(other, its, range(1, 2))
    assert_equal_states(full_state(other, its), full_state(model, optimizer))


@on_ranks(2)
def test_a_dict_missing_or_refused_on_one_rank_is_refused_on_all() -> None:
    model, optimizer = sharded(FEW_CONFIGS[1], steps=1)
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
        (renamed if mine else None, True, CheckpointError, "other."),
        (renamed if mine else state, True, CheckpointError, "other."),
        (boxes if mine else None, True, CheckpointError, "cannot send a sharded"),
        ([1] if mine else state, True, FsdpCompatError, "not an optimizer state dict"),
        (misshapen, False, CheckpointError, "blocks.0.up.weight"),
        *((wrong, False, UsageError, "") for wrong in ({}, {"param_groups": []}, [1])),
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


# --- before the first step ------------------------------------------------------------------------


@on_ranks(2)
def test_a_template_is_what_a_first_step_makes_and_changes_nothing() -> None:
    for kind, config in itertools.product(OPTIMIZERS, FEW_CONFIGS[:2]):
        model, optimizer = sharded(config, kind, steps=0)
        before = [p.detach().clone() for p in model.parameters()]
        had_state = bool(optimizer.state)  # Adagrad's
        hook = optimizer.register_step_pre_hook(lambda *_: pytest.fail("no step is made"))
        state = sharded_state(model, optimizer)["state"]
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


# --- torch's FSDP1 --------------------------------------------------------------------------------


@on_ranks(2)
def test_an_optimizer_may_key_its_state_by_names_as_in_torch() -> None:
    (theirs, _), (ours, _) = torchs_pair(False, steps=0)
    their_optimizer, optimizer = Named(theirs), Named(ours)
    for model, its in ((theirs, their_optimizer), (ours, optimizer)):
        train(model, its, range(2))
    expected, found = torchs_full(theirs, their_optimizer), full_state(ours, optimizer)
    assert_same(found["state"], expected["state"], rtol=1e-5, atol=1e-5)
    assert_same_groups(found, expected)
    boxes = sharded_state(ours, optimizer)
    for state in (
        loadable(ours, optimizer, found, is_named_optimizer=True),
        loadable(ours, optimizer, boxes, is_named_optimizer=True),
        from_rank0(ours, optimizer, found, is_named_optimizer=True),
    ):
        train(ours, optimizer, range(2, 4))
        optimizer.load_state_dict(state)
        assert_same(full_state(ours, optimizer)["state"], found["state"])
    assert_same(load_into_new(ours, "Adam", found), found["state"])
    with refuses(UsageError, "is not keyed by its parameters"):
        FSDP.optim_state_dict(ours, optimizer, found)


@on_ranks(2)
def test_state_of_no_parameter_is_saved_and_loaded() -> None:
    model, optimizer = sharded(FEW_CONFIGS[0], "Adam", steps=1)
    own, given = {"seen": torch.arange(3.0), "note": "text"}, copy.deepcopy(optimizer.state_dict())
    given["state"].update(own)
    with pytest.warns(UserWarning, match="seen, note") as caught:
        found = FSDP.optim_state_dict(model, optimizer, given)
    assert {each.filename for each in caught if "seen, note" in str(each.message)} == {__file__}
    without = loadable(model, optimizer, full_state(model, optimizer))
    for its in (loadable(model, optimizer, found), from_rank0(model, optimizer, found)):
        assert torch.equal(its["state"].pop("seen"), own["seen"])
        assert its["state"].pop("note") == "text"
        assert_equal_states(its, without)
    found["state"]["tables"] = {"rows": torch.ones(2)}
    only_state = {"state": found["state"]}
    with refuses(CheckpointError, "is_named_optimizer"):  # no groups list the parameters
        loadable(model, optimizer, only_state)
    for passed_on in (
        loadable(model, optimizer, found),
        from_rank0(model, optimizer, found),
        loadable(model, optimizer, only_state, is_named_optimizer=True),
    ):
        assert torch.equal(passed_on["state"]["tables"]["rows"], torch.ones(2))


@pytest.mark.parametrize("front_end", ["flat original", "rows"])
@on_ranks(2)
def test_groups_that_were_saved_with_other_settings_are_refused(front_end: str) -> None:
    one, other = {"lr": 0.1, "betas": (0.8, 0.9)}, {"lr": 0.1, "betas": (0.7, 0.9)}
    model = in_front_end(front_end, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    params = list(model.parameters())

    def in_groups(*settings: dict[str, Any]) -> torch.optim.Optimizer:
        parts = (params[:2], params[2:]) if len(settings) > 1 else (params,)
        groups = [{"params": p, **its} for p, its in zip(parts, settings, strict=True)]
        optimizer = torch.optim.AdamW(groups)
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    flat, is_flat = StateDictOptions(flatten_optimizer_state_dict=True), front_end != "rows"
    for had, have in (((one, other), (one,)), ((one,), (one, other))):
        optimizer, new = in_groups(*had), in_groups(*have)
        new.state.clear()
        for form in (FULL, SHARDED, *[StateDictType.LOCAL_STATE_DICT] * is_flat):
            with FSDP.state_dict_type(model, form):
                saved = FSDP.optim_state_dict(model, optimizer)
            with refuses(CheckpointError, "betas.*0.8.*0.7"):
                loadable(model, new, saved)
        with refuses(CheckpointError, "betas.*0.8.*0.7"):
            full = full_state(model, optimizer)
            older("shard_full_optim_state_dict", full, model, optim=new)
        for options in (None, flat) if is_flat else ():  # torch's own functions
            if options is None or len(had) == 2:  # else each parameter has its settings
                saved = get_optimizer_state_dict(model, optimizer, options=options)
                with refuses(CheckpointError, "betas.*0.8.*0.7"):
                    set_optimizer_state_dict(model, new, saved, options=options)
        assert not new.state
    optimizer = in_groups(one, other)
    reordered = full_state(model, in_groups(other, one))
    optimizer.load_state_dict(loadable(model, optimizer, reordered))
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.7, 0.8]


# --- optimizers that differ between ranks ---------------------------------------------------------

AdamW = OPTIMIZERS["AdamW"]


def shuffled(model: nn.Module, groups: bool) -> torch.optim.Optimizer:
    """An optimizer of parameters, in groups or not, in an order that every rank has for itself."""
    found = params_of(model, groups) if groups else [{"params": list(model.parameters())}]
    for group in found:
        params = group["params"]
        start = dist.get_rank() % len(params)
        group["params"] = params[start:] + params[:start] if dist.get_rank() != 1 else params[::-1]
    return AdamW(found[:: -1 if groups and dist.get_rank() == 1 else 1])


def loads(full: Any, boxes: Any, path: Path) -> list[Callable[[nn.Module, Any], object]]:
    """All ways to load an optimizer's state."""
    alone = copy.deepcopy(full) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return [
        lambda m, o: o.load_state_dict(from_rank0(m, o, full)),
        lambda m, o: load(m, o, full),
        lambda m, o: load(m, o, boxes),
        lambda m, o: checkpoint.load(path, m, o),
        lambda m, o: set_optimizer_state_dict(m, o, alone, options=options),
    ]


@on_ranks(3)
def test_ranks_may_order_their_optimizers_parameters_differently(tmp_path: Path) -> None:
    for step, config in enumerate(FEW_CONFIGS[:2]):
        groups = config[1]
        plain, reference = trained(make_model(), groups=groups)
        model = shard(make_model(), config)
        optimizer = shuffled(model, groups)
        train(model, optimizer, range(2))
        full = full_state(model, optimizer)
        assert_same(full["state"], state_by_name(plain, reference)["state"], rtol=1e-4, atol=1e-4)
        alone = full_state(model, optimizer, rank0_only=True)
        assert_same(alone.get("state", {}), full["state"] if dist.get_rank() == 0 else {})
        boxes = sharded_state(model, optimizer)
        path = checkpoint.save(tmp_path, model, optimizer, step=step)
        other_way = shard(make_model(), ("FULL_SHARD", config[1], "none"))
        for way in loads(full, boxes, path):
            other = shuffled(other_way, groups)
            way(other_way, other)
            assert_same(full_state(other_way, other)["state"], full["state"])
            settings = {group["lr"]: group["weight_decay"] for group in other.param_groups}
            assert settings == ({0.02: 0.3, 0.005: 0.0} if groups else {0.02: 0.1})


def assert_refused(call: Callable[[], Any], *texts: str) -> None:
    with refuses(UsageError) as caught:
        call()
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    dist.barrier()  # which every rank comes to


@on_ranks(2)
def test_a_unit_missing_or_a_parameter_too_many_on_one_rank_is_an_error_on_all(
    tmp_path: Path,
) -> None:
    model, optimizer = sharded(("FULL_SHARD", True, "blocks"))
    full, boxes = full_state(model, optimizer), sharded_state(model, optimizer)
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    options = StateDictOptions(full_state_dict=True)
    ways: list[Callable[[Any], Any]] = [
        lambda its: full_state(model, its),
        lambda its: get_optimizer_state_dict(model, its, options=options),
        lambda its: sharded_state(model, its),
        lambda its: loadable(model, its, boxes),
        lambda its: from_rank0(model, its, full),
        lambda its: checkpoint.save(tmp_path, model, its, step=7),
        lambda its: checkpoint.async_save(tmp_path, model, its, step=8),
        lambda its: checkpoint.load(path, model, its),
    ]
    missing = {*model.module.blocks[1].parameters()} if dist.get_rank() == 1 else set()
    present = [p for p in model.parameters() if p not in missing]
    short = AdamW(present)
    short.state.update({p: optimizer.state[p] for p in present})
    for call in ways:
        assert_refused(lambda call=call: call(short), "blocks.1.", "rank(s) [1]")
    assert_same(full_state(model, optimizer)["state"], full["state"])  # nothing is left behind
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    for call in ways:
        assert_refused(lambda call=call: call(optimizer))


@on_ranks(2)
def test_other_parameters_sizes_and_states_of_a_rank_are_errors_on_all() -> None:
    container = nn.ModuleDict(
        {"model": shard(make_model(), FEW_CONFIGS[0]), "plain": nn.Linear(2, 2)}
    )
    params = list(container.parameters())
    optimizer = AdamW(params[: len(params) - dist.get_rank()])
    full = full_state(container, optimizer)
    words = "outside of units", f"rank(s) [{1 - dist.get_rank()}]"
    assert_refused(lambda: from_rank0(container, optimizer, full), *words)
    other = FSDP(nn.Linear(3, 4 + 4 * dist.get_rank()))
    its = OPTIMIZERS["Adagrad"](other.parameters())  # which has state at once
    assert_refused(lambda: full_state(other, its), "8 elements on rank 0", "16 elements on rank 1")
    for state_of in (full_state, sharded_state):
        model, optimizer = sharded(FEW_CONFIGS[1], steps=1)
        if dist.get_rank() == 1:
            optimizer.state.clear()  # as after loading on one rank alone
        assert_refused(
            lambda m=model, o=optimizer, take=state_of: take(m, o), "on rank 0, not on 1"
        )


@pytest.mark.parametrize("lacks", ["parameters", "states"])
@on_ranks(3)
def test_an_optimizer_may_lack_parameters_its_rank_has_no_part_of(
    lacks: str, tmp_path: Path
) -> None:
    plain, reference = trained(make_model())
    model = shard(make_model(), ("FULL_SHARD", True, "always"))
    optimizer = AdamW(p for p in model.parameters() if p.numel() or lacks == "states")
    train(model, optimizer, range(2))
    for p in [p for p in optimizer.state if not p.numel()]:
        del optimizer.state[p]
    assert len(optimizer.state) < len(list(model.parameters()))
    expected = state_by_name(plain, reference)["state"]
    del expected["nothing"]
    full = full_state(model, optimizer)
    assert_same(full["state"], expected, rtol=1e-4, atol=1e-4)
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    boxes = sharded_state(model, optimizer)
    assert boxes["state"].keys() == expected.keys(), "on every rank, as with torch"
    for way in loads(full, boxes, path)[:4]:
        other = AdamW(p for p in model.parameters() if p.numel())
        way(model, other)
        assert_same(full_state(model, other)["state"], full["state"])
