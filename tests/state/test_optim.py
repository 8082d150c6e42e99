"""optim_state_dict and optim_state_dict_to_load: the unsharded optimizer's state by name, out of
any sharding, into any other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.tensor import DTensor

from fsdp_compat import FullOptimStateDictConfig, OptimStateKeyType, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._state.rank0 import Rank0Broadcast
from fsdp_compat.errors import CheckpointError, FsdpCompatError, UsageError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.checkpoints import sharded as in_front_end
from tests.support.odd_model import assert_same, each_tensor, train, whole
from tests.support.optimizer_state import (
    FEW_CONFIGS,
    OPTIMIZERS,
    SHARDED,
    Config,
    Named,
    NeedsClosure,
    Trained,
    assert_compact,
    assert_equal_states,
    assert_state,
    by_name,
    by_rank,
    from_rank0,
    full_state,
    load,
    load_into_new,
    loadable,
    make_model,
    num_sent,
    params_of,
    refuses,
    settings,
    shard,
    sharded,
    sharded_state,
    torchs_full,
    torchs_loadable,
    torchs_pair,
    trained,
    with_spare,
)
from tests.support.pairwise import each_value
from tests.support.parity import flat_form
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sampling import sample

# --- the full form --------------------------------------------------------------------------------


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
        assert_state(full_state(model, optimizer)["state"], by_name(plain, reference)["state"])
        losses = train(plain, reference, range(3))
        assert train(model, optimizer, range(3)) == pytest.approx(losses, rel=1e-5)
        found, expected = full_state(model, optimizer), by_name(plain, reference)
        assert_state(found["state"], expected["state"], tolerance=1e-4)
        assert_same_groups(found, expected)
        own = {number: entry for number, entry in enumerate(optimizer.state.values())}
        assert_compact(found["state"] | {number: dict(entry) for number, entry in own.items()})


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_parameter_groups_keep_their_settings_and_missing_state_stays_missing(
    world_size: int,
) -> None:
    plain, reference = trained(with_spare(), groups=True)
    expected = by_name(plain, reference)
    assert not [name for name in expected["state"] if name.startswith(("spare", "frozen"))]
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model, optimizer = trained(shard(with_spare(), (strategy, True, "blocks")), groups=True)
        found = full_state(model, optimizer)
        assert_state(found["state"], expected["state"], tolerance=1e-4)
        assert_same_groups(found, expected)
        other = torch.optim.AdamW(params_of(model, True), lr=7.0)
        other.param_groups[0]["weight_decay"] = 5.0
        assert_state(load(model, other, found), found["state"])
        assert settings(by_name(model, other)) == settings(found)


@on_ranks(2)
def test_a_full_dict_takes_one_collective_per_group_and_state_others_none() -> None:
    for config in FEW_CONFIGS:
        model, optimizer = sharded(config, "Adam")
        before = num_sent(model)
        found = full_state(model, optimizer)
        num_groups = len([group for group in model._runtime.groups if group.shard.ranks > 1])
        assert num_sent(model) - before == 3 * num_groups  # exp_avg, exp_avg_sq, max_exp_avg_sq
        before = num_sent(model)
        for state in (found, sharded_state(model, optimizer)):
            optimizer.load_state_dict(loadable(model, optimizer, state))
        assert num_sent(model) == before
        assert_state(full_state(model, optimizer)["state"], found["state"])
        on_rank0 = full_state(model, optimizer, rank0_only=True, offload_to_cpu=True)
        if dist.get_rank() == 0:
            assert_state(on_rank0["state"], found["state"])
            assert on_rank0["param_groups"] == found["param_groups"]
        else:
            assert on_rank0 == {}


def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all messages with states, noted as the first rank sends them."""
    sizes: list[int] = []
    send = Rank0Broadcast.send

    def noted(self: Rank0Broadcast, values: Sequence[Any], what: str) -> list[Tensor]:
        found = send(self, values, what)
        sizes.append(sum(tensor.nbytes for tensor in found))
        return found

    monkeypatch.setattr(Rank0Broadcast, "send", noted)
    return sizes


@pytest.mark.parametrize("world_size", sample([1, 2, 4], 1))
@on_ranks("world_size")
def test_rank_0_broadcasts_its_dict_one_group_at_a_time(world_size: int) -> None:
    configs = [(config, {}) for config in FEW_CONFIGS]
    if world_size == 4:
        mesh = dist.init_device_mesh("cpu", (2, 2))
        configs.append((("HYBRID_SHARD", True, "blocks"), {"device_mesh": mesh}))
    for number, (config, options) in enumerate(configs):
        kind, num_states = (("AdamW", 2), ("Adagrad", 1))[(number + world_size // 2) % 2]
        build = with_spare if config[1] else make_model
        model, optimizer = trained(shard(build(), config, **options), kind, groups=config[1])
        full: Any = full_state(model, optimizer, rank0_only=False)
        expected = loadable(model, optimizer, full)
        before = copy.deepcopy(full["state"])
        with pytest.MonkeyPatch.context() as monkeypatch:
            sizes = sent_bytes(monkeypatch)
            for given in (None, {}):
                sizes.clear()
                mine = full if dist.get_rank() == 0 else given
                found = FSDP.scatter_full_optim_state_dict(mine, model, optim=optimizer)
                assert_equal_states(found, expected)
                groups = model._runtime.groups
                assert bool(sizes) is (world_size > 1)
                assert len(sizes) <= num_states * len(groups), "one message per group and state"
                assert max(sizes, default=0) <= max(
                    group.store.numel * group.shard.ranks * 4 for group in groups
                )
            sizes.clear()
            found = FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
            assert_equal_states(found, expected)
            assert not sizes, "where every rank has the dict nothing is sent"
        plain, reference = trained(build(), kind, steps=0, groups=config[1])
        numbered = FSDP.rekey_optim_state_dict(
            full, OptimStateKeyType.PARAM_ID, plain, optim=reference
        )
        assert_state(from_rank0(model, optimizer, numbered)["state"], expected["state"])
        assert_state(full["state"], before)


@on_ranks(4)
def test_disjoint_process_groups_load_from_their_own_rank_0() -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = dist.get_rank() // 2
    half = halves[number]
    model = shard(make_model(number), FEW_CONFIGS[0], process_group=half)
    optimizer = trained(model, "Adam", 1 + number)[1]
    expected = loadable(model, optimizer, full_state(model, optimizer))
    for group in (None, half):
        alone = FSDP.full_optim_state_dict(model, optimizer, group=group)
        assert bool(alone) is (dist.get_rank() in (0, 2))
        given, options = alone or None, {"optim": optimizer, "group": group}
        found = FSDP.scatter_full_optim_state_dict(given, model, **options)
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

    def older(model: FSDP, optimizer: Any, state: Any) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)

    for load_on in (loadable, older):
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
        assert_state(full_state(model, optimizer)["state"], state["state"])


@pytest.mark.parametrize("use_orig_params", [True, False])
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
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
            return loadable(model, optimizer, given)

    renamed = {**state, "state": {f"other.{name}": value for name, value in state["state"].items()}}
    misshapen = copy.deepcopy(state)
    misshapen["state"]["blocks.0.linear.weight"]["exp_avg"] = torch.zeros(5, 4)
    boxes = sharded_state(model, optimizer)
    cases: tuple[tuple[Any, bool, type[FsdpCompatError], str], ...] = (
        (None if mine else state, True, UsageError, "on the first rank"),
        (None, True, UsageError, "on the first rank"),
        (renamed if mine else None, True, CheckpointError, "other."),
        (renamed if mine else state, True, CheckpointError, "other."),
        (boxes if mine else None, True, CheckpointError, "cannot send a sharded"),
        ([1] if mine else state, True, FsdpCompatError, "not an optimizer state dict"),
        (renamed, False, CheckpointError, "other."),
        (misshapen, False, CheckpointError, "blocks.0.linear.weight"),
        *((wrong, False, UsageError, "") for wrong in ({}, {"param_groups": []}, [1], "text")),
        (optimizer.state_dict(), False, FsdpCompatError, ""),
    )
    for its, rank0_only, kind, text in cases:
        with refuses(kind, text):
            given(its, rank0_only)
    with pytest.raises(FsdpCompatError, match="expected:"):  # another order of arguments
        FSDP.optim_state_dict_to_load(state, model, optimizer)  # type: ignore[arg-type]
    assert_state(full_state(model, optimizer)["state"], state["state"])
    found = given(state if mine else None, True)
    assert_equal_states(found, given(state, False))  # nothing is left behind


@on_ranks(2)
def test_containers_given_dicts_and_load_directly_work() -> None:
    container, optimizer = in_container()
    found = FSDP.optim_state_dict(container, optimizer)
    given = FSDP.optim_state_dict(container, optimizer, optimizer.state_dict())
    assert_state(given["state"], found["state"])
    assert {"model.blocks.0.linear.weight", "plain.weight"} <= found["state"].keys()
    assert found["state"]["plain.weight"]["exp_avg"].shape == (2, 2)
    other = OPTIMIZERS["Adam"](container.parameters())
    answer = FSDP.optim_state_dict_to_load(
        model=container, optim=other, optim_state_dict=found, load_directly=True
    )
    assert_state(full_state(container, other)["state"], found["state"])
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
    assert_state(load(model, part, full), expected)


# --- to another sharding --------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate's, whose attributes no copy can be made of."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.secret = dist.group.WORLD

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pytest.fail("it is asked for its state, not for a step")


How = tuple[str, str, bool]  # form, optimizer, with parameter groups


def _save(path: str, how: How, config: Config) -> tuple[dict[str, Any], list[float]]:
    form, kind, groups = how
    model, optimizer = trained(shard(make_model(1), config), kind, groups=groups)
    with FSDP.state_dict_type(model, StateDictType[f"{form.upper()}_STATE_DICT"]):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    if form == "sharded":
        dcp.save(state, checkpoint_id=path)
    elif dist.get_rank() == 0:
        torch.save(state, path)
    return full_state(model, optimizer), train(model, optimizer, range(2, 4))


def _load(path: str, how: How, config: Config, expected: dict[str, Any], losses: Any) -> None:
    form, kind, groups = how
    model, optimizer = trained(shard(make_model(2), config), kind, steps=0, groups=groups)
    if form == "full":
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(loadable(model, optimizer, state["optim"]))
    else:
        _load_into_the_template(path, model, optimizer)
    found = full_state(model, optimizer)
    assert_state(found["state"], expected["state"])
    assert settings(found) == settings(expected)
    assert train(model, optimizer, range(2, 4)) == pytest.approx(losses, rel=1e-6)
    steps = [value["step"] for p, value in optimizer.state.items() if "step" in value and p.numel()]
    assert len({id(step) for step in steps}) == len(steps)
    assert all(step.item() == 4 for step in steps), "every parameter has a count of its own"


def _load_into_the_template(path: str, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """Load into what the first step of the optimizer would make, which changes nothing."""
    wrapper, before = Wrapper(optimizer), [p.detach().clone() for p in model.parameters()]
    hook = optimizer.register_step_pre_hook(lambda *_: pytest.fail("no step is made"))
    had_state = bool(optimizer.state)
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, wrapper)}
        assert bool(optimizer.state) is had_state
        for p, value in zip(model.parameters(), before, strict=True):
            assert p.grad is None and torch.equal(p, value)
        assert all(entry.get("step", 0) == 0 for entry in state["optim"]["state"].values())
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        wrapper.load_state_dict(loadable(model, wrapper, state["optim"]))
    hook.remove()


Targets = tuple[tuple[int, Config], ...]
SPREAD: tuple[tuple[str, int, Config, Targets], ...] = (
    ("Adam", 1, FEW_CONFIGS[1], ((2, FEW_CONFIGS[0]), (3, FEW_CONFIGS[2]))),
    ("AdamW", 4, FEW_CONFIGS[0], ((1, FEW_CONFIGS[2]), (3, FEW_CONFIGS[1]))),
    ("SGD", 3, FEW_CONFIGS[2], ((2, FEW_CONFIGS[2]), (1, FEW_CONFIGS[0]))),
    ("Adagrad", 2, FEW_CONFIGS[3], ((3, FEW_CONFIGS[0]),)),
    ("AdamW in groups", 3, FEW_CONFIGS[1], ((2, FEW_CONFIGS[2]), (1, FEW_CONFIGS[1]))),
)


@each_value
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize(
    ("kind", "writers", "saved", "targets"), SPREAD, ids=[kind for kind, *_ in SPREAD]
)
def test_a_resumed_run_has_the_same_state_and_goes_on_with_the_same_losses(
    form: str, kind: str, writers: int, saved: Config, targets: Targets, tmp_path: Path
) -> None:
    path, how = str(tmp_path / "checkpoint"), (form, kind.split()[0], "groups" in kind)
    expected, losses = run_ranks(writers, _save, path, how, saved)[0]
    for readers, config in targets:
        run_ranks(readers, _load, path, how, config, expected, losses)


# --- before the first step ------------------------------------------------------------------------


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
    assert by_names.keys() == parts.keys() == dict(make_model().named_parameters()).keys()
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
def test_optimizer_dicts_equal_torchs_and_load_both_ways(use_orig_params: bool, kind: str) -> None:
    (theirs, their_optimizer), (ours, optimizer) = torchs_pair(use_orig_params, kind)
    expected, found = torchs_full(theirs, their_optimizer), full_state(ours, optimizer)
    assert found.keys() == expected.keys()
    if not use_orig_params:  # otherwise torch sorts by name
        assert list(found["state"]) == list(expected["state"])
    assert_state(found["state"], expected["state"], tolerance=1e-5)
    assert found["param_groups"] == expected["param_groups"]

    # torch's own, in which names may share a step, and one of other values
    for state in (expected["state"], each_tensor(expected["state"], lambda value: value * 2)):
        assert_state(load_into_new(ours, kind, {**expected, "state": state}), state)

    their_optimizer.load_state_dict(torchs_loadable(theirs, their_optimizer, found))
    losses = train(ours, optimizer, range(2, 4))
    assert train(theirs, their_optimizer, range(2, 4)) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(("world_size", "use_orig_params"), [(2, False), (4, True)])
@on_ranks("world_size")
def test_with_a_mesh_the_sharded_form_is_torchs_dtensors(
    world_size: int, use_orig_params: bool
) -> None:
    """Of a model that was given a mesh: with 4 ranks a hybrid one."""
    options = {"strategy": "HYBRID_SHARD" if world_size == 4 else "FULL_SHARD"}
    mesh = dist.init_device_mesh("cpu", (2, 2) if world_size == 4 else (2,))
    (theirs, their_optimizer), (ours, optimizer) = torchs_pair(
        use_orig_params, "Adam", device_mesh=mesh, **options
    )
    with TorchFSDP.state_dict_type(theirs, TorchType.SHARDED_STATE_DICT):
        expected = TorchFSDP.optim_state_dict(theirs, their_optimizer)
    before = num_sent(ours)
    found = sharded_state(ours, optimizer)
    assert num_sent(ours) - before == 3 * len(ours._runtime.groups)
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for name, entry in expected["state"].items():
        assert found["state"][name].keys() == entry.keys()
        for key, value in entry.items():
            one = found["state"][name][key]
            assert type(one) is type(value), f"{key} of {name}"
            if isinstance(value, DTensor):
                assert one.placements == value.placements
                assert one.device_mesh == value.device_mesh
                one, value = one.to_local(), value.to_local()
                assert one.untyped_storage().nbytes() == one.nbytes
            torch.testing.assert_close(one, value, rtol=1e-5, atol=1e-5)
    full = full_state(ours, optimizer)["state"]
    assert_state(load(ours, OPTIMIZERS["Adam"](ours.parameters()), found), full)
    with TorchFSDP.state_dict_type(theirs, TorchType.SHARDED_STATE_DICT):  # and torch reads ours
        their_optimizer.load_state_dict(
            TorchFSDP.optim_state_dict_to_load(theirs, their_optimizer, found)
        )
    losses = train(ours, optimizer, range(2, 4))
    assert train(theirs, their_optimizer, range(2, 4)) == pytest.approx(losses, rel=1e-5)


@flat_form
@on_ranks(2)
def test_an_optimizer_may_key_its_state_by_names(use_orig_params: bool) -> None:
    (theirs, _), (ours, _) = torchs_pair(use_orig_params, steps=0)
    their_optimizer, optimizer = Named(theirs), Named(ours)
    for model, its in ((theirs, their_optimizer), (ours, optimizer)):
        train(model, its, range(2))
    expected, found = torchs_full(theirs, their_optimizer), full_state(ours, optimizer)
    assert_state(found["state"], expected["state"], tolerance=1e-5)
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
        assert_state(full_state(ours, optimizer)["state"], found["state"])
    assert_state(load_into_new(ours, "Adam", found), found["state"])
    with refuses(UsageError, "is not keyed by its parameters"):
        FSDP.optim_state_dict(ours, optimizer, found)


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


@on_ranks(2)
def test_groups_that_were_saved_with_other_settings_are_refused() -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def made(front_end: str, *settings: dict[str, Any]) -> Trained:
        torch.manual_seed(0)
        model = in_front_end(front_end, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        params = [*model.parameters()]
        parts = (params[:2], params[2:]) if len(settings) > 1 else (params,)
        groups = [{"params": p, **its} for p, its in zip(parts, settings, strict=True)]
        return trained(model, lambda _: torch.optim.AdamW(groups), 0)

    def steps(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    one, other = {"lr": 0.1, "betas": (0.8, 0.9)}, {"lr": 0.1, "betas": (0.7, 0.9)}
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for front_end in ("flat original", "rows"):
        for had, have in (((one, other), (one,)), ((one,), (one, other))):
            model, optimizer = made(front_end, *had)
            steps(optimizer)
            new_model, new = made(front_end, *have)
            local = [StateDictType.LOCAL_STATE_DICT] * (front_end != "rows")
            for form in (StateDictType.FULL_STATE_DICT, SHARDED, *local):
                with FSDP.state_dict_type(model, form):
                    saved = FSDP.optim_state_dict(model, optimizer)
                with refuses(CheckpointError, "betas.*0.8.*0.7"):
                    loadable(new_model, new, saved)
            with refuses(CheckpointError, "betas.*0.8.*0.7"):
                FSDP.shard_full_optim_state_dict(full_state(model, optimizer), new_model, optim=new)
            for options in (None, flat) if front_end != "rows" else ():  # torch's own functions
                if options is None or len(had) == 2:  # else each parameter has its settings
                    saved = get_optimizer_state_dict(model, optimizer, options=options)
                    with refuses(CheckpointError, "betas.*0.8.*0.7"):
                        set_optimizer_state_dict(new_model, new, saved, options=options)
            assert not new.state
        reordered = made(front_end, other, one)
        steps(reordered[1])
        model, optimizer = made(front_end, one, other)
        optimizer.load_state_dict(loadable(model, optimizer, full_state(*reordered)))
        assert [group["betas"][0] for group in optimizer.param_groups] == [0.7, 0.8]
