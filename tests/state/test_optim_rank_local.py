"""Optimizer state that is neither a number nor of its parameter's shape: always saved, restored
bit-equal at an equal layout, and refused, before anything changes, at another."""

from __future__ import annotations

import copy
import functools
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_compat import FullOptimStateDictConfig, ShardingStrategy, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._state.optim_calls import check_optimizer
from fsdp_compat._state.optim_contents import StateKind, classify, classify_all
from fsdp_compat._state.units import clean_name
from fsdp_compat.errors import CheckpointError, StateError
from tests.state.test_optim import (
    OPTIMIZERS,
    Config,
    assert_four_facts,
    by_name,
    full_state,
    make_model,
    shard,
    train,
)
from tests.support.optimizer_state import create_optimizer_state
from tests.support.ranks import run_ranks
from tests.support.sampling import sample


class History:
    """What an optimizer may keep: an object that nobody else knows."""

    def __init__(self, mean: Tensor) -> None:
        self.means = [mean.expand(8).contiguous()[3]]  # of a storage that is larger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and [m.item() for m in self.means] == [
            m.item() for m in other.means
        ]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Blocks(torch.optim.Optimizer):
    """SGD with momentum that keeps the momentum in 8 bits with a scale per block of 4 elements, and
    all sorts of other things."""

    def __init__(
        self, params: Any, lr: float = 0.1, own: Callable[[Tensor], dict[str, Any]] | None = None
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.own = own  # not in state_dict(): what else it keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    num_blocks = -(-p.numel() // 4)
                    state.update(
                        step=0,
                        codes=torch.zeros(p.shape, dtype=torch.uint8),
                        scales=torch.zeros(num_blocks),
                        kind="8 bit",
                    )
                    state.update(
                        nothing=None,
                        history=History(p.sum()),
                        nested={"seen": [p.sum().clone()], "rank": rank()},
                    )
                    state.update(self.own(p) if self.own is not None else {})
                state["step"] += 1
                blocks = torch.zeros(len(state["scales"]) * 4)
                blocks[: p.numel()] = p.grad.reshape(-1).abs()
                state["scales"] = blocks.view(-1, 4).amax(1) if p.numel() else state["scales"]
                state["codes"] = (p.grad.abs() * 255).clamp(max=255).to(torch.uint8)
                state["history"].means.append(p.grad.sum())
                p.sub_(p.grad, alpha=group["lr"])


class Keeping(Blocks):
    """Blocks that takes its state as it is: torch's own way casts 8-bit states to the parameter's
    dtype."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.clear()
        self.state.update(
            {parameters[number]: dict(entry) for number, entry in state_dict["state"].items()}
        )


RANK_LOCAL = ("scales", "history", "nested")
CONFIGS: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("NO_SHARD", True, "none"),
)


def trained(
    config: Config, seed: int = 0, make: Any = Keeping, odd: bool = True
) -> tuple[FSDP, Any]:
    model = shard(make_model(seed, odd), config)
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    return model, optimizer


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected) and found.dtype == expected.dtype, where
    elif isinstance(expected, dict):
        assert list(found) and found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, where)
    else:
        assert type(found) is type(expected) and found == expected, where


def states_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Of the parameters that this rank has a part of."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    return [dict(optimizer.state[p]) for p in parameters if p in optimizer.state]


def rank_keys(state: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (name, key) for name, entry in state["state"].items() for key in entry if "@rank" in key
    }


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))


# --- what is what ---------------------------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass that is a tensor like any other."""


class Standing(torch.Tensor):
    """A subclass that stands for tensors that it holds, as quantized ones do."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_wrapper_subclass_tensor_is_rank_local_state() -> None:
    target = nn.Parameter(torch.zeros(6))
    assert classify(torch.zeros(6).as_subclass(Named), target) is StateKind.PER_ELEMENT
    standing = torch.Tensor._make_wrapper_subclass(Standing, (6,))  # type: ignore[attr-defined]
    assert classify(standing, target) is StateKind.RANK_LOCAL


def test_states_are_classified_by_type_and_shape() -> None:
    target = nn.Parameter(torch.zeros(6))
    scalars = [1, 2.5, True, 1j, None, "text", torch.tensor(3), torch.tensor(1.0)]
    assert {classify(value, target) for value in scalars} == {StateKind.SCALAR}
    assert {
        classify(value, target) for value in (torch.zeros(6), torch.zeros(6, dtype=torch.uint8))
    } == {StateKind.PER_ELEMENT}
    rank_local = [
        torch.zeros(2),
        torch.zeros(1),
        torch.zeros(6, 1),
        torch.zeros(6).to_sparse(),
        [],
        {"a": 1},
        (1, 2),
        History(torch.ones(())),
    ]
    assert {classify(value, target) for value in rank_local} == {StateKind.RANK_LOCAL}
    assert classify(torch.zeros(()), nn.Parameter(torch.zeros(()))) is StateKind.SCALAR


def test_a_rank_local_state_stays_rank_local_where_its_shape_fits_by_chance() -> None:
    large, one, none = (nn.Parameter(torch.zeros(n)) for n in (9, 1, 0))
    states = {
        p: {"codes": torch.zeros(p.shape), "scales": torch.zeros(-(-p.numel() // 4))}
        for p in (large, one, none)
    }
    for its in classify_all(states).values():
        assert its == {"codes": StateKind.PER_ELEMENT, "scales": StateKind.RANK_LOCAL}


# --- saved and restored ---------------------------------------------------------------------------


def _round_trips(directory: str) -> None:
    for number, config in enumerate(CONFIGS):
        # Whole parameters: every rank has the same state, as with DistributedDataParallel, under
        # the optimizer's own keys.
        whole = config[1] and (config[0] == "NO_SHARD" or dist.get_world_size() == 1)
        same = functools.partial(
            Keeping, own=lambda p: {"nested": {"seen": [p.sum().clone()], "rank": 0}}
        )
        model, optimizer = trained(config, make=same if whole else Keeping)
        expected = copy.deepcopy(states_of(optimizer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            full = full_state(model, optimizer, rank0_only=False)
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                sharded = FSDP.optim_state_dict(model, optimizer)
        train(model, optimizer, range(2, 4))  # what was taken does not change
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (rank_keys(sharded), rank_keys(full)))
        own, everyones = zip(*gathered, strict=True)
        assert all(not one & other for i, one in enumerate(own) for other in own[:i]), (
            "no two ranks share a key"
        )
        assert bool(own[0]) is not whole
        if not whole:
            assert not set.union(*own) ^ everyones[rank()], set.union(*own) ^ everyones[rank()]
        for state in (full, sharded):
            rank_local = [
                t
                for entry in state["state"].values()
                for key, v in entry.items()
                if "@rank" in key
                for t in tensors_in(v)
            ]
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in rank_local), (
                "compact copies"
            )
        file = io.BytesIO()
        safe = {
            n: {k: v for k, v in e.items() if not k.startswith("history")}
            for n, e in full["state"].items()
        }
        torch.save(safe, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert rank_keys({"state": loaded}) == rank_keys({"state": safe}), (
            "what holds tensors is read without trust"
        )
        file = io.BytesIO()
        torch.save(full, file)
        full = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        dcp.save({"optim": sharded}, checkpoint_id=f"{directory}/{number}")
        for form in ("full", "dcp"):
            other = Keeping(model.parameters())
            state = full
            if form == "dcp":
                create_optimizer_state(other)
                with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                    state = FSDP.optim_state_dict(model, other)
                    dcp.load({"optim": state}, checkpoint_id=f"{directory}/{number}")
            other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, state))
            assert len(states_of(other)) == len(expected)
            for found, wanted in zip(states_of(other), expected, strict=True):
                assert_same(found, wanted, f"{config} {form}")


@pytest.mark.parametrize("world_size", sample([1, 3], 1))
def test_every_state_is_restored_bit_equal_at_an_equal_layout(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(world_size, _round_trips, str(tmp_path))


def _from_rank_0() -> None:
    for config in CONFIGS[:2]:
        model, optimizer = trained(config)
        expected = copy.deepcopy(states_of(optimizer))
        full = full_state(model, optimizer, rank0_only=True)
        assert bool(full) is (rank() == 0)
        other = Keeping(model.parameters())
        other.load_state_dict(FSDP.scatter_full_optim_state_dict(full or None, model, optim=other))
        for found, wanted in zip(states_of(other), expected, strict=True):
            assert_same(found, wanted, str(config))


def test_rank_0_sends_each_rank_its_rank_local_state() -> None:
    run_ranks(2, _from_rank_0)


def _hybrid() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model = FSDP(make_model(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    optimizer = Keeping(model.parameters())
    train(model, optimizer, range(2))
    expected = copy.deepcopy(states_of(optimizer))
    full = full_state(model, optimizer, rank0_only=True)
    for entry in (
        expected
    ):  # the replicas' parts are equal, so their states are: those of the first copy stand for all
        entry["nested"]["rank"] %= 2
    if rank() == 0:
        assert len(rank_keys(full)) == len(RANK_LOCAL) * 2
    optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer))
    for found, wanted in zip(states_of(optimizer), expected, strict=True):
        assert_same(found, wanted)


def test_replicas_load_the_state_of_the_same_part() -> None:
    run_ranks(4, _hybrid)


def _differing_scalars() -> None:
    model, optimizer = trained(
        CONFIGS[1],
        make=functools.partial(Keeping, own=lambda p: {"norm": float(rank()), "same": 2.0}),
    )
    full = full_state(model, optimizer)
    parts: list[Any] = [None] * 2
    dist.all_gather_object(
        parts, {clean_name(name) for name, p in model.named_parameters() if p.numel()}
    )
    assert parts[0] & parts[1] and parts[0] ^ parts[1]
    for name, entry in full["state"].items():
        assert entry["same"] == 2.0
        having = [r for r in range(2) if name in parts[r]]
        norms = {key: value for key, value in entry.items() if key.startswith("norm")}
        if len(having) == 2:
            assert norms.keys() == {"norm@rank0", "norm@rank1"}, name
        elif having:
            assert norms == {"norm": float(having[0])}, name
    other = Keeping(model.parameters())
    other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, full))
    assert {state["norm"] for state in states_of(other)} == {float(rank())}


def test_scalars_that_differ_between_ranks_are_kept_per_rank() -> None:
    run_ranks(2, _differing_scalars)


def _not_everywhere() -> None:
    """An optimizer that keeps nothing for empty parts."""

    class Sparing(Keeping):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["params"], every = [p for p in group["params"] if p.numel()], group["params"]
                super().step()
                group["params"] = every

    model, optimizer = trained(CONFIGS[1], make=Sparing)
    expected = copy.deepcopy(states_of(optimizer))
    assert len(expected) < len(list(model.parameters()))
    full = full_state(model, optimizer)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {name: entry["step"] for name, entry in full["state"].items()})
    assert all(steps == gathered[0] for steps in gathered)
    assert set(gathered[0]) == {name for name, p in make_model().named_parameters() if p.numel()}, (
        "every rank that has a part"
    )
    other = Sparing(model.parameters())
    other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, full))
    found = [state for state in states_of(other) if "history" in state]
    for one, wanted in zip(found, expected, strict=True):
        assert_same(one, wanted)


def test_a_rank_without_state_for_an_empty_part_gets_the_rest_of_the_dict() -> None:
    run_ranks(3, _not_everywhere)


def _unpicklable() -> None:
    model, optimizer = trained(
        CONFIGS[0], make=functools.partial(Keeping, own=lambda p: {"lock": threading.Lock()})
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        full = full_state(model, optimizer)
    assert any("cannot be pickled" in str(warning.message) for warning in caught)
    assert {key for _, key in rank_keys(full) if key.startswith("lock")} == {f"lock@rank{rank()}"}
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))


def test_an_object_that_cannot_be_pickled_does_not_fail_a_save() -> None:
    run_ranks(2, _unpicklable)


# --- elsewhere ------------------------------------------------------------------------------------


def _saved(path: str, config: Config) -> None:
    model, optimizer = trained(config)
    state = full_state(model, optimizer, rank0_only=True, offload_to_cpu=True)
    if rank() == 0:
        torch.save(state, path)


def _refused_elsewhere(path: str, config: Config) -> None:
    model, optimizer = trained(config, seed=3)
    before = copy.deepcopy(states_of(optimizer))
    state = torch.load(path, weights_only=False)
    for call in (
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True),
        lambda: FSDP.scatter_full_optim_state_dict(
            state if rank() == 0 else None, model, optim=optimizer
        ),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert_four_facts(caught.value)
        assert any(f"{key}" in str(caught.value) for key in RANK_LOCAL)
        assert any(name in str(caught.value) for name, _ in make_model().named_parameters())
    for found, wanted in zip(states_of(optimizer), before, strict=True):
        assert_same(found, wanted)
    without = {
        **state,
        "state": {
            n: {k: v for k, v in e.items() if "@rank" not in k} for n, e in state["state"].items()
        },
    }
    FSDP.optim_state_dict_to_load(model, optimizer, without)  # the rest is resharded


def test_another_layout_refuses_and_names_rank_local_state(tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    run_ranks(2, _saved, path, CONFIGS[1])
    for num_ranks, config in (
        (3, CONFIGS[1]),
        (2, CONFIGS[0]),
        (2, ("FULL_SHARD", False, "none")),
        (1, CONFIGS[1]),
    ):
        run_ranks(num_ranks, _refused_elsewhere, path, config)


def _into_and_out_of_the_plain() -> None:
    model, optimizer = trained(("NO_SHARD", True, "blocks"), make=torch.optim.Adafactor, odd=False)
    plain = make_model(odd=False)
    reference = torch.optim.Adafactor(plain.parameters())
    train(plain, reference, range(2))
    found, expected = full_state(model, optimizer), by_name(plain, reference)
    assert "row_var" in found["state"]["embed.weight"]
    for name, entry in expected["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(found["state"][name][key], value, msg=f"{key} of {name}")
    other = torch.optim.Adafactor(model.parameters())
    other.load_state_dict(FSDP.optim_state_dict_to_load(model, other, reference.state_dict()))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(dict(other.state[p]), dict(reference.state[q]))
    sharded = shard(make_model(odd=False), ("FULL_SHARD", True, "blocks"))
    target = torch.optim.Adafactor(sharded.parameters())
    with pytest.raises(CheckpointError, match="row_var") as caught:
        FSDP.optim_state_dict_to_load(sharded, target, expected)
    assert_four_facts(caught.value)
    renamed = {name: {"object": History(torch.ones(()))} for name in expected["state"]}
    with pytest.raises(CheckpointError, match="object") as caught:
        FSDP.optim_state_dict_to_load(sharded, target, {**expected, "state": renamed})
    assert_four_facts(caught.value)


def test_on_one_rank_factored_state_equals_the_unwrapped_optimizers() -> None:
    run_ranks(2, _into_and_out_of_the_plain)


# --- said beforehand ------------------------------------------------------------------------------


def _warned_once() -> None:
    model, optimizer = trained(CONFIGS[1])
    names = [clean_name(name) for name, p in model.named_parameters() if p.numel()]
    caught = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            full_state(model, optimizer)
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                FSDP.optim_state_dict(model, optimizer)
        caught.append(
            [str(warning.message) for warning in found if "layout" in str(warning.message)]
        )
    assert [len(messages) for messages in caught] == [1, 0]
    assert all(f"{name}.{key}" in caught[0][0] for name in names for key in RANK_LOCAL)
    adam = trained(CONFIGS[1], make=OPTIMIZERS["Adam"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        full_state(*adam)


def test_the_first_dict_warns_once_about_all_rank_local_states() -> None:
    run_ranks(2, _warned_once)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("no closure")


def _asked_before_training() -> None:
    for config in CONFIGS:
        model = shard(make_model(), config)
        for make in OPTIMIZERS.values():
            assert check_optimizer(model, make(model.parameters())) == []
        factored = torch.optim.Adafactor(model.parameters())
        expected = (
            {"embed.weight.row_var", "embed.weight.col_var"} if config[0] == "NO_SHARD" else set()
        )
        assert expected <= set(check_optimizer(model, factored))
        optimizer = Keeping(model.parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it puts a step of its own on the optimizer
        optimizer.register_step_pre_hook(
            lambda *_: pytest.fail("the user's hooks see real steps only")
        )
        before = [p.detach().clone() for p in model.parameters()]
        seed = torch.get_rng_state()
        found = check_optimizer(model, optimizer)
        assert set(found) == {
            f"{name}.{key}" for name, _ in make_model().named_parameters() for key in RANK_LOCAL
        }
        assert not optimizer.state
        assert torch.equal(torch.get_rng_state(), seed)
        assert all(
            p.grad is None and torch.equal(p, b)
            for p, b in zip(model.parameters(), before, strict=True)
        )
        with pytest.raises(StateError, match="no closure") as caught:
            check_optimizer(model, NeedsClosure(model.parameters()))
        assert_four_facts(caught.value)
        optimizer = Keeping(model.parameters())
        train(model, optimizer, range(1))
        assert sorted(check_optimizer(model, optimizer)) == sorted(found)


def test_check_optimizer_works_before_training_and_changes_nothing() -> None:
    run_ranks(2, _asked_before_training)


def _config_is_respected() -> None:
    model, optimizer = trained(CONFIGS[0])
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        found = FSDP.optim_state_dict(model, optimizer)
    assert (found == {}) is (rank() != 0)


def test_ranks_without_the_result_get_no_rank_local_state() -> None:
    run_ranks(2, _config_is_respected)
